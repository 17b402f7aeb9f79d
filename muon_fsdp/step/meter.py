"""Measure how far a step moves and turns every matrix: norms of W, of W after the step and of their difference.

Ranks add up the squares over their own shards, so no weight is assembled, and whatever a rule or a kernel does counts:
weight decay, factors, masks, and rounding to the precision of the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count
from math import isfinite
from statistics import median

import torch
from torch import Tensor

from muon_fsdp.comm.process_groups import Ranks, my_rank
from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.comm.transfers import add_up
from muon_fsdp.declarations.state import working_dtype
from muon_fsdp.declarations.views import matrix_view
from muon_fsdp.plan.layout import LayoutError
from muon_fsdp.plan.matrix_sets import Block, MatrixSet, make_sets
from muon_fsdp.plan.stages import Stage
from muon_fsdp.plan.units import ParameterSpec

MOVED, TURNED = "relative_update", "update_angle"  # the metrics, each followed by "/" and a rule or a matrix
VANISHED = "vanished_updates"


class Meter:
    """The matrices of an optimizer, also those of element-wise rules, and what the last measured step did to them.

    Args:
        specs: one per parameter.
        names: their names, by position.
        rounded: the positions of matrices in half precision that are rounded to the nearest, so that small updates are
            lost.
    """

    def __init__(self, specs: Sequence[ParameterSpec], names: Sequence[str], rounded: Collection[int] = ()) -> None:
        self._rounded = rounded
        observed = [matrix_set for spec in specs if (matrix_set := _observed(spec)) is not None]
        self._sets = make_sets(observed, my_rank())
        of_matrices = {spec.position: _names_of_matrices(spec, names[spec.position]) for spec in observed}
        # For every set, the rule and the name of every matrix, in the order of its sums.
        self._matrices = [
            [
                (class_.rule, name)
                for class_ in matrix_set.classes
                for member in class_.members
                for name in of_matrices[member.position][member.block]
            ]
            for matrix_set in self._sets
        ]
        self._last: list[Tensor] = []
        self._unchanged: list[Tensor] = []
        self._num_elements = 0

    @property
    def groups(self) -> list[tuple[Ranks, torch.device]]:
        """Return the ranks and devices over which it sums."""
        found = [
            (tuple(sorted(matrix_set.ranks)), matrix_set.classes[0].device)
            for matrix_set in self._sets
            if len(matrix_set.ranks) > 1
        ]
        return sorted(found, key=lambda group: (group[0], group[1].type))

    def start(self, shards: Sequence[Tensor], updated: Collection[int]) -> MeasuredStep:
        """Return what measures one step, given the shards of all parameters and the positions that are updated."""
        return MeasuredStep(self._sets, shards, updated, self._rounded)

    def keep(self, measured: MeasuredStep) -> None:
        """Keep the sums of a step that has ended."""
        self._last, self._unchanged, self._num_elements = measured.sums, measured.unchanged, measured.num_elements

    def metrics(self, *, per_matrix: bool) -> dict[str, float]:
        """Return the median over the matrices of every rule; and the numbers of every matrix, if they are wanted.

        With matrices in half precision that are rounded to the nearest also VANISHED, of this rank's shards.
        """
        by_rule: dict[str, list[float]] = defaultdict(list)
        by_matrix: dict[str, float] = {}
        for matrices, sums in zip(self._matrices, self._last, strict=False):
            for (rule, name), moved, turned in zip(matrices, *_moved_and_turned(sums), strict=True):
                if not isfinite(moved):  # not updated, or zero before the step
                    continue
                for metric, number in ((MOVED, moved), (TURNED, turned)):
                    by_rule[f"{metric}/{rule}"].append(number)
                    by_matrix[f"{metric}/{name}"] = number
        medians = {name: median(by_rule[name]) for name in sorted(by_rule)}
        if self._num_elements:
            medians[VANISHED] = sum(int(each) for each in self._unchanged) / self._num_elements
        return medians | (by_matrix if per_matrix else {})


class MeasuredStep:
    """Sums over the matrices of one step.

    Args:
        sets: all matrices, by the ranks that hold them.
        shards: the local part of every parameter.
        updated: the positions of the parameters that are updated.
        rounded: those whose elements are counted that do not change.
    """

    def __init__(
        self, sets: Sequence[MatrixSet], shards: Sequence[Tensor], updated: Collection[int], rounded: Collection[int]
    ) -> None:
        self._sets, self._shards, self._rounded = sets, shards, rounded
        self.unchanged: list[Tensor] = []  # one number for each of these shards
        self.num_elements = 0  # of these shards
        # For every set, the sums over the squares of W, of W after the step, and of the difference.
        self.sums = [
            torch.zeros(
                3, sum(k.count for k in matrix_set.classes), dtype=torch.float64, device=matrix_set.classes[0].device
            )
            for matrix_set in sets
        ]
        self._before: dict[int, Tensor] = {}  # copies of shards, by position
        self._blocks: dict[int, list[tuple[Block, Tensor]]] = defaultdict(list)  # by position, with their sums
        for matrix_set, sums in zip(sets, self.sums, strict=True):
            of_classes = torch.split(sums, [class_.count for class_ in matrix_set.classes], dim=1)
            for block in matrix_set.blocks:
                # Of several ranks that hold the same part, one counts it.
                if block.position in updated and matrix_set.classes[block.class_index].weights[block.matrices.start]:
                    self._blocks[block.position].append((block, of_classes[block.class_index][:, block.matrices]))

    def before(self, stage: Stage) -> None:
        """Copy the shards that a stage is about to update; one that several stages update is copied for the first."""
        for position in stage.positions & self._blocks.keys():
            if stage.rows.get(position, (0, 0))[0] == 0:
                (_, sums), *_ = self._blocks[position]  # the shard may be on the host
                self._before[position] = self._shards[position].to(sums.device, copy=True)

    def after(self, stage: Stage) -> None:
        """Add the squares of the shards of a stage before and after it."""
        for position in stage.positions & self._before.keys():
            if position in stage.rows and stage.rows[position][1] < len(self._shards[position]):
                continue  # another stage updates further rows
            before = self._before.pop(position)
            after = self._shards[position].to(before.device)
            if position in self._rounded:
                self.unchanged.append((before == after).sum())
                self.num_elements += before.numel()
            for block, sums in self._blocks[position]:
                old, new = block.of(before), block.of(after)
                precise = working_dtype(old.dtype)  # bfloat16 would round the difference
                for row, part in enumerate((old, new, new.to(precise) - old.to(precise))):
                    # In float64, because the square of 1e20 overflows in float32.
                    sums[row] += torch.linalg.vector_norm(part, dim=(-2, -1), dtype=torch.float64).square()

    def finish(self, recorder: Recorder) -> None:
        """Sum over ranks, one reduction per set."""
        for index, (matrix_set, sums) in enumerate(zip(self._sets, self.sums, strict=True)):
            if len(matrix_set.ranks) > 1:
                self.sums[index] = add_up([sums], matrix_set.ranks, recorder)[0]


def _observed(spec: ParameterSpec) -> ParameterSpec | None:
    """Return a parameter as matrices whose parts are found; None for a vector, or shards that are not boxes."""
    if len(spec.shape) < 2 or 0 in spec.shape:
        return None
    view = spec.view or matrix_view(spec.shape, name="", kind="flatten")
    try:
        spec.layout.boxes(spec.shape)
    except LayoutError:  # element-wise rules allow them
        return None
    return replace(spec, view=view, is_observed=True)


def _names_of_matrices(spec: ParameterSpec, name: str) -> list[list[str]]:
    """Return the names of a parameter's matrices, block by block: its own, with a number if there are several."""
    if spec.matrices.num_matrices == 1:
        return [[name]]
    numbers = count()
    return [[f"{name}[{next(numbers)}]" for _ in range(size)] for size, _, _ in spec.matrices.block_shapes]


def _moved_and_turned(sums: Tensor) -> tuple[list[float], list[float]]:
    """Return ||dW|| / ||W||, not finite where W was zero, and the angle between W and W + dW, in radians."""
    before, after, moved = sums.cpu()
    inner = (after - before - moved) / 2  # <W, dW>
    # The angle is small: its cosine would round to 1. The sine is the part of dW that is orthogonal to W.
    orthogonal = (before * moved - inner.square()).clamp_min(0).sqrt()
    angle = torch.atan2(orthogonal, before + inner)
    return (moved / before).sqrt().tolist(), angle.tolist()
