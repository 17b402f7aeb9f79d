"""Second moments of rows, whole on every rank: who computes a matrix advances them, and tells the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muon_fsdp.distributed import add_up
from muon_fsdp.fused import pinned
from muon_fsdp.layout import Layout
from muon_fsdp.plan import Member, Stage
from muon_fsdp.recorder import Recorder
from muon_fsdp.rules.base import Rule, State, working_dtype
from muon_fsdp.views import MatrixView

NAME = "second_moment"


@dataclass
class _Set:
    """Parameters whose moments are added up together."""

    ranks: tuple[int, ...]
    positions: list[int] = field(default_factory=list)
    touched: Tensor | None = None  # by parameter, whether some rank has a gradient for it


class RowMoments:
    """The moments of all matrices of an optimizer whose rows are normalized."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        views: Sequence[MatrixView | None],  # of all parameters, as are the layouts
        layouts: Sequence[Layout],
        positions: Sequence[int],
    ) -> None:
        self._views: dict[int, MatrixView] = {}
        sets: dict[tuple[Any, ...], _Set] = {}
        for position in positions:
            parameter, view = parameters[position], views[position]
            assert view is not None
            if parameter.numel() == 0:
                continue
            self._views[position] = view
            ranks = tuple(sorted(layouts[position].ranks))
            key = (ranks, str(parameter.device), str(working_dtype(parameter.dtype)))
            sets.setdefault(key, _Set(ranks)).positions.append(position)
        self._sets = [sets[key] for key in sorted(sets)]  # collectives come in one order on all ranks
        self._states: Sequence[State] = ()
        self._found: dict[int, Tensor] = {}

    def look_up(self, states: Sequence[State], gradients: Mapping[int, Tensor], wanted: Mapping[int, Tensor]) -> None:
        """Write down what differs from step to step, where a captured step finds it."""
        self._states = states
        for own in self._sets:
            device = states[own.positions[0]][NAME].device
            if own.touched is None:
                own.touched = torch.zeros(len(own.positions), dtype=torch.bool, device=device)
            here = pinned([position in gradients for position in own.positions], torch.bool, device)
            own.touched.copy_(here, non_blocking=True)
            flags = [wanted.get(position, own.touched[i]) for i, position in enumerate(own.positions)]
            own.touched.copy_(torch.stack([flag.to(device) for flag in flags]))

    def begin(self) -> None:
        """What this rank does not compute stays zero, and others add to it."""
        self._found = {position: torch.zeros_like(self._states[position][NAME]) for position in self._views}

    def normalize(self, rule: Rule, stage: Stage, key: Any, members: Sequence[Member], directions: Tensor) -> None:
        """Normalize the rows of matrices that are members of one batch."""
        places = [self._place(stage, member) for member in members]
        moments = torch.cat([self._states[position][NAME][rows] for position, rows in places])
        after = rule.normalize_rows(key, directions, moments.view(directions.shape[:2])).reshape(-1)
        unit = stage.units[members[0].unit]
        if unit.owner is None and stage.exchange is not None:  # all ranks have the same, and all add it up
            after = after / len(stage.exchange.ranks)
        parts = torch.split(after, [rows.stop - rows.start for _, rows in places])
        torch._foreach_copy_([self._found[position][rows] for position, rows in places], list(parts))

    def _place(self, stage: Stage, member: Member) -> tuple[int, slice]:
        """Where the numbers of a member lie in the state of its parameter."""
        unit = stage.units[member.unit]
        view = self._views[unit.position]
        before = sum(count * rows for count, rows, _ in view.block_shapes[: member.block])
        rows = view.block_shapes[member.block][1]
        first = unit.first_matrix(view, member.block)
        return unit.position, slice(before + (first + member.start) * rows, before + (first + member.stop) * rows)

    def finish(self, recorder: Recorder) -> None:
        """Tell all ranks what each has found, and write it down."""
        for own in self._sets:
            found = [self._found[position] for position in own.positions]
            if len(own.ranks) > 1:
                found = add_up(found, own.ranks, recorder)
            assert own.touched is not None
            for touched, position, moments in zip(own.touched, own.positions, found, strict=True):
                state = self._states[position][NAME]
                state.copy_(torch.where(touched, moments, state))
        self._found = {}
