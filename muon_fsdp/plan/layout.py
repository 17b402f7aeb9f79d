"""Compute which box of a tensor each rank of a device mesh holds, from its shape and placements alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Shape: TypeAlias = tuple[int, ...]
Ranks: TypeAlias = tuple[int, ...]
_Held: TypeAlias = "tuple[tuple[Box, Ranks], ...]"  # boxes, each with the ranks that hold it
_Segments: TypeAlias = list[tuple[int, int]]  # half-open ranges of indices along one dimension


class LayoutError(ValueError):
    """Raised for a layout whose shards are not boxes."""


class Runs(NamedTuple):
    """The elements of a box in memory order, as numbers of elements of the whole tensor: runs of equal length.

    Element i of the box is element `first + i // length * stride + i % length` of the tensor.
    """

    first: int
    length: int
    stride: int


@dataclass(frozen=True)
class Box:
    """A rectangular region of a tensor: it starts at `offset` and has `shape`."""

    offset: Shape
    shape: Shape

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box:
        """Return the common box; it has no elements if the two do not overlap."""
        starts = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        stops = [
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        return Box(tuple(starts), tuple(max(0, stop - start) for start, stop in zip(starts, stops, strict=True)))

    def contains(self, other: Box) -> bool:
        return self.intersect(other).shape == other.shape

    def runs(self, shape: Shape) -> Runs | None:
        """Return which elements of a tensor of this shape the box has; None if its runs are not evenly spaced.

        They are if at most one dimension is cut besides the first.
        """
        cut = [axis for axis, (own, whole) in enumerate(zip(self.shape, shape, strict=True)) if own != whole]
        if cut and cut[:-1] not in ([], [0]):
            return None
        axis = cut[-1] if cut else 0
        inner = math.prod(shape[axis + 1 :])
        first = self.offset[0] * math.prod(shape[1:]) if cut and cut[0] == 0 else 0
        if axis == 0:
            return Runs(first, max(1, self.numel), 0)
        return Runs(first + self.offset[axis] * inner, max(1, self.shape[axis] * inner), shape[axis] * inner)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that cut this box out of a tensor that holds the box `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )


@dataclass(frozen=True)
class Layout:
    """The distribution of a tensor: the mesh's ranks in row-major order, its shape, and a placement per mesh axis."""

    ranks: tuple[int, ...]
    mesh_shape: Shape
    placements: tuple[Placement, ...]
    # What the methods below have found, by shape. A cache outside would hash ranks and placements, which takes longer.
    _boxes: dict[Shape, tuple[Box, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _distinct: dict[Shape, _Held] = field(default_factory=dict, init=False, repr=False, compare=False)
    _holders: dict[tuple[Shape, Box], Ranks] = field(default_factory=dict, init=False, repr=False, compare=False)

    def boxes(self, shape: Shape) -> tuple[Box, ...]:
        """Return the box that each rank holds, in the order of `ranks`."""
        boxes = self._boxes.get(shape)
        if boxes is None:
            boxes = self._boxes[shape] = _boxes(shape, self.mesh_shape, self.placements)
        return boxes

    def box_on(self, rank: int, shape: Shape) -> Box:
        """Return the box that one rank holds."""
        return self.boxes(shape)[self.index_of[rank]]

    def holders(self, shape: Shape, box: Box) -> tuple[int, ...]:
        """Return the ranks whose shard contains the box."""
        if self.largest_box(shape) < box.numel:
            return ()
        key = (shape, box)
        if key not in self._holders:
            distinct = self._distinct_boxes(shape)
            self._holders[key] = tuple(rank for held, ranks in distinct if held.contains(box) for rank in ranks)
        return self._holders[key]

    def largest_box(self, shape: Shape) -> int:
        """Return the number of elements of the largest box."""
        return self._distinct_boxes(shape)[0][0].numel

    def largest_shape(self, shape: Shape) -> Shape:
        """Return the shape of the largest box."""
        return self._distinct_boxes(shape)[0][0].shape

    def _distinct_boxes(self, shape: Shape) -> _Held:
        """Return every distinct box with the ranks that hold it, the largest first."""
        if shape not in self._distinct:
            ranks_of: dict[Box, list[int]] = defaultdict(list)
            for rank, box in zip(self.ranks, self.boxes(shape), strict=True):
                ranks_of[box].append(rank)
            ordered = sorted(ranks_of.items(), key=lambda item: -item[0].numel)
            self._distinct[shape] = tuple((box, tuple(ranks)) for box, ranks in ordered)
        return self._distinct[shape]

    @cached_property
    def index_of(self) -> dict[int, int]:
        """Return the index of each rank in `ranks`."""
        return {rank: index for index, rank in enumerate(self.ranks)}

    @cached_property
    def replica_of(self) -> tuple[int, ...]:
        """Return, per rank, the number of its replica; the ranks of a replica together hold the tensor once."""
        axes = [axis for axis, placement in enumerate(self.placements) if placement.is_replicate()]
        numbers: dict[tuple[int, ...], int] = {}
        coordinates = product(*map(range, self.mesh_shape))
        return tuple(
            numbers.setdefault(tuple(coordinate[axis] for axis in axes), len(numbers)) for coordinate in coordinates
        )

    @cached_property
    def shard_of(self) -> tuple[int, ...]:
        """Return, per rank, the number of its shard in its replica; equal numbers mean the same box."""
        seen: dict[int, int] = defaultdict(int)
        numbers = []
        for replica in self.replica_of:
            numbers.append(seen[replica])
            seen[replica] += 1
        return tuple(numbers)

    @cached_property
    def ranks_of_shard(self) -> tuple[tuple[int, ...], ...]:
        """Return, per number of a shard, the indices in `ranks` of its holders, one per replica in their order."""
        places: dict[int, list[int]] = defaultdict(list)
        for index, shard in enumerate(self.shard_of):
            places[shard].append(index)
        return tuple(tuple(sorted(many, key=self.replica_of.__getitem__)) for _, many in sorted(places.items()))

    @cached_property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """Return, per rank, the indices in `ranks` of all ranks with its box, in ascending order of these ranks."""
        of_shard = [tuple(sorted(places, key=self.ranks.__getitem__)) for places in self.ranks_of_shard]
        return tuple(of_shard[shard] for shard in self.shard_of)

    @cached_property
    def peer_number(self) -> tuple[int, ...]:
        """Return, per rank, its number among its peers."""
        numbers = {index: number for places in set(self.peers) for number, index in enumerate(places)}
        return tuple(numbers[index] for index in range(len(self.ranks)))

    @cached_property
    def num_replicas(self) -> int:
        return max(self.replica_of) + 1

    def repeated_over(self, ranks: tuple[int, ...]) -> Layout | None:
        """Return the layout of these shards on a larger mesh whose other submeshes hold the same shards again.

        Args:
            ranks: the ranks of the larger mesh in row-major order.

        Returns:
            A layout on all of `ranks`, equal for every submesh; None if the ranks of this layout are no submesh of
            the larger mesh.
        """
        index_of = {rank: index for index, rank in enumerate(ranks)}
        if not set(self.ranks) <= index_of.keys():
            return None
        if len(self.ranks) == len(ranks):
            return self
        places = [index_of[rank] for rank in self.ranks]
        mesh_shape: list[int] = []
        placements: list[Placement] = []
        indices = [places[0]]  # where the ranks of this layout must lie, axis by axis
        outer, inner = len(ranks), len(self.ranks)  # indices that one step along the axis before skips, there and here
        for size, placement in zip(self.mesh_shape, self.placements, strict=True):
            inner //= size
            stride = places[inner] - places[0] if size > 1 else outer
            if stride <= 0 or outer % (stride * size) or places[0] // stride % size:
                return None
            mesh_shape += [outer // (stride * size), size]
            placements += [Replicate(), placement]
            indices = [index + step * stride for index in indices for step in range(size)]
            outer = stride
        if indices != places:
            return None
        return Layout(ranks, (*mesh_shape, outer), (*placements, Replicate()))


def local_layout(rank: int) -> Layout:
    """Return the layout of a plain tensor, which one rank holds whole."""
    return Layout((rank,), (1,), (Replicate(),))


def fsdp_layout(world_size: int | None, mesh: Sequence[int] | None) -> Layout:
    """Return the layout that `fully_shard` gives every parameter on a mesh (shards,) or (replicas, shards)."""
    shape = tuple(mesh) if mesh is not None else (world_size or 1,)
    num_ranks = math.prod(shape)
    if len(shape) not in (1, 2) or any(size < 1 for size in shape) or world_size not in (None, num_ranks):
        ranks_given = "" if world_size is None else f" of {world_size} ranks"
        raise ValueError(f"mesh {shape} is not (shards,) or (replicas, shards){ranks_given}")
    ranks = tuple(range(num_ranks))
    placements = (Shard(0),) if len(shape) == 1 else (Replicate(), Shard(0))
    return Layout(ranks, shape, placements)


def state_layout(layout: Layout, *, shard_state: bool) -> Layout:
    """Return the layout of state: that of the parameters, or rows over all ranks if `shard_state` is set."""
    if not shard_state:
        return layout
    if layout.num_replicas != len(layout.ranks):
        raise ValueError(
            f"mesh {layout.mesh_shape} shards the parameters, and their state with them: shard_state=True is for "
            "replicas, so pass mesh=(replicas, 1)"
        )
    return Layout(layout.ranks, (len(layout.ranks),), (Shard(0),))


def box_of(shape: Shape, mesh_shape: Shape, placements: Sequence[Placement], coordinate: Sequence[int]) -> Box:
    """Return the box of a tensor that the rank at `coordinate` of the mesh holds, with PyTorch's uneven chunks.

    Placements are applied from left to right. A `_StridedShard` takes its chunk of each of `split_factor` pieces, so a
    rank may hold several ranges of a dimension on the way. In the end it must be one range.
    """
    segments: list[_Segments] = [[(0, size)] for size in shape]
    for num_chunks, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        if isinstance(placement, _StridedShard):
            factor = int(placement.split_factor)
            pieces = [_chunk(segments[placement.dim], factor, number) for number in range(factor)]
            segments[placement.dim] = [part for piece in pieces for part in _chunk(piece, num_chunks, index)]
        elif isinstance(placement, Shard):
            segments[placement.dim] = _chunk(segments[placement.dim], num_chunks, index)
        elif not isinstance(placement, Replicate):
            kind = "partial sums" if isinstance(placement, Partial) else repr(placement)
            raise LayoutError(f"placements {tuple(placements)} hold {kind}, not values")
    ranges = []
    for dimension in map(_merge, segments):
        if len(dimension) > 1:
            raise LayoutError(f"placements {tuple(placements)} give a rank several separate ranges {dimension}")
        ranges.append(dimension[0])
    return Box(tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges))


@lru_cache(maxsize=4096)
def _boxes(shape: Shape, mesh_shape: Shape, placements: tuple[Placement, ...]) -> tuple[Box, ...]:
    return tuple(box_of(shape, mesh_shape, placements, at) for at in product(*map(range, mesh_shape)))


def _chunk(segments: _Segments, num_chunks: int, index: int) -> _Segments:
    """Return one of `num_chunks` ranges, cut as torch.chunk does: equal lengths, the last one shorter, then empty."""
    total = sum(stop - start for start, stop in segments)
    length = -(-total // num_chunks)
    return _positions(segments, min(total, index * length), min(total, (index + 1) * length))


def _positions(segments: _Segments, first: int, last: int) -> _Segments:
    """Return the indices at positions [first, last) of the concatenated segments."""
    result = []
    before = 0
    for start, stop in segments:
        low, high = max(first - before, 0), min(last - before, stop - start)
        if low < high:
            result.append((start + low, start + high))
        before += stop - start
    return result


def _merge(segments: _Segments) -> _Segments:
    merged: _Segments = []
    for start, stop in segments:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged or [(0, 0)]
