"""Muon: momentum, orthogonalized."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muon_fsdp.newton_schulz import orthogonalization_flops, orthogonalize
from muon_fsdp.rules.base import GroupOptions, Rule, State, StateSpec
from muon_fsdp.scaling import update_scale


class MuonBatchKey(NamedTuple):
    method: str
    steps: int
    factor: float  # scale * ns_stepsize


class Muon(Rule):
    """buf = momentum * buf + grad;  U = scale * ns_stepsize * polar(buf, or grad + momentum * buf with Nesterov)."""

    name = "muon"
    orthogonalizes = True
    state = (StateSpec("momentum_buffer"),)

    def prepare(self, group: GroupOptions, grads: list[Tensor], states: list[State]) -> list[Tensor]:
        buffers = [state["momentum_buffer"] for state in states]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, grads)
        if group["nesterov"]:
            return list(torch._foreach_add(grads, buffers, alpha=group["momentum"]))
        return buffers

    def batch_key(self, group: GroupOptions, rows: int, cols: int) -> MuonBatchKey:
        factor = update_scale(group["scale"], rows, cols) * float(group["ns_stepsize"])
        return MuonBatchKey(group["orthogonalization"], group["ns_steps"], factor)

    def flops(self, key: MuonBatchKey, rows: int, cols: int) -> float:
        return orthogonalization_flops(rows, cols, key.steps)

    def direction(self, key: MuonBatchKey, matrices: Tensor) -> Tensor:
        return orthogonalize(matrices, method=key.method, steps=key.steps).mul_(key.factor)
