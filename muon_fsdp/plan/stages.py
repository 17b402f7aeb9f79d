"""Work out one rank's part of an outline: its stages, batches, buffers and transfers.

Everything here is a pure function of shapes and layouts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.declarations.views import MatrixView
from muon_fsdp.plan.costs import SCRATCH_STAGES, StageLimits, matrices_at_once, scratch_numel
from muon_fsdp.plan.layout import Box, Layout
from muon_fsdp.plan.outline import StageOutline
from muon_fsdp.plan.packing import BufferBox, Copies, Packing, Slot, make_copies, make_packing
from muon_fsdp.plan.slices import SLOT_ALIGNMENT, UpdateSlices, aligned
from muon_fsdp.plan.units import NO_OPTIONS, ParameterSpec, Unit

# Larger sets of ranks gather and scatter in one process group: every group has connections between all of its ranks.
SCATTER_GROUP_RANKS = 16


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

    @cached_property
    def count(self) -> int:
        return sum(member.stop - member.start for member in self.members)


@dataclass(frozen=True)
class Piece:
    """A part of a unit that one rank sends to another."""

    unit: int
    in_shard: tuple[slice, ...]  # its place in the holder's shard
    in_unit: tuple[slice, ...]  # its place in the unit
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Exchange:
    """The pieces that this rank sends and receives in a stage, by index of the other rank in `ranks`."""

    ranks: tuple[int, ...]  # sorted
    me: int  # the index of this rank
    gather_send: tuple[tuple[Piece, ...], ...]  # my shards, to the ranks that compute
    gather_receive: tuple[tuple[Piece, ...], ...]  # others' shards of what I compute
    scatter_send: tuple[tuple[Piece, ...], ...]  # my results, each element to one of its holders
    scatter_receive: tuple[tuple[Piece, ...], ...]  # results for my slice of my shards
    gathers: bool  # whether any rank sends something: a collective needs all ranks, or none
    scatters: bool
    peers: tuple[int, ...] = ()  # sorted ranks with my shards, which exchange slices; empty if there is no other
    slice_numel: int = 0  # elements of a slice; the slices of all peers are their whole buffer of updates

    @property
    def forwards(self) -> bool:
        return bool(self.peers)

    @property
    def forward_purpose(self) -> str:
        """Return the purpose of the peers' process group; it is empty if all ranks are peers, as under DDP.

        Peers may also be all ranks of another stage, whose transfers they may start in another order than this forward.
        Their group must therefore not be the group of that stage.
        """
        return "" if self.peers == self.ranks else "peers"

    @property
    def scatter_purpose(self) -> str:
        """Return the purpose of the process group that scatters; it is empty if gathers and scatters share one group.

        In a group of their own, scatters do not wait for the gather of the next stage. NCCL also has one thread per
        communicator that moves data to and from a network, so two of them send more at a time over sockets.
        """
        return "scatter" if len(self.ranks) <= SCATTER_GROUP_RANKS else ""


@dataclass(frozen=True)
class Packings:
    """The layouts of shards and units of a stage in the messages of its two all-to-alls, and what does not travel."""

    gather_send: Packing
    gather_receive: Packing
    scatter_send: Packing
    scatter_receive: Packing
    gather_own: Copies  # from this rank's shards to the units that it computes
    scatter_own: Copies  # between its shards and these units too: the results that it keeps


@dataclass(frozen=True)
class Stage:
    """This rank's part of a stage. Its shards are in one flat buffer, and the units that it computes in another."""

    number: int  # among the stages of this rank
    rule: str
    positions_by_group: tuple[tuple[int, tuple[int, ...]], ...]
    units: tuple[Unit, ...]
    batches: tuple[Batch, ...]
    exchange: Exchange | None  # None if nothing is sent: this rank holds whole all that it computes
    shard_slots: Mapping[int, Slot] = field(default_factory=dict)  # by position
    unit_slots: Mapping[int, Slot] = field(default_factory=dict)  # of the units it computes; batches lie together
    together: tuple[tuple[int, ...], ...] = ()  # numbers of the batches that are computed together
    in_flight: int = 3  # how far it overlaps with other stages, as in `StageLimits`
    # By position, for a shard that several stages update in turn: the first row of this one's part, and its end.
    rows: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    update_dtype: torch.dtype = torch.float32  # of the results of its units

    def cut(self, position: int, shard: Tensor) -> Tensor:
        """Return the part of a shard, or of a tensor of its shape, that this stage updates."""
        rows = self.rows.get(position)
        return shard if rows is None else shard[slice(*rows)]

    @cached_property
    def label(self) -> str:
        """Return what a profiler shows: the stage's number, its rule, and the shapes it orthogonalizes on this rank."""
        shapes = ", ".join(f"{batch.count}x{batch.rows}x{batch.cols}" for batch in self.batches)
        return f"stage {self.number} {self.rule} [{shapes}]"

    @cached_property
    def positions(self) -> frozenset[int]:
        """Return the positions of all of its parameters."""
        return frozenset(position for _, positions in self.positions_by_group for position in positions)

    @cached_property
    def packings(self) -> Packings:
        """Return how shards and units lie in the messages of its transfers."""
        assert self.exchange is not None
        exchange, me = self.exchange, self.exchange.me

        def in_shard(piece: Piece) -> BufferBox:
            return self.shard_slots[self.units[piece.unit].position], piece.in_shard

        def in_unit(piece: Piece) -> BufferBox:
            return self.unit_slots[piece.unit], piece.in_unit

        def of_shards(lists: Sequence[Sequence[Piece]]) -> Packing:
            return make_packing([map(in_shard, many) for many in lists], me)

        def of_units(lists: Sequence[Sequence[Piece]]) -> Packing:
            return make_packing([map(in_unit, many) for many in lists], me)

        def of_both(pieces: Sequence[Piece]) -> Copies:
            return make_copies((in_shard(piece), in_unit(piece)) for piece in pieces)

        return Packings(
            gather_send=of_shards(exchange.gather_send),
            gather_receive=of_units(exchange.gather_receive),
            scatter_send=of_units(exchange.scatter_send),
            scatter_receive=of_shards(exchange.scatter_receive),
            gather_own=of_both(exchange.gather_receive[me]),
            scatter_own=of_both(exchange.scatter_receive[me]),
        )

    @cached_property
    def starts(self) -> tuple[int | None, ...]:
        """Return where the matrices of each batch begin in the buffer of units; None if they are not contiguous."""
        return tuple(self._start_of(batch) for batch in self.batches)

    def _start_of(self, batch: Batch) -> int | None:
        matrix = batch.rows * batch.cols
        start = expected = self.unit_slots[batch.members[0].unit].offset + batch.members[0].start * matrix
        for member in batch.members:
            offset = self.unit_slots[member.unit].offset + member.start * matrix
            if not self.units[member.unit].view.in_memory_order or offset != expected:
                return None
            expected = offset + (member.stop - member.start) * matrix
        return start

    def shards_in(self, buffer: Tensor, positions: Sequence[int]) -> list[Tensor]:
        """Return the shards of these parameters as views of a flat buffer of all shards.

        Equal shards at equal distances are cut by one call, because a call takes microseconds of host time.
        """
        slots = [self.shard_slots[position] for position in positions]
        views: list[Tensor] = []
        while len(views) < len(slots):
            start = len(views)
            first, stop, step = slots[start], start + 1, 0
            if stop < len(slots):
                step = slots[stop].offset - first.offset
            while step > 0 and stop < len(slots) and slots[stop].offset == first.offset + (stop - start) * step:
                if slots[stop].shape != first.shape:
                    break
                stop += 1
            if stop - start == 1:
                views.append(first.of(buffer))
            else:
                strides = first.of(buffer).stride()
                views += buffer.as_strided((stop - start, *first.shape), (step, *strides), first.offset).unbind()
        return views

    @cached_property
    def shard_numel(self) -> int:
        return _end(self.shard_slots)

    @cached_property
    def update_numel(self) -> int:
        """Return the elements of a buffer for the updates of all shards, padded so that peers have equal slices."""
        slices = self.exchange.slice_numel * len(self.exchange.peers) if self.exchange is not None else 0
        return max(slices, self.shard_numel)

    @cached_property
    def unit_numel(self) -> int:
        return _end(self.unit_slots)


@dataclass(frozen=True)
class Plan:
    """The stages of one rank, in the order in which they run."""

    stages: tuple[Stage, ...]


def make_plan(outlines: Iterable[StageOutline], rank: int) -> Plan:
    """Return the stages of one rank, in the order of the outlines; outlines without this rank are left out."""
    own = (outline for outline in outlines if rank in outline.ranks)
    return Plan(tuple(_localize(number, outline, rank) for number, outline in enumerate(own)))


def cut_elementwise(plan: Plan, num_rows: Mapping[int, int], num_bytes: Mapping[int, int], limit: int) -> Plan:
    """Cut the stages of element-wise rules, of which nothing travels, so that none has more than `limit` bytes.

    Args:
        plan: the plan of this rank.
        num_rows: by position, the rows of the shard between which it may be cut; 1 if it must stay whole.
        num_bytes: by position, the bytes that count.
        limit: the most bytes of a stage; a shard that must stay whole, or one row, may have more.
    """
    cut = [[stage] if stage.units else _cut_stage(stage, num_rows, num_bytes, limit) for stage in plan.stages]
    return Plan(tuple(replace(stage, number=number) for number, stage in enumerate(chain.from_iterable(cut))))


def _cut_stage(stage: Stage, num_rows: Mapping[int, int], num_bytes: Mapping[int, int], limit: int) -> Iterator[Stage]:
    whole: list[tuple[int, int]] = []  # the groups and positions of shards that share a stage
    used = 0
    for group, positions in stage.positions_by_group:
        for position in positions:
            count, size = num_rows[position], num_bytes[position]
            if used + size > limit and whole:
                yield _part_of(stage, whole, {})
                whole, used = [], 0
            at_once = max(1, limit * count // max(1, size))
            if at_once >= count:
                whole.append((group, position))
                used += size
                continue
            at_once -= at_once % SLOT_ALIGNMENT if at_once > SLOT_ALIGNMENT else 0
            for start in range(0, count, at_once):
                yield _part_of(stage, [(group, position)], {position: (start, min(count, start + at_once))})
    if whole:
        yield _part_of(stage, whole, {})


def _part_of(stage: Stage, members: Sequence[tuple[int, int]], rows: Mapping[int, tuple[int, int]]) -> Stage:
    by_group: dict[int, list[int]] = defaultdict(list)
    for group, position in members:
        by_group[group].append(position)
    return replace(stage, positions_by_group=tuple((g, tuple(many)) for g, many in by_group.items()), rows=rows)


def make_gather_stage(shape: tuple[int, ...], layout: Layout, rank: int) -> Stage:
    """Return a stage that only assembles one tensor, on every rank."""
    whole = Box((0,) * len(shape), shape)
    unit = Unit(0, whole, MatrixView(shape, "matrix", False, shape[:1], 1), NO_OPTIONS, 0.0, owner=None)
    spec = ParameterSpec(0, 0, "", shape, layout, 1, torch.device("cpu"), torch.float32)
    outline = StageOutline("", layout.ranks, (spec,), (unit,), StageLimits(1), ())
    me = layout.ranks.index(rank)
    shard_slots = _make_slots({0: layout.boxes(shape)[me].shape})
    exchange = _make_exchange(outline, UpdateSlices(outline), me)
    return Stage(0, "", (), (unit,), (), exchange, shard_slots, _make_slots({0: shape}))


def _localize(number: int, outline: StageOutline, rank: int) -> Stage:
    me = outline.ranks.index(rank)
    by_group: dict[int, list[int]] = defaultdict(list)
    for spec in outline.specs:
        by_group[spec.group].append(spec.position)
    mine = tuple(i for i, unit in enumerate(outline.units) if unit.owner in (rank, None))
    batches = _make_batches(outline.units, mine, outline.specs[0].bytes_per_element, outline.limits.batch_bytes)
    slices = UpdateSlices(outline)
    exchange = _make_exchange(outline, slices, me) if len(outline.ranks) > 1 and outline.units else None
    groups = tuple((group, tuple(positions)) for group, positions in sorted(by_group.items()))
    shard_slots = _make_slots({spec.position: spec.layout.boxes(spec.shape)[me].shape for spec in slices.specs})
    if exchange is None:  # the shards are the units
        unit_slots = {number: shard_slots[outline.units[number].position] for number in mine}
    else:
        in_batches = dict.fromkeys(member.unit for batch in batches for member in batch.members)
        unit_slots = _make_slots({number: outline.units[number].box.shape for number in in_batches})
    together = _computed_together(batches, outline.specs[0].bytes_per_element, outline.limits.batch_bytes)
    return Stage(
        number,
        outline.rule,
        groups,
        outline.units,
        batches,
        exchange,
        shard_slots,
        unit_slots,
        together,
        outline.limits.in_flight,
        update_dtype=outline.specs[0].update_dtype,
    )


def _make_slots(shapes: Mapping[int, tuple[int, ...]]) -> dict[int, Slot]:
    slots: dict[int, Slot] = {}
    offset = 0
    for key, shape in shapes.items():
        slots[key] = Slot(offset, shape)
        offset += aligned(math.prod(shape))
    return slots


def _end(slots: Mapping[int, Slot]) -> int:
    return max((slot.offset + slot.numel for slot in slots.values()), default=0)


def _make_batches(
    units: Sequence[Unit], mine: Sequence[int], bytes_per_element: int, max_bytes: int
) -> tuple[Batch, ...]:
    members: dict[tuple[int, int, PlannedOptions], list[Member]] = defaultdict(list)
    for index in mine:
        unit = units[index]
        for block, (count, rows, cols) in enumerate(unit.view.block_shapes):
            members[(rows, cols, unit.options)].append(Member(index, block, 0, count))
    return tuple(
        Batch(options, rows, cols, piece)
        for (rows, cols, options), whole in members.items()
        for piece in _chunk(whole, matrices_at_once(rows, cols, bytes_per_element, max_bytes))
    )


def _computed_together(batches: Sequence[Batch], bytes_per_element: int, max_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Return which batches are computed together, because their shorter sides are equal and their scratch fits."""
    limit = SCRATCH_STAGES * max_bytes
    together: list[list[int]] = []
    latest: dict[int, tuple[list[int], int]] = {}  # by shorter side: the last list, and the bytes of its scratch
    for number, batch in enumerate(batches):
        side = min(batch.rows, batch.cols)
        scratch = batch.count * scratch_numel(batch.rows, batch.cols) * bytes_per_element
        numbers, used = latest.get(side, ([], 0))
        if not numbers or used + scratch > limit:
            numbers, used = [], 0
            together.append(numbers)
        numbers.append(number)
        latest[side] = numbers, used + scratch
    return tuple(map(tuple, together))


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


def _make_exchange(outline: StageOutline, slices: UpdateSlices, me: int) -> Exchange:
    """List what this rank sends and receives; every list is in the order of the units, on both sides of a message."""
    ranks = outline.ranks
    specs = {spec.position: spec for spec in outline.specs}
    # Pieces by the index of the other rank in `ranks`.
    gather_send, gather_receive, scatter_send, scatter_receive = (defaultdict[int, list[Piece]](list) for _ in range(4))
    gathers = scatters = forwards = False
    for number, unit in enumerate(outline.units):
        spec = specs[unit.position]
        boxes, replica_of = spec.layout.boxes(spec.shape), spec.layout.replica_of
        # Holders send their boxes to the ranks that compute the unit, within a replica.
        for computer in range(len(boxes)) if unit.owner is None else (spec.layout.index_of[unit.owner],):
            is_whole_there = boxes[computer].contains(unit.box)
            gathers |= not is_whole_there
            if me == computer if is_whole_there else replica_of[me] == replica_of[computer]:
                _append(gather_send[computer], number, unit.box, boxes[me])
            if computer == me:
                for source in (me,) if is_whole_there else range(len(boxes)):
                    if replica_of[source] == replica_of[me]:
                        _append(gather_receive[source], number, unit.box, boxes[source])
        if unit.owner is None:  # this rank has computed it, and keeps its part
            _append(scatter_send[me], number, unit.box, boxes[me])
            _append(scatter_receive[me], number, unit.box, boxes[me])
            continue
        # The owner sends to every holder the results in the holder's slice.
        owner = spec.layout.index_of[unit.owner]
        forwards |= slices.num_peers > 1
        scatters |= forwards or not boxes[owner].contains(unit.box)
        for part in slices.parts(me, spec):
            _append(scatter_receive[owner], number, unit.box, boxes[me], part)
        if owner == me:
            for holder, box in enumerate(boxes):
                for part in slices.parts(holder, spec):
                    _append(scatter_send[holder], number, unit.box, box, part)
    in_group_order = sorted(range(len(ranks)), key=ranks.__getitem__)  # as a process group numbers its ranks

    def ordered(lists: Mapping[int, list[Piece]]) -> tuple[tuple[Piece, ...], ...]:
        return tuple(tuple(lists.get(index, ())) for index in in_group_order)

    return Exchange(
        ranks=tuple(sorted(ranks)),
        me=in_group_order.index(me),
        gather_send=ordered(gather_send),
        gather_receive=ordered(gather_receive),
        scatter_send=ordered(scatter_send),
        scatter_receive=ordered(scatter_receive),
        gathers=gathers,
        scatters=scatters,
        peers=slices.peers(me) if forwards else (),
        slice_numel=slices.slice_numel(me) if forwards else 0,
    )


def _append(pieces: list[Piece], number: int, unit: Box, box: Box, part: Box | None = None) -> None:
    """Append what a unit and a holder's box have in common, or a part of this box, if there is anything."""
    common = (box if part is None else part).intersect(unit)
    if common.numel > 0:
        pieces.append(Piece(number, common.within(box), common.within(unit), common.shape))
