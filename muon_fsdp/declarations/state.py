"""Declare the state of rules: tensors of a parameter's shape, and numbers for each of its logical matrices."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.declarations.views import MatrixView
from muon_fsdp.kernels.tables import REMAINDER
from muon_fsdp.linalg.codes import Code

State: TypeAlias = dict[str, Tensor]
ParameterKind: TypeAlias = Literal["elements", "scalar"]
MatrixKind: TypeAlias = Literal["scalar", "rows", "columns", "subspace", "elements", "left", "right"]

NUM_VECTORS = 16  # the dimension of a "subspace", for matrices that are large enough


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of moments and updates: float32 for half and single precision, float64 for double."""
    return torch.promote_types(dtype, torch.float32)


def num_vectors(rows: int, cols: int) -> int:
    """Return the number of vectors that span the "subspace" state of a (rows, cols) matrix."""
    return min(NUM_VECTORS, rows, cols)


@dataclass(frozen=True)
class PerParameter:
    """State of one parameter: a tensor of its shape and layout in working precision, or one float32 number.

    Args:
        name: its key in `optimizer.state[parameter]`.
        kind: "elements" for a tensor of the parameter's shape and layout, "scalar" for one number.
        code: with `state_dtype="int8"`, how 8 bits store an element: "linear" for equal steps up to the largest
            absolute value of a block, as for momentum, or "positive" for numbers that are never negative and differ by
            orders of magnitude, as second moments do.
    """

    name: str
    kind: ParameterKind = "elements"
    code: Code = "linear"

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank holds only its shard of the state."""
        return self.kind == "elements"

    @property
    def is_moment(self) -> bool:
        """Return whether the option `state_dtype` says how the state is stored."""
        return self.is_sharded

    def dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of the state."""
        return working_dtype(parameter.dtype) if self.is_sharded else torch.float32

    def shape(self, parameter: Tensor, view: MatrixView | None) -> torch.Size:
        """Return the whole shape of the state, over all ranks."""
        return parameter.shape if self.is_sharded else torch.Size(())

    def create(self, parameter: Tensor, view: MatrixView | None) -> Tensor:
        """Create the state before the first step: zeros, a DTensor if the parameter is one and the state is sharded."""
        if self.is_sharded:
            return torch.zeros_like(parameter, dtype=self.dtype(parameter), memory_format=torch.preserve_format)
        return torch.zeros((), dtype=torch.float32, device=parameter.device)


@dataclass(frozen=True)
class Remainder(PerParameter):
    """What rounding dropped from the weights of a parameter, 8 bits each: state beside that of its rule."""

    name: str = REMAINDER

    @property
    def is_moment(self) -> bool:
        return False

    def dtype(self, parameter: Tensor) -> torch.dtype:
        return torch.int8


@dataclass(frozen=True)
class PerMatrix:
    """State of every logical matrix of a parameter, in working precision and whole on every rank.

    In `optimizer.state[parameter]` it is one flat tensor, matrix after matrix. It does not depend on the layout, so a
    checkpoint loads on any number of ranks. `batch.state` has one row for every matrix of the batch.

    Args:
        name: its key in `optimizer.state[parameter]` and in `batch.state`.
        kind: "scalar" (B,), "rows" (B, d_out), "columns" (B, d_in) or "subspace" (B, k, d_in), k vectors along the
            columns with k = min(16, d_out, d_in). For research sizes also "elements" (B, d_out, d_in), "left"
            (B, d_out, d_out) and "right" (B, d_in, d_in): every rank holds them whole, and every step sends them.
        initial: None to start from zero, or the name of a statistic of W of the same shape. The state then gets the
            value of that statistic at the first step that updates the matrix. A value of zero counts as not started.
        zero_error: for state with `initial`, why the statistic must not be zero, and what to do: the step raises it.
    """

    name: str
    kind: MatrixKind
    initial: str | None = None
    zero_error: str | None = None

    @property
    def is_large(self) -> bool:
        """Return whether the state is as large as a matrix, so that its memory and its traffic are worth a warning."""
        return self.kind in ("elements", "left", "right")

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank holds only its shard of the state: never."""
        return False

    @property
    def is_moment(self) -> bool:
        """Return whether the option `state_dtype` says how the state is stored: never."""
        return False

    def dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of the state."""
        return working_dtype(parameter.dtype)

    def shape_of_matrix(self, rows: int, cols: int) -> tuple[int, ...]:
        """Return the shape of the state of one (rows, cols) matrix."""
        shapes: dict[str, tuple[int, ...]] = {
            "scalar": (),
            "rows": (rows,),
            "columns": (cols,),
            "subspace": (num_vectors(rows, cols), cols),
            "elements": (rows, cols),
            "left": (rows, rows),
            "right": (cols, cols),
        }
        return shapes[self.kind]

    def numel(self, count: int, rows: int, cols: int) -> int:
        """Return the number of elements in the state of `count` (rows, cols) matrices."""
        return count * prod(self.shape_of_matrix(rows, cols))

    def span(self, view: MatrixView, block: int, start: int = 0, stop: int | None = None) -> slice:
        """Return where the state of some matrices of a block of the view is in the flat tensor of a parameter."""
        before = sum(self.numel(*shape) for shape in view.block_shapes[:block])
        count, rows, cols = view.block_shapes[block]
        each = self.numel(1, rows, cols)
        return slice(before + start * each, before + (count if stop is None else stop) * each)

    def shape(self, parameter: Tensor, view: MatrixView | None) -> torch.Size:
        """Return the shape of the flat tensor that holds the state of all matrices of a parameter."""
        assert view is not None
        return torch.Size((sum(self.numel(*block) for block in view.block_shapes),))

    def create(self, parameter: Tensor, view: MatrixView | None) -> Tensor:
        """Create the state before the first step: zeros."""
        return torch.zeros(self.shape(parameter, view), dtype=self.dtype(parameter), device=parameter.device)


StateSpec: TypeAlias = PerParameter | PerMatrix
