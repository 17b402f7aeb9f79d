"""Measure the size of updates and how orthogonal they are, on a sample of one matrix per batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.comm.transfers import local
from muon_fsdp.declarations.state import State
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.plan.stages import Batch, Stage
from muon_fsdp.rules import RULES, MatrixBatch, Rule

STEPS_BETWEEN = 50
# By numbers of stage and batch: the number of a parameter group, the size of an update, and its residual.
Taken: TypeAlias = dict[tuple[int, int], tuple[int, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Sample:
    """One matrix: the root mean square of its update, and the orthogonality residual if its rule defines one."""

    size: Tensor
    residual: Tensor | None
    lr: float | Tensor  # of its group, at that step


class Samples:
    """Samples of matrices that are whole on this rank only during a step.

    They are taken in the first step, and in the first step after each call of `ask`. A captured step takes none, so
    with CUDA graphs there are at least `STEPS_BETWEEN` steps between two samples.
    """

    def __init__(self, stages: Sequence[Stage], records: Sequence[ParameterRecord]) -> None:
        self._sampled = {
            (stage.number, index)
            for stage in stages
            for index, batch in enumerate(stage.batches)
            if not _is_whole(stage, batch, records)
        }
        self._found: dict[tuple[int, int], Sample] = {}
        self._taken: Taken = {}  # of a step that has not ended
        self._steps, self._asked = STEPS_BETWEEN, True

    def wanted(self, *, rarely: bool) -> bool:
        """Return whether the next step takes samples; `rarely` if it would otherwise be captured or replayed."""
        return bool(self._sampled) and self._asked and self._steps >= (STEPS_BETWEEN if rarely else 1)

    def ask(self) -> list[Sample]:
        """Return the last samples, and ask for new ones."""
        self._asked = True
        return list(self._found.values())

    def end_step(self, groups: Sequence[Mapping[str, Any]], *, took_samples: bool) -> None:
        """Count a step with these parameter groups, and note whether it has taken samples."""
        if took_samples:
            self._steps, self._asked = 0, False
            for key, (group, size, residual) in self._taken.items():
                self._found[key] = Sample(size, residual, _kept(groups[group]["lr"]))
        self._taken = {}
        self._steps += 1

    def apart(self) -> Samples:
        """Return an object that takes samples of the same batches, for stages that may be discarded."""
        apart = copy.copy(self)
        apart._taken = {}
        return apart

    def taken_from(self, stage: Stage) -> Taken:
        """Return the samples that were taken from a stage, once."""
        return {key: self._taken.pop(key) for key in list(self._taken) if key[0] == stage.number}

    def include(self, taken: Taken) -> None:
        """Take samples that another object has taken, because the step uses their stage."""
        self._taken.update(taken)

    def take(self, stage: Stage, index: int, batch: MatrixBatch) -> None:
        """Sample the first matrix of a batch, after `direction` has written its updates."""
        if (stage.number, index) in self._sampled:
            position = stage.units[stage.batches[index].members[0].unit].position
            group = next(group for group, positions in stage.positions_by_group if position in positions)
            first = MatrixBatch(batch.matrices[:1], batch.update[:1], batch.options)
            self._taken[(stage.number, index)] = (group, *_measure(RULES[stage.rule], first))


def _measure(rule: Rule, batch: MatrixBatch) -> tuple[Tensor, Tensor | None]:
    """Return the size of the update of a batch of one, and its residual."""
    return batch.update.double().square().mean().sqrt(), rule.residual(batch)


def _kept(lr: float | Tensor) -> float | Tensor:
    """Return the lr of a sample, which schedulers must not change."""
    return lr.clone() if isinstance(lr, Tensor) else lr


def whole_samples(
    stages: Sequence[Stage], records: Sequence[ParameterRecord], states: Mapping[Tensor, State]
) -> Iterator[Sample]:
    """Yield samples of the matrices that are whole on this rank, with the update that the present momentum gives.

    Rules that need statistics of W are left out: all ranks would have to compute them together.
    """
    for stage in stages:
        rule = RULES[stage.rule]
        for batch in stage.batches if not rule.statistics else ():
            unit = stage.units[batch.members[0].unit]
            state = states.get(records[unit.position].tensor)
            if not state or "momentum_buffer" not in state or not _is_whole(stage, batch, records):
                continue
            member = batch.members[0]
            momentum = unit.view.split(local(state["momentum_buffer"]))[member.block][member.start].unsqueeze(0)
            numbers = {
                spec.name: torch.zeros(
                    1, *spec.shape_of_matrix(batch.rows, batch.cols), dtype=momentum.dtype, device=momentum.device
                )
                for spec in rule.matrix_state
            }
            of_one = MatrixBatch(momentum, torch.empty_like(momentum), batch.options, numbers)
            rule.direction(of_one)
            yield Sample(*_measure(rule, of_one), _kept(records[unit.position].group["lr"]))


def numbers_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of samples by name; none where there are no samples."""
    sizes = [float(sample.lr) * float(sample.size) for sample in samples]
    residuals = [float(sample.residual.max()) for sample in samples if sample.residual is not None]
    numbers = {"orthogonality_residual": max(residuals)} if residuals else {}
    return numbers | ({"update_rms": sum(sizes) / len(sizes)} if sizes else {})


def _is_whole(stage: Stage, batch: Batch, records: Sequence[ParameterRecord]) -> bool:
    """Return whether the parameter of a batch's first matrix, and its state, are whole on this rank."""
    unit = stage.units[batch.members[0].unit]
    return records[unit.position].part().shape == unit.box.shape
