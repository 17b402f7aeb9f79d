"""Choose into which stages parameters are cut, by an estimate of time and memory.

Everything here is a pure function of numbers that are equal on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from muon_fsdp.declarations.settings import ONE_DEVICE_BYTES
from muon_fsdp.plan.costs import Load, StageCost, StageLimits, peak_bytes, run_timeline, stage_cost
from muon_fsdp.plan.speeds import ASSUMED

# Scratch may take this part of the memory of the smallest device, and at least these bytes. Total memory counts, not
# free memory, which differs between ranks and from step to step.
SCRATCH_SHARE = 0.05
LEAST_LIMIT = 64 * 2**20
# A step may take this much longer than the fastest one to save memory.
HARDLY_LONGER = 1.02
# On one device, stages whose state is on the host are smaller: nothing overlaps with the copies of the first and the
# last one.
STREAMED_STAGE_BYTES = ONE_DEVICE_BYTES // 2
# No larger stage is tried, unless a parameter is larger: planning takes seconds for models of that size.
LARGEST_STAGE = 4 * 2**30
# With this many stages, all but a few percent of the transfers are hidden. More are tried only to save memory.
ENOUGH_STAGES = 64


def scratch_limit(device_memory: int) -> int:
    """Return the bytes that scratch may take, from the total memory of the smallest device."""
    return max(LEAST_LIMIT, int(SCRATCH_SHARE * device_memory))


def choose_limits(loads: Sequence[Load], num_ranks: int, limit: int) -> StageLimits:
    """Choose stages for parameters on the same ranks, by time and memory.

    Few large stages overlap little and need much memory; many small ones pay for many transfers, and leave ranks
    without work. So the bound is halved from that of a single stage, and each bound is tried with 3, 2 and 1 stages in
    flight. Candidates whose scratch is within the limit come first; there may be none, where the largest matrix alone
    needs more. Of those that take hardly longer than the fastest one, the one with the least memory wins.

    Where nothing travels, there is nothing to overlap. Stages are then those of one device, or smaller ones within the
    limit.

    Args:
        loads: the parameters, in the order in which stages take them.
        num_ranks: the ranks that they lie on.
        limit: bytes that scratch may take on a rank, as `scratch_limit` returns them.
    """
    if num_ranks == 1 or not any(load.units for load in loads):
        return StageLimits(STREAMED_STAGE_BYTES if any(load.is_streamed for load in loads) else ONE_DEVICE_BYTES)
    least = smallest_bound(loads)
    if not any(unit.received or unit.sent for load in loads for unit in load.units):
        bound = ONE_DEVICE_BYTES
        while bound > least and peak_bytes(_stage_costs(loads, StageLimits(bound, 1))) > limit:
            bound = max(least, bound // 2)
        return StageLimits(bound, 1)
    bound = _bound_of_one_stage(loads)
    uneven = least * 9 // 8  # uneven shards of one unit per rank may be a little larger together than one unit
    while bound > LARGEST_STAGE and bound // 2 >= uneven:
        bound //= 2
    found: list[_Candidate] = []
    fits = False
    while True:
        costs = _stage_costs(loads, StageLimits(bound))
        for in_flight in (3, 2, 1) if len(costs) > 1 else (3,):
            stages = [replace(cost, in_flight=in_flight) for cost in costs]
            seconds = run_timeline(stages, ASSUMED).seconds
            found.append(_Candidate(seconds, peak_bytes(stages), StageLimits(bound, in_flight)))
        fits = fits or any(candidate.bytes <= limit for candidate in found)
        if bound == least or (fits and len(costs) >= ENOUGH_STAGES and bound <= ONE_DEVICE_BYTES):
            break
        if len(costs) < ENOUGH_STAGES:
            bound = max(uneven, bound // 2) if bound > uneven else least
        else:
            bound = max(least, ONE_DEVICE_BYTES) if bound > ONE_DEVICE_BYTES else least
    candidates = [candidate for candidate in found if candidate.bytes <= limit] or found
    longest = HARDLY_LONGER * min(candidate.seconds for candidate in candidates)
    return min((c for c in candidates if c.seconds <= longest), key=lambda c: (c.bytes, c.seconds)).limits


class _Candidate(NamedTuple):
    """The seconds of a step with these limits, and the bytes that it needs besides weights, gradients and state."""

    seconds: float
    bytes: int
    limits: StageLimits


def smallest_bound(loads: Sequence[Load]) -> int:
    """Return the most bytes that one parameter needs on a rank: no stage can be smaller."""
    return max((load.largest for load in loads), default=0)


def _bound_of_one_stage(loads: Sequence[Load]) -> int:
    computed: dict[int | None, int] = defaultdict(int)
    for load in loads:
        for who, size in load.by_owner:
            computed[who] += size
    return max((sum(load.shard for load in loads), *computed.values()))


def cut(loads: Sequence[Load], max_bytes: int) -> list[list[int]]:
    """Cut parameters into stages in which no rank holds or computes more than `max_bytes`.

    A parameter is never divided between stages. Where one exceeds the bound, the largest one becomes the bound, so a
    stage of large matrices still has one for every rank. A parameter of several matrices is then orthogonalized in
    batches within the bound.

    Returns:
        For every stage the indices of its parameters.
    """
    limit = max(max_bytes, smallest_bound(loads))
    stages: list[list[int]] = []
    held, by_rank = 0, dict[int | None, int]()
    for index, load in enumerate(loads):
        is_full = held + load.shard > limit
        for who, size in load.by_owner:
            is_full = is_full or by_rank.get(who, 0) + size > limit
        if not stages or is_full:
            stages.append([])
            held, by_rank = 0, {}
        stages[-1].append(index)
        held += load.shard
        for who, size in load.by_owner:
            by_rank[who] = by_rank.get(who, 0) + size
    return stages


def _stage_costs(loads: Sequence[Load], limits: StageLimits) -> list[StageCost]:
    """Return the memory and work of every stage that parameters are cut into."""
    return [stage_cost([loads[i] for i in stage], limits) for stage in cut(loads, limits.max_bytes)]
