"""Planning of a step from metadata alone: which matrices are orthogonalized together, and in which stage."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from muon_fsdp.views import BlockShape


@dataclass(frozen=True)
class ParameterSpec:
    """What planning needs to know of one parameter; `position` counts through all groups of the optimizer."""

    position: int
    group: int
    rule: str
    shape: tuple[int, ...]
    bytes_per_element: int  # in working precision
    placement: Hashable  # device and working dtype: parameters that differ in it are never in one stage
    blocks: tuple[BlockShape, ...] = ()  # its logical matrices, none for an element-wise rule
    batch_keys: tuple[Hashable, ...] = ()  # per block, what matrices of one batch must share

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.bytes_per_element


@dataclass(frozen=True)
class Member:
    """Matrices [start, stop) of one block of one parameter."""

    position: int
    block: int
    start: int
    stop: int


@dataclass(frozen=True)
class Batch:
    """Equally shaped matrices that are orthogonalized by one call."""

    key: Hashable
    rows: int
    cols: int
    members: tuple[Member, ...]

    @property
    def count(self) -> int:
        return sum(member.stop - member.start for member in self.members)


@dataclass(frozen=True)
class Stage:
    """Parameters of one rule that pass through prepare, direction and apply together."""

    rule: str
    positions_by_group: tuple[tuple[int, tuple[int, ...]], ...]
    batches: tuple[Batch, ...]
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    stages: tuple[Stage, ...]

    @property
    def num_matrices(self) -> int:
        return sum(batch.count for stage in self.stages for batch in stage.batches)


def make_plan(specs: Iterable[ParameterSpec], max_stage_bytes: int) -> Plan:
    """Put equal matrices together, and cut the work into stages of at most `max_stage_bytes` of updates.

    A parameter is never divided between stages, so one that is larger than the bound is a stage by itself; its
    matrices are still orthogonalized in batches within the bound where it holds several.
    """
    by_kind: dict[Hashable, list[ParameterSpec]] = defaultdict(list)
    for spec in specs:
        if math.prod(spec.shape) > 0:
            by_kind[(spec.rule, spec.placement)].append(spec)
    stages = []
    for kind in by_kind.values():
        same_shape_adjacent = sorted(kind, key=lambda spec: (spec.blocks, repr(spec.batch_keys), spec.position))
        stages += [_make_stage(members, max_stage_bytes) for members in _cut(same_shape_adjacent, max_stage_bytes)]
    return Plan(tuple(stages))


def _cut(specs: Sequence[ParameterSpec], max_stage_bytes: int) -> list[list[ParameterSpec]]:
    stages: list[list[ParameterSpec]] = []
    room = 0
    for spec in specs:
        if not stages or spec.num_bytes > room:
            stages.append([])
            room = max_stage_bytes
        stages[-1].append(spec)
        room -= spec.num_bytes
    return stages


def _make_stage(specs: Sequence[ParameterSpec], max_stage_bytes: int) -> Stage:
    by_group: dict[int, list[int]] = defaultdict(list)
    members: dict[tuple[int, int, Hashable], list[Member]] = defaultdict(list)
    for spec in specs:
        by_group[spec.group].append(spec.position)
        for block, ((count, rows, cols), key) in enumerate(zip(spec.blocks, spec.batch_keys, strict=True)):
            members[(rows, cols, key)].append(Member(spec.position, block, 0, count))
    bytes_per_element = specs[0].bytes_per_element  # one working dtype in a stage
    batches = [
        Batch(key, rows, cols, piece)
        for (rows, cols, key), whole in members.items()
        for piece in _chunk(whole, max(1, max_stage_bytes // (rows * cols * bytes_per_element)))
    ]
    groups = tuple((group, tuple(positions)) for group, positions in sorted(by_group.items()))
    return Stage(specs[0].rule, groups, tuple(batches), sum(spec.num_bytes for spec in specs))


def _chunk(members: Sequence[Member], max_matrices: int) -> list[tuple[Member, ...]]:
    """Cut a list of members into lists of at most `max_matrices` matrices."""
    chunks: list[tuple[Member, ...]] = []
    current: list[Member] = []
    room = max_matrices
    for member in members:
        start = member.start
        while start < member.stop:
            stop = min(member.stop, start + room)
            current.append(Member(member.position, member.block, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                chunks.append(tuple(current))
                current, room = [], max_matrices
    if current:
        chunks.append(tuple(current))
    return chunks
