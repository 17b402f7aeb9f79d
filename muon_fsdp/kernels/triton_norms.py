"""Compute Frobenius norms of batches of matrices (one read), and scaled casts of them (one read and one write)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon_fsdp.kernels.launch import is_aligned, launch
from muon_fsdp.kernels.tables import ALIGNMENT, CHUNK

INT32_MAX = 2**31 - 1  # Triton compiles another kernel for larger integer arguments
# Programs of `damp` per matrix. Nearly all of them return at once, so there are fewer than a pass over the data needs.
DAMPING_PROGRAMS = 16


@triton.jit
def partial_norm(values):  # type: ignore[no-untyped-def]
    """Return the largest absolute value and the sum of squares of values / largest.

    The squares of the values themselves could leave the range of float32.
    """
    largest = tl.max(tl.abs(values), axis=0)
    relative = values / tl.where(largest == 0, 1.0, largest)
    return largest, tl.sum(relative * relative, axis=0)


@triton.jit
def _matrix_chunk(numel, chunks, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's matrix and its first element in the batch, the elements from there on, and their mask."""
    index = tl.program_id(0)
    matrix = index // chunks
    offset = (index % chunks).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    start = matrix.to(tl.int64) * numel
    if ALIGNED:  # without this hint the compiled kernel loads single elements
        start = tl.multiple_of(start, 16)
        numel = numel // 16 * 16
    return matrix, start, offset, offset < numel


@triton.jit(do_not_specialize=["numel", "chunks"])
def _partials_kernel(matrices, partials, numel, chunks, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    _, start, offset, mask = _matrix_chunk(numel, chunks, CHUNK, ALIGNED)
    values = tl.load(matrices + start + offset, mask=mask, other=0.0).to(tl.float32)
    largest, squares = partial_norm(values)
    tl.store(partials + 2 * tl.program_id(0), largest)
    tl.store(partials + 2 * tl.program_id(0) + 1, squares)


@triton.jit(do_not_specialize=["chunks"])
def _inverse_norms_kernel(partials, first_chunk, inverse_norms, chunks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    matrix = tl.program_id(0)
    if first_chunk is None:  # every matrix has the same number of chunks
        start, stop = matrix * chunks, (matrix + 1) * chunks
    else:
        start, stop = tl.load(first_chunk + matrix), tl.load(first_chunk + matrix + 1)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for chunk in range(start, stop, BLOCK):
        index = chunk + lanes
        largest = tl.maximum(largest, tl.load(partials + 2 * index, mask=index < stop, other=0.0))
    overall = tl.max(largest, axis=0)
    unit = tl.where(overall == 0, 1.0, overall)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for chunk in range(start, stop, BLOCK):
        index = chunk + lanes
        ratio = tl.load(partials + 2 * index, mask=index < stop, other=0.0) / unit
        squares += ratio * ratio * tl.load(partials + 2 * index + 1, mask=index < stop, other=0.0)
    total = tl.sum(squares, axis=0)
    root = tl.sqrt(tl.where(total == 0, 1.0, total))
    # If the largest entry is below 3e-39, 1 / unit is infinite although 1 / norm may not be. A scale that is too large
    # would make the iteration diverge.
    inverse = tl.where(unit < 1.0e-38, 1.0 / (unit * root), 1.0 / unit / root)
    # The inverse of a norm below the smallest normal number would be infinite, so it is limited. NaN stays NaN.
    tl.store(inverse_norms + matrix, tl.where(inverse > 3.0e38, 3.0e38, inverse))


@triton.jit(do_not_specialize=["numel", "chunks"], do_not_specialize_on_alignment=["scales"])
def _scaled_cast_kernel(matrices, scales, out, numel, chunks, factor, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    matrix, start, offset, mask = _matrix_chunk(numel, chunks, CHUNK, ALIGNED)
    position = start + offset
    values = tl.load(matrices + position, mask=mask, other=0.0).to(tl.float32)
    # The scale of a tiny matrix is near the largest float32, so factor * scale could overflow.
    values = values * tl.load(scales + matrix) * factor
    tl.store(out + position, values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["inverse_norms"])
def _damp_kernel(updates, inverse_norms, numel, eps, EACH: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    matrix, part = tl.program_id(0) // EACH, tl.program_id(0) % EACH
    norm = 1.0 / tl.load(inverse_norms + matrix)
    if norm < eps:
        start = matrix.to(tl.int64) * numel
        if ALIGNED:  # without this hint the compiled kernel loads single elements
            start = tl.multiple_of(start, 16)
            numel = numel // 16 * 16
        for first in range(part * CHUNK, numel, EACH * CHUNK):
            offset = first + tl.arange(0, CHUNK)
            at = updates + start + offset
            values = tl.load(at, mask=offset < numel, other=0.0).to(tl.float32) * (norm / eps)
            tl.store(at, values.to(updates.dtype.element_ty), mask=offset < numel)


def inverse_norms(batch: Tensor) -> Tensor:
    """Return one over the Frobenius norm of every matrix of a contiguous (B, m, n) batch.

    Returns:
        (B,), float32, with 1 for a zero matrix.
    """
    count, numel = batch.shape[0], batch.shape[1] * batch.shape[2]
    chunks = -(-numel // CHUNK)
    partials = torch.empty(count * chunks, 2, dtype=torch.float32, device=batch.device)
    aligned = numel % ALIGNMENT == 0 and all(is_aligned(batch))
    launch(
        _partials_kernel,
        count * chunks,
        (batch, partials, numel, chunks),
        {"CHUNK": CHUNK, "ALIGNED": aligned},
        (batch.device, batch.dtype, is_aligned(batch), numel > INT32_MAX),
        num_warps=8,
    )
    return _combine(partials, None, count, chunks)


def inverse_norms_of_partials(
    partials: Tensor,  # (num_chunks, 2), as `partial_norm` returns them
    first_chunk: Tensor,  # (B + 1,), the first chunk of every matrix, and the number of chunks
) -> Tensor:
    """Return one over the Frobenius norm of every matrix, (B,), from the partial norms of its chunks."""
    return _combine(partials, first_chunk, first_chunk.shape[0] - 1, 0)


def _combine(partials: Tensor, first_chunk: Tensor | None, count: int, chunks: int) -> Tensor:
    result = torch.empty(count, dtype=torch.float32, device=partials.device)
    variant = (partials.device, first_chunk is None)
    launch(_inverse_norms_kernel, count, (partials, first_chunk, result, chunks), {"BLOCK": 1024}, variant)
    return result


def damp(
    updates: Tensor,  # (B, m, n), contiguous, changed in place
    inverse_norms: Tensor,  # (B,) float32
    eps: float,
) -> None:
    """Multiply every matrix by min(1, norm / eps). Matrices with a factor of 1 are neither read nor written."""
    count, numel = updates.shape[0], updates.shape[1] * updates.shape[2]
    aligned = numel % ALIGNMENT == 0 and all(is_aligned(updates))
    launch(
        _damp_kernel,
        count * DAMPING_PROGRAMS,
        (updates, inverse_norms, numel, float(eps)),
        {"EACH": DAMPING_PROGRAMS, "CHUNK": CHUNK, "ALIGNED": aligned},
        (updates.device, updates.dtype, is_aligned(updates), numel > INT32_MAX),
        num_warps=8,
    )


def scaled_cast(
    batch: Tensor,  # (B, m, n), contiguous
    scales: Tensor,  # (B,)
    factor: float,
    out: Tensor,  # (B, m, n), contiguous, in another dtype
) -> Tensor:
    """Compute batch * scales * factor into `out`.

    Returns:
        `out`.
    """
    count, numel = batch.shape[0], batch.shape[1] * batch.shape[2]
    chunks = -(-numel // CHUNK)
    aligned = numel % ALIGNMENT == 0 and all(is_aligned(batch))
    launch(
        _scaled_cast_kernel,
        count * chunks,
        (batch, scales, out, numel, chunks, float(factor)),
        {"CHUNK": CHUNK, "ALIGNED": aligned},
        (batch.device, batch.dtype, out.dtype, is_aligned(batch, out), numel > INT32_MAX),
        num_warps=8,
    )
    return out
