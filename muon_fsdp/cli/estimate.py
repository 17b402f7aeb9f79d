"""What a step takes on a rank: memory, counted; time, estimated from a plan and from rates that are assumed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from muon_fsdp.layout import Layout
from muon_fsdp.optimizer import MuonOptimizer
from muon_fsdp.report import PlanReport
from muon_fsdp.routing import RoutingRow
from muon_fsdp.rules import RULES
from muon_fsdp.rules.base import Rule, working_dtype
from muon_fsdp.views import MatrixView


@dataclass(frozen=True)
class Rates:
    """What a rank is assumed to do in a second."""

    flops: float
    network_bytes: float
    memory_bytes: float


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that holds most; with `adamw_state`, what AdamW would keep for all parameters."""

    weights: int
    gradients: int
    state: int
    scratch: int  # at most
    adamw_state: int
    mean_weights: float  # over all ranks

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.state + self.scratch

    @property
    def adamw_total(self) -> int:
        return self.weights + self.gradients + self.adamw_state


def memory(model: nn.Module, optimizer: MuonOptimizer, report: PlanReport, layout: Layout) -> Memory:
    """Count the first rank, which has the largest shard of every parameter."""
    weights = gradients = state = adamw_state = total = 0
    for parameter in model.parameters():
        bytes_held = _held(parameter, layout) * parameter.element_size()
        weights += bytes_held
        gradients += bytes_held if parameter.requires_grad else 0
        total += parameter.numel() * parameter.element_size() * layout.num_replicas
    for group, views in zip(optimizer.param_groups, optimizer._all_views(), strict=True):
        for parameter, view in zip(group["params"], views, strict=True):
            state += _state_bytes(RULES[group["rule"]], parameter, view, layout)
            adamw_state += _state_bytes(RULES["adamw"], parameter, None, layout)
    mean = total / len(layout.ranks)
    return Memory(weights, gradients, state, report.scratch_bytes, adamw_state, mean)


def _held(parameter: Tensor, layout: Layout) -> int:
    """Elements of the largest shard."""
    return layout.largest_tile(tuple(parameter.shape)) if parameter.ndim and parameter.numel() else parameter.numel()


def _state_bytes(rule: Rule, parameter: Tensor, view: MatrixView | None, layout: Layout) -> int:
    total = 0
    for spec in rule.state:
        whole = spec.like != "parameter"
        numel = spec.shape(parameter, view).numel() if whole else _held(parameter, layout)
        total += numel * spec.dtype(parameter).itemsize
    return total


@dataclass(frozen=True)
class Time:
    """Seconds of the busiest rank in a step."""

    orthogonalize: float
    elementwise: float  # momentum, AdamW, weights: bytes of device memory
    gather: float
    scatter: float
    num_stages: int

    @property
    def one_after_another(self) -> float:
        return self.orthogonalize + self.elementwise + self.gather + self.scatter

    @property
    def overlapped(self) -> float:
        """All but the gather of the first stage and the scatter of the last happens beside the computation."""
        exposed = (self.gather + self.scatter) / max(1, self.num_stages)
        hidden = self.gather + self.scatter - exposed
        return self.elementwise + exposed + max(self.orthogonalize, hidden)


def time(optimizer: MuonOptimizer, report: PlanReport, layout: Layout, rates: Rates) -> Time:
    moved = 0
    for group in optimizer.param_groups:
        moments = sum(spec.like == "parameter" for spec in RULES[group["rule"]].state)
        for parameter in group["params"]:
            # The gradient and the weight are read and the weight is written; moments are read and written. A matrix
            # also leaves its update in a buffer and takes it from there.
            staged = 4 if RULES[group["rule"]].orthogonalizes else 0
            working = working_dtype(parameter.dtype).itemsize
            each = 3 * parameter.element_size() + 2 * moments * working + staged
            moved += each * _held(parameter, layout)
    return Time(
        orthogonalize=report.max_flops / rates.flops,
        elementwise=moved / rates.memory_bytes,
        gather=report.traffic.busiest_gather / rates.network_bytes,
        scatter=report.traffic.busiest_scatter / rates.network_bytes,
        num_stages=report.num_stages,
    )


@dataclass(frozen=True)
class RoutedTo:
    """Parameters that take one rule for one reason."""

    rule: str
    reason: str
    parameters: int
    elements: int


def routing_summary(rows: Sequence[RoutingRow]) -> list[RoutedTo]:
    """Parameters by rule and reason, the most elements first."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in rows:
        found[(row.rule, row.reason)].append(math.prod(row.shape))
    summary = [RoutedTo(rule, reason, len(sizes), sum(sizes)) for (rule, reason), sizes in found.items()]
    return sorted(summary, key=lambda routed: -routed.elements)
