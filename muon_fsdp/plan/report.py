"""Report strategy, owners, bytes and balance of a plan for each shape; the ranks need not exist."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from muon_fsdp.declarations.settings import Settings
from muon_fsdp.plan.costs import (
    NUM_SLOTS,
    STREAMED_BYTES,
    Load,
    StageCost,
    StageLimits,
    Traffic,
    load_of,
    peak_bytes,
    stage_cost,
)
from muon_fsdp.plan.layout import Layout
from muon_fsdp.plan.outline import StageOutline, make_outline
from muon_fsdp.plan.slices import UpdateSlices, make_buckets
from muon_fsdp.plan.stage_limits import smallest_bound
from muon_fsdp.plan.units import ParameterSpec, Unit
from muon_fsdp.text import format_bytes, format_shape, plain_table


@dataclass(frozen=True)
class PlanRow:
    """Parameters of one shape and layout that are read as the same matrices.

    Args:
        shape: the whole shape of each of these parameters.
        matrices: the logical matrices of each of them, such as "32 of 128x4096".
        num_parameters: the number of these parameters.
        num_matrices: the number of logical matrices in all of these parameters.
        strategy: "owner", "replicate", or "local" if nothing is sent.
        num_owners: the number of ranks that compute some of these matrices.
        gather_bytes: bytes that all ranks together send to the ranks that compute, in a step.
        scatter_bytes: bytes of results that are sent back, in a step.
        flops: floating-point operations of the orthogonalizations; every matrix counts once.
    """

    shape: tuple[int, ...]
    matrices: str
    num_parameters: int
    num_matrices: int
    strategy: str
    num_owners: int
    gather_bytes: int
    scatter_bytes: int
    flops: float


@dataclass(frozen=True)
class Repeated:
    """Matrices on a submesh of a mesh on which other parameters lie; every such submesh computes them.

    Args:
        num_matrices: the number of these matrices.
        of_matrices: the number of all matrices.
        saved: the fraction of the job's FLOPs that `replicate_mesh` would save.
    """

    num_matrices: int
    of_matrices: int
    saved: float

    def __str__(self) -> str:
        return (
            f"{self.num_matrices} of {self.of_matrices} matrices lie on a submesh of a larger mesh, and every submesh "
            f"computes them. If they are equal on all submeshes, replicate_mesh= saves {self.saved:.0%} of the FLOPs"
        )


@dataclass(frozen=True)
class PlanReport:
    """The result of `optimizer.plan_report()`; `print` shows it as a table.

    Args:
        num_ranks: ranks that hold some matrix.
        num_stages: stages that a step is cut into.
        rows: one per shape, layout and view.
        flops_by_rank: work of every rank in a step.
        balance: the work of the busiest rank, divided by a lower bound for any assignment of owners; 1 is best.
        traffic: bytes that travel in a step, by rank.
        stages: memory and work of every stage.
        neediest: the shape of the parameter that needs the most scratch in a stage of its own; empty if there is none.
        least_scratch_bytes: the bytes of that scratch, which no choice of stages goes below.
        weight_buffers: bytes of the buffers in which weights are all-gathered with `shard_state=True`.
        cuda_graph: whether this rank runs steps as a CUDA graph, and if not, why; empty for a report about other ranks.
        settled_bytes: bytes of per-matrix state that a rank adds up with the others after a step.
        large_state: rules that keep per-matrix state as large as matrices, whole on every rank.
        repeated: the matrices that several submeshes of a mesh compute each, and what `replicate_mesh` would save.
        overlap: how many stages start in backward; empty with `overlap="step"`.
        state_bytes: bytes of state as it is stored, on a rank with the largest shard of every parameter.
        state_dict_bytes: those of the state that `state_dict()` returns, in working precision.
        host_bytes: those of the state that is in the memory of the host; 0 without `offload_state`.
        slot_bytes: bytes of the device for the part of it that a step works on at a time.
    """

    num_ranks: int
    num_stages: int
    rows: tuple[PlanRow, ...]
    flops_by_rank: dict[int, float]
    balance: float
    traffic: Traffic
    stages: tuple[StageCost, ...]
    neediest: tuple[int, ...] = ()
    least_scratch_bytes: int = 0
    weight_buffers: int = 0
    cuda_graph: str = ""
    settled_bytes: int = 0
    large_state: tuple[str, ...] = ()
    repeated: Repeated | None = None
    overlap: str = ""
    state_bytes: int = 0
    state_dict_bytes: int = 0
    host_bytes: int = 0
    slot_bytes: int = 0

    @property
    def device_state_bytes(self) -> int:
        """Return the bytes of state on a device: all but what is on the host, and the slots for that."""
        return self.state_bytes - self.host_bytes + self.slot_bytes

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
        """Return an upper bound of the bytes in use on a rank besides weights, gradients and state."""
        return max(peak_bytes(self.stages), self.weight_buffers)  # weights are all-gathered after the last stage

    @property
    def large_state_warning(self) -> str:
        """Return what large per-matrix state costs; empty if there is none."""
        if not self.large_state:
            return ""
        return (
            f"rule {', '.join(map(repr, self.large_state))} keeps state as large as matrices, whole on every rank, and "
            f"adds up {format_bytes(self.settled_bytes)} of it over ranks after every step: this is for research sizes"
        )

    def __str__(self) -> str:
        header = ("shape", "parameters", "each is", "matrices", "strategy", "owners", "gather", "scatter", "GFLOP")
        rows = [
            (
                format_shape(row.shape),
                str(row.num_parameters),
                row.matrices,
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
        weights = self.traffic.weights
        gathered = f"\nWeights that a rank receives after a step: {format_bytes(weights)}" if weights else ""
        graph = f"\nCUDA graph: {self.cuda_graph}" if self.cuda_graph else ""
        repeated = f"\n{self.repeated}" if self.repeated is not None else ""
        settled = f"\n{self.large_state_warning}" if self.large_state else ""
        overlap = f"\nOverlap with backward: {self.overlap}" if self.overlap else ""
        host = f" and {format_bytes(self.host_bytes)} on the host" if self.host_bytes else ""
        memory = (
            f"\nMemory of a rank beside weights and gradients: state {format_bytes(self.device_state_bytes)}{host}, "
            f"scratch at most {format_bytes(self.scratch_bytes)}"
        )
        return f"{plain_table(header, rows)}\n{totals}{memory}{gathered}{settled}{repeated}{graph}{overlap}"


def make_report(specs: Sequence[ParameterSpec], settings: Settings) -> PlanReport:
    """Plan the parameters that are orthogonalized, and sum up the plan."""
    matrices = [spec for spec in specs if spec.view is not None and math.prod(spec.shape) > 0]
    outlines = make_outline(matrices, max_stage_bytes=settings.max_stage_bytes, strategy=settings.strategy)
    by_shape: dict[tuple[object, ...], list[tuple[ParameterSpec, Load]]] = defaultdict(list)
    layouts = {id(spec.layout): spec.layout for spec in matrices}
    flops: dict[int, float] = {rank: 0.0 for layout in layouts.values() for rank in layout.ranks}
    traffic = Traffic(dict.fromkeys(flops, 0), dict.fromkeys(flops, 0))
    stages: list[StageCost] = []
    for outline in outlines:
        loads, cost = _exact_cost(outline)
        stages.append(cost)
        for spec, load in zip(outline.specs, loads, strict=True):
            by_shape[(spec.shape, spec.matrices.matrices, id(spec.layout), spec.device, spec.dtype)].append(
                (spec, load)
            )
        traffic.shards_sent += cost.traffic.shards_sent
        traffic.shards_received += cost.traffic.shards_received
        traffic.forwarded += cost.traffic.forwarded
        for owner, work in cost.flops_by_rank.items():
            for rank in outline.ranks if owner is None else (owner,):
                flops[rank] += work
                traffic.gathered[rank] += cost.traffic.gathered[owner]
                traffic.scattered[rank] += cost.traffic.scattered[owner]
    traffic.weights, weight_buffers = _gathered_weights(specs, settings.bucket_bytes)
    units = [unit.flops for outline in outlines for unit in outline.units]
    bound = balance_bound(units, len(flops))
    least_scratch_bytes, neediest = _neediest(outlines)
    return PlanReport(
        num_ranks=len(flops),
        num_stages=len(outlines),
        rows=tuple(_row(members) for members in by_shape.values()),
        flops_by_rank=flops,
        balance=max(flops.values(), default=0.0) / bound if bound else 1.0,
        traffic=traffic,
        stages=tuple(stages),
        neediest=neediest,
        least_scratch_bytes=least_scratch_bytes,
        weight_buffers=weight_buffers,
        settled_bytes=sum(spec.settled_bytes for spec in matrices if len(spec.layout.ranks) > 1),
        large_state=tuple(sorted({spec.rule for spec in matrices if spec.has_large_state})),
        repeated=_repeated(specs, matrices),
        host_bytes=sum(spec.streamed_bytes for spec in specs),
        slot_bytes=_slot_bytes(specs, outlines),
    )


def _slot_bytes(specs: Sequence[ParameterSpec], outlines: Sequence[StageOutline]) -> int:
    """Return an upper bound of the bytes of all slots: each holds the state of the largest of its stages."""
    stages = [sum(spec.streamed_bytes for spec in outline.specs) for outline in outlines]
    elementwise = sum(spec.streamed_bytes for spec in specs if spec.view is None)
    whole, rest = divmod(elementwise, STREAMED_BYTES)
    stages += [STREAMED_BYTES] * min(whole, NUM_SLOTS) + [rest]
    return sum(sorted(stages)[-NUM_SLOTS:])


def _exact_cost(outline: StageOutline) -> tuple[Sequence[Load], StageCost]:
    """Return the cost of the parameters of a stage, and of the stage.

    The planner assumes how peers divide results, because it has not cut stages yet. Here the slices are known.
    """
    cost = stage_cost(outline.loads, outline.limits)
    if cost.peers == 1:
        return outline.loads, cost
    slices, kept = UpdateSlices(outline), defaultdict[int, list[int]](list)
    units = defaultdict[int, list[Unit]](list)
    of_position = {spec.position: spec for spec in outline.specs}
    for unit in outline.units:
        units[unit.position].append(unit)
        kept[unit.position].append(slices.kept(unit, of_position[unit.position]))
    loads = [load_of(spec, units[spec.position], kept[spec.position]) for spec in outline.specs]
    cost = stage_cost(loads, outline.limits)
    cost.traffic.forwarded = (slices.num_peers - 1) * slices.slice_numel(0) * loads[0].bytes_per_element
    return loads, cost


def _neediest(outlines: Iterable[StageOutline]) -> tuple[int, tuple[int, ...]]:
    """Find the parameter that needs the most scratch in a stage of its own.

    Returns:
        The bytes of its scratch, and its shape.
    """
    needs: dict[tuple[int, ...], int] = {}
    for outline in outlines:
        for spec, load in zip(outline.specs, outline.loads, strict=True):
            if spec.shape not in needs:  # thousands of parameters may share one
                alone = StageLimits(smallest_bound([load]), in_flight=1)
                needs[spec.shape] = peak_bytes([stage_cost([load], alone)])
    return max(((size, shape) for shape, size in needs.items()), default=(0, ()))


def _repeated(specs: Sequence[ParameterSpec], matrices: Sequence[ParameterSpec]) -> Repeated | None:
    """Return which matrices several submeshes of a mesh compute; None if there are none.

    Args:
        specs: all parameters. Their meshes show which ranks the job has; those of other pipeline stages do not count.
        matrices: those that are orthogonalized.
    """
    layouts = {id(spec.layout): spec.layout for spec in specs}
    times = {key: _num_submeshes(layout, list(layouts.values())) for key, layout in layouts.items()}
    num_repeated = num_matrices = 0
    once = now = 0.0
    for spec in matrices:
        submeshes, count = times[id(spec.layout)], spec.matrices.num_matrices
        flops = spec.flops(spec.matrices)
        num_matrices += count
        num_repeated += count if submeshes > 1 else 0
        once, now = once + flops, now + submeshes * flops
    return Repeated(num_repeated, num_matrices, 1 - once / now if now else 0.0) if num_repeated else None


def _num_submeshes(layout: Layout, others: Sequence[Layout]) -> int:
    """Return how many submeshes the largest mesh has that this layout is a submesh of; 1 if there is no larger one."""
    larger = {other.ranks for other in others if len(other.ranks) > len(layout.ranks)}
    return max((len(r) // len(layout.ranks) for r in larger if layout.repeated_over(r) is not None), default=1)


def _gathered_weights(specs: Sequence[ParameterSpec], bucket_bytes: int) -> tuple[int, int]:
    """Count the bytes of weights that ranks all-gather after a step.

    Returns:
        Those that a rank receives, and those of the buffers in use at a time.
    """
    alike: dict[tuple[int, torch.device, int], list[ParameterSpec]] = defaultdict(list)
    for spec in specs:
        if spec.weight_bytes and math.prod(spec.shape) > 0:
            alike[(id(spec.layout), spec.device, spec.weight_bytes)].append(spec)
    received, buffers = 0, [0, 0]
    for (*_, size), members in alike.items():
        num_ranks = len(members[0].layout.ranks)
        shapes = [(spec.position, spec.shape) for spec in members]
        for bucket in make_buckets(shapes, num_ranks, bucket_bytes // size):
            received += (num_ranks - 1) * bucket.slice_numel * size
            buffers.append(num_ranks * bucket.slice_numel * size)
    return received, max(map(sum, pairwise(buffers)))


def balance_bound(costs: Sequence[float], num_ranks: int) -> float:
    """Return a lower bound of the busiest rank's load under any assignment of these costs."""
    ordered = sorted(costs, reverse=True)
    bound = max(sum(ordered) / max(1, num_ranks), ordered[0] if ordered else 0.0)
    for per_rank in (2, 3):  # some rank gets two of the first r + 1, and some three of the first 2r + 1
        last = (per_rank - 1) * num_ranks + 1
        if len(ordered) >= last:
            bound = max(bound, sum(ordered[last - per_rank : last]))
    return bound


def _row(members: Sequence[tuple[ParameterSpec, Load]]) -> PlanRow:
    """Sum up parameters of one shape and layout."""
    spec, loads = members[0][0], [load for _, load in members]
    units = [unit for load in loads for unit in load.units]
    gathered, scattered = sum(load.gathered for load in loads), sum(load.scattered for load in loads)
    is_replicated = any(load.is_replicated for load in loads)
    return PlanRow(
        spec.shape,
        spec.matrices.matrices,
        len(members),
        sum(spec.matrices.num_matrices for spec, _ in members),
        "replicate" if is_replicated else "owner" if gathered + scattered else "local",
        len(spec.layout.ranks) if is_replicated else len({unit.owner for unit in units}),
        gathered,
        scattered,
        sum(unit.flops for unit in units),
    )
