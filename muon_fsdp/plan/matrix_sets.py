"""Describe which matrices lie on which ranks, for statistics of W and per-matrix state.

A class holds the matrices of one rule, one set of planned options and one shape; a batch of a stage is always part of
one class. A set holds all classes on the same ranks, whose numbers travel together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.plan.parts import Block, blocks_of, has_whole_rows
from muon_fsdp.plan.units import ParameterSpec


@dataclass(frozen=True)
class Place:
    """Matrices [first, first + count) of a class: one block of a parameter's view."""

    position: int
    block: int
    first: int
    count: int
    group: int


@dataclass(frozen=True)
class MatrixClass:
    """Matrices of one rule, one set of planned options and one shape on the same ranks and device."""

    rule: str
    options: PlannedOptions
    rows: int
    cols: int
    places: tuple[Place, ...]
    # Per matrix: 1 if this rank's part of it counts in sums over the ranks, 0 if an earlier rank holds the same part.
    weights: tuple[float, ...]
    device: torch.device
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return len(self.weights)


@dataclass(frozen=True)
class MatrixSet:
    """All classes that lie on the same ranks and device, and the parts of them that this rank holds."""

    ranks: tuple[int, ...]
    classes: tuple[MatrixClass, ...]
    blocks: tuple[Block, ...]  # only of classes whose rule requests statistics
    is_split: bool  # whether ranks hold different parts
    cuts_rows: bool  # whether some rank holds only a part of a row

    def only(self, chosen: list[int]) -> MatrixSet:
        """Return a set with only these classes, renumbered in this order."""
        renumbered = {old: new for new, old in enumerate(chosen)}
        blocks = tuple(block.of_class(renumbered[block.kind]) for block in self.blocks if block.kind in renumbered)
        classes = tuple(self.classes[index] for index in chosen)
        return MatrixSet(self.ranks, classes, blocks, self.is_split, self.cuts_rows)


def make_sets(specs: Iterable[ParameterSpec], rank: int) -> list[MatrixSet]:
    """Sort matrices into sets and classes, in the same order on all ranks, so that their collectives match."""
    by_ranks: dict[tuple[Any, ...], list[ParameterSpec]] = defaultdict(list)
    for spec in specs:
        by_ranks[(spec.layout.ranks, str(spec.device), str(spec.dtype))].append(spec)
    return [_make_set(members, rank) for _, members in sorted(by_ranks.items(), key=lambda item: item[0])]


def _make_set(specs: list[ParameterSpec], rank: int) -> MatrixSet:
    places: dict[tuple[Any, ...], list[Place]] = defaultdict(list)
    weights: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    numbers: dict[tuple[Any, ...], int] = {}
    blocks: list[Block] = []
    is_split = cuts_rows = False
    for spec in specs:
        boxes = spec.layout.boxes(spec.matrices.shape)
        me = spec.layout.index_of[rank]
        # Exactly one rank counts a part: dividing by the number of its holders is not exact for three of them.
        weight = float(boxes.index(boxes[me]) == me)
        base: list[tuple[int, int]] = []  # per block: its class, and the first of its matrices there
        for block, (count, rows, cols) in enumerate(spec.matrices.block_shapes):
            key = (spec.rule, spec.options, rows, cols)
            number = numbers.setdefault(key, len(numbers))
            first = len(weights[key])
            base.append((number, first))
            places[key].append(Place(spec.position, block, first, count, spec.group))
            weights[key] += [weight] * count
        is_split |= any(box.shape != spec.matrices.shape for box in boxes)
        if spec.is_observed:
            cuts_rows |= any(not has_whole_rows(spec.matrices, box) for box in boxes if box.numel > 0)
            blocks += blocks_of(spec.position, spec.matrices, boxes[me], base)
    device, dtype = specs[0].device, specs[0].dtype
    classes = tuple(
        MatrixClass(rule, options, rows, cols, tuple(places[key]), tuple(weights[key]), device, dtype)
        for key in numbers
        for rule, options, rows, cols in [key]
    )
    return MatrixSet(specs[0].layout.ranks, classes, tuple(blocks), is_split, cuts_rows)
