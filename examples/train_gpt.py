"""Train a GPT with Muon on Python's standard library, or on any text or token shards.

python examples/train_gpt.py --model small --steps 100
python examples/train_gpt.py --model gpt2 --epochs 3 --data folder_of_token_shards --compile
torchrun --nproc_per_node=4 examples/train_gpt.py --model small --fsdp
torchrun --nproc_per_node=4 examples/train_gpt.py --model small --replicas 2       # HSDP: 2 replicas of 2 shards
torchrun --nproc_per_node=4 examples/train_gpt.py --model small --tp 2             # FSDP2 x tensor parallel
python examples/train_gpt.py --optimizer normuon --beta2 0.99                     # any registered rule and its options
python examples/train_gpt.py --resume                                             # from the newest checkpoint

The program is `muon_fsdp.training`, the same as `muon-fsdp train`. These three lines of it concern Muon:

    model = place(GPT(config), ...)                       # muon_fsdp/training/parallel.py: fully_shard, DDP, TP
    optimizer = FSDPMuonOptimizer(model, groups, ...)     # muon_fsdp/training/optimizers.py
    loss.backward(); optimizer.step()                     # muon_fsdp/training/loop.py
"""

from __future__ import annotations

from muon_fsdp.training.ending import end_process
from muon_fsdp.training.program import main

if __name__ == "__main__":
    end_process(main(prog="examples/train_gpt.py"))
