"""Muon: momentum, orthogonalized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from muon_fsdp.newton_schulz import orthogonalization_flops, orthogonalize
from muon_fsdp.rules.base import GroupOptions, Rule, State, StateSpec, working_dtype
from muon_fsdp.scaling import update_scale

if TYPE_CHECKING:
    from muon_fsdp.kernels.triton_elementwise import TensorList


class MuonBatchKey(NamedTuple):
    method: str
    steps: int
    factor: float  # scale * ns_stepsize


class Muon(Rule):
    """buf = momentum * buf + grad;  U = scale * ns_stepsize * polar(buf, or grad + momentum * buf with Nesterov)."""

    name = "muon"
    orthogonalizes = True
    state: ClassVar[tuple[StateSpec, ...]] = (StateSpec("momentum_buffer"),)

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

    def result_dtype(self, keys: Sequence[MuonBatchKey], units: Tensor) -> torch.dtype:
        """float16 on GPUs, where it is what the iteration has, unless a factor would take it out of its range."""
        in_range = all(2.0**-8 <= key.factor <= 2.0**8 and key.method != "exact" for key in keys)
        if units.is_cuda and units.dtype != torch.float64 and in_range:
            return torch.float16
        return working_dtype(units.dtype)

    def direction(self, key: MuonBatchKey, matrices: Tensor, out: Tensor, inverse_norms: Tensor | None = None) -> None:
        orthogonalize(
            matrices, method=key.method, steps=key.steps, factor=key.factor, inverse_norms=inverse_norms, out=out
        )

    fused = True

    def fused_scalars(self, group: GroupOptions) -> tuple[float, ...]:
        return (group["momentum"],)

    def fused_prepare(self, group: GroupOptions, tensors: TensorList, staging: Tensor, partials: Tensor | None) -> None:
        from muon_fsdp.kernels import triton_elementwise

        triton_elementwise.muon_prepare(tensors, staging, partials, nesterov=group["nesterov"])

    def fused_apply(self, group: GroupOptions, tensors: TensorList, updates: Tensor) -> None:
        from muon_fsdp.kernels import triton_elementwise

        triton_elementwise.apply_updates(tensors, updates)
