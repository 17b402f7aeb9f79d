"""Describe a parameter as the planner sees it, and cut it into units, which are computed in one place each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.declarations.views import MatrixView
from muon_fsdp.plan.layout import Box, Layout
from muon_fsdp.plan.speeds import DEVICE_MEMORY

NO_OPTIONS = PlannedOptions()


@dataclass(frozen=True)
class ParameterSpec:
    """The planner's view of one parameter; `position` counts through all groups of the optimizer."""

    position: int
    group: int
    rule: str
    shape: tuple[int, ...]
    layout: Layout
    bytes_per_element: int  # in the buffers of a stage, and in transfers
    device: torch.device  # parameters on different devices are never in one stage
    dtype: torch.dtype  # working precision; parameters of different precision are never in one stage either
    view: MatrixView | None = None  # None for an element-wise rule
    options: PlannedOptions = NO_OPTIONS  # what matrices of one batch must share
    block_flops: tuple[float, ...] = ()  # per block, the cost of one of its matrices
    is_observed: bool = False  # whether its rule asks for statistics of W or of the update
    sums_updates: bool = False  # whether its rule asks for statistics of the update
    weight_bytes: int = 0  # bytes per element of a weight whose rows are all-gathered after the step; 0 if they are not
    device_memory: int = DEVICE_MEMORY  # total bytes of the smallest device among its ranks

    @property
    def matrices(self) -> MatrixView:
        """Return the view. Call this only for parameters under a rule of matrices, which always have one."""
        assert self.view is not None
        return self.view

    def flops(self, view: MatrixView) -> float:
        """Return the FLOPs of all matrices of a view: that of the parameter, or of one matrix of a stack."""
        return sum(count * cost for (count, _, _), cost in zip(view.block_shapes, self.block_flops, strict=True))


@dataclass(frozen=True)
class Unit:
    """A piece of work that is computed in one place: a whole parameter, or one matrix of a stack."""

    position: int
    box: Box
    view: MatrixView
    options: PlannedOptions
    flops: float
    owner: int | None = None  # a global rank; None: every rank of the layout computes it

    def first_matrix(self, whole: MatrixView, block: int) -> int:
        """Return the index of the unit's first matrix in a block of `whole`, the view of the whole parameter."""
        is_part = self.view.shape != whole.shape  # some matrices of a stack
        return self.box.offset[0] * self.view.block_shapes[block][0] if is_part else 0


def units_of(spec: ParameterSpec) -> tuple[Unit, ...]:
    """Cut a stack into one unit per matrix if ranks could share the work; every other parameter is one unit."""
    view, shape = spec.view, spec.shape
    assert view is not None
    if not (view.kind == "stacked" and len(shape) == 3 and len(spec.layout.ranks) > 1):
        return (Unit(spec.position, Box((0,) * len(shape), shape), view, spec.options, spec.flops(view)),)
    one = replace(view, shape=(1, *shape[1:]))
    flops = spec.flops(one)
    return tuple(
        Unit(spec.position, Box((number, 0, 0), one.shape), one, spec.options, flops) for number in range(shape[0])
    )
