"""Estimate what a plan costs: bytes that travel, FLOPs, seconds, and memory in use.

The choice of a strategy, the choice of stages and `plan_report()` ask these functions, so that they never disagree.
Everything here is a pure function of numbers that are equal on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from muon_fsdp.declarations.settings import ONE_DEVICE_BYTES
from muon_fsdp.plan.speeds import ASSUMED, FIXED_SECONDS, Speeds
from muon_fsdp.plan.units import ParameterSpec, Unit

# The scratch memory of an orthogonalization is at most this many times the bound of a stage.
SCRATCH_STAGES = 4
# With `offload_state=True` the device holds the state of so many stages, and element-wise rules get stages with at most
# so many bytes of it.
NUM_SLOTS = 3
STREAMED_BYTES = 64 * 2**20


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
        bytes_per_element: in the buffers of a stage, and in transfers.
        units: its units.
        travels: whether it lies on more than one rank.
        by_owner: the ranks that compute its units, and the bytes of these.
        largest: bytes that it needs on a rank: those of its shard, or of the units that one rank computes.
        gathered: bytes that all ranks together receive in the gather.
        scattered: bytes of results that all ranks together send in the scatter and then to their peers.
        is_streamed: whether its state is on the host.
        scratch: bytes of scratch for one of its matrices, by shape.
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
    gathered: int
    scattered: int
    is_streamed: bool
    scratch: Mapping[tuple[int, int], int]

    @property
    def is_replicated(self) -> bool:
        """Return whether several ranks compute all of its units."""
        return any(unit.owner is None for unit in self.units)


def load_of(spec: ParameterSpec, units: Sequence[Unit], kept: Sequence[int] | None = None) -> Load:
    """Return what a parameter with these units costs in a stage.

    Args:
        spec: the parameter.
        units: its units, with their owners.
        kept: elements of the results of each unit that its owner keeps. They are known once stages have been cut; None
            assumes about one of the slices of its own box.
    """
    layout, shape, size = spec.layout, spec.shape, spec.bytes_per_element
    num_ranks, replicas = len(layout.ranks), layout.num_replicas
    shard = layout.largest_box(shape) * size
    others = num_ranks // replicas - 1  # ranks of the same replica
    loads = tuple(_unit_load(unit, spec, None if kept is None else kept[i]) for i, unit in enumerate(units))
    replicated = any(unit.owner is None for unit in units)
    if replicated:  # every rank lacks what the other ranks of its replica hold
        gathered, scattered = (num_ranks - replicas) * sum(unit.bytes for unit in loads), 0
    else:
        gathered = sum(unit.received for unit in loads)
        scattered = sum(unit.sent + (replicas - 1) * unit.bytes for unit in loads)
    by_owner = _bytes_by_owner(loads)
    return Load(
        shard=shard,
        # With owners, only those of its own replica get its shard, and it is one of them itself.
        shard_sent=(shard * others // (1 if replicated else num_ranks)) if gathered else 0,
        # Its slice, from the owners in its own replica.
        shard_received=shard * others // num_ranks if scattered else 0,
        receivers=max(1, others) if replicated else 1,
        peers=1 if replicated else replicas,
        bytes_per_element=size,
        units=loads,
        travels=num_ranks > 1,
        by_owner=by_owner,
        largest=max((shard, *(size for _, size in by_owner))),
        gathered=gathered,
        scattered=scattered,
        is_streamed=spec.streamed_bytes > 0,
        scratch=_scratch_by_shape(spec),
    )


def _scratch_by_shape(spec: ParameterSpec) -> dict[tuple[int, int], int]:
    shapes = () if spec.view is None else spec.view.block_shapes
    each = spec.block_scratch or [scratch_numel(rows, cols) * spec.bytes_per_element for _, rows, cols in shapes]
    return {(rows, cols): size for (_, rows, cols), size in zip(shapes, each, strict=True)}


def _unit_load(unit: Unit, spec: ParameterSpec, kept: int | None) -> UnitLoad:
    """Return what a unit costs the rank that computes it."""
    numel, size, layout = unit.box.numel, spec.bytes_per_element, spec.layout
    if unit.owner is None:
        # The mean over all ranks. The busiest rank of such a gather is the one that sends the largest shard.
        received = numel - numel * layout.num_replicas // len(layout.ranks)
        return UnitLoad(None, numel * size, unit.flops, received * size, 0, unit.view.block_shapes)
    box = layout.box_on(unit.owner, spec.shape)
    held = box.numel if unit.box.shape == spec.shape else box.intersect(unit.box).numel
    sent = numel - (held // layout.num_replicas if kept is None else kept)
    return UnitLoad(unit.owner, numel * size, unit.flops, (numel - held) * size, sent * size, unit.view.block_shapes)


def _bytes_by_owner(units: Sequence[UnitLoad]) -> tuple[tuple[int | None, int], ...]:
    """Return the ranks that compute units, and the bytes of all units of each."""
    if len(units) == 1:  # most parameters: planning makes ten thousands of these
        return ((units[0].owner, units[0].bytes),)
    computed: dict[int | None, int] = defaultdict(int)
    for unit in units:
        computed[unit.owner] += unit.bytes
    return tuple(computed.items())


@dataclass
class Traffic:
    """Bytes that travel. Owners receive in a gather and send in a scatter; peers exchange results in an all-gather.

    In the traffic of a stage, the key None stands for each of its ranks.
    """

    gathered: dict[int | None, int] = field(default_factory=dict)  # received by each rank
    scattered: dict[int | None, int] = field(default_factory=dict)  # sent by each rank
    # What the rank with the largest shards sends in the gather and receives in the scatter, with evenly spread owners.
    shards_sent: int = 0
    shards_received: int = 0
    forwarded: int = 0  # what it sends, and also receives, in all-gathers
    weights: int = 0  # what a rank receives of weights after a step with `shard_state=True`

    @property
    def sends(self) -> bool:
        """Return whether anything travels in a gather, in a scatter or between peers."""
        return self.busiest_gather + self.busiest_scatter > 0

    @property
    def busiest_gather(self) -> int:
        return max(self.shards_sent, *self.gathered.values(), 0)

    @property
    def busiest_all_to_all(self) -> int:
        """Return the bytes of the busiest rank in scatters, without the all-gathers that follow."""
        return max(self.shards_received, *self.scattered.values(), 0)

    @property
    def busiest_scatter(self) -> int:
        return self.busiest_all_to_all + self.forwarded


@dataclass(frozen=True)
class StageLimits:
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


@dataclass(frozen=True)
class StageCost:
    """Memory and work of a stage. Each number of bytes is that of the rank where it is largest."""

    flops_by_rank: Mapping[int | None, float]  # by owner; the key None stands for units that every rank computes
    shards: int  # bytes of the updates of a rank's shards
    units: int  # bytes of the units that a rank computes
    scratch: int  # bytes of scratch memory for batches that are computed together
    receivers: int  # ranks that a shard is sent to: its owner, or all other ranks of the replica
    peers: int  # ranks that hold the same shards and exchange slices of their updates; 1 if none do
    traffic: Traffic
    travels: bool
    in_flight: int = 3  # as in `StageLimits`

    @property
    def slice(self) -> int:
        """Return the bytes of updates that a rank receives from owners."""
        return -(-self.shards // self.peers)

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


NOTHING = StageCost({}, 0, 0, 0, 1, 1, Traffic(), travels=False)


def stage_cost(loads: Sequence[Load], limits: StageLimits) -> StageCost:
    """Sum up the parameters of one stage."""
    units: dict[int | None, int] = defaultdict(int)
    flops: dict[int | None, float] = defaultdict(float)
    received: dict[int | None, int] = defaultdict(int)
    sent: dict[int | None, int] = defaultdict(int)
    matrices: dict[tuple[int | None, int, int, int], int] = defaultdict(int)  # by owner, shape and scratch of each
    for load in loads:
        # Unpacked at once, because plans have ten thousands of units.
        for owner, size, work, brought, returned, blocks in load.units:
            units[owner] += size
            flops[owner] += work
            received[owner] += brought
            sent[owner] += returned
            for count, rows, cols in blocks:
                matrices[(owner, rows, cols, load.scratch[rows, cols])] += count
    shards, peers = sum(load.shard for load in loads), max(load.peers for load in loads)
    return StageCost(
        flops_by_rank=flops,
        shards=shards,
        units=max(units.values(), default=0),
        scratch=_scratch_bytes(matrices, loads[0].bytes_per_element, limits.batch_bytes),
        receivers=max(load.receivers for load in loads),
        peers=peers,
        traffic=Traffic(
            gathered=received,
            scattered=sent,
            shards_sent=sum(load.shard_sent for load in loads),
            shards_received=sum(load.shard_received for load in loads),
            forwarded=shards - -(-shards // peers),  # all but the slice that owners have sent
        ),
        travels=any(load.travels for load in loads),
        in_flight=limits.in_flight,
    )


def seconds_alone(loads: Sequence[Load]) -> float:
    """Estimate the seconds of parameters in one stage; its transfers have one fixed time in common."""
    cost = stage_cost(loads, StageLimits(ONE_DEVICE_BYTES))
    moved = cost.traffic.busiest_gather + cost.traffic.busiest_scatter
    return FIXED_SECONDS + ASSUMED.compute(max(cost.flops_by_rank.values())) + ASSUMED.send(moved)


def seconds_to_move(
    units: Sequence[Unit], holders: Sequence[tuple[int, ...]], owners: Sequence[int], bytes_per_element: int
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
    return ASSUMED.transfer(2 * max(moved.values(), default=0.0) * bytes_per_element)


def _scratch_bytes(
    matrices: Mapping[tuple[int | None, int, int, int], int], bytes_per_element: int, max_bytes: int
) -> int:
    """Return an upper bound of the scratch memory of a stage: for its directions, and for samples of its matrices.

    Args:
        matrices: the number of matrices by owner, rows, columns and bytes of scratch for each.
        bytes_per_element: in the buffers of the stage.
        max_bytes: the bound of a batch.
    """
    # By owner and shorter side: what all batches need, and the largest one by `scratch_numel`, which decides what runs
    # together; the largest share of `scratch_numel` that is needed; and copies of the sampled matrix of each batch.
    all_batches: dict[tuple[int | None, int], int] = defaultdict(int)
    one_batch: dict[tuple[int | None, int], int] = defaultdict(int)
    share: dict[tuple[int | None, int], float] = defaultdict(float)
    copies: dict[tuple[int | None, int], int] = defaultdict(int)
    sample = 0  # what the sample of a matrix needs beside its copy
    for (owner, rows, cols, each), count in matrices.items():
        key, size = (owner, min(rows, cols)), rows * cols * bytes_per_element
        most = scratch_numel(rows, cols) * bytes_per_element
        at_once = min(count, matrices_at_once(rows, cols, bytes_per_element, max_bytes))
        all_batches[key] += count * each
        one_batch[key] = max(one_batch[key], at_once * most)
        share[key] = max(share[key], each / most)
        if each != most:  # the default has room for samples
            copies[key] += -(-count // at_once) * size
            sample = max(sample, most - size)
    needs = 0
    for key, every in all_batches.items():
        together = int(share[key] * max(SCRATCH_STAGES * max_bytes, one_batch[key]))
        needs = max(needs, max(min(every, together), sample) + copies[key])
    return needs


def scratch_numel(rows: int, cols: int) -> int:
    """Return the elements of scratch that a matrix needs at most: twice its size, and four times its Gram matrix."""
    return 2 * rows * cols + 4 * min(rows, cols) ** 2


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
            free = start + speeds.compute(flops)
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
            free[rank] = max(free[rank], ready) + speeds.compute(work)
        computed = max((free[rank] for rank in stage.flops_by_rank), default=0.0)
        transfer(stage.traffic.busiest_all_to_all, computed)
        transfer(stage.traffic.forwarded, computed)
        if stage.in_flight < 3:
            ended = network

    for stage in stages:
        if waiting and stage.in_flight == 1:
            compute()
        transfer(stage.traffic.busiest_gather)
        gathered = network
        if waiting:
            compute()
        waiting.append((stage, gathered))
    if waiting:
        compute()
    return timeline._replace(seconds=max((network, *free.values())))
