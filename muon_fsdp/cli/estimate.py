"""Count the memory of a rank and estimate the time of a step, from a plan and from assumed speeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from muon_fsdp.declarations.state import working_dtype
from muon_fsdp.optimizers.muon import MuonOptimizer
from muon_fsdp.parameters.records import held_elements, state_bytes
from muon_fsdp.parameters.routing_report import RoutingRow
from muon_fsdp.plan.costs import run_timeline
from muon_fsdp.plan.layout import Layout
from muon_fsdp.plan.report import PlanReport
from muon_fsdp.plan.speeds import Speeds
from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that holds the most, compared with AdamW for all parameters."""

    weights: int
    gradients: int
    state: int
    scratch: int  # an upper bound
    least_scratch: int  # that of the parameter that needs the most, in a stage of its own
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
        bytes_held = held_elements(parameter, layout) * parameter.element_size()
        weights += bytes_held
        gradients += bytes_held if parameter.requires_grad else 0
        total += parameter.numel() * parameter.element_size() * layout.num_replicas
    for record in optimizer._records():
        state += state_bytes(record.rule, record.tensor, record.view, of_state)
        adamw_state += state_bytes(RULES[DEFAULT_OTHER_RULE], record.tensor, None, layout)
    mean = total / len(layout.ranks)
    return Memory(weights, gradients, state, report.scratch_bytes, report.least_scratch_bytes, adamw_state, mean)


@dataclass(frozen=True)
class Time:
    """Seconds that the busiest rank spends in each part of a step, and in the whole step.

    The step is the sum of its parts, less what overlaps.
    """

    orthogonalize: float
    elementwise: float  # momentum, AdamW and weights, limited by device memory
    gather: float
    scatter: float
    weights: float  # all-gather of the weights that other ranks have updated
    waiting: float  # for other ranks that compute, send or receive more, and for transfers to start
    overlapped: float  # the time of transfers in which the rank computes
    step: float
    num_stages: int


def time(optimizer: MuonOptimizer, report: PlanReport, of_state: Layout, speeds: Speeds) -> Time:
    """Estimate the time of a step on the busiest rank.

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
            moved += each * held_elements(parameter, of_state)
            if report.traffic.weights:  # rows of all ranks are copied from a buffer into the weight
                moved += 2 * parameter.element_size() * parameter.numel()
    elementwise = moved / speeds.memory_bytes
    gather = speeds.send(report.traffic.busiest_gather)
    scatter = speeds.send(report.traffic.busiest_scatter)
    weights = speeds.send(report.traffic.weights)
    orthogonalize = speeds.compute(report.max_flops)
    timeline = run_timeline(report.stages, speeds)
    busiest = max(report.flops_by_rank, key=report.flops_by_rank.__getitem__, default=0)
    overlapped = timeline.overlap(report.stages, speeds, busiest)
    return Time(
        orthogonalize=orthogonalize,
        elementwise=elementwise,
        gather=gather,
        scatter=scatter,
        weights=weights,
        waiting=timeline.seconds + overlapped - orthogonalize - gather - scatter,
        overlapped=overlapped,
        step=elementwise + timeline.seconds + weights,
        num_stages=report.num_stages,
    )


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
