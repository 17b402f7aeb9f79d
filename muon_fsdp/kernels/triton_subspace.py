"""Kernels that find the best vectors of subspaces of all matrices at once: inner products, small factors, combinations.

Vectors are rows of flat float32 buffers, 16 or fewer per matrix; matrices of all shapes share a buffer and a launch.
Small matrices are float64: what is nearly dependent is blown up when it is made orthonormal, and its rounding with it.
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

CHUNK = 512  # columns of which one program computes inner products
BLOCK = 64
SQUARINGS = 24  # S^(2^24): all but the top eigenvalue have died out, or are as large but for 1e-7
# What is left of a unit vector without those before it is rounding if its square is no more: of vectors in memory,
# which are float32, and of small ones in float64.
DEPENDENT, DEPENDENT_SMALL = tl.constexpr(1e-10), tl.constexpr(1e-20)
FIELDS = 5


@dataclass(frozen=True)
class Space:
    """Where the vectors along one side of all matrices are in a flat buffer: class by class, matrix by matrix."""

    shapes: tuple[tuple[int, int, int], ...]  # (count, vectors of each, length) of every class
    # (M, 5) int64: start, vectors, length, start among single vectors, start among those of classes
    matrices: Tensor
    programs: Tensor  # (P, 2) int32: matrix, first column
    first_program: Tensor  # (M + 1,) int32
    each: Tensor  # (M + 1,) int32: 0, 1, ..

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, int, int]], device: torch.device) -> Space:
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
        numel = sum(count * (1 if single else vectors) * length for count, vectors, length in self.shapes)
        return torch.empty(numel, dtype=torch.float32, device=self.matrices.device)

    def split(self, flat: Tensor, *, single: bool = False) -> list[Tensor]:
        """(count, vectors, length) of every class; (count, length) of single ones."""
        sizes = [(c, n) if single else (c, b, n) for c, b, n in self.shapes]
        parts = torch.split(flat, [torch.Size(size).numel() for size in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    at, first, second, col, HAS_SECOND: tl.constexpr, VECTORS: tl.constexpr
):
    """(rows, cols) of a matrix's vectors in `first`, and below them those in `second`."""
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
        total = tl.dot(values, tl.trans(values), total, out_dtype=tl.float64)
    row = tl.arange(0, SIZE)
    tl.store(partials + index * SIZE * SIZE + row[:, None] * SIZE + row[None, :], total)


@triton.jit
def _summed(partials, first_program, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inner products of the matrix of this program."""
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
    """Rows T of which T A is orthonormal and spans A, from A A^T: the Gram-Schmidt process. The first KNOWN are."""
    inner = _summed(partials, first_program, SIZE)
    row, col = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    squares = tl.sum(tl.where(row == col, inner, 0.0), axis=0)
    scales = tl.where(squares == 0, 0.0, 1.0 / tl.sqrt(tl.where(squares == 0, 1.0, squares)))
    inner = inner * scales[:, None] * scales[None, :]
    combined = tl.where(row == col, 1.0, 0.0).to(tl.float64)
    for step in range(SIZE):
        inner_row = tl.sum(tl.where(row == step, inner, 0.0), axis=0)  # and column: what is left to do is symmetric
        combined_row = tl.sum(tl.where(row == step, combined, 0.0), axis=0)
        pivot = tl.sum(tl.where(tl.arange(0, SIZE) == step, inner_row, 0.0), axis=0)
        depends = pivot <= DEPENDENT  # NaN does not
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
    """Of S = A A^T the top eigenvector; and rows of S^8, where what is far from the top dies out, made orthonormal."""
    row, col = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    power = _scaled(_summed(partials, first_program, SIZE))
    for _ in range(3):
        power = _scaled(tl.dot(power, power, out_dtype=tl.float64))
    filtered = tl.where(row < VECTORS, power, 0.0)
    squares = tl.sum(filtered * filtered, axis=1)
    filtered = filtered / tl.sqrt(tl.where(squares == 0, 1.0, squares))[:, None]
    index = tl.arange(0, SIZE)
    kept = tl.zeros((SIZE,), dtype=tl.int32)
    for step in range(2 * VECTORS):  # twice: rounding leaves a part of the others in a row
        at = step % VECTORS
        this = tl.sum(tl.where(row == at, filtered, 0.0), axis=0)
        square = tl.sum(this * this, axis=0)
        depends = square <= DEPENDENT_SMALL
        this = tl.where(depends, 0.0, this / tl.sqrt(tl.where(depends, 1.0, square)))
        kept = tl.where(index == at, tl.where(depends, 0, 1), kept)
        parts = tl.sum(filtered * this[None, :], axis=1)
        filtered -= tl.where(row > at, parts[:, None] * this[None, :], 0.0)
        filtered = tl.where(row == at, this[None, :], filtered)
    # A vector that no row has taken the place of stays.
    filtered = tl.where((kept == 0)[:, None], tl.where(row == col, 1.0, 0.0), filtered)
    at = better + tl.program_id(0) * VECTORS * SIZE + row * SIZE + col
    tl.store(at, filtered, mask=(row < VECTORS) & (col < SIZE))
    for _ in range(SQUARINGS - 3):
        power = _scaled(tl.dot(power, power, out_dtype=tl.float64))
    # All columns are multiples of the eigenvector by now, but some may be zero.
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
        combined = tl.dot(factor, values, out_dtype=tl.float64).to(tl.float32)
        if ROUND:
            combined = rounded(combined)
        tl.store(out + start + row * length + col[None, :], combined, mask=(row < count) & (col < length)[None, :])


@triton.jit
def _unit_kernel(rights, lefts, right, left, norms, BLOCK: tl.constexpr, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Norms of W v for v that may not have a norm of 1, and both made unit vectors."""
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
    """Put `starts`, one set per class, where vectors are zero."""
    constants = {"VECTORS": MAX_VECTORS, "BLOCK": 1024, "FIELDS": FIELDS}
    programs = len(space.matrices) * MAX_VECTORS
    launch(_fill_kernel, programs, (space.matrices, vectors, starts), constants, _kind(space, vectors, starts))


def _inner(space: Space, first: Tensor, second: Tensor | None) -> Tensor:
    """Parts of the inner products of all vectors of a matrix, (P, q, q)."""
    size = _size(second)
    partials = torch.empty(len(space.programs), size, size, dtype=torch.float64, device=first.device)
    args = (space.matrices, space.programs, first, second, partials)
    constants = {"HAS_SECOND": second is not None, "VECTORS": MAX_VECTORS, "CHUNK": CHUNK, "BLOCK": BLOCK}
    launch(_inner_kernel, len(space.programs), args, {**constants, "FIELDS": FIELDS}, _kind(space, first, second))
    return partials


def _combine(
    space: Space, factors: Tensor, first: Tensor, second: Tensor | None, *, single: bool = False, rounds: bool = False
) -> Tensor:
    """Factors (M, 16, q) times all vectors of a matrix; or (M, q), to a single one."""
    out = space.empty(single=single)
    args = (space.matrices, space.programs, factors, first, second, out)
    constants = {"SINGLE": single, "ROUND": rounds, "HAS_SECOND": second is not None, "VECTORS": MAX_VECTORS}
    constants |= {"CHUNK": CHUNK, "BLOCK": BLOCK, "FIELDS": FIELDS}
    launch(_combine_kernel, len(space.programs), args, constants, _kind(space, first, second, factors))
    return out


def orthonormal(space: Space, vectors: Tensor, known: Tensor | None = None) -> Tensor:
    """The vectors of every matrix made orthonormal, and orthogonal to known ones; what depends on others becomes 0.

    In TF32, so that products with them are exact in them; inner products take them as they are.
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
        _kind(space, partials),
        num_warps=1,
    )
    return _combine(space, factors, first, second, rounds=True)


class Refined(NamedTuple):
    """Flat: the best vector of every subspace, W times it, and a better subspace."""

    right: Tensor  # single vectors, not yet of norm 1
    left: Tensor  # single vectors, or parts of them on this rank
    subspace: Tensor


def refine(
    left: Callable[[Tensor], Tensor],
    right: Callable[[Tensor], Tensor],
    inner: Callable[[Tensor], Tensor],  # sums (M, q, q) over the ranks; the same tensor if there is nothing to add
    cols: Space,
    rows: Space,
    subspaces: Tensor,
) -> Refined:
    """`muon_fsdp.linalg.subspaces.refine` with two products W x, for vectors in flat buffers."""
    known = orthonormal(cols, subspaces)
    known_left = left(known)
    new = orthonormal(cols, right(known_left), known)
    new_left = left(new)
    partials, size = _inner(rows, known_left, new_left), 2 * MAX_VECTORS
    count, device = len(rows.matrices), subspaces.device
    sums = torch.empty(count, size, size, dtype=torch.float64, device=device)
    launch(_sum_kernel, count, (partials, rows.first_program, sums), {"SIZE": size}, _kind(rows, partials))
    sums = inner(sums)
    best = torch.empty(count, size, dtype=torch.float64, device=device)
    better = torch.empty(count, MAX_VECTORS, size, dtype=torch.float64, device=device)
    constants = {"SQUARINGS": SQUARINGS, "VECTORS": MAX_VECTORS, "SIZE": size}
    args = (sums, rows.each, best, better)
    launch(_ritz_kernel, count, args, constants, _kind(rows, sums))
    return Refined(
        _combine(cols, best, known, new, single=True),
        _combine(rows, best, known_left, new_left, single=True),
        _combine(cols, better, known, new),
    )


def make_unit(cols: Space, rows: Space, right: Tensor, left: Tensor) -> Tensor:
    """Vectors v and W v made unit vectors, in place; the norms ||W v|| (M,) for unit v."""
    norms = torch.empty(len(cols.matrices), dtype=torch.float32, device=right.device)
    args = (cols.matrices, rows.matrices, right, left, norms)
    launch(_unit_kernel, len(norms), args, {"BLOCK": 1024, "FIELDS": FIELDS}, _kind(cols, right, left))
    return norms


def _size(second: Tensor | None) -> int:
    return MAX_VECTORS if second is None else 2 * MAX_VECTORS


def _kind(space: Space, *tensors: Tensor | None) -> object:
    return (space.matrices.device, tuple(tensor is None for tensor in tensors), is_aligned(*tensors))
