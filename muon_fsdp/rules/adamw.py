"""Update non-matrix parameters by AdamW, with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from muon_fsdp.declarations.option import Option, merge, number, pair_of_fractions
from muon_fsdp.declarations.state import PerParameter, State
from muon_fsdp.kernels.tables import ADAMW_LAYOUT
from muon_fsdp.rules.base import CAUTIOUS_OPTION, FusedKernels, GroupOptions, Rule

if TYPE_CHECKING:
    from muon_fsdp.kernels.tables import TensorList


class AdamWKernels(FusedKernels):
    """The kernels of AdamW: one launch counts steps and one updates the parameters, without a staging buffer."""

    layout = ADAMW_LAYOUT
    state_dtypes = (torch.float32, torch.bfloat16, torch.int8)
    roundings = ("nearest", "stochastic", "remainder")
    state_in_apply = True

    def scalars(self, group: GroupOptions) -> dict[str, float]:
        beta1, beta2 = group["betas"]
        return {
            "beta2": beta2,
            "eps": group["eps"],
            "log_beta1": _log(beta1),
            "log_beta2": _log(beta2),
            # Subtracted here in double precision: the kernel's float32 would lose digits of 1 - beta.
            "one_minus_beta1": 1 - beta1,
            "one_minus_beta2": 1 - beta2,
        }

    def apply(self, group: GroupOptions, tensors: TensorList, updates: Tensor, factors: Tensor | None) -> None:
        from muon_fsdp.kernels import triton_elementwise

        triton_elementwise.adamw_update(tensors, cautious=group["cautious_weight_decay"])


class AdamW(Rule):
    """The AdamW rule, for parameters of any shape.

        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad^2
        U = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    t counts the steps that updated the parameter.
    """

    name = "adamw"
    title = "AdamW"
    paper = "arXiv 1711.05101"
    options: ClassVar[tuple[Option, ...]] = merge(
        Rule.options,
        (
            Option(
                "lr",
                None,
                "learning rate; None follows from the lr of the matrices, by a ratio that depends on their scale",
                check=number,
                per_step=True,
                label="learning rate",
            ),
            Option(
                "betas",
                (0.9, 0.95),
                "decay of the first and of the second moment, each in [0, 1)",
                check=pair_of_fractions,
                per_step=True,
            ),
            Option(
                "eps", 1e-8, "added to the square root of the second moment, at least 0", check=number, per_step=True
            ),
            CAUTIOUS_OPTION,
        ),
    )
    state = (
        PerParameter("momentum_buffer"),
        PerParameter("second_moment", code="positive"),
        PerParameter("step", "scalar"),
    )
    kernels = AdamWKernels()
    recipe: ClassVar[dict[str, float]] = {"lr": 2e-3, "weight_decay": 0.1}

    def prepare(self, group: GroupOptions, grads: list[Tensor], states: list[State]) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        first = [state["momentum_buffer"] for state in states]
        second = [state["second_moment"] for state in states]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)

        # Each parameter's step counter stays on the device, so that the host does not wait for the device here.
        precise_steps = [step.to(moment.dtype) for step, moment in zip(steps, first, strict=True)]
        denominators = list(torch._foreach_div(second, _bias_corrections(beta2, precise_steps)))
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = list(torch._foreach_div(first, _bias_corrections(beta1, precise_steps)))
        torch._foreach_div_(updates, denominators)
        return updates

    def take_over(self, saved: Mapping[str, Any], group: GroupOptions) -> dict[str, Any]:
        """Return the moments and the step count of `torch.optim.AdamW` or `torch.optim.Adam`."""
        has_moments = {"exp_avg", "exp_avg_sq", "step"} <= saved.keys()
        # RAdam and NAdam save moments under the same names, which mean something else; they have none of these options.
        if not has_moments or not group.keys() & {"amsgrad", "use_muon"}:
            return {}
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise ValueError(
                    f"saved with {option}=True, which rule {self.name!r} does not have: set it to False in the saved "
                    "groups to use the moments anyway"
                )
        if not group.get("decoupled_weight_decay", True) and group.get("weight_decay"):
            raise ValueError(
                "saved by Adam, whose weight_decay is part of its moments: set it to 0 in the saved groups to use them "
                "anyway"
            )
        return {"momentum_buffer": saved["exp_avg"], "second_moment": saved["exp_avg_sq"], "step": saved["step"]}


def _log(beta: float) -> float:
    """Return log(beta), which is minus infinity for 0."""
    return math.log(beta) if beta > 0 else -math.inf


def _bias_corrections(beta: float, steps: list[Tensor]) -> list[Tensor]:
    """Return 1 - beta^t for every step count t.

    It is computed as -expm1(t log beta): at beta = 0.999 and t = 1, 1 - beta^t loses three digits in float32.
    """
    corrections = list(torch._foreach_mul(steps, _log(beta)))
    torch._foreach_expm1_(corrections)
    torch._foreach_neg_(corrections)
    return corrections
