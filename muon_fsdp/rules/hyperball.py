"""Update matrices by Muon on a hyperball (arXiv 2606.16899), which keeps the Frobenius norm of every matrix fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.declarations.state import PerMatrix, working_dtype
from muon_fsdp.linalg.scaling import ADAMW_RATIO, RELATIVE_LRS, damp
from muon_fsdp.rules.base import GroupOptions, MatrixBatch, MatrixValues
from muon_fsdp.rules.muon import MOMENTUM_OPTIONS, Muon, unusual_lr


class Hyperball(Muon):
    """The Hyperball rule: each matrix keeps the Frobenius norm R of its first step, and lr is the relative step size.

        W = R N(W - lr R N(O) * min(1, ||M||_F / momentum_eps)),  N(X) = X / ||X||_F

    O is Muon's orthogonalized momentum M. There is no weight decay: the norm does not grow.
    """

    name = "hyperball"
    title = "Hyperball"
    options = MOMENTUM_OPTIONS
    state = (
        *Muon.state,
        PerMatrix(
            "radius",
            "scalar",
            initial="frobenius_norm",
            zero_error="such a matrix can't keep its norm. Initialize it, or give it another rule with overrides",
        ),
    )
    statistics = ("frobenius_norm",)
    update_statistics = True
    diagnostics = ("norm_over_radius",)
    overwrites_matrices = True
    hints: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("scale", "ns_stepsize"),
            "the norm of each matrix replaces it: lr is the size of a step relative to that norm",
        ),
        "cautious_weight_decay": "the factor that brings each matrix back to its norm replaces weight decay",
    }
    paper = "arXiv 2606.16899"
    recipe: ClassVar[dict[str, float]] = {"lr": 0.02, "weight_decay": 0.0}

    def direction(self, batch: MatrixBatch) -> None:
        Hyperball.directions(self, [batch])

    def directions(self, batches: Sequence[MatrixBatch]) -> None:
        for batch, norms in zip(batches, self._orthogonalize(batches), strict=True):
            # The norm becomes that of an orthogonal matrix and not 1: float16 could not represent the elements.
            dtype = working_dtype(batch.update.dtype)
            size = torch.linalg.vector_norm(batch.update, dim=(-2, -1), keepdim=True, dtype=dtype)
            batch.update.mul_(torch.where(size > 0, min(batch.update.shape[-2:]) ** 0.5 / size, 0.0))
            damp(batch.update, norms, batch.options["momentum_eps"])

    def factor(self, options: PlannedOptions, rows: int, cols: int) -> float:
        return 1.0

    def factors(self, values: MatrixValues) -> tuple[Tensor, Tensor]:
        """Return the factors of weights and updates, which bring W - lr R N(O) back to the norm R."""
        lr, radius = values.options["lr"], values.state["radius"].double()
        norm = values.statistics["frobenius_norm"].double()
        of_update = values.update_statistics
        step = lr * radius / min(values.rows, values.cols) ** 0.5
        squared = norm.square() - 2 * step * of_update.inner_product + step.square() * of_update.squared_norm
        values.diagnostics["norm_over_radius"] = norm / radius
        back = radius / squared.clamp_min(0).sqrt()
        return back, back * radius / min(values.rows, values.cols) ** 0.5

    def update_scale(self, group: GroupOptions, rows: int, cols: int) -> float | None:
        return None

    def other_lr_ratio(self, options: GroupOptions) -> float | None:
        return ADAMW_RATIO

    def warnings(self, group: GroupOptions) -> list[str]:
        found = unusual_lr(group, RELATIVE_LRS, "With rule='hyperball' a step is about lr times the norm of its matrix")
        if group["weight_decay"] == 0:
            return found
        return [
            *found,
            "weight_decay has no effect on matrices with rule='hyperball', which keeps their norm. "
            "Pass weight_decay=0.",
        ]

    def metrics(self, last: Mapping[str, Tensor], total: Mapping[str, float]) -> dict[str, float]:
        """Return numbers for a logger.

        Keys:
            frobenius_norm_over_radius_min: the smallest ratio of a matrix's norm and R before the last step.
            frobenius_norm_over_radius_max: the largest ratio.
        """
        ratios = last["norm_over_radius"]
        ratios = ratios[ratios.isfinite() & (ratios > 0)]
        if not len(ratios):
            return {}
        return {
            "frobenius_norm_over_radius_min": float(ratios.min()),
            "frobenius_norm_over_radius_max": float(ratios.max()),
        }
