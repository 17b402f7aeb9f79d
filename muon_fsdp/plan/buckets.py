"""Divide weights into buckets that ranks all-gather after a step, if each rank has updated its own rows of them.

This is the case with `shard_state=True`: the weights are whole on every rank, and their state is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from muon_fsdp.plan.slices import aligned


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
