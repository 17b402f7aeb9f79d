"""Measure the size of updates and how orthogonal they are, on a sample of one matrix per batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.declarations.state import working_dtype
from muon_fsdp.plan.stages import Stage
from muon_fsdp.rules import RULES, MatrixBatch

STEPS_BETWEEN = 50
_BatchKey: TypeAlias = tuple[int, int]  # the numbers of a stage and of a batch in it


class Samples:
    """Samples of the updates that this rank computes: one matrix of every batch.

    On a CPU every step measures their sizes. On a GPU the first step does, and the first step after each call of `ask`.
    Residuals take longer, and are computed in these steps only. A captured step takes no samples, so with CUDA graphs
    there are at least `STEPS_BETWEEN` steps between two of them.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._has_matrices = any(stage.batches for stage in stages)
        self._sizes: dict[_BatchKey, tuple[Tensor, float | Tensor]] = {}  # each with lr at that step
        self._residuals: dict[_BatchKey, Tensor] = {}
        self._steps, self._asked = STEPS_BETWEEN, True
        self._wants_to_measure = False  # until somebody asks for metrics

    def start(self, device_type: str, *, rarely: bool, measures: bool = False) -> TakenSamples | None:
        """Return what takes the samples of the next step; None if it takes none.

        Args:
            device_type: where parameters are.
            rarely: whether the step would otherwise be captured or replayed.
            measures: whether ranks have agreed that the step is measured, so that it is neither.
        """
        wanted = self._has_matrices and self._asked and (measures or self._is_time(rarely=rarely))
        return TakenSamples(has_residuals=wanted) if wanted or device_type == "cpu" else None

    def wants_to_measure(self, *, rarely: bool) -> bool:
        """Return whether the next step should measure how far weights move, which all ranks must do together."""
        return self._wants_to_measure and self._is_time(rarely=rarely)

    def _is_time(self, *, rarely: bool) -> bool:
        return self._steps >= (STEPS_BETWEEN if rarely else 1)

    def ask(self) -> dict[str, float]:
        """Return the metrics of the last samples by name, none where there are no samples, and ask for new ones."""
        self._asked = self._wants_to_measure = True
        sizes = [float(lr) * float(size) for size, lr in self._sizes.values()]
        residuals = [float(residual.max()) for residual in self._residuals.values()]
        numbers = {"orthogonality_residual": max(residuals)} if residuals else {}
        return numbers | ({"update_rms": sum(sizes) / len(sizes)} if sizes else {})

    def end_step(self, groups: Mapping[int, Mapping[str, Any]], taken: TakenSamples | None, *, measures: bool) -> None:
        """Count a step with these parameter groups, and keep the samples that it has taken.

        Args:
            groups: the parameter groups by number.
            taken: the samples; None if there are none.
            measures: whether the step was measured.
        """
        self._steps += 1
        if measures:
            self._steps, self._wants_to_measure = 1, False
        if taken is None:
            return
        for key, sample in taken.samples.items():
            self._sizes[key] = sample.size, _kept(groups[sample.group]["lr"])
            if sample.residual is not None:
                self._residuals[key] = sample.residual
        if taken.has_residuals:
            self._steps, self._asked = 1, False


class Sample(NamedTuple):
    """One matrix: the root mean square of its update, without lr, and its residual if it was asked for and exists."""

    group: int  # the number of its parameter group
    size: Tensor
    residual: Tensor | None


class TakenSamples:
    """The samples of one step, or of the stages beside one backward.

    Args:
        has_residuals: whether residuals are computed too.
    """

    def __init__(self, *, has_residuals: bool) -> None:
        self.has_residuals = has_residuals
        self.samples: dict[_BatchKey, Sample] = {}

    def take(self, stage: Stage, index: int, one: MatrixBatch, group: int, factor: Tensor | None) -> None:
        """Sample one matrix of a batch, after `direction` has written its update.

        Args:
            stage: the stage.
            index: the number of the batch in the stage.
            one: the matrix and its update, as a batch.
            group: the number of its parameter group.
            factor: what its update is multiplied by besides lr; None for rules without `factors`.
        """
        update = one.result
        if factor is not None and factor.numel() > 1:
            update, factor = update.to(factor.dtype) * factor, None
        # Not in float64, for which a GPU would copy the update.
        size = torch.linalg.vector_norm(update, dtype=working_dtype(update.dtype)).double() / update.numel() ** 0.5
        if factor is not None:
            size = size * factor.abs().double().squeeze()
        residual = RULES[stage.rule].residual(one) if self.has_residuals else None
        self.samples[stage.number, index] = Sample(group, size, residual)

    def multiply(self, stage: Stage, index: int, factor: Tensor) -> None:
        """Multiply the sample of a batch by the factor of its update, which was not known when it was taken."""
        sample = self.samples[stage.number, index]
        self.samples[stage.number, index] = sample._replace(size=sample.size * factor.abs())

    def of(self, stage: Stage) -> dict[_BatchKey, Sample]:
        """Return the samples of one stage, once."""
        return {key: self.samples.pop(key) for key in list(self.samples) if key[0] == stage.number}


def _kept(lr: float | Tensor) -> float | Tensor:
    """Return the lr of a sample, which schedulers must not change."""
    return lr.clone() if isinstance(lr, Tensor) else lr
