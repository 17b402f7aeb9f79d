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

import torch

from muon_fsdp.plan.costs import Load, StageLimits, load_of, seconds_alone, seconds_to_move
from muon_fsdp.plan.speeds import ASSUMED
from muon_fsdp.plan.stage_limits import choose_limits, cut, scratch_limit
from muon_fsdp.plan.units import ParameterSpec, Unit, units_of

# Every rank computes everything only if that takes less than this fraction of the time with owners.
REPLICATE_BELOW = 0.7


@dataclass(frozen=True)
class StageOutline:
    """A stage as all of its ranks know it: parameters that pass through a step together, and who owns their units."""

    rule: str
    ranks: tuple[int, ...]
    specs: tuple[ParameterSpec, ...]
    units: tuple[Unit, ...]
    limits: StageLimits  # how it was cut, and how it overlaps with others
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
            `choose_limits` choose, for every set of parameters that may share stages.
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
    alike: dict[tuple[int, int, str, torch.device, torch.dtype, torch.dtype], list[ParameterSpec]] = defaultdict(list)
    for spec in sorted(specs, key=lambda spec: set_of[id(spec.layout)]):
        which = id(spec.layout)
        alike[(set_of[which], peers_of[which], spec.rule, spec.device, spec.dtype, spec.update_dtype)].append(spec)
    by_set: dict[int, list[ParameterSpec]] = defaultdict(list)
    for spec in specs:
        if spec.view is not None:
            by_set[set_of[id(spec.layout)]].append(spec)
    owned = _assign_owners({rank_sets[number]: members for number, members in by_set.items()})
    turn = {position: number for number, position in enumerate(owned)}  # owners were assigned to the largest first
    outlines = []
    for (number, _, rule, *_), members in alike.items():
        ranks = rank_sets[number]
        work = {spec.position: owned.get(spec.position, ()) for spec in members}
        has_owners = members[0].view is not None
        largest_first = sorted(members, key=lambda s: turn[s.position]) if has_owners else sorted(members, key=_order)
        loads = [load_of(spec, work[spec.position]) for spec in largest_first]
        if has_owners and len(ranks) > 1 and strategy != "owner":
            on_all = {position: tuple(replace(unit, owner=None) for unit in many) for position, many in work.items()}
            on_all_loads = [load_of(spec, on_all[spec.position]) for spec in largest_first]
            if strategy == "replicate" or _is_faster(on_all_loads, loads):
                work, loads = on_all, on_all_loads
        # Decide only by parameters of this set, as for owners.
        if max_stage_bytes is None:
            limits = choose_limits(loads, len(ranks), scratch_limit(members[0].device_memory))
        else:
            limits = StageLimits(max_stage_bytes)
        for indices in cut(loads, limits.max_bytes):
            stage = tuple(largest_first[index] for index in indices)
            units_of_stage = tuple(unit for spec in stage for unit in work[spec.position])
            costs = tuple(loads[index] for index in indices)
            outlines.append(StageOutline(rule, ranks, stage, units_of_stage, limits, costs))
    return outlines


def _order(spec: ParameterSpec, units: Sequence[Unit] = ()) -> tuple[object, ...]:
    """Return a sort key for owners and stages: largest first, so that every stage uses all ranks; then by shape."""
    return (-max((unit.flops for unit in units), default=0.0), spec.shape, repr(spec.options), spec.position)


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
        # The order of stages, so that a stage of as many units as there are ranks has one for every rank.
        cut_up = sorted(((spec, units_of(spec)) for spec in specs_by_ranks[ranks]), key=lambda pair: _order(*pair))
        units = [(unit, spec) for spec, many in cut_up for unit in many]
        holders = [spec.layout.holders(spec.shape, unit.box) for unit, spec in units]
        # Decide only by parameters of this set: a rank may see others that the rest of the set does not know.
        first = specs_by_ranks[ranks][0]
        # Ranks get work in this order: a shard's holders in all replicas, then the next shard's.
        in_turn = [ranks[index] for places in first.layout.ranks_of_shard for index in places]
        before = {rank: sum(loads[other][rank] for other in wider) for rank in in_turn}
        owners, after = _assign([unit for unit, _ in units], holders, before, first.bytes_per_element)
        loads[ranks] = {rank: after[rank] - before[rank] for rank in ranks}
        for (unit, spec), owner in zip(units, owners, strict=True):
            placed[spec.position].append(replace(unit, owner=owner))
    return {position: tuple(many) for position, many in placed.items()}


def _assign(
    units: Sequence[Unit], holders: Sequence[tuple[int, ...]], loads: dict[int, float], bytes_per_element: int
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
        seconds_saved = ASSUMED.compute(max(after.values()) - max(free_after.values()))
        if seconds_to_move(units, holders, free_owners, bytes_per_element) < seconds_saved:
            return free_owners, free_after
    return owners, after


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


def _is_faster(on_all: Sequence[Load], owned: Sequence[Load]) -> bool:
    """Return whether parameters take less time if every rank computes all units, and not each unit once."""
    return seconds_alone(on_all) < REPLICATE_BELOW * seconds_alone(owned)
