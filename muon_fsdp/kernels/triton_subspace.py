"""Find the best vectors in subspaces for matrices of all shapes at once: inner products, small factors, combinations.

Vectors are rows of flat float32 buffers, at most 16 per matrix. Matrices of all shapes share a buffer and a launch.
Small matrices are float64, because making nearly dependent vectors orthonormal amplifies their rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon_fsdp.kernels.launch import is_aligned, launch
from muon_fsdp.kernels.triton_spectral import MAX_VECTORS, rounded

CHUNK = 512  # columns for which one program computes inner products
BLOCK = 64
SQUARINGS = 24  # in S^(2^24) only eigenvalues remain that are equal to the top one to about 1e-7
# After the components along earlier vectors are subtracted from a unit vector, a squared norm up to this is rounding
# error: for vectors in memory, which are float32, and for small vectors in float64.
DEPENDENT, DEPENDENT_SMALL = tl.constexpr(1e-10), tl.constexpr(1e-20)
FIELDS = 5


@dataclass(frozen=True)
class Space:
    """The positions of the vectors along one side of all M matrices in a flat buffer, ordered by class and matrix."""

    shapes: tuple[tuple[int, int, int], ...]  # (count, vectors per matrix, length) of every class
    # (M, 5) int64: start, vectors, length, start in a buffer of one vector per matrix, start in a buffer of one set of
    # vectors per class
    matrices: Tensor
    programs: Tensor  # (P, 2) int32: matrix, first column
    first_program: Tensor  # (M + 1,) int32: first program of every matrix
    each: Tensor  # (M + 1,) int32: 0, 1, .., the same for one program per matrix

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, int, int]], device: torch.device) -> Space:
        """Build the tables for classes of the given shapes, (count, vectors per matrix, length)."""
        matrices: list[tuple[int, ...]] = []
        programs: list[tuple[int, int]] = []
        first_program = [0]
        start = single = of_class = 0
        for count, vectors, length in shapes:
            for _ in range(count):
                programs += [(len(matrices), first) for first in range(0, length, CHUNK)]
                first_program.append(len(programs))
                matrices.append((start, vectors, length, single, of_class))
                start, single = start + vectors * length, single + length
            of_class += vectors * length
        return cls(
            tuple(shapes),
            torch.tensor(matrices, dtype=torch.int64).to(device),
            torch.tensor(programs, dtype=torch.int32).to(device),
            torch.tensor(first_program, dtype=torch.int32).to(device),
            torch.arange(len(matrices) + 1, dtype=torch.int32).to(device),
        )

    def empty(self, *, single: bool = False) -> Tensor:
        """Return an uninitialized buffer for all vectors, or for one vector per matrix if `single`."""
        numel = sum(count * (1 if single else vectors) * length for count, vectors, length in self.shapes)
        return torch.empty(numel, dtype=torch.float32, device=self.matrices.device)

    def split(self, flat: Tensor, *, single: bool = False) -> list[Tensor]:
        """Split a buffer into views, one per class.

        Returns:
            Views of shape (count, vectors, length), or (count, length) if `single`.
        """
        sizes = [(c, n) if single else (c, b, n) for c, b, n in self.shapes]
        parts = torch.split(flat, [torch.Size(size).numel() for size in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    at, first, second, col, HAS_SECOND: tl.constexpr, VECTORS: tl.constexpr
):
    """Load a block of a matrix's vectors in `first`, (rows, cols), and below them those in `second`."""
    start, count, length = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    row = tl.arange(0, 2 * VECTORS if HAS_SECOND else VECTORS)
    offset = start + (row % VECTORS)[:, None] * length + col[None, :]
    mask = (row % VECTORS < count)[:, None] & (col < length)[None, :]
    if HAS_SECOND:
        values = tl.load(first + offset, mask=mask & (row < VECTORS)[:, None], other=0.0)
        values += tl.load(second + offset, mask=mask & (row >= VECTORS)[:, None], other=0.0)
    else:
        values = tl.load(first + offset, mask=mask, other=0.0)
    return values.to(tl.float64)


@triton.jit
def _fill_kernel(matrices, vectors, starts, VECTORS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    at, row = matrices + FIELDS * (tl.program_id(0) // VECTORS), tl.program_id(0) % VECTORS
    count, length = tl.load(at + 1), tl.load(at + 2)
    if row < count:
        start, of_class = tl.load(at) + row * length, tl.load(at + 4) + row * length
        lane = tl.arange(0, BLOCK)
        others = tl.zeros((BLOCK,), dtype=tl.int32)
        for first in range(0, length, BLOCK):
            col = first + lane
            others += (tl.load(vectors + start + col, mask=col < length, other=0.0) != 0).to(tl.int32)
        if tl.sum(others, axis=0) == 0:
            for first in range(0, length, BLOCK):
                col = first + lane
                value = tl.load(starts + of_class + col, mask=col < length, other=0.0)
                tl.store(vectors + start + col, value, mask=col < length)


@triton.jit
def _inner_kernel(  # type: ignore[no-untyped-def]
    matrices, programs, first, second, partials,
    HAS_SECOND: tl.constexpr, VECTORS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    at, first_col = matrices + FIELDS * tl.load(programs + 2 * index), tl.load(programs + 2 * index + 1)
    SIZE: tl.constexpr = 2 * VECTORS if HAS_SECOND else VECTORS
    total = tl.zeros((SIZE, SIZE), dtype=tl.float64)
    for offset in range(0, tl.minimum(CHUNK, tl.load(at + 2) - first_col), BLOCK):
        values = _rows(at, first, second, first_col + offset + tl.arange(0, BLOCK), HAS_SECOND, VECTORS)
        total = tl.dot(values, tl.trans(values), total, input_precision="ieee", out_dtype=tl.float64)
    row = tl.arange(0, SIZE)
    tl.store(partials + index * SIZE * SIZE + row[:, None] * SIZE + row[None, :], total)


@triton.jit
def _summed(partials, first_program, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of all partial inner products of this program's matrix."""
    row = tl.arange(0, SIZE)
    start, stop = tl.load(first_program + tl.program_id(0)), tl.load(first_program + tl.program_id(0) + 1)
    total = tl.zeros((SIZE, SIZE), dtype=tl.float64)
    for index in range(start, stop):
        total += tl.load(partials + index * SIZE * SIZE + row[:, None] * SIZE + row[None, :])
    return total


@triton.jit
def _sum_kernel(partials, first_program, sums, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, SIZE)
    total = _summed(partials, first_program, SIZE)
    tl.store(sums + tl.program_id(0) * SIZE * SIZE + row[:, None] * SIZE + row[None, :], total)


@triton.jit
def _orthonormal_kernel(partials, first_program, factors, KNOWN: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute factors T from A A^T such that the rows of T A are an orthonormal basis of the rows of A.

    This is the Gram-Schmidt process. The first KNOWN rows of A are already orthonormal; their factors are not stored.
    """
    inner = _summed(partials, first_program, SIZE)
    row, col = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    squares = tl.sum(tl.where(row == col, inner, 0.0), axis=0)
    scales = tl.where(squares == 0, 0.0, 1.0 / tl.sqrt(tl.where(squares == 0, 1.0, squares)))
    inner = inner * scales[:, None] * scales[None, :]
    combined = tl.where(row == col, 1.0, 0.0).to(tl.float64)
    for step in range(SIZE):
        # Equal to the column, because the remaining block is symmetric.
        inner_row = tl.sum(tl.where(row == step, inner, 0.0), axis=0)
        combined_row = tl.sum(tl.where(row == step, combined, 0.0), axis=0)
        pivot = tl.sum(tl.where(tl.arange(0, SIZE) == step, inner_row, 0.0), axis=0)
        depends = pivot <= DEPENDENT  # False for NaN
        scale = tl.where(depends, 0.0, 1.0 / tl.sqrt(tl.where(depends, 1.0, pivot)))
        below = tl.where(row > step, (inner_row * scale)[:, None], 0.0)
        inner -= below * (inner_row * scale)[None, :]
        combined_row *= scale
        combined = tl.where(row == step, combined_row[None, :], combined - below * combined_row[None, :])
    at = factors + tl.program_id(0) * (SIZE - KNOWN) * SIZE + (row - KNOWN) * SIZE + col
    tl.store(at, combined * scales[None, :], mask=(row >= KNOWN) & (col < SIZE))


@triton.jit
def _scaled(square):  # type: ignore[no-untyped-def]
    largest = tl.max(tl.max(tl.abs(square), axis=1), axis=0)
    return square / tl.where(largest == 0, 1.0, largest)


@triton.jit
def _ritz_kernel(  # type: ignore[no-untyped-def]
    partials, first_program, best, better, SQUARINGS: tl.constexpr, VECTORS: tl.constexpr, SIZE: tl.constexpr
):
    """Compute the top eigenvector of S = A A^T, and an orthonormal basis of the first VECTORS rows of S^8.

    In S^8, directions with small eigenvalues have nearly vanished.
    """
    row, col = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    power = _scaled(_summed(partials, first_program, SIZE))
    for _ in range(3):
        power = _scaled(tl.dot(power, power, input_precision="ieee", out_dtype=tl.float64))
    filtered = tl.where(row < VECTORS, power, 0.0)
    squares = tl.sum(filtered * filtered, axis=1)
    filtered = filtered / tl.sqrt(tl.where(squares == 0, 1.0, squares))[:, None]
    index = tl.arange(0, SIZE)
    kept = tl.zeros((SIZE,), dtype=tl.int32)
    for step in range(2 * VECTORS):  # twice, because rounding leaves components along the other rows
        at = step % VECTORS
        this = tl.sum(tl.where(row == at, filtered, 0.0), axis=0)
        square = tl.sum(this * this, axis=0)
        depends = square <= DEPENDENT_SMALL
        this = tl.where(depends, 0.0, this / tl.sqrt(tl.where(depends, 1.0, square)))
        kept = tl.where(index == at, tl.where(depends, 0, 1), kept)
        parts = tl.sum(filtered * this[None, :], axis=1)
        filtered -= tl.where(row > at, parts[:, None] * this[None, :], 0.0)
        filtered = tl.where(row == at, this[None, :], filtered)
    # Where a row depends on others, the old vector is kept.
    filtered = tl.where((kept == 0)[:, None], tl.where(row == col, 1.0, 0.0), filtered)
    at = better + tl.program_id(0) * VECTORS * SIZE + row * SIZE + col
    tl.store(at, filtered, mask=(row < VECTORS) & (col < SIZE))
    for _ in range(SQUARINGS - 3):
        power = _scaled(tl.dot(power, power, input_precision="ieee", out_dtype=tl.float64))
    # Every column is now a multiple of the eigenvector, but some columns may be zero.
    squares = tl.sum(power * power, axis=0)
    largest = tl.argmax(squares, axis=0)
    vector = tl.sum(tl.where(col == largest, power, 0.0), axis=1)
    nothing = tl.max(squares, axis=0) == 0
    vector = tl.where(nothing, tl.where(index == 0, 1.0, 0.0), vector)
    tl.store(best + tl.program_id(0) * SIZE + index, vector)


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    matrices, programs, factors, first, second, out,
    SINGLE: tl.constexpr, ROUND: tl.constexpr, HAS_SECOND: tl.constexpr,
    VECTORS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    matrix, first_col = tl.load(programs + 2 * index), tl.load(programs + 2 * index + 1)
    at = matrices + FIELDS * matrix
    SIZE: tl.constexpr = 2 * VECTORS if HAS_SECOND else VECTORS
    row, inner = tl.arange(0, VECTORS)[:, None], tl.arange(0, SIZE)[None, :]
    length = tl.load(at + 2)
    if SINGLE:
        count, start = 1, tl.load(at + 3)
        factor = tl.load(factors + matrix * SIZE + row * SIZE + inner, mask=row < 1, other=0.0)
    else:
        count, start = tl.load(at + 1), tl.load(at)
        factor = tl.load(factors + matrix * VECTORS * SIZE + row * SIZE + inner)
    for offset in range(0, tl.minimum(CHUNK, length - first_col), BLOCK):
        col = first_col + offset + tl.arange(0, BLOCK)
        values = _rows(at, first, second, col, HAS_SECOND, VECTORS)
        combined = tl.dot(factor, values, input_precision="ieee", out_dtype=tl.float64).to(tl.float32)
        if ROUND:
            combined = rounded(combined)
        tl.store(out + start + row * length + col[None, :], combined, mask=(row < count) & (col < length)[None, :])


@triton.jit
def _unit_kernel(rights, lefts, right, left, norms, BLOCK: tl.constexpr, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale v and W v to unit vectors in place, and store ||W v|| / ||v||."""
    matrix = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    right_at, left_at = rights + FIELDS * matrix, lefts + FIELDS * matrix
    right_length, right_start = tl.load(right_at + 2), tl.load(right_at + 3)
    left_length, left_start = tl.load(left_at + 2), tl.load(left_at + 3)
    right_norm = _norm(right + right_start, right_length, lane, BLOCK)
    left_norm = _norm(left + left_start, left_length, lane, BLOCK)
    _scale(right + right_start, right_length, right_norm, lane, BLOCK)
    _scale(left + left_start, left_length, left_norm, lane, BLOCK)
    tl.store(norms + matrix, (left_norm / tl.where(right_norm == 0, 1.0, right_norm)).to(tl.float32))


@triton.jit
def _norm(values, length, lane, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for first in range(0, length, BLOCK):
        part = tl.load(values + first + lane, mask=first + lane < length, other=0.0).to(tl.float64)
        total += part * part
    return tl.sqrt(tl.sum(total, axis=0))


@triton.jit
def _scale(values, length, norm, lane, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    divisor = tl.where(norm == 0, 1.0, norm)
    for first in range(0, length, BLOCK):
        at, mask = values + first + lane, first + lane < length
        tl.store(at, (tl.load(at, mask=mask, other=0.0).to(tl.float64) / divisor).to(tl.float32), mask=mask)


def fill(space: Space, vectors: Tensor, starts: Tensor) -> None:
    """Replace vectors that are zero by `starts`, which has one set of vectors per class."""
    constants = {"VECTORS": MAX_VECTORS, "BLOCK": 1024, "FIELDS": FIELDS}
    programs = len(space.matrices) * MAX_VECTORS
    launch(_fill_kernel, programs, (space.matrices, vectors, starts), constants, _variant(space, vectors, starts))


def _inner(space: Space, first: Tensor, second: Tensor | None) -> Tensor:
    """Compute partial inner products of all vectors of a matrix.

    Returns:
        (P, q, q) float64, one part per program, with q = 16, or 32 if there are `second` vectors.
    """
    size = _size(second)
    partials = torch.empty(len(space.programs), size, size, dtype=torch.float64, device=first.device)
    args = (space.matrices, space.programs, first, second, partials)
    constants = {"HAS_SECOND": second is not None, "VECTORS": MAX_VECTORS, "CHUNK": CHUNK, "BLOCK": BLOCK}
    launch(_inner_kernel, len(space.programs), args, {**constants, "FIELDS": FIELDS}, _variant(space, first, second))
    return partials


def _combine(
    space: Space, factors: Tensor, first: Tensor, second: Tensor | None, *, single: bool = False, rounds: bool = False
) -> Tensor:
    """Multiply factors with all vectors of every matrix.

    Factors are (M, 16, q), or (M, q) if `single`, for one combined vector per matrix. `rounds` rounds results to TF32.
    """
    out = space.empty(single=single)
    args = (space.matrices, space.programs, factors, first, second, out)
    constants = {"SINGLE": single, "ROUND": rounds, "HAS_SECOND": second is not None, "VECTORS": MAX_VECTORS}
    constants |= {"CHUNK": CHUNK, "BLOCK": BLOCK, "FIELDS": FIELDS}
    launch(_combine_kernel, len(space.programs), args, constants, _variant(space, first, second, factors))
    return out


def orthonormal(space: Space, vectors: Tensor, known: Tensor | None = None) -> Tensor:
    """Make the vectors of every matrix orthonormal to each other and to known vectors. Dependent vectors become zero.

    The result is rounded to TF32, so that tensor cores do not truncate it in products with weights.
    """
    first, second = (vectors, None) if known is None else (known, vectors)
    partials, size = _inner(space, first, second), _size(second)
    factors = torch.empty(len(space.matrices), MAX_VECTORS, size, dtype=torch.float64, device=vectors.device)
    constants = {"KNOWN": size - MAX_VECTORS, "SIZE": size}
    launch(
        _orthonormal_kernel,
        len(space.matrices),
        (partials, space.first_program, factors),
        constants,
        _variant(space, partials),
        num_warps=1,
    )
    return _combine(space, factors, first, second, rounds=True)


class Refined(NamedTuple):
    """The results of `refine` in flat buffers: best vectors, W times them, and subspaces for the next call."""

    right: Tensor  # one vector per matrix, not yet scaled to norm 1
    left: Tensor  # one vector per matrix, or the part of it on this rank
    subspace: Tensor  # all vectors


def refine(
    left: Callable[[Tensor], Tensor],  # W x
    right: Callable[[Tensor], Tensor],  # W^T y
    inner: Callable[[Tensor], Tensor] | None,  # the sum of (M, q, q) over the ranks; None if there is only one part
    cols: Space,
    rows: Space,
    subspaces: Tensor,
) -> Refined:
    """Do the same as `muon_fsdp.linalg.subspaces.refine` with two products W x, for vectors in flat buffers."""
    known = orthonormal(cols, subspaces)
    known_left = left(known)
    new = orthonormal(cols, right(known_left), known)
    new_left = left(new)
    partials, size = _inner(rows, known_left, new_left), 2 * MAX_VECTORS
    count, device = len(rows.matrices), subspaces.device
    first_program = rows.first_program
    if inner is not None:
        sums = torch.empty(count, size, size, dtype=torch.float64, device=device)
        launch(_sum_kernel, count, (partials, first_program, sums), {"SIZE": size}, _variant(rows, partials))
        partials, first_program = inner(sums), rows.each
    best = torch.empty(count, size, dtype=torch.float64, device=device)
    better = torch.empty(count, MAX_VECTORS, size, dtype=torch.float64, device=device)
    constants = {"SQUARINGS": SQUARINGS, "VECTORS": MAX_VECTORS, "SIZE": size}
    args = (partials, first_program, best, better)
    launch(_ritz_kernel, count, args, constants, _variant(rows, partials))
    return Refined(
        _combine(cols, best, known, new, single=True),
        _combine(rows, best, known_left, new_left, single=True),
        _combine(cols, better, known, new),
    )


def make_unit(cols: Space, rows: Space, right: Tensor, left: Tensor) -> Tensor:
    """Scale vectors v, in `right`, and W v, in `left`, to unit vectors, in place.

    Returns:
        (M,), the norms ||W v|| of unit vectors v.
    """
    norms = torch.empty(len(cols.matrices), dtype=torch.float32, device=right.device)
    args = (cols.matrices, rows.matrices, right, left, norms)
    launch(_unit_kernel, len(norms), args, {"BLOCK": 1024, "FIELDS": FIELDS}, _variant(cols, right, left))
    return norms


def _size(second: Tensor | None) -> int:
    return MAX_VECTORS if second is None else 2 * MAX_VECTORS


def _variant(space: Space, *tensors: Tensor | None) -> object:
    return (space.matrices.device, tuple(tensor is None for tensor in tensors), is_aligned(*tensors))
