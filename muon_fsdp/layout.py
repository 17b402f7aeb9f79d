"""Tiles: which box of a tensor every rank of a device mesh holds, as a pure function of the layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TypeAlias

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Shape: TypeAlias = tuple[int, ...]
_Segments: TypeAlias = list[tuple[int, int]]  # half-open ranges of indices along one dimension


class LayoutError(ValueError):
    """A layout whose tiles are not boxes."""


@dataclass(frozen=True)
class Tile:
    """The box of a tensor that starts at `offset` and has `shape`."""

    offset: Shape
    shape: Shape

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Tile) -> Tile:
        """The common box; one without elements if there is none."""
        starts = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        stops = [
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        return Tile(tuple(starts), tuple(max(0, stop - start) for start, stop in zip(starts, stops, strict=True)))

    def contains(self, other: Tile) -> bool:
        return self.intersect(other).shape == other.shape

    def within(self, outer: Tile) -> tuple[slice, ...]:
        """Slices that cut this box out of a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh: global ranks in row-major order, the mesh's shape, one placement per mesh axis."""

    ranks: tuple[int, ...]
    mesh_shape: Shape
    placements: tuple[Placement, ...]

    def tiles(self, shape: Shape) -> tuple[Tile, ...]:
        """The tile of every rank, in the order of `ranks`."""
        return _tiles(shape, self.mesh_shape, self.placements)

    @cached_property
    def replica_of(self) -> tuple[int, ...]:
        """Per rank, the number of its replica: ranks of one replica hold the tensor once, together."""
        axes = [axis for axis, placement in enumerate(self.placements) if placement.is_replicate()]
        numbers: dict[tuple[int, ...], int] = {}
        coordinates = product(*map(range, self.mesh_shape))
        return tuple(
            numbers.setdefault(tuple(coordinate[axis] for axis in axes), len(numbers)) for coordinate in coordinates
        )


def local_layout(rank: int) -> Layout:
    """The layout of a plain tensor."""
    return Layout((rank,), (1,), (Replicate(),))


def tile_of(shape: Shape, mesh_shape: Shape, placements: Sequence[Placement], coordinate: Sequence[int]) -> Tile:
    """The box of a tensor of `shape` that the rank at `coordinate` of the mesh holds, with PyTorch's uneven chunks.

    Placements are applied from left to right. A strided shard takes its chunk of each of `split_factor` pieces, so in
    between a rank can hold several ranges of a dimension; in the end it must be one.
    """
    segments: list[_Segments] = [[(0, size)] for size in shape]
    for num_chunks, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        if isinstance(placement, _StridedShard):
            pieces = _chunk(segments[placement.dim], int(placement.split_factor))
            segments[placement.dim] = [part for piece in pieces for part in _chunk(piece, num_chunks)[index]]
        elif isinstance(placement, Shard):
            segments[placement.dim] = _chunk(segments[placement.dim], num_chunks)[index]
        elif not isinstance(placement, Replicate):
            kind = "partial sums" if isinstance(placement, Partial) else repr(placement)
            raise LayoutError(f"placements {tuple(placements)} hold {kind}, not values")
    ranges = []
    for dimension in map(_merge, segments):
        if len(dimension) > 1:
            raise LayoutError(f"placements {tuple(placements)} give a rank several separate ranges {dimension}")
        ranges.append(dimension[0])
    return Tile(tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges))


@lru_cache(maxsize=4096)
def _tiles(shape: Shape, mesh_shape: Shape, placements: tuple[Placement, ...]) -> tuple[Tile, ...]:
    return tuple(tile_of(shape, mesh_shape, placements, at) for at in product(*map(range, mesh_shape)))


def _chunk(segments: _Segments, num_chunks: int) -> list[_Segments]:
    """Cut indices into `num_chunks` runs as torch.chunk does: all of one length, the last shorter, then empty ones."""
    total = sum(stop - start for start, stop in segments)
    length = -(-total // num_chunks)
    return [
        _positions(segments, min(total, index * length), min(total, (index + 1) * length))
        for index in range(num_chunks)
    ]


def _positions(segments: _Segments, first: int, last: int) -> _Segments:
    """The indices at positions [first, last) of the concatenated segments."""
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
