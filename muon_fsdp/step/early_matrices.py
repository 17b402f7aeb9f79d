"""Keep the per-matrix state of stages that run beside backward, where `direction` changes copies of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.declarations.state import PerMatrix, State
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.plan.stages import Batch, Stage
from muon_fsdp.rules import RULES, MatrixBatch
from muon_fsdp.rules.base import NamedValues
from muon_fsdp.step.matrix_state import LeftNumbers

_Place: TypeAlias = tuple[int, int]  # the numbers of a stage and of a batch in it


class EarlyMatrices:
    """The per-matrix state of the stages of one round, by batch.

    Args:
        records: one per parameter.
    """

    def __init__(self, records: Sequence[ParameterRecord]) -> None:
        self._records = records
        self._states: dict[_Place, State] = {}
        self._left: defaultdict[int, dict[int, LeftNumbers]] = defaultdict(dict)  # by numbers of stage and batch

    def load(self, stage: Stage, states: Mapping[int, State]) -> None:
        """Copy the state of all batches of a stage.

        Args:
            stage: the stage.
            states: the state of its parameters by position.
        """
        if RULES[stage.rule].needs_weights:
            return  # it is only gathered
        for number, batch in enumerate(stage.batches):
            self._states[stage.number, number] = {
                spec.name: torch.cat(self._slices(stage, batch, spec, states)).view(
                    batch.count, *spec.shape_of_matrix(batch.rows, batch.cols)
                )
                for spec in RULES[stage.rule].matrix_state
            }

    def _slices(self, stage: Stage, batch: Batch, spec: PerMatrix, states: Mapping[int, State]) -> list[Tensor]:
        """Return the parts of the parameters' state that belong to a batch, in its order."""
        slices = []
        for member in batch.members:
            unit = stage.units[member.unit]
            record = self._records[unit.position]
            assert record.view is not None
            numels = [spec.numel(*shape) for shape in record.view.block_shapes]
            first = unit.first_matrix(record.view, member.block)
            each = spec.numel(1, batch.rows, batch.cols)
            start = sum(numels[: member.block]) + each * (first + member.start)
            slices.append(states[unit.position][spec.name][start : start + each * (member.stop - member.start)])
        return slices

    def place(self, stage: Stage, batch_number: int, members: object) -> _Place:
        """Return the place of a batch. All of its members take part: otherwise the updates are not used."""
        return stage.number, batch_number

    def batch(
        self, options: PlannedOptions, place: _Place, matrices: Tensor, update: Tensor, inverse_norms: Tensor | None
    ) -> MatrixBatch:
        """Return the batch that `direction` gets."""
        state = NamedValues(options.rule, "state", self._states.pop(place))
        return MatrixBatch(matrices, update, options, state, None, inverse_norms)

    def take(self, stage: Stage, number: int, place: _Place, left: LeftNumbers) -> None:
        """Keep what `direction` has left for a batch."""
        self._left[stage.number][number] = left

    def left(self, stage: Stage) -> dict[int, LeftNumbers]:
        """Return what `direction` has left for the batches of a stage, once."""
        return self._left.pop(stage.number, {})
