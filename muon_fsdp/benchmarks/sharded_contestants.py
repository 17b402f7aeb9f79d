"""Make the optimizers that are compared on a model sharded by FSDP2, ours and those of other libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from muon_fsdp import FSDPMuonOptimizer
from muon_fsdp.benchmarks.contestants import OURS

# Makes the optimizers that together update all parameters of a model on a mesh.
MakeOptimizers = Callable[[nn.Module, DeviceMesh], list[torch.optim.Optimizer]]

OVERLAPPED = f'{OURS}, overlap="backward"'
LR, OTHER_LR = 0.02, 3e-4


def contestants(device: str) -> dict[str, MakeOptimizers]:
    """Return what makes each contestant that runs on a device, by the name that the table shows."""
    found: dict[str, MakeOptimizers] = {
        OURS: _ours,
        OVERLAPPED: partial(_ours, overlap="backward"),
        "torch.optim.AdamW(fused)": _adamw,
        "torch.optim.Muon": _torch_muon,
    }
    if device == "cuda" and importlib.util.find_spec("dion"):
        found["dion Muon (Triton)"] = _dion
    return found


def _ours(model: nn.Module, mesh: DeviceMesh, **options: Any) -> list[torch.optim.Optimizer]:
    return [FSDPMuonOptimizer(model, lr=LR, adamw_lr=OTHER_LR, nesterov=True, **options)]


def _adamw(model: nn.Module, mesh: DeviceMesh) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=OTHER_LR, fused=True)]


def _torch_muon(model: nn.Module, mesh: DeviceMesh) -> list[torch.optim.Optimizer]:
    matrices, others = _divide(model)
    return [torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(others, lr=OTHER_LR, fused=True)]


def _dion(model: nn.Module, mesh: DeviceMesh) -> list[torch.optim.Optimizer]:
    muon: Any = importlib.import_module("dion").Muon
    matrices, others = _divide(model)
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw", "lr": OTHER_LR}]
    return [muon(groups, distributed_mesh=mesh, lr=LR, nesterov=True, use_triton=True)]


def _divide(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices in the blocks of a model, and all other parameters."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if name.startswith("blocks.") and p.ndim == 2]
    chosen = set(matrices)
    return matrices, [p for _, p in named if p not in chosen]
