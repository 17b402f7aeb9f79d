"""One rank's part of an outline: its stages, the batches it computes, where they lie in buffers, and what is sent.

Everything here is a pure function of shapes and layouts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.declarations.views import MatrixView
from muon_fsdp.plan.layout import Box, Layout
from muon_fsdp.plan.outline import NO_OPTIONS, ParameterSpec, StageOutline, Unit, is_relayed

# The scratch of an orthogonalization stays within so many times the bound of a stage.
SCRATCH_STAGES = 4
# Buffers hold many tensors one after another; each begins at a multiple of this many elements.
SLOT_ALIGNMENT = 16


@dataclass(frozen=True)
class Member:
    """Matrices [start, stop) of one block of one unit of the stage."""

    unit: int
    block: int
    start: int
    stop: int


@dataclass(frozen=True)
class Batch:
    """Equally shaped matrices that are orthogonalized by one call."""

    options: PlannedOptions
    rows: int
    cols: int
    members: tuple[Member, ...]

    @property
    def count(self) -> int:
        return sum(member.stop - member.start for member in self.members)


@dataclass(frozen=True)
class Piece:
    """A box that travels: part of the unit, held by some rank."""

    unit: int
    in_shard: tuple[slice, ...]  # where it lies in the holder's local tensor
    in_unit: tuple[slice, ...]  # where it lies in the unit
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Exchange:
    """What this rank sends and receives, by index of the other rank in `ranks`; its own entries never travel."""

    ranks: tuple[int, ...]  # sorted
    me: int
    gather_send: tuple[tuple[Piece, ...], ...]  # my shards, to whoever computes
    gather_receive: tuple[tuple[Piece, ...], ...]  # others' shards of what I compute
    scatter_send: tuple[tuple[Piece, ...], ...]  # results, to who holds a part in the replica of who computed them
    scatter_receive: tuple[tuple[Piece, ...], ...]  # results for my shards
    forward_send: tuple[tuple[Piece, ...], ...]  # what I received so, to those who hold the same part in other replicas
    forward_receive: tuple[tuple[Piece, ...], ...]
    gathers: bool  # whether anything travels on any rank: all of them take part in a collective, or none
    scatters: bool
    forwards: bool

    def elements_sent(self) -> int:
        """Elements that this rank hands to all transfers for others."""
        lists = zip(self.gather_send, self.scatter_send, self.forward_send, strict=True)
        return sum(p.numel for other, all_ in enumerate(lists) if other != self.me for pieces in all_ for p in pieces)


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in a flat buffer."""

    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class Stage:
    """This rank's part of a stage. Its shards lie in one flat buffer, and the units it computes in another."""

    rule: str
    positions_by_group: tuple[tuple[int, tuple[int, ...]], ...]
    units: tuple[Unit, ...]
    mine: tuple[int, ...]  # the units this rank computes
    batches: tuple[Batch, ...]
    exchange: Exchange | None  # None: this rank holds what it computes and computes what it holds
    num_bytes: int  # of this rank's shards
    shard_slots: Mapping[int, Slot] = field(default_factory=dict)  # by position
    unit_slots: Mapping[int, Slot] = field(default_factory=dict)  # by number of the unit; batches lie together

    @property
    def shard_numel(self) -> int:
        return _end(self.shard_slots)

    @property
    def unit_numel(self) -> int:
        return _end(self.unit_slots)


@dataclass(frozen=True)
class Plan:
    stages: tuple[Stage, ...]

    @property
    def num_matrices(self) -> int:
        """Matrices that this rank orthogonalizes in a step."""
        return sum(batch.count for stage in self.stages for batch in stage.batches)


def make_plan(outlines: Iterable[StageOutline], rank: int, max_stage_bytes: int) -> Plan:
    """The part of `rank` in the outlines it takes part in, in their order."""
    return Plan(tuple(_localize(outline, rank, max_stage_bytes) for outline in outlines if rank in outline.ranks))


def make_gather_stage(shape: tuple[int, ...], layout: Layout, rank: int) -> Stage:
    """A stage that only assembles one tensor, on every rank."""
    whole = Box((0,) * len(shape), shape)
    unit = Unit(0, whole, MatrixView(shape, "matrix", False, shape[:1], 1), NO_OPTIONS, 0.0, owner=None)
    spec = ParameterSpec(0, 0, "", shape, layout, 1, torch.device("cpu"), torch.float32)
    outline = StageOutline("", layout.ranks, (spec,), (unit,))
    me = layout.ranks.index(rank)
    shard_slots = _make_slots({0: layout.boxes(shape)[me].shape})
    exchange = _make_exchange(outline, {0: spec}, me)
    return Stage("", (), (unit,), (0,), (), exchange, 0, shard_slots, _make_slots({0: shape}))


def _localize(outline: StageOutline, rank: int, max_stage_bytes: int) -> Stage:
    me = outline.ranks.index(rank)
    specs = {spec.position: spec for spec in outline.specs}
    by_group: dict[int, list[int]] = defaultdict(list)
    num_bytes = 0
    for spec in outline.specs:
        by_group[spec.group].append(spec.position)
        num_bytes += spec.layout.boxes(spec.shape)[me].numel * spec.bytes_per_element
    mine = tuple(i for i, unit in enumerate(outline.units) if unit.owner in (rank, None))
    batches = _make_batches(outline.units, mine, outline.specs[0].bytes_per_element, max_stage_bytes)
    exchange = _make_exchange(outline, specs, me) if len(outline.ranks) > 1 and outline.units else None
    groups = tuple((group, tuple(positions)) for group, positions in sorted(by_group.items()))
    shard_slots = _make_slots({spec.position: spec.layout.boxes(spec.shape)[me].shape for spec in outline.specs})
    if exchange is None:  # the shards are the units
        unit_slots = {number: shard_slots[outline.units[number].position] for number in mine}
    else:
        in_batches = dict.fromkeys(member.unit for batch in batches for member in batch.members)
        unit_slots = _make_slots({number: outline.units[number].box.shape for number in in_batches})
    return Stage(outline.rule, groups, outline.units, mine, batches, exchange, num_bytes, shard_slots, unit_slots)


def _make_slots(shapes: Mapping[int, tuple[int, ...]]) -> dict[int, Slot]:
    slots: dict[int, Slot] = {}
    offset = 0
    for key, shape in shapes.items():
        slots[key] = Slot(offset, shape)
        offset += -(-math.prod(shape) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    return slots


def _end(slots: Mapping[int, Slot]) -> int:
    return max((slot.offset + slot.numel for slot in slots.values()), default=0)


def _make_batches(
    units: Sequence[Unit], mine: Sequence[int], bytes_per_element: int, max_stage_bytes: int
) -> tuple[Batch, ...]:
    members: dict[tuple[int, int, PlannedOptions], list[Member]] = defaultdict(list)
    for index in mine:
        unit = units[index]
        for block, (count, rows, cols) in enumerate(unit.view.block_shapes):
            members[(rows, cols, unit.options)].append(Member(index, block, 0, count))
    return tuple(
        Batch(options, rows, cols, piece)
        for (rows, cols, options), whole in members.items()
        for piece in _chunk(whole, matrices_at_once(rows, cols, bytes_per_element, max_stage_bytes))
    )


def scratch_numel(rows: int, cols: int) -> int:
    """Beside a matrix there are two of its size and five of its Gram matrix's while it is orthogonalized."""
    return 2 * rows * cols + 5 * min(rows, cols) ** 2


def matrices_at_once(rows: int, cols: int, bytes_per_element: int, max_stage_bytes: int) -> int:
    """How many matrices one orthogonalization may take: within a stage, and its scratch within a few stages."""
    by_scratch = SCRATCH_STAGES * max_stage_bytes // (scratch_numel(rows, cols) * bytes_per_element)
    return max(1, min(max_stage_bytes // (rows * cols * bytes_per_element), by_scratch))


def _chunk(members: Sequence[Member], max_matrices: int) -> list[tuple[Member, ...]]:
    """Cut a list of members into lists of at most `max_matrices` matrices."""
    chunks: list[tuple[Member, ...]] = []
    current: list[Member] = []
    room = max_matrices
    for member in members:
        start = member.start
        while start < member.stop:
            stop = min(member.stop, start + room)
            current.append(replace(member, start=start, stop=stop))
            room -= stop - start
            start = stop
            if room == 0:
                chunks.append(tuple(current))
                current, room = [], max_matrices
    if current:
        chunks.append(tuple(current))
    return chunks


def _make_exchange(outline: StageOutline, specs: dict[int, ParameterSpec], me: int) -> Exchange:
    """Every list is in the order of the units, on both sides of every message."""
    ranks = outline.ranks
    index_of = {rank: index for index, rank in enumerate(ranks)}
    gather_send: list[list[Piece]] = [[] for _ in ranks]
    gather_receive: list[list[Piece]] = [[] for _ in ranks]
    scatter_send: list[list[Piece]] = [[] for _ in ranks]
    scatter_receive: list[list[Piece]] = [[] for _ in ranks]
    forward_send: list[list[Piece]] = [[] for _ in ranks]
    forward_receive: list[list[Piece]] = [[] for _ in ranks]
    gathers = scatters = forwards = False
    for number, unit in enumerate(outline.units):
        spec = specs[unit.position]
        boxes = spec.layout.boxes(spec.shape)
        replica_of = spec.layout.replica_of
        computing = range(len(ranks)) if unit.owner is None else (index_of[unit.owner],)
        for computer in computing:
            whole_there = boxes[computer].contains(unit.box)
            gathers |= not whole_there
            holds = me == computer if whole_there else replica_of[me] == replica_of[computer]
            if holds:
                _append(gather_send[computer], number, unit.box, boxes[me])
            if computer == me:
                for source in [me] if whole_there else range(len(ranks)):
                    if replica_of[source] == replica_of[me]:
                        _append(gather_receive[source], number, unit.box, boxes[source])
        if unit.owner is None:
            _append(scatter_send[me], number, unit.box, boxes[me])
            _append(scatter_receive[me], number, unit.box, boxes[me])
        else:
            owner = index_of[unit.owner]
            scatters = scatters or any(
                rank != owner and box.intersect(unit.box).numel > 0 for rank, box in enumerate(boxes)
            )
            relays = is_relayed(unit, spec)
            forwards |= relays
            is_near = not relays or replica_of[me] == replica_of[owner]
            if is_near:
                _append(scatter_receive[owner], number, unit.box, boxes[me])
            if owner == me:
                for holder in range(len(ranks)):
                    if not relays or replica_of[holder] == replica_of[me]:
                        _append(scatter_send[holder], number, unit.box, boxes[holder])
            if relays:
                same_part = spec.layout.ranks_of_shard[spec.layout.shard_of[me]]
                if is_near:
                    for other in same_part:
                        if other != me:
                            _append(forward_send[other], number, unit.box, boxes[me])
                else:
                    _append(forward_receive[same_part[replica_of[owner]]], number, unit.box, boxes[me])
    in_group_order = sorted(range(len(ranks)), key=ranks.__getitem__)  # a process group numbers its ranks so

    def ordered(lists: list[list[Piece]]) -> tuple[tuple[Piece, ...], ...]:
        return tuple(tuple(lists[index]) for index in in_group_order)

    return Exchange(
        ranks=tuple(sorted(ranks)),
        me=in_group_order.index(me),
        gather_send=ordered(gather_send),
        gather_receive=ordered(gather_receive),
        scatter_send=ordered(scatter_send),
        scatter_receive=ordered(scatter_receive),
        forward_send=ordered(forward_send),
        forward_receive=ordered(forward_receive),
        gathers=gathers,
        scatters=scatters,
        forwards=forwards,
    )


def _append(pieces: list[Piece], number: int, unit: Box, box: Box) -> None:
    common = box.intersect(unit)
    if common.numel > 0:
        pieces.append(Piece(number, common.within(box), common.within(unit), common.shape))
