"""Train a small transformer with FSDP2 and Muon. Run torchrun --nproc-per-node 2 examples/quickstart.py"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from muon_fsdp import FSDPMuonOptimizer


class Transformer(nn.Module):
    """A causal language model of bytes."""

    def __init__(self):
        super().__init__()
        block = nn.TransformerEncoderLayer(96, nhead=4, dim_feedforward=384, bias=False, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(256, 96)
        self.body = nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(96, 256, bias=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return self.head(self.body(self.embed(x), mask, is_causal=True))


dist.init_process_group()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
model = Transformer().to(device)
for block in (*model.body.layers, model):
    fully_shard(block)
optimizer = FSDPMuonOptimizer(model, lr=0.02)

text = torch.tensor(list(Path(argparse.__file__).read_bytes()), device=device)  # the source of a module of Python
torch.manual_seed(dist.get_rank())  # every rank draws its own windows
for step in range(1, 61):
    windows = text.unfold(0, 65, 1)[torch.randint(len(text) - 64, (16,), device=device)]
    loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 20 == 0:
        print(f"step {step}: loss {loss.item():.2f}")
if dist.get_rank() == 0:
    print(optimizer.routing_report())
dist.destroy_process_group()
