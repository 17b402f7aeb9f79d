"""Update embeddings and output heads by Sinkhorn normalization (DeepSeek-V4.1 report, section 2.5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from muon_fsdp.declarations.option import Option, PlannedOptions, fraction, integer, merge, number
from muon_fsdp.declarations.state import PerParameter, State, StateSpec, working_dtype
from muon_fsdp.plan.speeds import FLOPS_PER_SECOND, MEMORY_BYTES_PER_SECOND
from muon_fsdp.rules.base import GroupOptions, MatrixBatch, Rule
from muon_fsdp.rules.muon import MuonKernels, accumulate

if TYPE_CHECKING:
    from muon_fsdp.kernels.tables import TensorList


def _odd(value: object) -> None:
    """Raise unless a value is an odd number of normalizations: rows are first and last."""
    integer(value)
    if int(value) % 2 == 0:  # type: ignore[call-overload]
        raise ValueError("must be odd, because rows are normalized first and last")


class SinkhornKernels(MuonKernels):
    """The kernels of Muon, always with Nesterov momentum."""

    def prepare(self, group: GroupOptions, tensors: TensorList, staging: Tensor, partials: Tensor | None) -> None:
        super().prepare({**group, "nesterov": True}, tensors, staging, partials)


class Sinkhorn(Rule):
    """The Sinkhorn rule, for embeddings and output heads of shape (vocabulary, hidden).

        buf = momentum * buf + grad
        M = grad + momentum * buf, and rows of M with a norm of at most tau * (mean norm of rows) become zero
        rows of M, columns, rows, ...: each is divided by (its norm + eps), `sinkhorn_steps` times in all
        U = gamma * sqrt(hidden) * M

    Rows are first and last, so every row of U that is not zero has an RMS of gamma. The paper averages gradients,
    buf = momentum * buf + (1 - momentum) * grad, which multiplies M by 1 - momentum and leaves U the same.
    """

    name = "sinkhorn"
    title = "Sinkhorn"
    paper = "DeepSeek-V4.1 report, section 2.5"
    options: ClassVar[tuple[Option, ...]] = merge(
        Rule.options,
        (
            Option("lr", 2.6e-4, "learning rate", check=number, per_step=True, label="learning rate"),
            Option("momentum", 0.95, "decay of the momentum buffer, in [0, 1)", check=fraction, per_step=True),
            Option("sinkhorn_steps", 11, "normalizations of rows and columns in all, an odd number", check=_odd),
            Option("tau", 1e-3, "rows of at most tau times the mean norm of rows are not updated", check=number),
            Option("sinkhorn_eps", 1e-20, "added to the norms of rows and columns", check=number),
            Option("gamma", 0.18, "the RMS of every row of the update", check=number),
        ),
    )
    state: ClassVar[tuple[StateSpec, ...]] = (PerParameter("momentum_buffer"),)
    kernels = SinkhornKernels()
    recipe: ClassVar[dict[str, float]] = {"lr": 2.6e-4, "weight_decay": 0.0}

    def prepare(self, group: GroupOptions, grads: list[Tensor], states: list[State]) -> list[Tensor]:
        return accumulate(group["momentum"], grads, states, nesterov=True)

    def direction(self, batch: MatrixBatch) -> None:
        options = batch.options
        # The norms of gradients in float64: their squares may leave the range of float32.
        norms = torch.linalg.vector_norm(batch.matrices, dim=-1, keepdim=True, dtype=torch.float64)  # (B, rows, 1)
        kept = norms > options["tau"] * norms.mean(dim=-2, keepdim=True)
        # A selection rather than a factor of 0, and at least the smallest normal number instead of 0 / 0 with eps = 0.
        tiny = torch.finfo(torch.float32).tiny
        update = batch.matrices.to(working_dtype(batch.matrices.dtype), copy=True)  # (B, rows, cols)
        update.div_((norms + options["sinkhorn_eps"]).clamp_min(tiny).to(update.dtype))
        update = torch.where(kept, update, 0.0)
        for step in range(1, options["sinkhorn_steps"]):
            norms = torch.linalg.vector_norm(update, dim=-2 if step % 2 else -1, keepdim=True)
            update.div_((norms + options["sinkhorn_eps"]).clamp_min(tiny))
        batch.update = update.mul_(self._factor(options, update.shape[-1]))

    def flops(self, options: PlannedOptions, rows: int, cols: int) -> float:
        """Return the FLOPs that take as long as reading a matrix twice and writing it once per normalization."""
        seconds = 3 * 4 * rows * cols * int(options["sinkhorn_steps"]) / MEMORY_BYTES_PER_SECOND
        return seconds * FLOPS_PER_SECOND

    def half_precision_suffices(self, options: PlannedOptions, rows: int, cols: int) -> bool:
        # Norms are computed in float32. Only the update travels: rows of RMS gamma, elements of at most the factor.
        return options["gamma"] >= 2.0**-8 and self._factor(options, cols) <= 2.0**8

    def update_scale(self, group: GroupOptions, rows: int, cols: int) -> float | None:
        return self._factor(group, cols)

    def other_lr_ratio(self, options: GroupOptions) -> float | None:
        return 1.0  # updates have about the RMS of AdamW's

    @staticmethod
    def _factor(options: PlannedOptions | GroupOptions, cols: int) -> float:
        """Return the factor of an update whose rows have a norm of 1."""
        return float(options["gamma"]) * math.sqrt(cols)
