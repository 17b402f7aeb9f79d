"""A small network, and helpers that train it, for the tests of MuonOptimizer on one device."""

from __future__ import annotations

import torch
from torch import nn

from muon_fsdp import MuonOptimizer


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int, seed: int = 0, closure: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 12, generator=generator, dtype=torch.float32).to(next(model.parameters()).dtype)

        def loss(x=x):
            optimizer.zero_grad()
            value = model(x).square().mean()
            value.backward()
            return value

        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 6)).to(dtype)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def updates_of(optimizer: MuonOptimizer, *parameters: nn.Parameter) -> list[torch.Tensor]:
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    return [old - p.detach() for old, p in zip(before, parameters, strict=True)]
