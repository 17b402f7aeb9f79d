"""Convert the factors that rules return for weights and updates to the forms that kernels and lists of tensors use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.kernels.tables import cut_into_chunks
from muon_fsdp.plan.layout import Box
from muon_fsdp.plan.matrix_sets import MatrixClass, local_parts, segments_of
from muon_fsdp.plan.units import ParameterSpec
from muon_fsdp.rules import RULES

FactorKind: TypeAlias = Literal["matrix", "rows", "columns", "elements"]
Factors: TypeAlias = tuple[Tensor, Tensor]  # of the weights and of the updates of a class


class WeightFactors:
    """The factors of this step, and which elements of each parameter they multiply."""

    def __init__(
        self,
        parameters: Sequence[ParameterSpec],
        boxes: Mapping[int, Box],  # by position
        classes: Sequence[MatrixClass],
        class_of: Mapping[tuple[int, int], tuple[int, int]],  # (position, block): class, first matrix there
    ) -> None:
        self._parameters = {p.position: p for p in parameters if RULES[p.rule].multiplies_weights}
        self._boxes, self._classes, self._class_of = boxes, classes, class_of
        # The number of each class's first matrix among all.
        self._first = _running_sums([class_.count for class_ in classes])
        # By class, as the first call of `factors` shows. Those that depend on the update are of whole matrices.
        self._kinds: dict[int, tuple[FactorKind, FactorKind]] = {
            index: ("matrix", "matrix") for index, class_ in enumerate(classes) if RULES[class_.rule].update_statistics
        }
        self._maps: dict[tuple[int, FactorKind], Tensor | None] = {}
        self._now: Sequence[Factors | None] = ()
        self._flat: Tensor | None = None

    @property
    def are_known(self) -> bool:
        """Return whether the kinds of all factors are known: those of matrices, rows or columns."""
        return all(i in self._kinds for i, class_ in enumerate(self._classes) if RULES[class_.rule].multiplies_weights)

    def accept(self, index: int, factors: Factors) -> Factors:
        """Return the factors of a class; raise if they are of another kind than in the first step."""
        class_ = self._classes[index]
        shapes = {shape: of_what for of_what, shape in _shapes(class_.count, class_.rows, class_.cols).items()}
        for factor in factors:
            if tuple(factor.shape) not in shapes:
                raise _wrong_shape(class_, factor)
        kinds = shapes[tuple(factors[0].shape)], shapes[tuple(factors[1].shape)]
        for factor, now, known in zip(factors, kinds, self._kinds.setdefault(index, kinds), strict=True):
            if now != known:
                raise _wrong_shape(class_, factor)
        return factors

    def set(self, factors: Sequence[Factors | None]) -> None:
        """Set the factors of this step, one pair per class; None for rules without factors."""
        self._now, self._flat = factors, None

    def put(self, index: int, where: Tensor | slice, factors: Factors) -> None:
        """Set the factors of some matrices of a class, once their updates are known."""
        known = self._now[index]
        assert known is not None
        for target, values in zip(known, factors, strict=True):
            target[where] = values
        self._flat = None

    def of_updates(self, index: int) -> Tensor:
        """Return the factors of the updates of a class."""
        factors = self._now[index]
        assert factors is not None
        return factors[1]

    def multiplies(self, position: int) -> bool:
        """Return whether the weights of a parameter are multiplied by factors."""
        return position in self._parameters

    @property
    def unfusable(self) -> dict[int, str]:
        """Return the positions whose weights kernels can't multiply by factors, each with the reason."""
        reasons = {}
        for position, parameter in self._parameters.items():
            if any(self._kinds.get(index) != ("matrix", "matrix") for index, _ in self._blocks(position)):
                reasons[position] = f"rule {parameter.rule!r} multiplies its rows or columns by factors"
            elif segments_of(parameter.matrices, self._boxes[position]) is None:
                reasons[position] = "its matrices are not contiguous in memory"
        return reasons

    def chunks(self, positions: Sequence[int], device: torch.device) -> tuple[Tensor, bool]:
        """Cut parameters into chunks with one factor each. A chunk ends with the index of its factor in `flat`.

        Returns:
            The chunks as kernels read them, and whether they are aligned.
        """
        segments = []
        for tensor, position in enumerate(positions):
            view = self._parameters[position].matrices
            numbers = [
                self._first[index] + first + i
                for (index, first), (count, _, _) in zip(self._blocks(position), view.block_shapes, strict=True)
                for i in range(count)
            ]
            for start, length, matrix in segments_of(view, self._boxes[position]) or ():
                segments.append((tensor, start, length, numbers[matrix]))
        return cut_into_chunks(segments, device)

    def flat(self) -> Tensor:
        """Return the factors of weights and of updates of all matrices, (2, matrices), as kernels read them."""
        if self._flat is None:
            columns: list[list[Tensor]] = [[], []]
            for class_, factors in zip(self._classes, self._now, strict=True):
                if factors is None or factors[0].ndim > 1 or factors[1].ndim > 1:
                    factors = (torch.ones(class_.count, dtype=torch.float32, device=class_.device),) * 2
                for column, values in zip(columns, factors, strict=True):
                    column.append(values.float())
            self._flat = torch.cat([*columns[0], *columns[1]]).view(2, -1)
        return self._flat

    def of(self, position: int, shard: Tensor) -> Factors:
        """Return the factors of a shard and of its update, both broadcastable to the shard."""
        blocks, shapes = self._blocks(position), self._parameters[position].matrices.block_shapes
        result = []
        for which in range(2):
            kind = _common({self._kinds[index][which] for index, _ in blocks})
            parts = []
            for (index, first), (count, rows, cols) in zip(blocks, shapes, strict=True):
                factors = self._now[index]
                assert factors is not None
                parts.append(_expanded(factors[which][first : first + count], kind, rows, cols))
            values = torch.cat(parts) if len(parts) > 1 else parts[0]
            numbers = self._map(position, shard, kind)
            result.append(values[0] if numbers is None else values[numbers])
        return result[0], result[1]

    def _blocks(self, position: int) -> list[tuple[int, int]]:
        """Return, per block of a parameter's view, its class and its first matrix there."""
        return [self._class_of[(position, b)] for b in range(len(self._parameters[position].matrices.block_shapes))]

    def _map(self, position: int, shard: Tensor, kind: FactorKind) -> Tensor | None:
        """Return the index of each element's factor, broadcastable to the shard; None if there is a single factor."""
        if (position, kind) not in self._maps:
            self._maps[(position, kind)] = self._make_map(position, shard, kind)
        return self._maps[(position, kind)]

    def _make_map(self, position: int, shard: Tensor, kind: FactorKind) -> Tensor | None:
        view = self._parameters[position].matrices
        matrix_of, row_of = view.row_numbers()
        shapes = [(rows, cols) for count, rows, cols in view.block_shapes for _ in range(count)]
        if kind == "matrix" and len(shapes) == 1:
            return None
        first_row = torch.tensor(_running_sums([rows for rows, _ in shapes]))
        first_col = torch.tensor(_running_sums([cols for _, cols in shapes]))
        first_element = torch.tensor(_running_sums([rows * cols for rows, cols in shapes]))
        index = torch.empty(tuple(shard.shape), dtype=torch.int64)
        for part in local_parts(view, self._boxes[position]):
            matrices = matrix_of[part.rows]
            numbers = matrices[:, None].expand(-1, part.width)
            if kind == "rows":
                numbers = (first_row[matrices] + row_of[part.rows])[:, None].expand(-1, part.width)
            elif kind in ("columns", "elements"):
                columns = torch.arange(part.first_col, part.first_col + part.width)
                numbers = first_col[matrices][:, None] + columns
                if kind == "elements":
                    num_cols = torch.tensor([cols for _, cols in shapes])[matrices]
                    numbers = (first_element[matrices] + row_of[part.rows] * num_cols)[:, None] + columns
            part.of(index).copy_(numbers)
        for axis in range(index.ndim):  # keep an index once if it is the same along an axis
            if index.shape[axis] > 1 and bool((index == index.narrow(axis, 0, 1)).all()):
                index = index.narrow(axis, 0, 1)
        return index.contiguous().to(shard.device)


class FactorOptions(dict[str, Any]):
    """The options that `factors` may read: planned ones, and numbers that may change from step to step."""

    def __init__(self, planned: PlannedOptions, per_step: Mapping[str, Tensor]) -> None:
        super().__init__({**planned, **per_step})
        self._rule = planned.rule

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"factors of rule {self._rule!r} can't read {name!r}: it is not one of its options, or a per_step option "
            "that is not a number. Declare it without per_step=True"
        )


def as_factor(value: Tensor | float, class_: MatrixClass, count: int) -> Tensor:
    """Return a factor in working precision; a single number is repeated for `count` matrices of the class."""
    if not isinstance(value, Tensor):  # filled on the device, because a copy from the host can't be captured
        return torch.full((count,), float(value), dtype=class_.dtype, device=class_.device)
    return (value.to(class_.device).expand(count) if value.ndim == 0 else value).to(class_.dtype)


def _common(kinds: set[FactorKind]) -> FactorKind:
    """Return the kind of factor that covers all blocks of a parameter."""
    kinds = kinds - {"matrix"} or kinds
    return kinds.pop() if len(kinds) == 1 else "elements"


def _expanded(factor: Tensor, kind: FactorKind, rows: int, cols: int) -> Tensor:
    """Expand the factors of some matrices to another kind, and flatten them."""
    whole = factor.view(-1, 1, 1) if factor.ndim == 1 else factor
    shapes = {"matrix": (1, 1), "rows": (rows, 1), "columns": (1, cols), "elements": (rows, cols)}
    return whole.expand(-1, *shapes[kind]).reshape(-1)


def _running_sums(numbers: Sequence[int]) -> list[int]:
    """Return the sum of all numbers before each of them."""
    return list(accumulate(numbers, initial=0))[:-1]


def _shapes(count: int, rows: int, cols: int) -> dict[FactorKind, tuple[int, ...]]:
    return {"columns": (count, 1, cols), "rows": (count, rows, 1), "matrix": (count,)}


def _wrong_shape(class_: MatrixClass, factor: Tensor) -> ValueError:
    return ValueError(
        f"rule {class_.rule!r}: factors must return tensors (B,), (B, d_out, 1) or (B, 1, d_in), the same kind at "
        f"every step; for {class_.count} matrices of {class_.rows} x {class_.cols} it returned {tuple(factor.shape)}"
    )
