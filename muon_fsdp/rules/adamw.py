"""AdamW (decoupled decay), for everything that is not orthogonalized."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muon_fsdp.rules.base import GroupOptions, Rule, State, StateSpec

if TYPE_CHECKING:
    from muon_fsdp.kernels.triton_elementwise import TensorList


class AdamW(Rule):
    """m, v = moving averages of g and g^2;  U = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)."""

    name = "adamw"
    orthogonalizes = False
    state = (StateSpec("momentum_buffer"), StateSpec("second_moment"), StateSpec("step", like="scalar"))

    def prepare(self, group: GroupOptions, grads: list[Tensor], states: list[State]) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        first = [state["momentum_buffer"] for state in states]
        second = [state["second_moment"] for state in states]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)

        # The step counter stays on the device, one per parameter, so that nothing here waits for the host.
        precise_steps = [step.to(moment.dtype) for step, moment in zip(steps, first, strict=True)]
        denominators = list(torch._foreach_div(second, _bias_corrections(beta2, precise_steps)))
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = list(torch._foreach_div(first, _bias_corrections(beta1, precise_steps)))
        torch._foreach_div_(updates, denominators)
        return updates

    fused = True

    def fused_scalars(self, group: GroupOptions) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return (beta1, beta2, group["eps"], _log(beta1), _log(beta2), 1 - beta1, 1 - beta2)

    def fused_prepare(self, group: GroupOptions, tensors: TensorList, staging: Tensor, partials: Tensor | None) -> None:
        pass  # nothing is staged: all of it happens in one launch of `fused_apply`

    def fused_apply(self, group: GroupOptions, tensors: TensorList, updates: Tensor) -> None:
        from muon_fsdp.kernels import triton_elementwise

        triton_elementwise.adamw_update(tensors)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _bias_corrections(beta: float, steps: list[Tensor]) -> list[Tensor]:
    """1 - beta^t as -expm1(t log beta): at beta = 0.999 and t = 1 the plain form loses three digits in float32."""
    corrections = list(torch._foreach_mul(steps, _log(beta)))
    torch._foreach_expm1_(corrections)
    torch._foreach_neg_(corrections)
    return corrections
