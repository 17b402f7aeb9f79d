"""Describe which matrices lie on which ranks, and which rows and columns of them a shard holds, in any layout.

Statistics of W and per-matrix state need this. A class holds the matrices of one rule, one set of planned options and
one shape; a batch of a stage is always part of one class. A set holds all classes on the same ranks, whose numbers
travel together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.declarations.views import ATTN_MATRICES, MatrixView
from muon_fsdp.plan.layout import Box
from muon_fsdp.plan.units import ParameterSpec


@dataclass(frozen=True)
class LocalPart:
    """A part of a shard that consists of rows of the parameter's stack of matrices, cut to some columns."""

    rows: Tensor  # (R,), numbers of rows in the stack
    first_col: int
    width: int
    of: Callable[[Tensor], Tensor]  # takes a shard, returns (R, width)


def local_parts(view: MatrixView, box: Box) -> list[LocalPart]:
    """Divide a box of a parameter into rows of its stack of matrices."""
    if box.numel == 0:
        return []
    ranges = [torch.arange(start, start + size) for start, size in zip(box.offset, box.shape, strict=True)]
    if view.kind == "attn":
        width = view.shape[1] // ATTN_MATRICES
        parts = []
        for number in range(ATTN_MATRICES):  # a row of the parameter is four rows of the stack
            start, stop = max(box.offset[1], number * width), min(ranges[1][-1].item() + 1, (number + 1) * width)
            if start < stop:
                columns = slice(int(start - box.offset[1]), int(stop - box.offset[1]))
                rows = ATTN_MATRICES * ranges[0] + number
                parts.append(_part(rows, int(start - number * width), columns))
        return parts
    if view.kind == "flatten":
        inner = view.shape[1:]
        if box.shape[2:] == inner[1:]:
            each = prod(inner[1:])
            first, width = box.offset[1] * each, box.shape[1] * each
            return [LocalPart(ranges[0], first, width, lambda shard: shard.reshape(len(shard), -1))]
        parts = []
        for index in product(*map(range, box.shape[1:-1])):
            at = [offset + i for offset, i in zip(box.offset[1:], (*index, 0), strict=True)]
            first = sum(i * prod(inner[axis + 1 :]) for axis, i in enumerate(at))
            parts.append(_row_part(ranges[0], first, box.shape[-1], index))
        return parts
    if view.transposed:  # one part per matrix: the rows of several have no common distance in memory
        height = view.shape[-1]
        return [
            _transposed_part(number * height + ranges[-1], box, index)
            for index, number in zip(product(*map(range, box.shape[:-2])), _numbers(view, box), strict=True)
        ]
    rows = ranges[-2]
    for axis in range(len(ranges) - 3, -1, -1):
        rows = (ranges[axis][:, None] * prod(view.shape[axis + 1 : -1]) + rows).flatten()
    return [LocalPart(rows, box.offset[-1], box.shape[-1], lambda shard: shard.reshape(-1, shard.shape[-1]))]


def _part(rows: Tensor, first_col: int, columns: slice) -> LocalPart:
    return LocalPart(rows, first_col, columns.stop - columns.start, lambda shard: shard[:, columns])


def _transposed_part(rows: Tensor, box: Box, index: tuple[int, ...]) -> LocalPart:
    return LocalPart(rows, box.offset[-2], box.shape[-2], lambda shard: shard[index].mT)


def _numbers(view: MatrixView, box: Box) -> list[int]:
    """Return the numbers of the matrices in a stack that a box holds a part of."""
    numbers = [0]
    for offset, size, whole in zip(box.offset[:-2], box.shape[:-2], view.shape[:-2], strict=True):
        numbers = [number * whole + offset + index for number in numbers for index in range(size)]
    return numbers


def _row_part(rows: Tensor, first_col: int, width: int, index: tuple[int, ...]) -> LocalPart:
    return LocalPart(rows, first_col, width, lambda shard: shard.movedim(0, -1)[index].movedim(-1, 0))


@dataclass(frozen=True)
class Block:
    """Parts of the same size of consecutive matrices of one class, which this rank holds in one parameter."""

    position: int
    class_index: int
    matrices: slice  # which matrices of the class
    rows: slice  # which rows of each of these matrices
    cols: slice
    part: LocalPart
    part_rows: slice

    def continues_in(self, other: Block) -> bool:
        """Return whether another block has the same rows and columns of the matrices that follow."""
        return (
            self.part is other.part
            and (self.class_index, self.rows, self.cols) == (other.class_index, other.rows, other.cols)
            and self.matrices.stop == other.matrices.start
        )

    def of(self, shard: Tensor) -> Tensor:
        """Return this block of a shard, (count, rows, cols)."""
        rows = self.part.of(shard)[self.part_rows]
        return rows.reshape(self.matrices.stop - self.matrices.start, -1, self.part.width)


def has_whole_rows(view: MatrixView, box: Box) -> bool:
    """Return whether the box contains every row of a matrix either whole or not at all."""
    if view.kind == "flatten":
        return box.shape[1:] == view.shape[1:]
    axis = -2 if view.transposed else -1
    return box.shape[axis] == view.shape[axis]


def blocks_of(position: int, view: MatrixView, box: Box, base: Sequence[tuple[int, int]]) -> list[Block]:
    """Divide a box of a parameter into blocks of its matrices.

    Args:
        position: the number of the parameter among those of all groups.
        view: how the parameter is read as matrices.
        box: the box of the parameter that this rank holds.
        base: for every block of the view, its class and the index of its first matrix in that class.
    """
    matrix_of, row_of = view.row_numbers()
    counts = [count for count, _, _ in view.block_shapes]
    of_matrix = [  # for every matrix of the parameter, its class and its index in that class
        (class_index, first + index)
        for (class_index, first), count in zip(base, counts, strict=True)
        for index in range(count)
    ]
    blocks: list[Block] = []
    for part in local_parts(view, box):
        for number, part_rows in _rows_by_matrix(part, matrix_of):
            class_index, matrix = of_matrix[number]
            rows = row_of[part.rows[part_rows]]
            step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
            block = Block(
                position,
                class_index,
                slice(matrix, matrix + 1),
                slice(int(rows[0]), int(rows[-1]) + 1, step),
                slice(part.first_col, part.first_col + part.width),
                part,
                part_rows,
            )
            if blocks and blocks[-1].continues_in(block):
                matrices = slice(blocks[-1].matrices.start, block.matrices.stop)
                part_rows = slice(blocks[-1].part_rows.start, block.part_rows.stop)
                blocks[-1] = replace(block, matrices=matrices, part_rows=part_rows)
            else:
                blocks.append(block)
    return blocks


def _rows_by_matrix(part: LocalPart, matrix_of: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield every run of rows of a part that belongs to one matrix: the number of this matrix, and which rows."""
    numbers, lengths = torch.unique_consecutive(matrix_of[part.rows], return_counts=True)
    start = 0
    for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True):
        yield number, slice(start, start + length)
        start += length


def segments_of(view: MatrixView, box: Box) -> list[tuple[int, int, int]] | None:
    """Cut a contiguous shard into runs that belong to one matrix each.

    Returns:
        (start, length, matrix) of every run; None if the elements of a matrix are not contiguous.
    """
    if view.num_matrices == 1:
        return [(0, box.numel, 0)] if box.numel > 0 else []
    if view.transposed:
        if len(view.block_shapes) > 1 or view.stacked_heads > 1:
            return None
        each = box.shape[-2] * box.shape[-1]
        return [(index * each, each, number) for index, number in enumerate(_numbers(view, box))] if each else []
    parts = local_parts(view, box)
    if len(parts) > 1:
        return None
    matrix_of, _ = view.row_numbers()
    return [
        (rows.start * part.width, (rows.stop - rows.start) * part.width, number)
        for part in parts
        for number, rows in _rows_by_matrix(part, matrix_of)
    ]


@dataclass(frozen=True)
class ClassMember:
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
    members: tuple[ClassMember, ...]
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
        blocks = tuple(
            replace(block, class_index=renumbered[block.class_index])
            for block in self.blocks
            if block.class_index in renumbered
        )
        classes = tuple(self.classes[index] for index in chosen)
        return MatrixSet(self.ranks, classes, blocks, self.is_split, self.cuts_rows)


def make_sets(specs: Iterable[ParameterSpec], rank: int) -> list[MatrixSet]:
    """Sort matrices into sets and classes, in the same order on all ranks, so that their collectives match."""
    by_ranks: dict[tuple[Any, ...], list[ParameterSpec]] = defaultdict(list)
    for spec in specs:
        by_ranks[(spec.layout.ranks, str(spec.device), str(spec.dtype))].append(spec)
    return [_make_set(members, rank) for _, members in sorted(by_ranks.items(), key=lambda item: item[0])]


def _make_set(specs: list[ParameterSpec], rank: int) -> MatrixSet:
    members: dict[tuple[Any, ...], list[ClassMember]] = defaultdict(list)
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
            members[key].append(ClassMember(spec.position, block, first, count, spec.group))
            weights[key] += [weight] * count
        is_split |= any(box.shape != spec.matrices.shape for box in boxes)
        if spec.is_observed:
            cuts_rows |= any(not has_whole_rows(spec.matrices, box) for box in boxes if box.numel > 0)
            blocks += blocks_of(spec.position, spec.matrices, boxes[me], base)
    device, dtype = specs[0].device, specs[0].dtype
    classes = tuple(
        MatrixClass(rule, options, rows, cols, tuple(members[key]), tuple(weights[key]), device, dtype)
        for key in numbers
        for rule, options, rows, cols in [key]
    )
    return MatrixSet(specs[0].layout.ranks, classes, tuple(blocks), is_split, cuts_rows)
