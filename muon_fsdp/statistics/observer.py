"""Compute the statistics of weights that rules request by name, on shards: no weight W is ever gathered.

A new statistic is one object in `STATISTICS`. Most are sums over elements: every rank adds up the parts of W that it
holds, and one all-reduce completes the statistics of all matrices on the same ranks. `top_singular` is iterative.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.comm.transfers import add_up
from muon_fsdp.declarations.option import Option, integer
from muon_fsdp.declarations.state import PerMatrix, State
from muon_fsdp.plan.matrix_sets import MatrixSet
from muon_fsdp.statistics.top_singular import Survey


class Statistic:
    """A statistic of the weights. Its state and options are added to those of every rule that requests it."""

    name: str
    doc: str
    state: tuple[PerMatrix, ...] = ()
    reads: tuple[str, ...] = ()  # the names of the state that the statistic starts from; its other state is a result
    options: tuple[Option, ...] = ()


class SummedStatistic(Statistic, ABC):
    """A statistic that is a function of a sum over elements: every rank adds the terms of its parts of W."""

    @abstractmethod
    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Return the shape of the statistic of one (rows, cols) matrix."""

    @abstractmethod
    def add(self, sums: Tensor, part: Tensor, matrices: slice, rows: slice, cols: slice) -> None:
        """Add the terms of a part of some matrices to the sums.

        Args:
            sums: (B, ...), float64, the sums of all matrices of a class, changed in place.
            part: (count, rows, cols), a part of `count` matrices.
            matrices: which of the B matrices the part belongs to.
            rows: which rows of these matrices the part holds.
            cols: which columns of these matrices the part holds.
        """

    def finish(self, total: Tensor) -> Tensor:
        """Return the statistic for the sum over all ranks, (B, ...)."""
        return total


class _Norm(SummedStatistic):
    """The norms of whole matrices, or of their rows, or of their columns."""

    def __init__(self, name: str, doc: str, dims: tuple[int, ...]) -> None:
        self.name, self.doc, self._dims = name, doc, dims

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        return tuple(size for dim, size in ((-2, rows), (-1, cols)) if dim not in self._dims)

    def add(self, sums: Tensor, part: Tensor, matrices: slice, rows: slice, cols: slice) -> None:
        # In float64, because the square of 1e20 overflows in float32.
        squares = torch.linalg.vector_norm(part, dim=self._dims, dtype=torch.float64).square()
        kept = [part_of_dim for dim, part_of_dim in ((-2, rows), (-1, cols)) if dim not in self._dims]
        where = (matrices, *kept)
        sums[where] += squares

    def finish(self, total: Tensor) -> Tensor:
        return total.sqrt()


class _TopSingular(Statistic):
    """The top singular triples. Each step starts from the subspaces of the previous step, which are its state."""

    name = "top_singular"
    doc = "`TopSingular(norm, left, right)`: the largest singular value with its vectors"
    state = (
        PerMatrix("singular_subspace", "subspace"),
        PerMatrix("right_singular_vector", "columns"),
        PerMatrix("left_singular_vector", "rows"),
    )
    reads = ("singular_subspace",)
    options = (
        Option(
            "power_iteration_steps",
            10,
            "accuracy of the top singular vectors at every step, in steps of power iteration",
            check=integer,
        ),
    )


STATISTICS: dict[str, Statistic] = {
    statistic.name: statistic
    for statistic in (
        _Norm("frobenius_norm", "(B,), the Frobenius norm", (-2, -1)),
        _Norm("row_norms", "(B, d_out), the norm of every row", (-1,)),
        _Norm("column_norms", "(B, d_in), the norm of every column", (-2,)),
        _TopSingular(),
    )
}


class Observer:
    """Computes the statistics of the matrices of one set. `names` lists the statistics that each class needs."""

    def __init__(self, matrices: MatrixSet, names: Sequence[Sequence[str]]) -> None:
        self._matrices = matrices
        self._summed = [[s for name in each if isinstance(s := STATISTICS[name], SummedStatistic)] for each in names]
        by_steps: dict[int, list[int]] = defaultdict(list)
        for index, (class_, each) in enumerate(zip(matrices.classes, names, strict=True)):
            if _TopSingular.name in each:
                by_steps[class_.options["power_iteration_steps"]].append(index)
        # Sorted, because every survey has its own collectives and all ranks must issue them in the same order.
        self._surveys = [
            (indices, Survey(matrices.only(indices), steps)) for steps, indices in sorted(by_steps.items())
        ]

    @property
    def iterates(self) -> bool:
        """Return whether a first step, which has no subspaces yet, does more work than later steps."""
        return bool(self._surveys)

    def observe(
        self, shards: Mapping[int, Tensor], states: Sequence[State], recorder: Recorder, *, cold: bool
    ) -> list[dict[str, Any]]:
        """Compute the statistics of all matrices of the set; a collective.

        Args:
            shards: the local shards by position of the parameter.
            states: for every class the per-matrix state that statistics start from; their new state is added.
            recorder: issues the collectives, so that a CUDA graph can be recorded around them.
            cold: whether some of the states may still be zero.

        Returns:
            The statistics of every class by name.
        """
        found: list[dict[str, Any]] = [{} for _ in states]
        self._observe_sums(shards, recorder, found)
        for indices, survey in self._surveys:
            subspaces = [states[index]["singular_subspace"] for index in indices]
            results = survey.run(subspaces, shards, recorder, cold=cold)
            for index, (subspace, top) in zip(indices, results, strict=True):
                found[index][_TopSingular.name] = top
                states[index].update(
                    singular_subspace=subspace, right_singular_vector=top.right, left_singular_vector=top.left
                )
        return found

    def _observe_sums(self, shards: Mapping[int, Tensor], recorder: Recorder, found: Sequence[dict[str, Any]]) -> None:
        matrices = self._matrices
        sums: dict[tuple[int, SummedStatistic], Tensor] = {}  # by class and statistic
        for index, class_ in enumerate(matrices.classes):
            for each in self._summed[index]:
                shape = (class_.count, *each.shape(class_.rows, class_.cols))
                sums[index, each] = torch.zeros(shape, dtype=torch.float64, device=class_.device)
        for block in matrices.blocks:
            index = block.class_index
            if self._summed[index] and matrices.classes[index].weights[block.matrices.start]:
                part = block.of(shards[block.position])
                for each in self._summed[index]:
                    each.add(sums[index, each], part, block.matrices, block.rows, block.cols)
        totals = list(sums.values())
        # Necessary even if every rank holds all of W, because only the first of these ranks has added its terms.
        if totals and len(matrices.ranks) > 1:
            totals = add_up(totals, matrices.ranks, recorder)
        for (index, each), total in zip(sums, totals, strict=True):
            found[index][each.name] = each.finish(total).to(matrices.classes[index].dtype)
