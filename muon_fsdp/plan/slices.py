"""Divide buffers into equal slices, one per rank, that an all-gather completes.

Updates: an owner that sent its results to every replica would pack a copy for each. Instead, ranks that hold the same
shards (peers) divide their buffer of updates into slices, one per peer. An owner sends every element of its results
once, to the peer whose slice it lies in, and one all-gather per set of peers completes the buffers.

Weights: with `shard_state=True` weights are whole on every rank, and each rank updates its own rows of them. After a
step, one all-gather per bucket of weights completes these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from muon_fsdp.plan.layout import Box, Layout, Shape
from muon_fsdp.plan.outline import StageOutline
from muon_fsdp.plan.units import ParameterSpec, Unit

# A buffer holds many tensors; each begins at a multiple of this many elements, which kernels need to load vectors.
SLOT_ALIGNMENT = 16


class UpdateSlices:
    """The buffers of updates on all ranks of a stage, and the slices into which peers divide them.

    Ranks are given by their index in `outline.ranks`. All parameters of a stage have the same peers.
    """

    def __init__(self, outline: StageOutline) -> None:
        self._layout: Layout = outline.specs[0].layout
        self.num_peers = self._layout.num_replicas
        self.specs = _by_slice_of_owner(outline) if self.num_peers > 1 else outline.specs
        # Few shards differ in size, and thousands of parameters have the same shape: both are looked up.
        alike = {(id(spec.layout), spec.shape): spec for spec in self.specs}
        numbers = {key: number for number, key in enumerate(alike)}
        self._shards = [(spec.layout, spec.shape) for spec in alike.values()]
        self._shard_of = [numbers[(id(spec.layout), spec.shape)] for spec in self.specs]
        self._by_numels: dict[tuple[int, ...], tuple[dict[int, int], int]] = {}
        self._by_first_peer: dict[int, tuple[dict[int, int], int]] = {}

    def peers(self, index: int) -> tuple[int, ...]:
        """Return the global ranks that hold the same shards as this rank, in the order of their slices."""
        return tuple(self._layout.ranks[peer] for peer in self._layout.peers[index])

    def slice_numel(self, index: int) -> int:
        """Return the elements of each slice of this rank's buffer; the last slices may be padding."""
        return self._lay_out(index)[1]

    def kept(self, unit: Unit, spec: ParameterSpec) -> int:
        """Return how many elements of a unit lie in the slice of its owner, which it does not send."""
        assert unit.owner is not None
        owner = self._layout.index_of[unit.owner]
        return sum(part.intersect(unit.box).numel for part in self.parts(owner, spec))

    def parts(self, index: int, spec: ParameterSpec) -> Iterator[Box]:
        """Yield the boxes of a parameter that make up its part in the slice of this rank, in their order there."""
        box = spec.layout.boxes(spec.shape)[index]
        if self.num_peers == 1:
            yield box
            return
        offsets, numel = self._lay_out(index)
        start = self._layout.peer_number[index] * numel - offsets[spec.position]
        for offset, shape in _boxes_of_range(box.shape, max(0, start), min(box.numel, start + numel)):
            yield Box(tuple(a + b for a, b in zip(box.offset, offset, strict=True)), shape)

    def _lay_out(self, index: int) -> tuple[dict[int, int], int]:
        """Return where each parameter begins in the buffer of this rank, by position, and the elements of a slice."""
        peer = self._layout.peers[index][0]
        if peer not in self._by_first_peer:
            numels = tuple(layout.boxes(shape)[peer].numel for layout, shape in self._shards)
            if numels not in self._by_numels:
                offsets, end = {}, 0
                for spec, shard in zip(self.specs, self._shard_of, strict=True):
                    offsets[spec.position] = end
                    end += aligned(numels[shard])
                self._by_numels[numels] = offsets, aligned(-(-end // self.num_peers))
            self._by_first_peer[peer] = self._by_numels[numels]
        return self._by_first_peer[peer]


def aligned(numel: int) -> int:
    """Return the number of elements, rounded up to the alignment of buffers."""
    return -(-numel // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def _by_slice_of_owner(outline: StageOutline) -> tuple[ParameterSpec, ...]:
    """Sort parameters by the number of their owner among its peers.

    Results then lie near the slice that their owner keeps. Under HSDP most of them stay in the owner's replica.
    """
    layout = outline.specs[0].layout
    owners = {unit.position: unit.owner for unit in reversed(outline.units)}  # of the first unit of a parameter

    def number(spec: ParameterSpec) -> int:
        owner = owners.get(spec.position)
        return 0 if owner is None else layout.peer_number[layout.index_of[owner]]

    return tuple(sorted(outline.specs, key=number))


def _boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield offset and shape of the boxes that make up the elements [start, stop) of a contiguous tensor, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows are [first, last)
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    for offset, size in _boxes_of_range(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


@dataclass(frozen=True)
class Rows:
    """The rows of one weight in the slices of a bucket.

    Args:
        position: the number of the parameter among those of all groups.
        shape: its whole shape.
        offset: where its rows begin in the slice of every rank.
        rows_per_rank: rows that a rank updates; the last ranks may have fewer, or none, as with `Shard(0)`.
    """

    position: int
    shape: tuple[int, ...]
    offset: int
    rows_per_rank: int

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Bucket:
    """Weights of one precision on one device that one all-gather completes; every rank has a slice of equal size."""

    weights: tuple[Rows, ...]
    slice_numel: int


def make_buckets(shapes: Iterable[tuple[int, tuple[int, ...]]], num_ranks: int, max_numel: int) -> list[Bucket]:
    """Divide weights into buckets of at most `max_numel` elements, or one weight.

    Args:
        shapes: position and whole shape of every weight.
        num_ranks: the ranks over which rows are sharded.
        max_numel: the elements of a bucket on all ranks, with padding.
    """
    buckets: list[Bucket] = []
    weights: list[Rows] = []
    end = 0
    for position, shape in shapes:
        rows_per_rank = -(-shape[0] // num_ranks)
        numel = aligned(rows_per_rank * math.prod(shape[1:]))
        if weights and (end + numel) * num_ranks > max_numel:
            buckets.append(Bucket(tuple(weights), end))
            weights, end = [], 0
        weights.append(Rows(position, shape, end, rows_per_rank))
        end += numel
    return [*buckets, Bucket(tuple(weights), end)] if weights else buckets
