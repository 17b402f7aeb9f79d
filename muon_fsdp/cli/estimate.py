"""Count the memory of a rank and estimate the time of a step, from a plan and from assumed speeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from muon_fsdp.declarations.state import working_dtype
from muon_fsdp.declarations.views import MatrixView
from muon_fsdp.optimizers.muon import MuonOptimizer
from muon_fsdp.parameters.routing import RoutingRow
from muon_fsdp.plan.layout import Layout
from muon_fsdp.plan.report import PlanReport, StageReport
from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES, Rule


@dataclass(frozen=True)
class Speeds:
    """Assumed speeds of one rank, per second: operations, bytes sent and received, and bytes of device memory."""

    flops: float
    network_bytes: float
    memory_bytes: float


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that holds the most, compared with AdamW for all parameters."""

    weights: int
    gradients: int
    state: int
    scratch: int  # an upper bound
    adamw_state: int
    mean_weights: float  # mean over all ranks

    @property
    def total(self) -> int:
        """Return the sum for the planned optimizer."""
        return self.weights + self.gradients + self.state + self.scratch

    @property
    def adamw_total(self) -> int:
        """Return the sum if AdamW updated every parameter."""
        return self.weights + self.gradients + self.adamw_state


def memory(model: nn.Module, optimizer: MuonOptimizer, report: PlanReport, layout: Layout, of_state: Layout) -> Memory:
    """Count the memory of the first rank, which has the largest shard of every parameter.

    Args:
        model: on the meta device.
        optimizer: has the rule of every parameter.
        report: its plan.
        layout: the layout of all parameters.
        of_state: the layout of their state.
    """
    weights = gradients = state = adamw_state = total = 0
    for parameter in model.parameters():
        bytes_held = _held(parameter, layout) * parameter.element_size()
        weights += bytes_held
        gradients += bytes_held if parameter.requires_grad else 0
        total += parameter.numel() * parameter.element_size() * layout.num_replicas
    for record in optimizer._records():
        state += _state_bytes(record.rule, record.tensor, record.view, of_state)
        adamw_state += _state_bytes(RULES[DEFAULT_OTHER_RULE], record.tensor, None, layout)
    mean = total / len(layout.ranks)
    return Memory(weights, gradients, state, report.scratch_bytes, adamw_state, mean)


def _held(parameter: Tensor, layout: Layout) -> int:
    """Return the number of elements in the largest shard of a parameter."""
    return layout.largest_box(tuple(parameter.shape)) if parameter.ndim and parameter.numel() else parameter.numel()


def _state_bytes(rule: Rule, parameter: Tensor, view: MatrixView | None, layout: Layout) -> int:
    """Return the bytes of state that a rule keeps for a parameter on the rank with the largest shard."""
    total = 0
    for spec in rule.all_state:
        whole = not spec.is_sharded
        numel = spec.shape(parameter, view).numel() if whole else _held(parameter, layout)
        total += numel * spec.dtype(parameter).itemsize
    return total


@dataclass(frozen=True)
class Time:
    """Seconds that the busiest rank spends in each part of a step, and in the whole step."""

    orthogonalize: float
    elementwise: float  # momentum, AdamW and weights, limited by device memory
    gather: float
    scatter: float
    weights: float  # all-gather of the weights that other ranks have updated
    step: float
    num_stages: int


def time(optimizer: MuonOptimizer, report: PlanReport, of_state: Layout, speeds: Speeds) -> Time:
    """Estimate the time of a step on the busiest rank; latencies are not counted.

    `of_state` is the layout of state and of what a rank updates.
    """
    moved = 0
    for group in optimizer.param_groups:
        moments = sum(spec.is_sharded for spec in RULES[group["rule"]].all_state)
        for parameter in group["params"]:
            # A step reads the gradient and the weight and writes the weight; it reads and writes the moments. The
            # update of a matrix is also written to a buffer and read from it.
            staged = 4 if RULES[group["rule"]].needs_matrices else 0
            working = working_dtype(parameter.dtype).itemsize
            each = 3 * parameter.element_size() + 2 * moments * working + staged
            moved += each * _held(parameter, of_state)
            if report.traffic.weights:  # rows of all ranks are copied from a buffer into the weight
                moved += 2 * parameter.element_size() * parameter.numel()
    elementwise = moved / speeds.memory_bytes
    gather = report.traffic.busiest_gather / speeds.network_bytes
    scatter = report.traffic.busiest_scatter / speeds.network_bytes
    weights = report.traffic.weights / speeds.network_bytes
    return Time(
        orthogonalize=report.max_flops / speeds.flops,
        elementwise=elementwise,
        gather=gather,
        scatter=scatter,
        weights=weights,
        step=elementwise + _pipeline(report.stages, gather, scatter, speeds.flops) + weights,
        num_stages=report.num_stages,
    )


def _pipeline(stages: Sequence[StageReport], gather: float, scatter: float, flops: float) -> float:
    """Return the time at which the last stage has been scattered, if ranks overlap stages as a real step does.

    All transfers use one network in a fixed order: a stage is gathered before the previous one is scattered. A stage is
    computed once it has been gathered, and scattered once all of its owners have computed it.
    """
    total = sum(stage.numel for stage in stages)
    network = 0.0  # the time at which the network becomes free
    free: dict[int | None, float] = defaultdict(float)  # the time at which each rank becomes free
    gathered: list[float] = []

    def compute(number: int) -> None:
        nonlocal network
        stage = stages[number]
        for rank, work in stage.flops_by_rank.items():
            free[rank] = max(free[rank], gathered[number]) + work / flops
        computed = max(free[rank] for rank in stage.flops_by_rank)
        network = max(network, computed) + scatter * stage.numel / total

    for number, stage in enumerate(stages):
        network += gather * stage.numel / total
        gathered.append(network)
        if number > 0:
            compute(number - 1)
    if stages:
        compute(len(stages) - 1)
    return network


@dataclass(frozen=True)
class RoutedTo:
    """The numbers of parameters and elements that have one rule for one reason."""

    rule: str
    reason: str
    parameters: int
    elements: int


def routing_summary(rows: Sequence[RoutingRow]) -> list[RoutedTo]:
    """Group parameters by rule and reason, the group with the most elements first."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in rows:
        found[(row.rule, row.reason)].append(math.prod(row.shape))
    summary = [RoutedTo(rule, reason, len(sizes), sum(sizes)) for (rule, reason), sizes in found.items()]
    return sorted(summary, key=lambda routed: -routed.elements)
