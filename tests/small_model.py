"""A small model, its training and copies of its state, for tests on one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A small language model with a layer that takes no part in the forward pass."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.unused = nn.Linear(4, 4)
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.down = nn.Linear(10, 6)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.down(torch.relu(self.up(self.embed(tokens)))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> list[float]:
    """Train on random tokens; return the losses."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 11, (4, 5), generator=generator)
        optimizer.zero_grad()
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return copies of every weight and its state, by the names of parameter and state."""
    return {
        name: {"weight": p.detach().clone()} | {key: value.clone() for key, value in optimizer.state.get(p, {}).items()}
        for name, p in model.named_parameters()
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all weights by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
