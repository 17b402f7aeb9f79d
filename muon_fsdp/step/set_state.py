"""Read and write the per-matrix state of all matrices on the same ranks, in a few launches together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muon_fsdp.declarations.state import PerMatrix, State
from muon_fsdp.kernels.tables import pinned
from muon_fsdp.plan.matrix_sets import MatrixClass, MatrixSet
from muon_fsdp.rules import RULES
from muon_fsdp.statistics.observer import STATISTICS


class Entry(NamedTuple):
    """One declared state of one class; `number` counts the classes of the set."""

    number: int
    kind: MatrixClass
    spec: PerMatrix

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.kind.count, *self.spec.shape_of_matrix(self.kind.rows, self.kind.cols))

    @property
    def numel(self) -> int:
        return self.spec.numel(self.kind.count, self.kind.rows, self.kind.cols)


class SetState:
    """The per-matrix state of all classes of one set, and which of their matrices are updated.

    Rules change the state that they declare. Statistics replace their own, the observed state, for all matrices.
    """

    def __init__(self, own: MatrixSet) -> None:
        self._classes = own.classes
        self.is_alone = len(own.ranks) == 1
        entries = [
            Entry(number, kind, spec)
            for number, kind in enumerate(own.classes)
            for spec in RULES[kind.rule].all_state
            if isinstance(spec, PerMatrix)
        ]
        of_rules = [entry for entry in entries if entry.spec in RULES[entry.kind.rule].matrix_state]
        observed = [entry for entry in entries if entry.spec not in RULES[entry.kind.rule].matrix_state]
        inputs = {name for statistic in STATISTICS.values() for name in statistic.reads}
        self.of_rules = of_rules
        self._read = [entry for entry in observed if entry.spec.name in inputs]
        self.observed = self._read + [entry for entry in observed if entry.spec.name not in inputs]
        device, counts = own.classes[0].device, [kind.count for kind in own.classes]
        # A captured step keeps the addresses of these tensors.
        self._updated = torch.ones(sum(counts), dtype=torch.bool, device=device)
        self.updated: list[Tensor] = list(torch.split(self._updated, counts))  # (count,) for every class
        firsts = [sum(counts[:number]) for number in range(len(counts))]
        matrices = [
            torch.arange(entry.kind.count).repeat_interleave(entry.numel // entry.kind.count) + firsts[entry.number]
            for entry in of_rules
        ]
        self._matrix_of = torch.cat([torch.empty(0, dtype=torch.int64), *matrices]).to(device)  # of every element
        self._elements = torch.ones(len(self._matrix_of), dtype=torch.bool, device=device)
        self._flags: tuple[bool, ...] = ()
        self._slices: list[list[Tensor]] = []  # of the rules' state, then of the observed state
        self._before = self._flat = torch.empty(0)

    def bind(self, slices_of: Callable[[MatrixClass, PerMatrix], list[Tensor]]) -> None:
        """Read and write these state tensors from now on: for a class, the parts of the parameters' state."""
        self._slices = [slices_of(entry.kind, entry.spec) for entry in (*self.of_rules, *self.observed)]

    def fill(self, updated: Collection[int]) -> None:
        """Write which matrices are updated, given the positions of parameters, to where a captured step reads it."""
        flags = tuple([place.position in updated for kind in self._classes for place in kind.places])
        if flags != self._flags:
            counts = [place.count for kind in self._classes for place in kind.places]
            each = [flag for flag, count in zip(flags, counts, strict=True) for _ in range(count)]
            self._updated.copy_(pinned(each, torch.bool, self._updated.device), non_blocking=True)
            torch.index_select(self._updated, 0, self._matrix_of, out=self._elements)
            self._flags = flags

    def read(self) -> list[tuple[State, State]]:
        """Return, for every class, copies of its rule's state and of the observed state that statistics start from."""
        states: list[tuple[State, State]] = [({}, {}) for _ in self._classes]
        first, stop = len(self.of_rules), len(self.of_rules) + len(self._read)
        if self.of_rules:
            self._before = _joined(self._slices[:first])
            self._flat = self._before.clone()
            for entry, value in self._split(self.of_rules, self._flat):
                states[entry.number][0][entry.spec.name] = value
        if self._read:
            for entry, value in self._split(self._read, _joined(self._slices[first:stop])):
                states[entry.number][1][entry.spec.name] = value
        return states

    def originals(self) -> list[State]:
        """Return, for every class, its rule's state before this step; nobody may change it."""
        states: list[State] = [{} for _ in self._classes]
        if self.of_rules:
            for entry, value in self._split(self.of_rules, self._before):
                states[entry.number][entry.spec.name] = value
        return states

    def write(self, states: Sequence[tuple[State, State]]) -> None:
        """Store the rules' state of matrices that are updated, and the observed state of all matrices."""
        sources = [states[entry.number][1][entry.spec.name].reshape(-1) for entry in self.observed]
        if self.of_rules:
            values = [states[entry.number][0][entry.spec.name].reshape(-1) for entry in self.of_rules]
            found = self._flat if self._holds(values) else torch.cat(values)
            kept = torch.where(self._elements, found, self._before)
            sources = [value.reshape(-1) for _, value in self._split(self.of_rules, kept)] + sources
        parts = [
            part
            for source, slices in zip(sources, self._slices, strict=True)
            for part in torch.split(source, [target.numel() for target in slices])
        ]
        if parts:
            torch._foreach_copy_([target for slices in self._slices for target in slices], parts)

    def _holds(self, values: Sequence[Tensor]) -> bool:
        """Return whether the values still lie in the buffer of `read`: rules have changed them in place, if at all."""
        place = self._flat.data_ptr()
        for value in values:
            if value.data_ptr() != place or value.dtype != self._flat.dtype or not value.is_contiguous():
                return False
            place += value.numel() * value.itemsize
        return True

    @staticmethod
    def _split(entries: Sequence[Entry], flat: Tensor) -> list[tuple[Entry, Tensor]]:
        parts = torch.split(flat, [entry.numel for entry in entries])
        return [(entry, part.view(entry.shape)) for entry, part in zip(entries, parts, strict=True)]


def _joined(slices: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.cat([part for parts in slices for part in parts])
