"""Who computes which matrices, and in which stage: what all ranks agree on, from metadata alone.

Everything here is a pure function of shapes and layouts; an outline for thousands of ranks needs none of them.
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
from muon_fsdp.plan.layout import Box, Layout

Strategy = Literal["auto", "owner", "replicate"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

# The cost model of "auto": a GPU's matrix rate, what one rank can send, and what a step costs however small it is.
FLOPS_PER_SECOND = 4e14
BYTES_PER_SECOND = 1e11
FIXED_SECONDS = 1e-4
# Computing everything everywhere must promise this much of the owner's time before it is preferred.
REPLICATE_BELOW = 0.7
NO_OPTIONS = PlannedOptions()


@dataclass(frozen=True)
class ParameterSpec:
    """What planning needs to know of one parameter; `position` counts through all groups of the optimizer."""

    position: int
    group: int
    rule: str
    shape: tuple[int, ...]
    layout: Layout
    bytes_per_element: int  # of what a stage holds of it
    device: torch.device  # parameters on different devices are never in one stage
    dtype: torch.dtype  # working precision; likewise
    view: MatrixView | None = None  # None for an element-wise rule
    options: PlannedOptions = NO_OPTIONS  # what matrices of one batch must share
    block_flops: tuple[float, ...] = ()  # per block, the cost of one of its matrices
    wire_bytes: int = 2  # of an element that travels


@dataclass(frozen=True)
class Unit:
    """A box of a parameter that is orthogonalized in one place: all of it, or some matrices of a stack."""

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
        """The number of its first matrix in a block of the parameter, whose view is `whole`."""
        is_part = self.view.shape != whole.shape  # some matrices of a stack
        return self.box.offset[0] * self.view.block_shapes[block][0] if is_part else 0


@dataclass(frozen=True)
class StageOutline:
    """What all ranks of `ranks` agree on: parameters that pass through a step together, and who computes them."""

    rule: str
    ranks: tuple[int, ...]
    specs: tuple[ParameterSpec, ...]
    units: tuple[Unit, ...]


def make_outline(specs: Iterable[ParameterSpec], *, max_stage_bytes: int, strategy: str = "auto") -> list[StageOutline]:
    """Who computes what in which stage, for all ranks; the same on every rank that sees the same parameters.

    Stages come in one total order (ranks, then size), so that groups of ranks that overlap can't wait for each other
    in a circle.
    """
    specs = [spec for spec in specs if math.prod(spec.shape) > 0 or spec.view is None]  # empty shards count steps
    # Sets of ranks are long: they are compared once per layout, not once per parameter.
    layouts = {id(spec.layout): spec.layout for spec in specs}
    # Those that are the same ranks in another order share a process group, so nothing comes between them.
    rank_sets = sorted({layout.ranks for layout in layouts.values()}, key=lambda ranks: (sorted(ranks), ranks))
    set_of = {key: rank_sets.index(layout.ranks) for key, layout in layouts.items()}
    by_kind: dict[tuple[int, str, torch.device, torch.dtype], list[ParameterSpec]] = defaultdict(list)
    for spec in sorted(specs, key=lambda spec: set_of[id(spec.layout)]):
        by_kind[(set_of[id(spec.layout)], spec.rule, spec.device, spec.dtype)].append(spec)
    by_set: dict[int, list[ParameterSpec]] = defaultdict(list)
    for spec in specs:
        if spec.view is not None:
            by_set[set_of[id(spec.layout)]].append(spec)
    owned = _assign_owners({rank_sets[number]: members for number, members in by_set.items()})
    outlines = []
    for (number, rule, *_), members in by_kind.items():
        ranks = rank_sets[number]
        work = {spec.position: owned.get(spec.position, ()) for spec in members}
        units = [unit for many in work.values() for unit in many]
        if len(ranks) > 1 and _replicates(units, members[0], strategy):
            work = {position: tuple(replace(unit, owner=None) for unit in many) for position, many in work.items()}
        largest_first = sorted(members, key=lambda spec: _order(spec, work[spec.position]))
        outlines += [
            StageOutline(rule, ranks, tuple(stage), tuple(unit for spec in stage for unit in work[spec.position]))
            for stage in _cut(largest_first, work, max_stage_bytes)
        ]
    return outlines


def _order(spec: ParameterSpec, units: Sequence[Unit]) -> tuple[object, ...]:
    """Largest first, as owners are assigned, so that every stage spreads over all ranks; equal shapes side by side."""
    return (-max((unit.flops for unit in units), default=0.0), spec.shape, repr(spec.options), spec.position)


def _units_of(spec: ParameterSpec) -> tuple[Unit, ...]:
    """Cut a stack of matrices where ranks could share the work; anything else is one unit."""
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
    """The units of every parameter, each with an owner, by load over the whole model.

    A rank knows only the parameters it holds a part of, and owners must be the same on all ranks that share them.
    So the widest sets of ranks come first, and a narrower set counts what its ranks do in the sets that contain it.
    """
    loads: dict[tuple[int, ...], dict[int, float]] = {}
    placed: dict[int, list[Unit]] = defaultdict(list)
    for ranks in sorted(specs_by_ranks, key=lambda ranks: (-len(ranks), ranks)):
        wider = [other for other in loads if set(ranks) <= set(other)]
        before = {rank: sum(loads[other][rank] for other in wider) for rank in ranks}
        units = [(unit, spec) for spec in specs_by_ranks[ranks] for unit in _units_of(spec)]
        holders = [spec.layout.holders(spec.shape, unit.box) for unit, spec in units]
        # Only what all ranks of the set know may decide: its own parameters, not the others that a rank sees.
        first = specs_by_ranks[ranks][0]
        in_turn = _replicas_in_turn(first.layout)
        owners, after = _assign([unit for unit, _ in units], holders, {r: before[r] for r in in_turn}, first.wire_bytes)
        loads[ranks] = {rank: after[rank] - before[rank] for rank in ranks}
        for (unit, spec), owner in zip(units, owners, strict=True):
            owned = Unit(unit.position, unit.box, unit.view, unit.options, unit.flops, owner)
            placed[spec.position].append(owned)
    return {position: tuple(many) for position, many in placed.items()}


def _replicas_in_turn(layout: Layout) -> list[int]:
    """Ranks in the order in which work is dealt out: each replica passes on what its ranks have computed."""
    return [layout.ranks[index] for places in layout.ranks_of_shard for index in places]


def _assign(
    units: Sequence[Unit], holders: Sequence[tuple[int, ...]], loads: dict[int, float], wire_bytes: int
) -> tuple[list[int], dict[int, float]]:
    """Owners of units that share their ranks: whoever holds one whole where there is such a rank, else anybody.

    Weights that lie whole on few ranks (256 experts over 4,096 ranks) are moved all the same when the others would
    wait longer than moving takes.
    """
    owners, after = _balance(units, holders, loads)
    if any(0 < len(who) < len(loads) for who in holders):
        free_owners, free_after = _balance(units, [()] * len(units), loads)
        moved = sum(
            2 * unit.box.numel * wire_bytes
            for unit, who, owner in zip(units, holders, free_owners, strict=True)
            if who and owner not in who
        )
        seconds_to_move = FIXED_SECONDS + moved / (len(loads) * BYTES_PER_SECOND)
        seconds_saved = (max(after.values()) - max(free_after.values())) / FLOPS_PER_SECOND
        if seconds_to_move < seconds_saved:
            return free_owners, free_after
    return owners, after


def _balance(
    units: Sequence[Unit], candidates: Sequence[tuple[int, ...]], loads: dict[int, float]
) -> tuple[list[int], dict[int, float]]:
    """Longest processing time first: the next largest unit goes to the least loaded of its candidates, and among
    equals to the first in `loads`."""
    loads = dict(loads)
    everybody = tuple(loads)
    turn = {rank: number for number, rank in enumerate(everybody)}
    owners = [-1] * len(units)
    # By candidates; None: everybody, whose tuple is long to hash.
    heaps: dict[tuple[int, ...] | None, list[tuple[float, int, int]]] = {}
    # Units with a choice of few ranks first: the others can even out what these leave.
    has_choice = [not 0 < len(who) < len(loads) for who in candidates]
    for index in sorted(range(len(units)), key=lambda i: (has_choice[i], -units[i].flops)):
        ranks = None if has_choice[index] else candidates[index]
        heap = heaps.get(ranks)
        if heap is None:
            heap = heaps[ranks] = [(loads[rank], turn[rank], rank) for rank in (everybody if ranks is None else ranks)]
            heapq.heapify(heap)
        while heap[0][0] != loads[heap[0][2]]:  # this rank was given work from another heap meanwhile
            _, number, rank = heap[0]
            heapq.heapreplace(heap, (loads[rank], number, rank))
        load, number, rank = heap[0]
        owners[index] = rank
        loads[rank] = load + units[index].flops
        heapq.heapreplace(heap, (loads[rank], number, rank))
    return owners, loads


def _replicates(units: Sequence[Unit], spec: ParameterSpec, strategy: str) -> bool:
    """Whether every rank should compute everything instead of each unit once; `spec` is one of their parameters."""
    if strategy != "auto" or not units:
        return strategy == "replicate"
    num_ranks, num_replicas = len(spec.layout.ranks), spec.layout.num_replicas
    shards = num_ranks // num_replicas
    loads: dict[int, float] = defaultdict(float)
    for unit in units:
        if unit.owner is not None:
            loads[unit.owner] += unit.flops
    num_bytes = spec.wire_bytes * sum(unit.box.numel for unit in units)
    gathered = num_bytes * (shards - 1) / shards
    scattered = num_bytes * num_replicas - num_bytes / shards
    owner = (
        FIXED_SECONDS + max(loads.values()) / FLOPS_PER_SECOND + (gathered + scattered) / num_ranks / BYTES_PER_SECOND
    )
    everywhere = FIXED_SECONDS + sum(loads.values()) / FLOPS_PER_SECOND + gathered / BYTES_PER_SECOND
    return everywhere < REPLICATE_BELOW * owner


def _cut(
    specs: Sequence[ParameterSpec], work: dict[int, tuple[Unit, ...]], max_stage_bytes: int
) -> list[list[ParameterSpec]]:
    """Cut parameters into stages in which no rank holds or computes more than `max_stage_bytes`.

    A parameter is never divided between stages, so where one exceeds the bound the largest one takes its place: a
    stage of large matrices still has one for every rank. They are orthogonalized in batches within the bound where
    a parameter holds several.
    """
    needs: list[tuple[int, dict[int | None, int]]] = []  # bytes of a shard, and of units by who computes them
    for spec in specs:
        computed: dict[int | None, int] = defaultdict(int)
        for unit in work[spec.position]:
            computed[unit.owner] += unit.box.numel * spec.bytes_per_element
        needs.append((spec.layout.largest_box(spec.shape) * spec.bytes_per_element, computed))
    limit = max([max_stage_bytes, *(max((shard, *computed.values())) for shard, computed in needs)])
    stages: list[list[ParameterSpec]] = []
    held, by_rank = 0, dict[int | None, int]()
    for spec, (shard, computed) in zip(specs, needs, strict=True):
        if not stages or max((held + shard, *(by_rank.get(who, 0) + size for who, size in computed.items()))) > limit:
            stages.append([])
            held, by_rank = 0, {}
        stages[-1].append(spec)
        held += shard
        for who, size in computed.items():
            by_rank[who] = by_rank.get(who, 0) + size
    return stages


def is_relayed(unit: Unit, spec: ParameterSpec) -> bool:
    """Whether results reach other replicas in a second hop: who computed the unit would have to send all of it to every
    replica, so where its own is several ranks it sends to these alone, and each of them passes its part on."""
    if unit.owner is None or spec.layout.num_replicas == 1:
        return False
    return not spec.layout.boxes(spec.shape)[spec.layout.index_of[unit.owner]].contains(unit.box)
