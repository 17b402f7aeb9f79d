"""How a parameter is read as logical matrices: fused and stacked weights are orthogonalized matrix by matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

ViewName = Literal["auto", "matrix", "stacked", "flatten", "attn"]
VIEW_NAMES: tuple[str, ...] = get_args(ViewName)
BlockShape: TypeAlias = tuple[int, int, int]  # (count, rows, cols)

ATTN_MATRICES = 4  # an "attn" parameter holds W_q, W_k, W_v and W_o


@dataclass(frozen=True)
class MatrixView:
    """A parameter of shape `shape` as stacks of matrices, each logical matrix being (d_out, d_in)."""

    shape: tuple[int, ...]
    kind: str  # a ViewName other than "auto"
    transposed: bool  # the parameter stores (d_in, d_out), as Hugging Face's Conv1D does
    row_heights: tuple[int, ...]  # the rows of every matrix are cut into blocks of these heights
    stacked_heads: int  # and every block into this many equal ones

    @cached_property
    def block_shapes(self) -> tuple[BlockShape, ...]:
        """The shape of every tensor that `split` returns."""
        count, _, cols = self._matrix_stack_shape()
        return tuple((count * self.stacked_heads, height // self.stacked_heads, cols) for height in self.row_heights)

    @property
    def in_memory_order(self) -> bool:
        """Whether the matrices of a contiguous parameter lie one after another in memory."""
        return len(self.row_heights) == 1 and not self.transposed

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The logical matrices of a tensor of the parameter's shape: one (count, rows, cols) per block height.

        Of a contiguous tensor they share its memory.
        """
        stack = (tensor.mT if self.transposed else tensor).reshape(self._matrix_stack_shape())
        blocks = torch.split(stack, list(self.row_heights), dim=1) if len(self.row_heights) > 1 else [stack]
        return [block.reshape(shape) for block, shape in zip(blocks, self.block_shapes, strict=True)]

    def row_numbers(self) -> tuple[Tensor, Tensor]:
        """For every row of the parameter's stack of matrices, the number of its logical matrix and its row in that.

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
    """Check that the options fit the shape of the parameter `name`, and give its view."""
    which = f"parameter {name!r} of shape {tuple(shape)}"
    if len(shape) < 2:
        raise ValueError(f"{which} is not a matrix and can't be orthogonalized; use rule 'adamw' for it")
    kind = _kind(shape, kind)
    if kind == "matrix" and len(shape) != 2:
        raise ValueError(f"{which}: view 'matrix' needs 2 dimensions; use 'stacked' or 'flatten'")
    if kind == "stacked" and len(shape) < 3:
        raise ValueError(f"{which}: view 'stacked' needs at least 3 dimensions; use 'matrix'")
    if kind == "attn" and (len(shape) != 2 or shape[1] % ATTN_MATRICES):
        raise ValueError(f"{which}: view 'attn' needs a shape (d1, {ATTN_MATRICES} * d2)")
    transposed = transposed and kind == "matrix"
    _, rows, _ = _matrix_stack_shape(shape, kind, transposed)
    if num_heads is not None and split_sizes is not None:
        raise ValueError(f"{which}: give num_heads or split_sizes, not both")
    if num_heads is not None and rows % num_heads:
        raise ValueError(f"{which}: num_heads={num_heads} does not divide its {rows} rows")
    if split_sizes is not None and sum(split_sizes) != rows:
        raise ValueError(f"{which}: split_sizes {split_sizes} add up to {sum(split_sizes)}, not to its {rows} rows")
    return MatrixView(tuple(shape), kind, transposed, split_sizes or (rows,), num_heads or 1)


def vectors_in(shape: tuple[int, ...], kind: str) -> int:
    """Return how many vectors a parameter of this shape is under a view, or 0 if it has matrices to orthogonalize.

    What has one row or one column is a vector: (n,), (n, 1), (1, 1, n); five experts of (n, 1) are five of them.
    """
    if len(shape) < 2:
        return 1
    count, rows, cols = _matrix_stack_shape(shape, _kind(shape, kind), transposed=False)
    return count if 1 in (rows, cols) else 0


def _kind(shape: tuple[int, ...], kind: str) -> str:
    """Return the view that "auto" stands for."""
    if kind != "auto":
        return kind
    return "matrix" if len(shape) == 2 else "stacked" if len(shape) == 3 else "flatten"


def _matrix_stack_shape(shape: tuple[int, ...], kind: str, transposed: bool) -> BlockShape:
    if kind == "flatten":
        return (1, shape[0], math.prod(shape[1:]))
    if kind == "attn":  # in memory order, as p.view(4, d1, d2): neither rows nor columns of the parameter
        return (ATTN_MATRICES, shape[0], shape[1] // ATTN_MATRICES)
    rows, cols = (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])
    return (math.prod(shape[:-2]), rows, cols)
