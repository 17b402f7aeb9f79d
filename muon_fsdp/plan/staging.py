"""Choose into which stages parameters are cut, by an estimate of time and memory.

Everything here is a pure function of numbers that are equal on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from muon_fsdp.plan.costs import Speeds

# The bound of a stage on one device, where there is no transfer to hide, and of any batch. Larger batches were not
# faster on a GPU.
ONE_DEVICE_BYTES = 256 * 2**20
# The scratch memory of an orthogonalization is at most this many times the bound of a stage.
SCRATCH_STAGES = 4
# Scratch may take this part of the memory of the smallest device, and at least these bytes. Total memory counts, not
# free memory, which differs between ranks and from step to step.
SCRATCH_SHARE = 0.05
LEAST_LIMIT = 64 * 2**20
# A step may take this much longer than the fastest one to save memory.
HARDLY_LONGER = 1.02
# No larger stage is tried, unless a parameter is larger: planning takes seconds for models of that size.
LARGEST_STAGE = 4 * 2**30
# With this many stages, all but a few percent of the transfers are hidden. More are tried only to save memory.
ENOUGH_STAGES = 64
ASSUMED = Speeds()


class UnitLoad(NamedTuple):
    """The cost of one unit. Bytes are those of the rank that computes it, or of each such rank."""

    owner: int | None  # None: every rank computes it
    bytes: int  # of the unit, in a buffer
    flops: float
    received: int  # bytes that the gather brings
    sent: int  # bytes of results that the owner sends in the scatter
    blocks: tuple[tuple[int, int, int], ...]  # number, rows and columns of its matrices


class Load(NamedTuple):
    """The cost of one parameter in a stage.

    Args:
        shard: bytes of its largest shard, in a buffer.
        shard_sent: bytes of it that travel in the gather, if owners are spread evenly.
        shard_received: bytes of it that travel in the scatter.
        receivers: ranks that a shard is sent to: the owner, or all other ranks of the replica.
        peers: ranks that hold the same shard and exchange slices of its updates; 1 if none do.
        bytes_per_element: in the buffers of a stage.
        units: its units.
        travels: whether it lies on more than one rank.
        by_owner: the ranks that compute its units, and the bytes of these.
        largest: bytes that it needs on a rank: those of its shard, or of the units that one rank computes.
    """

    shard: int
    shard_sent: int
    shard_received: int
    receivers: int
    peers: int
    bytes_per_element: int
    units: tuple[UnitLoad, ...]
    travels: bool
    by_owner: tuple[tuple[int | None, int], ...]
    largest: int


def bytes_by_owner(units: Sequence[UnitLoad]) -> tuple[tuple[int | None, int], ...]:
    """Return the ranks that compute units, and the bytes of all units of each."""
    if len(units) == 1:  # most parameters: planning makes ten thousands of these
        return ((units[0].owner, units[0].bytes),)
    computed: dict[int | None, int] = defaultdict(int)
    for unit in units:
        computed[unit.owner] += unit.bytes
    return tuple(computed.items())


@dataclass(frozen=True)
class StageCost:
    """Memory and work of a stage. Each number of bytes is that of the rank where it is largest."""

    flops_by_rank: Mapping[int | None, float]  # by owner; the key None stands for units that every rank computes
    shards: int  # bytes of the updates of a rank's shards
    units: int  # bytes of the units that a rank computes
    scratch: int  # bytes of scratch memory for batches that are computed together
    receivers: int  # ranks that a shard is sent to: its owner, or all other ranks of the replica
    peers: int  # ranks that hold the same shards and exchange slices of their updates; 1 if none do
    gathered: int  # bytes that a rank sends or receives in the gather
    scattered: int  # bytes that a rank sends or receives in the scatter
    travels: bool
    in_flight: int = 3  # as in `Staging`

    @property
    def slice(self) -> int:
        """Return the bytes of updates that a rank receives from owners."""
        return -(-self.shards // self.peers)

    @property
    def forwarded(self) -> int:
        """Return the bytes of updates that a rank receives from its peers."""
        return self.shards - self.slice

    @property
    def gathering(self) -> int:
        """Return the bytes of shards and of the send and receive buffers of a gather."""
        return (1 + self.receivers) * self.shards + self.units if self.travels else 0

    @property
    def computing(self) -> int:
        """Return the bytes of matrices, results and scratch, or those of results and of the buffers of a scatter."""
        if not self.travels:
            return self.shards + self.units + self.scratch
        return max(2 * self.units + self.scratch, 3 * self.units + self.slice)

    @property
    def scattering(self) -> int:
        """Return the bytes of results, of the send and receive buffers of a scatter, and of the shards' updates."""
        return 2 * self.units + self.slice + self.shards if self.travels else 0

    @property
    def forwarding(self) -> int:
        """Return the bytes of the shards' updates, which are all-gathered in place."""
        return self.shards if self.peers > 1 else 0


NOTHING = StageCost({}, 0, 0, 0, 1, 1, 0, 0, False)


@dataclass(frozen=True)
class Staging:
    """How parameters are cut into stages, and how far these overlap.

    Args:
        max_bytes: bytes of updates that a rank holds or computes in a stage, at most.
        in_flight: how many stages have buffers at a time. With 3, the next stage is gathered and the one before is
            scattered while one computes; where there are replicas, a fourth is forwarded. With 2, the next is gathered
            while one computes, and a stage has been scattered before the next computes. With 1, stages follow each
            other.
    """

    max_bytes: int
    in_flight: int = 3

    @property
    def batch_bytes(self) -> int:
        """Return the bound of a batch, in bytes of its matrices."""
        return min(self.max_bytes, ONE_DEVICE_BYTES)


def scratch_limit(device_memory: int) -> int:
    """Return the bytes that scratch may take, from the total memory of the smallest device."""
    return max(LEAST_LIMIT, int(SCRATCH_SHARE * device_memory))


def choose_staging(loads: Sequence[Load], num_ranks: int, limit: int) -> Staging:
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
        return Staging(ONE_DEVICE_BYTES)
    least = smallest_bound(loads)
    if not any(unit.received or unit.sent for load in loads for unit in load.units):
        bound = ONE_DEVICE_BYTES
        while bound > least and peak_bytes(_stage_costs(loads, Staging(bound, 1))) > limit:
            bound = max(least, bound // 2)
        return Staging(bound, 1)
    bound = _bound_of_one_stage(loads)
    uneven = least * 9 // 8  # uneven shards of one unit per rank may be a little larger together than one unit
    while bound > LARGEST_STAGE and bound // 2 >= uneven:
        bound //= 2
    found: list[_Candidate] = []
    fits = False
    while True:
        costs = _stage_costs(loads, Staging(bound))
        for in_flight in (3, 2, 1) if len(costs) > 1 else (3,):
            stages = [replace(cost, in_flight=in_flight) for cost in costs]
            seconds = run_timeline(stages, ASSUMED).seconds
            found.append(_Candidate(seconds, peak_bytes(stages), Staging(bound, in_flight)))
        fits = fits or any(candidate.bytes <= limit for candidate in found)
        if bound == least or (fits and len(costs) >= ENOUGH_STAGES and bound <= ONE_DEVICE_BYTES):
            break
        if len(costs) < ENOUGH_STAGES:
            bound = max(uneven, bound // 2) if bound > uneven else least
        else:
            bound = max(least, ONE_DEVICE_BYTES) if bound > ONE_DEVICE_BYTES else least
    candidates = [candidate for candidate in found if candidate.bytes <= limit] or found
    longest = HARDLY_LONGER * min(candidate.seconds for candidate in candidates)
    return min((c for c in candidates if c.seconds <= longest), key=lambda c: (c.bytes, c.seconds)).staging


class _Candidate(NamedTuple):
    """The seconds of a step with a staging, and the bytes that it needs besides weights, gradients and state."""

    seconds: float
    bytes: int
    staging: Staging


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


def _stage_costs(loads: Sequence[Load], staging: Staging) -> list[StageCost]:
    """Return the memory and work of every stage that parameters are cut into."""
    return [stage_cost([loads[i] for i in stage], staging) for stage in cut(loads, staging.max_bytes)]


def stage_cost(loads: Sequence[Load], staging: Staging) -> StageCost:
    """Sum up the parameters of one stage."""
    units: dict[int | None, int] = defaultdict(int)
    flops: dict[int | None, float] = defaultdict(float)
    received: dict[int | None, int] = defaultdict(int)
    sent: dict[int | None, int] = defaultdict(int)
    matrices: dict[tuple[int | None, int, int], int] = defaultdict(int)  # by owner and shape
    for load in loads:
        # Unpacked at once, because plans have ten thousands of units.
        for owner, size, work, brought, returned, blocks in load.units:
            units[owner] += size
            flops[owner] += work
            received[owner] += brought
            sent[owner] += returned
            for count, rows, cols in blocks:
                matrices[(owner, rows, cols)] += count
    return StageCost(
        flops_by_rank=flops,
        shards=sum(load.shard for load in loads),
        units=max(units.values(), default=0),
        scratch=_scratch_bytes(matrices, loads[0].bytes_per_element, staging.batch_bytes),
        receivers=max(load.receivers for load in loads),
        peers=max(load.peers for load in loads),
        gathered=max((sum(load.shard_sent for load in loads), *received.values())),
        scattered=max((sum(load.shard_received for load in loads), *sent.values())),
        travels=any(load.travels for load in loads),
        in_flight=staging.in_flight,
    )


def _scratch_bytes(matrices: Mapping[tuple[int | None, int, int], int], bytes_per_element: int, max_bytes: int) -> int:
    """Return an upper bound of the scratch memory of a stage, given the number of matrices by owner and shape."""
    all_batches: dict[tuple[int | None, int], int] = defaultdict(int)  # by owner and shorter side
    one_batch: dict[tuple[int | None, int], int] = defaultdict(int)
    for (owner, rows, cols), count in matrices.items():
        key, each = (owner, min(rows, cols)), scratch_numel(rows, cols) * bytes_per_element
        all_batches[key] += count * each
        at_once = min(count, matrices_at_once(rows, cols, bytes_per_element, max_bytes))
        one_batch[key] = max(one_batch[key], at_once * each)
    limit = SCRATCH_STAGES * max_bytes
    return max((min(every, max(limit, one_batch[key])) for key, every in all_batches.items()), default=0)


def scratch_numel(rows: int, cols: int) -> int:
    """Return the elements of scratch that a matrix needs at most: twice its size, and five times its Gram matrix."""
    return 2 * rows * cols + 5 * min(rows, cols) ** 2


def matrices_at_once(rows: int, cols: int, bytes_per_element: int, max_bytes: int) -> int:
    """Return how many matrices a batch may have: within the bound of a stage, and scratch within a few bounds."""
    by_scratch = SCRATCH_STAGES * max_bytes // (scratch_numel(rows, cols) * bytes_per_element)
    return max(1, min(max_bytes // (rows * cols * bytes_per_element), by_scratch))


def peak_bytes(stages: Sequence[StageCost]) -> int:
    """Return an upper bound of the bytes in use on a rank besides weights, gradients and state."""
    padded = (*2 * (NOTHING,), *stages, NOTHING)
    peak = max((stage.gathering for stage in stages), default=0)
    for first, before, now, after in zip(padded, padded[1:], padded[2:], padded[3:], strict=False):
        next_gathered = after.gathering if after.in_flight > 1 else 0
        ending = 0  # bytes of stages that are still being scattered and forwarded while this one computes
        if before.in_flight == 3 and now.in_flight > 1:
            ending = first.forwarding + before.scattering
        peak = max(peak, now.computing + ending + next_gathered)
        if before.in_flight < 3 and now.in_flight > 1 and before.peers == 1:
            # Its updates wait until the next stage but one has started.
            peak = max(peak, before.shards + now.gathering + next_gathered)
        peak = max(peak, now.scattering + next_gathered, now.forwarding + next_gathered)
    return peak


class Timeline(NamedTuple):
    """The seconds of a step in which stages are gathered, computed and scattered."""

    seconds: float  # of the whole step
    transfers: list[tuple[float, float]]  # start and end of each transfer, in order
    ready: list[float]  # for every stage, when its owners can start to compute it

    def overlap(self, stages: Sequence[StageCost], speeds: Speeds, rank: int) -> float:
        """Return for how long a rank computes while something travels.

        Args:
            stages: those that this timeline was made of.
            speeds: those that it was made with.
            rank: the rank that computes.
        """
        seconds = free = 0.0
        first = 0  # the first transfer that has not ended when the stage starts
        for stage, ready in zip(stages, self.ready, strict=True):
            start = max(free, ready)
            flops = stage.flops_by_rank.get(rank, 0.0) + stage.flops_by_rank.get(None, 0.0)
            free = start + flops / speeds.flops
            while first < len(self.transfers) and self.transfers[first][1] <= start:
                first += 1
            for begin, end in islice(self.transfers, first, None):
                if begin >= free:
                    break
                seconds += min(free, end) - max(start, begin)
        return seconds


def run_timeline(stages: Sequence[StageCost], speeds: Speeds) -> Timeline:
    """Estimate when every stage is gathered, computed and scattered, if ranks overlap stages as a step does.

    All transfers use one network in a fixed order: a stage is gathered before the previous one is scattered. A transfer
    takes as long as its busiest rank: one matrix takes as long to reach its owner in a stage of few matrices as in a
    stage with one for every rank. A stage is computed once it has been gathered, and scattered once all of its owners
    have computed it.
    """
    network = 0.0  # the time at which the network becomes free
    ended = 0.0  # the time at which all stages have been scattered that must end before the next one computes
    free: dict[int | None, float] = defaultdict(float)  # the time at which each rank becomes free
    waiting: list[tuple[StageCost, float]] = []  # a stage that is not computed yet, and when it has been gathered
    timeline = Timeline(0.0, [], [])

    def transfer(num_bytes: float, earliest: float = 0.0) -> None:
        nonlocal network
        if num_bytes:
            start = max(network, earliest)
            network = start + speeds.transfer(num_bytes)
            timeline.transfers.append((start, network))

    def compute() -> None:
        nonlocal ended
        stage, gathered = waiting.pop()
        # What every rank computes starts when all of them are free, and occupies all of them.
        occupied = free.values() if None in stage.flops_by_rank else (free[None],)
        ready = max((gathered, ended, *occupied))
        timeline.ready.append(ready)
        for rank, work in stage.flops_by_rank.items():
            free[rank] = max(free[rank], ready) + work / speeds.flops
        computed = max((free[rank] for rank in stage.flops_by_rank), default=0.0)
        transfer(stage.scattered, computed)
        transfer(stage.forwarded, computed)
        if stage.in_flight < 3:
            ended = network

    for stage in stages:
        if waiting and stage.in_flight == 1:
            compute()
        transfer(stage.gathered)
        gathered = network
        if waiting:
            compute()
        waiting.append((stage, gathered))
    if waiting:
        compute()
    return timeline._replace(seconds=max((network, *free.values())))
