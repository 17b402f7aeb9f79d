"""Numbers for a logger: how large updates are, and how orthogonal, by a sample of one matrix of every batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muon_fsdp.comm.transfers import local
from muon_fsdp.declarations.state import State
from muon_fsdp.plan.stages import Batch, Stage
from muon_fsdp.rules import RULES, MatrixBatch, Rule


@dataclass(frozen=True)
class Sample:
    """One matrix: the root mean square of its update, and how far from orthogonal it is where the rule can tell."""

    position: int  # of its parameter
    size: Tensor
    residual: Tensor | None


class Samples:
    """Samples of matrices that are whole on this rank only while a step runs.

    They are taken in the first step, and in the first step after each time that somebody has asked.
    """

    def __init__(self, stages: Sequence[Stage], parameters: Sequence[Tensor]) -> None:
        self._sampled = {
            (number, index)
            for number, stage in enumerate(stages)
            for index, batch in enumerate(stage.batches)
            if not _is_whole(stage, batch, parameters)
        }
        self.wanted = bool(self._sampled)
        self.found: dict[tuple[int, int], Sample] = {}

    def ask(self) -> list[Sample]:
        """Return what was found last, and take samples in the next step."""
        self.wanted = bool(self._sampled)
        return list(self.found.values())

    def take(self, number: int, stage: Stage, index: int, batch: MatrixBatch) -> None:
        """Sample the first matrix of a batch of which `direction` has just written the updates."""
        if (number, index) in self._sampled:
            position = stage.units[stage.batches[index].members[0].unit].position
            first = MatrixBatch(batch.matrices[:1], batch.update[:1], batch.options)
            self.found[(number, index)] = measure(position, RULES[stage.rule], first)


def measure(position: int, rule: Rule, batch: MatrixBatch) -> Sample:
    """Return the sample of a batch of one."""
    return Sample(position, batch.update.double().square().mean().sqrt(), rule.residual(batch))


def whole_samples(
    stages: Sequence[Stage], parameters: Sequence[Tensor], states: Mapping[Tensor, State]
) -> Iterator[Sample]:
    """Yield samples of matrices that are whole on this rank, of updates by momentum as it is now.

    Rules that need statistics of W are left out: these are found by all ranks together.
    """
    for stage in stages:
        rule = RULES[stage.rule]
        for batch in stage.batches if not rule.statistics else ():
            unit = stage.units[batch.members[0].unit]
            state = states.get(parameters[unit.position])
            if not state or "momentum_buffer" not in state or not _is_whole(stage, batch, parameters):
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
            yield measure(unit.position, rule, of_one)


def numbers_of(samples: Sequence[Sample], groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of samples by name; none where there are no samples."""
    lrs = [group["lr"] for group in groups for _ in group["params"]]
    sizes = [float(lrs[sample.position]) * float(sample.size) for sample in samples]
    residuals = [float(sample.residual.max()) for sample in samples if sample.residual is not None]
    numbers = {"orthogonality_residual": max(residuals)} if residuals else {}
    return numbers | ({"update_rms": sum(sizes) / len(sizes)} if sizes else {})


def _is_whole(stage: Stage, batch: Batch, parameters: Sequence[Tensor]) -> bool:
    """Return whether the parameter of a batch's first matrix is whole on this rank."""
    unit = stage.units[batch.members[0].unit]
    return local(parameters[unit.position]).shape == unit.tile.shape
