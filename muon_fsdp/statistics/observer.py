"""Statistics of the weights that rules ask for by name, found on shards: W is never assembled.

A new statistic is one object in `STATISTICS`. Most are sums over elements: every rank adds up the parts of W that it
holds, and one reduction completes the statistics of all matrices on the same ranks. `top_singular` iterates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muon_fsdp.comm.transfers import add_up
from muon_fsdp.declarations.option import Option, integer
from muon_fsdp.declarations.state import PerMatrix, State
from muon_fsdp.kernels.recorder import Recorder
from muon_fsdp.plan.matrix_sets import MatrixSet
from muon_fsdp.statistics.top_singular import Survey


class TopSingular(NamedTuple):
    """The largest singular value of every weight matrix, with its vectors.

    Args:
        norm: (B,), the spectral norm.
        left: (B, d_out), unit vectors u; zero where the norm is zero.
        right: (B, d_in), unit vectors v.
    """

    norm: Tensor
    left: Tensor
    right: Tensor


class Statistic(ABC):
    """A statistic of the weights. It may keep state of its own and have options, which rules that ask for it get."""

    name: str
    doc: str
    state: tuple[PerMatrix, ...] = ()
    options: tuple[Option, ...] = ()

    @abstractmethod
    def example(self, rows: int, cols: int) -> Any:
        """Return the statistic of one zero matrix, on the CPU."""


class SummedStatistic(Statistic):
    """A statistic that is a sum over elements, or follows from one: every rank adds what its parts of W give."""

    @abstractmethod
    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Return the shape of what belongs to one matrix."""

    @abstractmethod
    def add(self, sums: Tensor, part: Tensor, matrices: slice, rows: slice, cols: slice) -> None:
        """Add what a part (count, rows, cols) of some matrices gives to the float64 sums (B, ...) of all."""

    def finish(self, total: Tensor) -> Tensor:
        """Return the statistic, given the sum over all ranks."""
        return total

    def example(self, rows: int, cols: int) -> Tensor:
        return torch.zeros(1, *self.shape(rows, cols))


class _Norm(SummedStatistic):
    """Norms of whole matrices, of their rows or of their columns."""

    def __init__(self, name: str, doc: str, dims: tuple[int, ...]) -> None:
        self.name, self.doc, self._dims = name, doc, dims

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        return tuple(size for dim, size in ((-2, rows), (-1, cols)) if dim not in self._dims)

    def add(self, sums: Tensor, part: Tensor, matrices: slice, rows: slice, cols: slice) -> None:
        # In float64: the square of 1e20 is not a float32.
        squares = torch.linalg.vector_norm(part, dim=self._dims, dtype=torch.float64).square()
        kept = [place for dim, place in ((-2, rows), (-1, cols)) if dim not in self._dims]
        place = (matrices, *kept)
        sums[place] += squares

    def finish(self, total: Tensor) -> Tensor:
        return total.sqrt()


class _TopSingular(Statistic):
    """Warm-started from the subspaces of the last step, which are its state."""

    name = "top_singular"
    doc = "`TopSingular(norm, left, right)`: the largest singular value with its vectors"
    state = (
        PerMatrix("singular_subspace", "subspace"),
        PerMatrix("right_singular_vector", "columns"),
        PerMatrix("left_singular_vector", "rows"),
    )
    options = (
        Option(
            "power_iteration_steps",
            10,
            "accuracy of the top singular vectors at every step, in steps of power iteration",
            check=integer,
        ),
    )

    def example(self, rows: int, cols: int) -> TopSingular:
        return TopSingular(torch.zeros(1), torch.zeros(1, rows), torch.zeros(1, cols))


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
    """Finds the statistics of the matrices of one set. `names` are those that each class asks for."""

    def __init__(self, matrices: MatrixSet, names: Sequence[Sequence[str]]) -> None:
        self._matrices = matrices
        self._summed = [[s for name in each if isinstance(s := STATISTICS[name], SummedStatistic)] for each in names]
        by_steps: dict[int, list[int]] = defaultdict(list)
        for index, (kind, each) in enumerate(zip(matrices.classes, names, strict=True)):
            if _TopSingular.name in each:
                by_steps[kind.options["power_iteration_steps"]].append(index)
        # In one order on all ranks: every survey has collectives of its own.
        self._surveys = [
            (indices, Survey(matrices.only(indices), steps)) for steps, indices in sorted(by_steps.items())
        ]

    @property
    def iterates(self) -> bool:
        """Whether a first step, which knows no subspaces, does more than later ones."""
        return bool(self._surveys)

    def observe(
        self, shards: Mapping[int, Tensor], states: Sequence[State], recorder: Recorder, *, cold: bool
    ) -> list[dict[str, Any]]:
        """Return the statistics of every class by name. `states` are their per-matrix states, of which those that
        belong to a statistic are replaced; `cold` if some of these may still be zero."""
        found: list[dict[str, Any]] = [{} for _ in states]
        self._observe_sums(shards, recorder, found)
        for indices, survey in self._surveys:
            subspaces = [states[index]["singular_subspace"] for index in indices]
            for index, result in zip(indices, survey.run(subspaces, shards, recorder, cold=cold), strict=True):
                found[index][_TopSingular.name] = TopSingular(result.norm, result.left, result.right)
                states[index].update(
                    singular_subspace=result.subspace,
                    right_singular_vector=result.right,
                    left_singular_vector=result.left,
                )
        return found

    def _observe_sums(self, shards: Mapping[int, Tensor], recorder: Recorder, found: Sequence[dict[str, Any]]) -> None:
        matrices = self._matrices
        sums = [
            {
                each.name: torch.zeros(
                    kind.count, *each.shape(kind.rows, kind.cols), dtype=torch.float64, device=kind.device
                )
                for each in summed
            }
            for kind, summed in zip(matrices.classes, self._summed, strict=True)
        ]
        for block in matrices.blocks:
            kind = matrices.classes[block.kind]
            if self._summed[block.kind] and kind.weights[block.matrices.start]:
                part = block.of(shards[block.position])
                for each in self._summed[block.kind]:
                    each.add(sums[block.kind][each.name], part, block.matrices, block.rows, block.cols)
        flat = [(index, each, sums[index][each.name]) for index, many in enumerate(self._summed) for each in many]
        totals = [value for _, _, value in flat]
        # Also where every rank holds all of W: only the first of them has counted it.
        if totals and len(matrices.ranks) > 1:
            totals = add_up(totals, matrices.ranks, recorder)
        for (index, each, _), total in zip(flat, totals, strict=True):
            found[index][each.name] = each.finish(total).to(matrices.classes[index].dtype)
