"""Read a parameter as logical matrices, so that fused and stacked weights are orthogonalized matrix by matrix."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from muon_fsdp.text import format_shape

ViewName = Literal["auto", "matrix", "stacked", "flatten", "attn"]
VIEW_NAMES: tuple[str, ...] = get_args(ViewName)
BlockShape: TypeAlias = tuple[int, int, int]  # (count, rows, cols)

ATTN_MATRICES = 4  # an "attn" parameter holds W_q, W_k, W_v and W_o


@dataclass(frozen=True)
class MatrixView:
    """A reading of a parameter of shape `shape` as stacks of logical (d_out, d_in) matrices."""

    shape: tuple[int, ...]
    kind: str  # a ViewName other than "auto"
    transposed: bool  # it stores (d_in, d_out), as Conv1D of Hugging Face does, or a stack of these
    row_heights: tuple[int, ...]  # the rows of every matrix are cut into blocks of these heights
    stacked_heads: int  # every block is cut into this many matrices of equal height

    def __str__(self) -> str:
        """Return the view as options would describe it, such as "matrix, split_sizes=(4, 2, 2)"."""
        parts = [self.kind]
        if self.transposed:
            parts.append("transposed")
        if self.stacked_heads > 1:
            parts.append(f"num_heads={self.stacked_heads}")
        if len(self.row_heights) > 1:
            parts.append(f"split_sizes={self.row_heights}")
        return ", ".join(parts)

    @cached_property
    def block_shapes(self) -> tuple[BlockShape, ...]:
        """Return the shape (count, rows, cols) of every tensor that `split` returns."""
        count, _, cols = self._matrix_stack_shape()
        return tuple((count * self.stacked_heads, height // self.stacked_heads, cols) for height in self.row_heights)

    @property
    def num_matrices(self) -> int:
        """Return the number of logical matrices."""
        return sum(count for count, _, _ in self.block_shapes)

    @property
    def matrices(self) -> str:
        """Return the logical matrices as a list such as "32x32, 2 of 16x32"."""
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for count, rows, cols in self.block_shapes:
            counts[(rows, cols)] += count
        return ", ".join(f"{n} of {format_shape(s)}" if n > 1 else format_shape(s) for s, n in counts.items())

    @property
    def in_memory_order(self) -> bool:
        """Return whether the matrices of a contiguous parameter lie one after another in memory."""
        return len(self.row_heights) == 1 and not self.transposed

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Split a tensor of the parameter's shape into its logical matrices.

        Returns:
            One tensor (count, rows, cols) for every block height. They share the memory of a contiguous tensor.
        """
        stack = (tensor.mT if self.transposed else tensor).reshape(self._matrix_stack_shape())
        blocks = torch.split(stack, list(self.row_heights), dim=1) if len(self.row_heights) > 1 else [stack]
        return [block.reshape(shape) for block, shape in zip(blocks, self.block_shapes, strict=True)]

    def row_numbers(self) -> tuple[Tensor, Tensor]:
        """Find the logical matrix of every row of the parameter's stack of matrices, before rows are cut.

        Returns:
            Two tensors with one entry per row: the number of its logical matrix, and the row within that matrix.
            Matrices are numbered block by block, in the order of `split`.
        """
        count, _, _ = self._matrix_stack_shape()
        matrices, rows = [], []
        first = 0
        for height in self.row_heights:
            each = height // self.stacked_heads
            within = torch.arange(height)
            matrices.append(first + torch.arange(count)[:, None] * self.stacked_heads + within // each)
            rows.append((within % each).expand(count, height))
            first += count * self.stacked_heads
        return torch.cat(matrices, dim=1).flatten(), torch.cat(rows, dim=1).flatten()

    def _matrix_stack_shape(self) -> BlockShape:
        """Return the shape of the parameter as a stack of matrices, before rows are cut."""
        return _matrix_stack_shape(self.shape, self.kind, self.transposed)


def matrix_view(
    shape: tuple[int, ...],
    *,
    name: str,
    kind: str,
    transposed: bool = False,
    num_heads: int | None = None,
    split_sizes: tuple[int, ...] | None = None,
) -> MatrixView:
    """Return the view of the parameter `name`.

    Args:
        shape: the whole shape of the parameter.
        name: how errors name the parameter.
        kind: one of `VIEW_NAMES`.
        transposed: whether the parameter stores its matrices as (d_in, d_out); for views "matrix" and "stacked".
        num_heads: cut the rows of every matrix into this many equal matrices.
        split_sizes: cut the rows of every matrix into matrices of these heights.

    Raises:
        ValueError: the options do not fit the shape.
    """
    which = f"parameter {name!r} of shape {tuple(shape)}"
    if len(shape) < 2:
        raise ValueError(f"{which} is not a matrix and cannot be orthogonalized; use rule 'adamw' for it")
    kind = _kind(shape, kind)
    if kind == "matrix" and len(shape) != 2:
        raise ValueError(f"{which}: view 'matrix' needs 2 dimensions; use 'stacked' or 'flatten'")
    if kind == "stacked" and len(shape) < 3:
        raise ValueError(f"{which}: view 'stacked' needs at least 3 dimensions; use 'matrix'")
    if kind == "attn" and (len(shape) != 2 or shape[1] % ATTN_MATRICES):
        raise ValueError(f"{which}: view 'attn' needs a shape (d1, {ATTN_MATRICES} * d2)")
    if transposed and not can_be_transposed(shape, kind):
        raise ValueError(f"{which}: transposed=True needs view 'matrix' or 'stacked', and its view is {kind!r}")
    count, rows, _ = _matrix_stack_shape(shape, kind, transposed)
    if num_heads is not None and split_sizes is not None:
        raise ValueError(f"{which}: pass num_heads or split_sizes, not both")
    if num_heads is not None and rows % num_heads:
        raise ValueError(f"{which}: num_heads={num_heads} does not divide its {rows} rows")
    if split_sizes is not None and sum(split_sizes) != rows:
        raise ValueError(f"{which}: split_sizes {split_sizes} add up to {sum(split_sizes)}, not to its {rows} rows")
    if transposed and count > 1 and num_heads is not None:  # these heads do not lie at one distance in memory
        split_sizes, num_heads = (rows // num_heads,) * num_heads, None
    return MatrixView(tuple(shape), kind, transposed, split_sizes or (rows,), num_heads or 1)


def can_be_transposed(shape: tuple[int, ...], kind: str) -> bool:
    """Return whether a parameter can store (d_in, d_out) under a view: its last two dimensions are a matrix."""
    return _kind(shape, kind) in ("matrix", "stacked")


def vectors_in(shape: tuple[int, ...], kind: str) -> int:
    """Return the number of vectors that a parameter consists of under a view; 0 if it consists of matrices.

    A matrix with one row or one column is a vector: (n,), (n, 1) and (1, 1, n) are one vector each, and (5, n, 1) are
    five.
    """
    if len(shape) < 2:
        return 1
    count, rows, cols = _matrix_stack_shape(shape, _kind(shape, kind), transposed=False)
    return count if 1 in (rows, cols) else 0


def _kind(shape: tuple[int, ...], kind: str) -> str:
    """Return the view that `kind` selects for a shape; "auto" depends on the number of dimensions."""
    if kind != "auto":
        return kind
    return "matrix" if len(shape) == 2 else "stacked" if len(shape) == 3 else "flatten"


def _matrix_stack_shape(shape: tuple[int, ...], kind: str, transposed: bool) -> BlockShape:
    """Return the shape (count, rows, cols) of a parameter as a stack of matrices, before rows are cut."""
    if kind == "flatten":
        return (1, shape[0], math.prod(shape[1:]))
    if kind == "attn":  # p.view(4, d1, d2), in memory order: the matrices are no ranges of rows or columns
        return (ATTN_MATRICES, shape[0], shape[1] // ATTN_MATRICES)
    rows, cols = (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])
    return (math.prod(shape[:-2]), rows, cols)
