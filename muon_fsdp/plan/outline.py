"""Decide which rank computes which matrices, and in which stage.

Everything here is a pure function of shapes and layouts, so all ranks decide alike, and a plan for thousands of ranks
can be made on one.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.declarations.views import MatrixView
from muon_fsdp.plan.costs import BYTES_PER_SECOND, DEVICE_MEMORY, FIXED_SECONDS, FLOPS_PER_SECOND
from muon_fsdp.plan.layout import Box, Layout
from muon_fsdp.plan.staging import Load, Staging, UnitLoad, bytes_by_owner, choose_staging, cut, scratch_limit

Strategy = Literal["auto", "owner", "replicate"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

# Every rank computes everything only if that takes less than this fraction of the time with owners.
REPLICATE_BELOW = 0.7
NO_OPTIONS = PlannedOptions()


@dataclass(frozen=True)
class ParameterSpec:
    """The planner's view of one parameter; `position` counts through all groups of the optimizer."""

    position: int
    group: int
    rule: str
    shape: tuple[int, ...]
    layout: Layout
    bytes_per_element: int  # in the buffers of a stage
    device: torch.device  # parameters on different devices are never in one stage
    dtype: torch.dtype  # working precision; parameters of different precision are never in one stage either
    view: MatrixView | None = None  # None for an element-wise rule
    options: PlannedOptions = NO_OPTIONS  # what matrices of one batch must share
    block_flops: tuple[float, ...] = ()  # per block, the cost of one of its matrices
    wire_bytes: int = 2  # bytes per element in transfers
    is_observed: bool = False  # whether its rule asks for statistics of W
    weight_bytes: int = 0  # bytes per element of a weight whose rows are all-gathered after the step; 0 if they are not
    device_memory: int = DEVICE_MEMORY  # total bytes of the smallest device among its ranks

    @property
    def matrices(self) -> MatrixView:
        """Return the view. Call this only for parameters under a rule of matrices, which always have one."""
        assert self.view is not None
        return self.view


@dataclass(frozen=True)
class Unit:
    """A piece of work that is computed in one place: a whole parameter, or one matrix of a stack."""

    position: int
    box: Box
    view: MatrixView
    options: PlannedOptions
    flops: float
    owner: int | None = None  # a global rank; None: every rank of the layout computes it

    @property
    def num_matrices(self) -> int:
        return sum(count for count, _, _ in self.view.block_shapes)

    def first_matrix(self, whole: MatrixView, block: int) -> int:
        """Return the index of the unit's first matrix in a block of `whole`, the view of the whole parameter."""
        is_part = self.view.shape != whole.shape  # some matrices of a stack
        return self.box.offset[0] * self.view.block_shapes[block][0] if is_part else 0


@dataclass(frozen=True)
class StageOutline:
    """A stage as all of its ranks know it: parameters that pass through a step together, and who owns their units."""

    rule: str
    ranks: tuple[int, ...]
    specs: tuple[ParameterSpec, ...]
    units: tuple[Unit, ...]
    staging: Staging  # how it was cut, and how it overlaps with others
    loads: tuple[Load, ...]  # what each of its parameters costs


def make_outline(
    specs: Iterable[ParameterSpec], *, max_stage_bytes: int | None, strategy: str = "auto"
) -> list[StageOutline]:
    """Divide parameters into stages and assign owners, for all ranks; equal parameters give equal outlines.

    Stages come in one total order (by ranks, then by size). Otherwise overlapping sets of ranks could wait for each
    other in a circle.

    Args:
        specs: all parameters that this rank knows.
        max_stage_bytes: bytes of updates that a rank holds or computes in a stage, at most; None lets
            `choose_staging` choose, for every set of parameters that may share stages.
        strategy: "owner", "replicate" or "auto".
    """
    specs = [spec for spec in specs if math.prod(spec.shape) > 0 or spec.view is None]  # empty shards still count steps
    # Sets of ranks are long, so they are compared once per layout instead of once per parameter.
    layouts = {id(spec.layout): spec.layout for spec in specs}
    # Sets of the same ranks in another order share a process group, so no other set may come between them.
    rank_sets = sorted({layout.ranks for layout in layouts.values()}, key=lambda ranks: (sorted(ranks), ranks))
    set_of = {key: rank_sets.index(layout.ranks) for key, layout in layouts.items()}
    # A stage ends with one all-gather among peers, so all of its parameters have the same peers.
    peers: dict[tuple[tuple[int, ...], ...], int] = {}
    peers_of = {key: peers.setdefault(layout.peers, len(peers)) for key, layout in layouts.items()}
    by_kind: dict[tuple[int, int, str, torch.device, torch.dtype], list[ParameterSpec]] = defaultdict(list)
    for spec in sorted(specs, key=lambda spec: set_of[id(spec.layout)]):
        which = id(spec.layout)
        by_kind[(set_of[which], peers_of[which], spec.rule, spec.device, spec.dtype)].append(spec)
    by_set: dict[int, list[ParameterSpec]] = defaultdict(list)
    for spec in specs:
        if spec.view is not None:
            by_set[set_of[id(spec.layout)]].append(spec)
    owned = _assign_owners({rank_sets[number]: members for number, members in by_set.items()})
    place = {position: number for number, position in enumerate(owned)}  # owners were assigned to the largest first
    outlines = []
    for (number, _, rule, *_), members in by_kind.items():
        ranks = rank_sets[number]
        work = {spec.position: owned.get(spec.position, ()) for spec in members}
        units = [unit for many in work.values() for unit in many]
        if len(ranks) > 1 and _replicates(units, members, strategy):
            work = {position: tuple(replace(unit, owner=None) for unit in many) for position, many in work.items()}
        has_owners = members[0].view is not None
        largest_first = sorted(members, key=lambda s: place[s.position]) if has_owners else sorted(members, key=_order)
        loads = [_load(spec, work[spec.position]) for spec in largest_first]
        # Decide only by parameters of this set, as for owners.
        if max_stage_bytes is None:
            staging = choose_staging(loads, len(ranks), scratch_limit(members[0].device_memory))
        else:
            staging = Staging(max_stage_bytes)
        for indices in cut(loads, staging.max_bytes):
            stage = tuple(largest_first[index] for index in indices)
            units_of_stage = tuple(unit for spec in stage for unit in work[spec.position])
            costs = tuple(loads[index] for index in indices)
            outlines.append(StageOutline(rule, ranks, stage, units_of_stage, staging, costs))
    return outlines


def _order(spec: ParameterSpec, units: Sequence[Unit] = ()) -> tuple[object, ...]:
    """Return a sort key for owners and stages: largest first, so that every stage uses all ranks; then by shape."""
    return (-max((unit.flops for unit in units), default=0.0), spec.shape, repr(spec.options), spec.position)


def _units_of(spec: ParameterSpec) -> tuple[Unit, ...]:
    """Cut a stack into one unit per matrix if ranks could share the work; every other parameter is one unit."""
    view, shape = spec.view, spec.shape
    assert view is not None
    if not (view.kind == "stacked" and len(shape) == 3 and len(spec.layout.ranks) > 1):
        return (_unit(spec, Box((0,) * len(shape), shape), view),)
    one = replace(view, shape=(1, *shape[1:]))
    return tuple(_unit(spec, Box((number, 0, 0), one.shape), one) for number in range(shape[0]))


def _unit(spec: ParameterSpec, box: Box, view: MatrixView) -> Unit:
    flops = sum(count * cost for (count, _, _), cost in zip(view.block_shapes, spec.block_flops, strict=True))
    return Unit(spec.position, box, view, spec.options, flops)


def _assign_owners(specs_by_ranks: dict[tuple[int, ...], list[ParameterSpec]]) -> dict[int, tuple[Unit, ...]]:
    """Assign an owner to every unit, balancing the load over the whole model.

    A rank knows only the parameters it holds a part of, but all ranks that share a parameter must find the same owner.
    So the largest sets of ranks come first, and a smaller set counts the load that its ranks have in sets that contain
    it.

    Returns:
        The units of every parameter, by position.
    """
    loads: dict[tuple[int, ...], dict[int, float]] = {}
    placed: dict[int, list[Unit]] = defaultdict(list)
    for ranks in sorted(specs_by_ranks, key=lambda ranks: (-len(ranks), ranks)):
        wider = [other for other in loads if set(ranks) <= set(other)]
        before = {rank: sum(loads[other][rank] for other in wider) for rank in ranks}
        # The order of stages, so that a stage of as many units as there are ranks has one for every rank.
        cut_up = sorted(((spec, _units_of(spec)) for spec in specs_by_ranks[ranks]), key=lambda pair: _order(*pair))
        units = [(unit, spec) for spec, many in cut_up for unit in many]
        holders = [spec.layout.holders(spec.shape, unit.box) for unit, spec in units]
        # Decide only by parameters of this set: a rank may see others that the rest of the set does not know.
        first = specs_by_ranks[ranks][0]
        in_turn = _replicas_in_turn(first.layout)
        owners, after = _assign([unit for unit, _ in units], holders, {r: before[r] for r in in_turn}, first.wire_bytes)
        loads[ranks] = {rank: after[rank] - before[rank] for rank in ranks}
        for (unit, spec), owner in zip(units, owners, strict=True):
            owned = Unit(unit.position, unit.box, unit.view, unit.options, unit.flops, owner)
            placed[spec.position].append(owned)
    return {position: tuple(many) for position, many in placed.items()}


def _replicas_in_turn(layout: Layout) -> list[int]:
    """Return ranks in the order in which they get work: a shard's holders in all replicas, then the next shard's."""
    return [layout.ranks[index] for places in layout.ranks_of_shard for index in places]


def _assign(
    units: Sequence[Unit], holders: Sequence[tuple[int, ...]], loads: dict[int, float], wire_bytes: int
) -> tuple[list[int], dict[int, float]]:
    """Choose owners for units on the same ranks: a rank that holds the unit whole if there is one, else any rank.

    Weights that lie whole on few ranks (256 experts over 4,096 ranks) are moved anyway if the other ranks would wait
    longer than the move takes.

    Returns:
        The owner of each unit, and the load of each rank with these units.
    """
    owners, after = _balance(units, holders, loads)
    if any(0 < len(who) < len(loads) for who in holders):
        free_owners, free_after = _balance(units, [()] * len(units), loads)
        seconds_saved = (max(after.values()) - max(free_after.values())) / FLOPS_PER_SECOND
        if _seconds_to_move(units, holders, free_owners, wire_bytes) < seconds_saved:
            return free_owners, free_after
    return owners, after


def _seconds_to_move(
    units: Sequence[Unit], holders: Sequence[tuple[int, ...]], owners: Sequence[int], wire_bytes: int
) -> float:
    """Estimate how long it takes to move units from ranks that hold them whole to other owners, and results back.

    The busiest rank decides: a few ranks may hold all units that move.
    """
    moved: dict[int, float] = defaultdict(float)  # elements by rank
    for unit, who, owner in zip(units, holders, owners, strict=True):
        if who and owner not in who:
            moved[owner] += unit.box.numel
            for rank in who:
                moved[rank] += unit.box.numel / len(who)
    return FIXED_SECONDS + 2 * max(moved.values(), default=0.0) * wire_bytes / BYTES_PER_SECOND


def _balance(
    units: Sequence[Unit], candidates: Sequence[tuple[int, ...]], loads: dict[int, float]
) -> tuple[list[int], dict[int, float]]:
    """Give the next largest unit to the least loaded of its candidates, and among equals to the first in `loads`.

    Returns:
        The owner of each unit, and the load of each rank with these units.
    """
    loads = dict(loads)
    everybody = tuple(loads)
    turn = {rank: number for number, rank in enumerate(everybody)}
    owners = [-1] * len(units)
    # One heap per set of candidates. None stands for all ranks, whose tuple would be slow to hash.
    heaps: dict[tuple[int, ...] | None, list[tuple[float, int, int]]] = {}
    # Units with few candidates first: the others can even out the loads afterwards.
    has_choice = [not 0 < len(who) < len(loads) for who in candidates]
    for index in sorted(range(len(units)), key=lambda i: (has_choice[i], -units[i].flops)):
        ranks = None if has_choice[index] else candidates[index]
        heap = heaps.get(ranks)
        if heap is None:
            heap = heaps[ranks] = [(loads[rank], turn[rank], rank) for rank in (everybody if ranks is None else ranks)]
            heapq.heapify(heap)
        while heap[0][0] != loads[heap[0][2]]:  # this rank got work from another heap since
            _, number, rank = heap[0]
            heapq.heapreplace(heap, (loads[rank], number, rank))
        load, number, rank = heap[0]
        owners[index] = rank
        loads[rank] = load + units[index].flops
        heapq.heapreplace(heap, (loads[rank], number, rank))
    return owners, loads


def _replicates(units: Sequence[Unit], specs: Sequence[ParameterSpec], strategy: str) -> bool:
    """Return whether every rank should compute all units, instead of each unit once.

    Args:
        units: with their owners.
        specs: their parameters, which all have the same ranks.
        strategy: "auto" compares the times of both, which are those of the busiest rank.
    """
    if strategy != "auto" or not units:
        return strategy == "replicate"
    by_position = {spec.position: spec for spec in specs}
    num_ranks, wire_bytes = len(specs[0].layout.ranks), specs[0].wire_bytes
    replicas = specs[0].layout.num_replicas  # parameters that are computed in common have the same peers
    flops: dict[int, float] = defaultdict(float)
    received: dict[int, int] = defaultdict(int)
    sent: dict[int, float] = defaultdict(float)
    total = 0
    for unit in units:
        spec, numel = by_position[unit.position], unit.box.numel
        assert unit.owner is not None
        held = _held(unit, spec)
        total += numel
        flops[unit.owner] += unit.flops
        received[unit.owner] += numel - held
        sent[unit.owner] += numel - held / replicas  # all but about one of the slices of its own box
    missing = total * (1 - replicas / num_ranks)  # elements that a rank lacks of all units
    all_gathered = total * (replicas - 1) / num_ranks  # elements that a rank receives from its peers
    moved = max(received.values()) + max(sent.values()) + all_gathered
    with_owners = max(flops.values()) / FLOPS_PER_SECOND + moved * wire_bytes / BYTES_PER_SECOND
    everywhere = sum(flops.values()) / FLOPS_PER_SECOND + missing * wire_bytes / BYTES_PER_SECOND
    return FIXED_SECONDS + everywhere < REPLICATE_BELOW * (FIXED_SECONDS + with_owners)


def _held(unit: Unit, spec: ParameterSpec) -> int:
    """Return the elements of a unit that its owner holds."""
    assert unit.owner is not None
    box = spec.layout.box_on(unit.owner, spec.shape)
    return box.numel if unit.box.shape == spec.shape else box.intersect(unit.box).numel


def _load(spec: ParameterSpec, units: Sequence[Unit]) -> Load:
    """Return what a parameter with these units costs in a stage."""
    layout, shape = spec.layout, spec.shape
    num_ranks, largest = len(layout.ranks), layout.largest_box(shape)
    others = num_ranks // layout.num_replicas - 1  # ranks of the same replica
    loads = [_unit_load(unit, spec) for unit in units]
    replicated = num_ranks > 1 and any(unit.owner is None for unit in units)
    shard_sent = largest * others * spec.wire_bytes
    shard, by_owner = largest * spec.bytes_per_element, bytes_by_owner(loads)
    return Load(
        shard=shard,
        # With owners, only those of its own replica get its shard, and it is one of them itself.
        shard_sent=(shard_sent if replicated else shard_sent // num_ranks) if any(u.received for u in loads) else 0,
        # Its slice, from the owners in its own replica.
        shard_received=shard_sent // num_ranks if any(u.sent for u in loads) else 0,
        receivers=max(1, others) if replicated else 1,
        peers=1 if replicated else layout.num_replicas,
        bytes_per_element=spec.bytes_per_element,
        units=tuple(loads),
        travels=num_ranks > 1,
        by_owner=by_owner,
        largest=max((shard, *(size for _, size in by_owner))),
    )


def _unit_load(unit: Unit, spec: ParameterSpec) -> UnitLoad:
    """Return what a unit costs the rank that computes it."""
    numel, wire, layout = unit.box.numel, spec.wire_bytes, spec.layout
    size, blocks = numel * spec.bytes_per_element, unit.view.block_shapes
    if unit.owner is None:
        received = numel - numel * layout.num_replicas // len(layout.ranks)
        return UnitLoad(None, size, unit.flops, received * wire, 0, blocks)
    held = _held(unit, spec)
    sent = numel - held // layout.num_replicas  # all but about one of the slices of its own box
    return UnitLoad(unit.owner, size, unit.flops, (numel - held) * wire, sent * wire, blocks)
