"""Fine-tune a small Transformers model by LoRA with PEFT: Muon updates lora_A and lora_B, everything else is frozen.

python examples/lora.py                         # offline: a tiny model with random weights learns a sequence
python examples/lora.py --b-lr-ratio 4          # a learning rate of its own for lora_B
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def make_model(rank: int) -> Any:
    """Return a tiny Llama with adapters of a rank in all its linear layers; its own weights are frozen."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=rank, target_modules="all-linear"))


def main(argv: Sequence[str] | None = None) -> float:
    """Train the adapters and return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate (default: %(default)s)")
    parser.add_argument("--b-lr-ratio", type=float, default=1.0, help="that of lora_B over --lr (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    args = parser.parse_args(argv)

    import torch

    from muon_fsdp import MuonOptimizer

    model = make_model(args.rank)
    # After get_peft_model, so that the adapters exist and the weights below them are frozen.
    optimizer = MuonOptimizer(model, lr=args.lr, overrides={"*.lora_B.*": {"lr": args.lr * args.b_lr_ratio}})
    print(optimizer.routing_report())
    tokens = (torch.arange(24).repeat(4, 1) + torch.arange(4)[:, None]) % 32  # (4, 24), counting
    loss = torch.tensor(0.0)
    for step in range(1, args.steps + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    return loss.item()


if __name__ == "__main__":
    main()
