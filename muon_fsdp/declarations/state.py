"""The state that rules declare: tensors of a parameter's shape, and numbers of its logical matrices."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.declarations.views import MatrixView

State: TypeAlias = dict[str, Tensor]
ParameterKind: TypeAlias = Literal["elements", "scalar"]
MatrixKind: TypeAlias = Literal["scalar", "rows", "columns", "subspace"]

# Vectors that span the subspace that is kept of a matrix.
NUM_VECTORS = 16


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of moments and updates: float32 for half and single precision, float64 for double."""
    return torch.promote_types(dtype, torch.float32)


def num_vectors(rows: int, cols: int) -> int:
    """Return how many vectors span the subspace that is kept of a (rows, cols) matrix."""
    return min(NUM_VECTORS, rows, cols)


@dataclass(frozen=True)
class PerParameter:
    """A tensor of the parameter's shape in working precision, distributed like it; or one float32 number ("scalar").

    Args:
        name: its key in `optimizer.state[parameter]`.
        kind: "elements" or "scalar".
    """

    name: str
    kind: ParameterKind = "elements"

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds only its shard of it."""
        return self.kind == "elements"

    def dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the precision in which it is kept."""
        return working_dtype(parameter.dtype) if self.is_sharded else torch.float32

    def shape(self, parameter: Tensor, view: MatrixView | None) -> torch.Size:
        """Return its whole shape."""
        return parameter.shape if self.is_sharded else torch.Size(())

    def create(self, parameter: Tensor, view: MatrixView | None) -> Tensor:
        """Return it as it is before the first step: zero."""
        if self.is_sharded:
            return torch.zeros_like(parameter, dtype=self.dtype(parameter), memory_format=torch.preserve_format)
        return torch.zeros((), dtype=torch.float32, device=parameter.device)


@dataclass(frozen=True)
class PerMatrix:
    """Numbers of every logical matrix of a parameter, in working precision and whole on every rank.

    In `optimizer.state[parameter]` they are one flat tensor, matrix after matrix, which does not depend on the layout,
    so a checkpoint loads on any number of ranks. In `batch.state` they are one row per matrix of the batch.

    Args:
        name: its key in `optimizer.state[parameter]` and in `batch.state`.
        kind: "scalar" (B,), "rows" (B, d_out), "columns" (B, d_in) or "subspace" (B, k, d_in), k vectors along the
            columns with k = min(16, d_out, d_in).
        initial: None starts from zero; the name of a statistic of W of the same shape starts from that statistic at
            the first step that updates the matrix. A number that is zero counts as not started.
    """

    name: str
    kind: MatrixKind
    initial: str | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds only its shard of it."""
        return False

    def dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the precision in which it is kept."""
        return working_dtype(parameter.dtype)

    def shape_of_matrix(self, rows: int, cols: int) -> tuple[int, ...]:
        """Return the shape of what belongs to one (rows, cols) matrix."""
        shapes: dict[str, tuple[int, ...]] = {
            "scalar": (),
            "rows": (rows,),
            "columns": (cols,),
            "subspace": (num_vectors(rows, cols), cols),
        }
        return shapes[self.kind]

    def numel(self, count: int, rows: int, cols: int) -> int:
        """Return how many numbers belong to so many matrices of one shape."""
        return count * prod(self.shape_of_matrix(rows, cols))

    def shape(self, parameter: Tensor, view: MatrixView | None) -> torch.Size:
        """Return its whole shape: flat."""
        assert view is not None
        return torch.Size((sum(self.numel(*block) for block in view.block_shapes),))

    def create(self, parameter: Tensor, view: MatrixView | None) -> Tensor:
        """Return it as it is before the first step: zero."""
        return torch.zeros(self.shape(parameter, view), dtype=self.dtype(parameter), device=parameter.device)


StateSpec: TypeAlias = PerParameter | PerMatrix
