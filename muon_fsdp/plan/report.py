"""Report strategy, owners, bytes and balance of a plan for each shape; the ranks need not exist."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from muon_fsdp.plan.layout import Box, Layout
from muon_fsdp.plan.outline import ParameterSpec, StageOutline, Unit, is_relayed, make_outline
from muon_fsdp.plan.settings import Settings
from muon_fsdp.plan.stages import SCRATCH_STAGES, matrices_at_once, scratch_numel
from muon_fsdp.text import format_bytes, format_shape, plain_table


@dataclass(frozen=True)
class PlanRow:
    """Parameters of one shape and layout.

    Args:
        shape: the whole shape of each of these parameters.
        num_parameters: the number of these parameters.
        num_matrices: the number of logical matrices in all of these parameters.
        strategy: "owner", "replicate", or "local" if nothing is sent.
        num_owners: the number of ranks that compute some of these matrices.
        gather_bytes: bytes that all ranks together send to the ranks that compute, in a step.
        scatter_bytes: bytes of results that are sent back, in a step.
        flops: floating-point operations of the orthogonalizations; every matrix counts once.
    """

    shape: tuple[int, ...]
    num_parameters: int
    num_matrices: int
    strategy: str
    num_owners: int
    gather_bytes: int
    scatter_bytes: int
    flops: float


@dataclass(frozen=True)
class StageReport:
    """Memory and work of a stage. Each number of bytes is that of the rank where it is largest."""

    flops_by_rank: Mapping[int | None, float]  # by owner; the key None stands for units that every rank computes
    numel: int  # elements of all parameters
    shards: int  # bytes of the updates of a rank's shards
    units: int  # bytes of the units that a rank computes
    scratch: int  # bytes of scratch memory for batches that are computed together
    receivers: int  # ranks that a shard is sent to: its owner, or all other ranks of the replica
    copies: int  # how many replicas an owner sends its results to
    forwarded: int  # bytes of results that a rank forwards to other replicas
    travels: bool

    @property
    def gathering(self) -> int:
        """Return the bytes of shards and of the send and receive buffers of a gather."""
        return (1 + self.receivers) * self.shards + self.units if self.travels else 0

    @property
    def computing(self) -> int:
        """Return the bytes of matrices, results and scratch, or those of results and of the buffers of a scatter."""
        if not self.travels:
            return self.shards + self.units + self.scratch
        return max(2 * self.units + self.scratch, (2 + self.copies) * self.units + self.shards)

    @property
    def scattering(self) -> int:
        """Return the bytes of results, of the send and receive buffers of a scatter, and of the shards' updates."""
        return (1 + self.copies) * self.units + 2 * self.shards if self.travels else 0

    @property
    def forwarding(self) -> int:
        """Return the bytes of the shards' updates and of the send and receive buffers of a forward."""
        return 2 * self.shards + self.forwarded if self.forwarded else 0


@dataclass
class Traffic:
    """Bytes of a step by rank. Owners receive in a gather and send in a scatter; other ranks forward results."""

    gathered: dict[int, int] = field(default_factory=dict)
    scattered: dict[int, int] = field(default_factory=dict)
    # What the rank with the largest shards sends in the gather and receives in the scatter, with evenly spread owners.
    shards_sent: int = 0
    shards_received: int = 0

    @property
    def busiest_gather(self) -> int:
        return max(self.shards_sent, *self.gathered.values(), 0)

    @property
    def busiest_scatter(self) -> int:
        return max(self.shards_received, *self.scattered.values(), 0)


@dataclass(frozen=True)
class PlanReport:
    """The result of `optimizer.plan_report()`; `print` shows it as a table.

    Args:
        num_ranks: ranks that hold some matrix.
        num_stages: stages that a step is cut into.
        rows: one per shape and layout.
        flops_by_rank: work of every rank in a step.
        balance: the work of the busiest rank, divided by a lower bound for any assignment of owners; 1 is best.
        traffic: bytes that travel in a step, by rank.
        stages: memory and work of every stage.
        cuda_graph: whether this rank runs steps as a CUDA graph, and if not, why; empty for a report about other ranks.
        overlap: how many stages start in backward; empty with `overlap="step"`.
    """

    num_ranks: int
    num_stages: int
    rows: tuple[PlanRow, ...]
    flops_by_rank: dict[int, float]
    balance: float
    traffic: Traffic
    stages: tuple[StageReport, ...]
    cuda_graph: str = ""
    overlap: str = ""

    @property
    def num_matrices(self) -> int:
        """Return the number of logical matrices in the whole model."""
        return sum(row.num_matrices for row in self.rows)

    @property
    def gather_bytes(self) -> int:
        """Return the bytes sent to the ranks that compute, in the whole job, per step."""
        return sum(row.gather_bytes for row in self.rows)

    @property
    def scatter_bytes(self) -> int:
        """Return the bytes of results sent back, in the whole job, per step."""
        return sum(row.scatter_bytes for row in self.rows)

    @property
    def max_flops(self) -> float:
        """Return the FLOPs of the busiest rank."""
        return max(self.flops_by_rank.values(), default=0.0)

    @property
    def mean_flops(self) -> float:
        """Return the mean FLOPs of a rank."""
        return sum(self.flops_by_rank.values()) / max(1, self.num_ranks)

    @property
    def scratch_bytes(self) -> int:
        """Return an upper bound of the bytes in use on a rank besides weights, gradients and state.

        While a stage computes, the next is being gathered, the one before it scattered, and the one before that
        forwarded.
        """
        nothing = 3 * (StageReport({}, 0, 0, 0, 0, 1, 1, 0, False),)
        stages = (*nothing, *self.stages, *nothing)
        return max(
            first.forwarding + before.scattering + now.computing + after.gathering
            for first, before, now, after in zip(stages, stages[1:], stages[2:], stages[3:], strict=False)
        )

    def __str__(self) -> str:
        header = ("shape", "parameters", "matrices", "strategy", "owners", "gather", "scatter", "GFLOP")
        rows = [
            (
                format_shape(row.shape),
                str(row.num_parameters),
                str(row.num_matrices),
                row.strategy,
                str(row.num_owners),
                format_bytes(row.gather_bytes),
                format_bytes(row.scatter_bytes),
                f"{row.flops / 1e9:.4g}",
            )
            for row in self.rows
        ]
        totals = (
            f"{self.num_ranks} rank(s), {self.num_stages} stage(s); FLOPs of a rank: busiest {self.max_flops:.3g}, "
            f"mean {self.mean_flops:.3g}; busiest over lower bound {self.balance:.3f}"
        )
        graph = f"\nCUDA graph: {self.cuda_graph}" if self.cuda_graph else ""
        overlap = f"\nOverlap with backward: {self.overlap}" if self.overlap else ""
        return f"{plain_table(header, rows)}\n{totals}{graph}{overlap}"


def fsdp_layouts(parameters: Sequence[Tensor], world_size: int | None, mesh: Sequence[int] | None) -> list[Layout]:
    """Return the layout that `fully_shard` gives every parameter on a mesh (shards,) or (replicas, shards)."""
    shape = tuple(mesh) if mesh is not None else (world_size or 1,)
    if len(shape) > 2 or any(size < 1 for size in shape) or math.prod(shape) != (world_size or math.prod(shape)):
        raise ValueError(f"mesh {shape} is not (shards,) or (replicas, shards) of {world_size} ranks")
    ranks = tuple(range(math.prod(shape)))
    placements = (Shard(0),) if len(shape) == 1 else (Replicate(), Shard(0))
    return [Layout(ranks, shape, placements)] * len(parameters)


def make_report(specs: Sequence[ParameterSpec], settings: Settings) -> PlanReport:
    """Plan the parameters that are orthogonalized, and sum up the plan."""
    matrices = [spec for spec in specs if spec.view is not None and math.prod(spec.shape) > 0]
    outlines = make_outline(matrices, max_stage_bytes=settings.max_stage_bytes, strategy=settings.strategy)
    by_shape: dict[tuple[object, ...], list[tuple[ParameterSpec, list[Unit]]]] = defaultdict(list)
    layouts = {id(spec.layout): spec.layout for spec in matrices}
    loads: dict[int, float] = {rank: 0.0 for layout in layouts.values() for rank in layout.ranks}
    costs = []
    for outline in outlines:
        units = defaultdict(list)
        for unit in outline.units:
            units[unit.position].append(unit)
            costs.append(unit.flops)
            for rank in outline.ranks if unit.owner is None else (unit.owner,):
                loads[rank] += unit.flops
        for spec in outline.specs:
            by_shape[(spec.shape, id(spec.layout), spec.device, spec.dtype)].append((spec, units[spec.position]))
    traffic = Traffic(dict.fromkeys(loads, 0), dict.fromkeys(loads, 0))
    rows = tuple(_row(members, traffic) for members in by_shape.values())
    bound = balance_bound(costs, len(loads))
    return PlanReport(
        num_ranks=len(loads),
        num_stages=len(outlines),
        rows=rows,
        flops_by_rank=loads,
        balance=max(loads.values(), default=0.0) / bound if bound else 1.0,
        traffic=traffic,
        stages=tuple(_stage_report(outline, settings.max_stage_bytes) for outline in outlines),
    )


def _stage_report(outline: StageOutline, max_stage_bytes: int) -> StageReport:
    specs = {spec.position: spec for spec in outline.specs}
    units: dict[int | None, int] = defaultdict(int)
    flops: dict[int | None, float] = defaultdict(float)
    matrices: dict[tuple[int | None, int, int], int] = defaultdict(int)  # by owner and shape
    copies = 1
    for unit in outline.units:
        spec = specs[unit.position]
        units[unit.owner] += unit.box.numel * spec.bytes_per_element
        flops[unit.owner] += unit.flops
        if unit.owner is not None and not is_relayed(unit, spec):
            copies = max(copies, spec.layout.num_replicas)
        for count, rows, cols in unit.view.block_shapes:
            matrices[(unit.owner, rows, cols)] += count
    size, layout = outline.specs[0].bytes_per_element, outline.specs[0].layout
    forwarded = _forwarded((unit, specs[unit.position]) for unit in outline.units)
    return StageReport(
        flops_by_rank=flops,
        numel=sum(math.prod(spec.shape) for spec in outline.specs),
        shards=sum(spec.layout.largest_box(spec.shape) * spec.bytes_per_element for spec in outline.specs),
        units=max(units.values()),
        scratch=_scratch_bytes(matrices, size, max_stage_bytes),
        receivers=max(1, len(outline.ranks) // layout.num_replicas - 1) if None in units else 1,
        copies=copies,
        forwarded=max(forwarded.values(), default=0) * size,
        travels=len(outline.ranks) > 1,
    )


def _scratch_bytes(
    matrices: Mapping[tuple[int | None, int, int], int], bytes_per_element: int, max_stage_bytes: int
) -> int:
    """Return an upper bound of the scratch memory of a stage, given the number of matrices by owner and shape."""
    all_batches: dict[tuple[int | None, int], int] = defaultdict(int)  # by owner and shorter side
    one_batch: dict[tuple[int | None, int], int] = defaultdict(int)
    for (owner, rows, cols), count in matrices.items():
        key, each = (owner, min(rows, cols)), scratch_numel(rows, cols) * bytes_per_element
        all_batches[key] += count * each
        at_once = min(count, matrices_at_once(rows, cols, bytes_per_element, max_stage_bytes))
        one_batch[key] = max(one_batch[key], at_once * each)
    limit = SCRATCH_STAGES * max_stage_bytes
    return max(min(every, max(limit, one_batch[key])) for key, every in all_batches.items())


def balance_bound(costs: Sequence[float], num_ranks: int) -> float:
    """Return a lower bound of the busiest rank's load under any assignment of these costs."""
    ordered = sorted(costs, reverse=True)
    bound = max(sum(ordered) / max(1, num_ranks), ordered[0] if ordered else 0.0)
    for per_rank in (2, 3):  # some rank gets two of the first r + 1, and some three of the first 2r + 1
        last = (per_rank - 1) * num_ranks + 1
        if len(ordered) >= last:
            bound = max(bound, sum(ordered[last - per_rank : last]))
    return bound


def _row(members: Sequence[tuple[ParameterSpec, list[Unit]]], traffic: Traffic) -> PlanRow:
    """Sum up parameters of one shape and layout, and add their bytes to `traffic`."""
    spec = members[0][0]
    layout = spec.layout
    units = [unit for _, many in members for unit in many]
    gathered, scattered = 0, 0
    for unit in units:
        gathers, scatter = _traffic(unit, layout, spec.shape)
        gathered += sum(gathers)
        scattered += scatter
        for rank, gather in zip(layout.ranks if unit.owner is None else (unit.owner,), gathers, strict=True):
            traffic.gathered[rank] += gather * spec.wire_bytes
        if is_relayed(unit, spec):
            scatter -= (layout.num_replicas - 1) * unit.box.numel
        if unit.owner is not None:
            traffic.scattered[unit.owner] += scatter * spec.wire_bytes
    for rank, forwarded in _forwarded((unit, spec) for unit in units).items():
        traffic.scattered[rank] += forwarded * spec.wire_bytes
    owners = {unit.owner for unit in units}
    replicated = None in owners and len(layout.ranks) > 1
    shards = len(members) * layout.largest_box(spec.shape) * spec.wire_bytes
    num_ranks, others = len(layout.ranks), len(layout.ranks) // layout.num_replicas - 1
    if gathered and replicated:
        traffic.shards_sent += shards * others
    elif gathered:  # to the owners in its own replica, of which it is one itself
        traffic.shards_sent += shards * others // num_ranks
    if scattered:
        traffic.shards_received += shards * (num_ranks - 1) // num_ranks
    return PlanRow(
        spec.shape,
        len(members),
        sum(unit.num_matrices for unit in units),
        "local" if gathered + scattered == 0 and not replicated else "replicate" if replicated else "owner",
        len(spec.layout.ranks) if replicated else len(owners),
        gathered * spec.wire_bytes,
        scattered * spec.wire_bytes,
        sum(unit.flops for unit in units),
    )


def _forwarded(units: Iterable[tuple[Unit, ParameterSpec]]) -> dict[int, int]:
    """Return the elements that each rank forwards to other replicas."""
    # Thousands of units are the same box of a shape, computed in the same replica. Count those first.
    layouts: dict[int, Layout] = {}
    counts: dict[tuple[int, tuple[int, ...], Box, int], int] = defaultdict(int)
    for unit, spec in units:
        if unit.owner is not None and is_relayed(unit, spec):
            layout = layouts.setdefault(id(spec.layout), spec.layout)
            counts[(id(layout), spec.shape, unit.box, layout.replica_of[layout.index_of[unit.owner]])] += 1
    forwarded: dict[int, int] = defaultdict(int)
    for (key, shape, box, replica), count in counts.items():
        layout = layouts[key]
        for shard, numel in layout.shards_of(shape, box):
            forwarded[layout.ranks[layout.ranks_of_shard[shard][replica]]] += count * (layout.num_replicas - 1) * numel
    return forwarded


def _traffic(unit: Unit, layout: Layout, shape: tuple[int, ...]) -> tuple[list[int], int]:
    """Count the elements of a unit that travel.

    Returns:
        Those gathered by each rank that computes it, and those sent back in all.
    """
    size = unit.box.numel
    boxes = layout.boxes(shape)
    if unit.owner is None:
        return [size - box.intersect(unit.box).numel for box in boxes], 0
    held = boxes[layout.index_of[unit.owner]]
    own = held.numel if unit.box.shape == shape else held.intersect(unit.box).numel
    return [size - own], layout.num_replicas * size - own
