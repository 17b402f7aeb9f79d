"""A model, its training and its state, for the tests of checkpoints and migration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer
from muon_fsdp.comm.dtensors import local
from tests.comparisons import assert_same

OPTIMIZERS = [MuonOptimizer, FSDPMuonOptimizer, SpectralSphereOptimizer]
FLATTENED = {flag: StateDictOptions(flatten_optimizer_state_dict=flag) for flag in (False, True)}
Make = Callable[..., torch.optim.Optimizer]


def net(seed: int = 0) -> nn.Sequential:
    """Make a model with matrices, vectors and an embedding, sharded where there are ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.LayerNorm(8))
    if dist.is_initialized():
        fully_shard(model[1])
        fully_shard(model)
    return model


def backward(model: nn.Module) -> None:
    model(torch.arange(8)).square().mean().backward()


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        backward(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return a copy of this rank's state, by the names of parameter and state."""
    return {
        f"{name} {key}": local(torch.as_tensor(value)).clone()
        for name, parameter in model.named_parameters()
        for optimizer in optimizers
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that two results of `state_of` are equal, and that the state is not all zeros, as in a new optimizer."""
    assert any(value.any() for value in expected.values()), f"state of a new optimizer: {expected}"
    assert_same(found, expected)


@contextmanager
def folder() -> Iterator[str]:
    """Make a temporary folder that all ranks know."""
    with tempfile.TemporaryDirectory() as name:
        names = [name]
        if dist.is_initialized():
            dist.broadcast_object_list(names)
        yield names[0]
        if dist.is_initialized():
            dist.barrier()


def others(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Train a model with torch.optim.Muon for matrices and AdamW for other parameters; return both."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors)]
    train(model, *optimizers)
    return optimizers
