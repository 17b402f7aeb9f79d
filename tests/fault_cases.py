"""A small model, sharded parameters, and errors and warnings as text, for the tests of faults."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer

OPTIMIZERS = [MuonOptimizer, FSDPMuonOptimizer]
ROWS = (Shard(0),)
LIMIT = 240.0  # seconds for a case that must not hang; on a busy machine they take a while


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))


def error_of(act: Callable[[], object]) -> str:
    """Return the text of the RuntimeError that an act ends with, "" if it does not."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""


def backward(model: nn.Module, seed: int = 0) -> None:
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def warnings_of(act: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in caught if "drift apart" in str(warning.message)]


def sharded(value: Tensor, mesh: DeviceMesh, placements: Any = ROWS) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None))


def give_gradients(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.ndim))
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
