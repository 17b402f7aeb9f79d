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
    settled_bytes: int = 0  # of per-matrix state that its rule may change, which ranks add up after a step
    has_large_state: bool = False  # whether some of it is as large as a matrix
    weight_bytes: int = 0  # bytes per element of a weight whose rows are all-gathered after the step; 0 if they are not
    streamed_bytes: int = 0  # of its state on the host, for the largest shard, which a step copies to the device
    device_memory: int = DEVICE_MEMORY  # total bytes of the smallest device among its ranks
    block_scratch: tuple[int, ...] = ()  # per block, the bytes of scratch for one of its matrices; () for the default
    update_dtype: torch.dtype = torch.float32  # matrices whose updates differ in precision are never in one stage

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
    """A piece of work that is computed in one place: a parameter, one matrix of a stack, or some parts of a weight."""

    position: int
    box: Box
    view: MatrixView
    options: PlannedOptions
    flops: float
    owner: int | None = None  # a global rank; None: every rank of the layout computes it
    # If it is a part of a parameter: the block of its first matrix in the view of the whole parameter, and the number
    # of this matrix in that block. Its matrices in the blocks that follow have the same numbers there.
    first_block: int = 0
    first_in_block: int = 0

    def block_of(self, block: int) -> tuple[int, int]:
        """Return which block of the whole parameter a block of the unit belongs to, and its first matrix there."""
        return self.first_block + block, self.first_in_block


def units_of(spec: ParameterSpec) -> tuple[Unit, ...]:
    """Cut a stack into one unit per matrix if ranks could share the work, and a fused weight by the ranks of its parts.

    Every other parameter is one unit.
    """
    view, shape = spec.view, spec.shape
    assert view is not None
    if len(spec.layout.ranks) > 1 and view.kind in ("matrix", "flatten") and view.num_matrices > 1:
        parts = _parts_by_holders(spec, view)
        if len(parts) > 1:
            return parts
    if not (view.kind == "stacked" and len(shape) == 3 and len(spec.layout.ranks) > 1):
        return (Unit(spec.position, Box((0,) * len(shape), shape), view, spec.options, spec.flops(view)),)
    one = replace(view, shape=(1, *shape[1:]))
    flops, count = spec.flops(one), one.block_shapes[0][0]  # all blocks of a view have as many matrices
    return tuple(
        Unit(spec.position, Box((number, 0, 0), one.shape), one, spec.options, flops, first_in_block=number * count)
        for number in range(shape[0])
    )


def _parts_by_holders(spec: ParameterSpec, view: MatrixView) -> tuple[Unit, ...]:
    """Divide a weight that is cut by rows so that matrices which lie whole on some rank need not travel.

    Consecutive matrices that lie whole on the same ranks are one unit, and so are those that lie whole on none.
    """
    axis = len(spec.shape) - 1 if view.transposed else 0
    heads = view.stacked_heads
    heights = view.row_heights if heads == 1 else (view.row_heights[0] // heads,) * heads
    runs: list[tuple[tuple[int, ...], int, int, int]] = []  # holders, first matrix, first row, rows
    start = 0
    for number, height in enumerate(heights):
        holders = spec.layout.holders(spec.shape, _range_of(spec.shape, axis, start, height))
        if runs and runs[-1][0] == holders:
            runs[-1] = (*runs[-1][:3], runs[-1][3] + height)
        else:
            runs.append((holders, number, start, height))
        start += height
    ends = [number for _, number, _, _ in runs[1:]] + [len(heights)]
    units = []
    for (_, first, row, rows), end in zip(runs, ends, strict=True):
        box = _range_of(spec.shape, axis, row, rows)
        if heads == 1:
            part = replace(view, shape=box.shape, row_heights=heights[first:end])
            flops = sum(spec.block_flops[first:end])
            units.append(Unit(spec.position, box, part, spec.options, flops, first_block=first))
        else:
            part = replace(view, shape=box.shape, row_heights=(rows,), stacked_heads=end - first)
            flops = (end - first) * spec.block_flops[0]
            units.append(Unit(spec.position, box, part, spec.options, flops, first_in_block=first))
    return tuple(units)


def _range_of(shape: tuple[int, ...], axis: int, start: int, length: int) -> Box:
    """Return the box that is a range of one dimension and everything of the others."""
    offset = tuple(start if each == axis else 0 for each in range(len(shape)))
    return Box(offset, tuple(length if each == axis else size for each, size in enumerate(shape)))
