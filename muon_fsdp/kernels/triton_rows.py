"""Rescale the rows of matrices by running second moments, in three launches: two reads of the matrices and one write.

No sum depends on the order in which programs finish, so all ranks that compute a matrix get the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon_fsdp.kernels.launch import has_aligned_rows, is_aligned, launch
from muon_fsdp.kernels.triton_norms import INT32_MAX

ROWS = 8  # rows per program


@triton.jit
def rows_of_program(program, programs_each, rows, cols, ROWS: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of a program's matrix, the rows it computes, the columns, and where the matrix begins."""
    matrix, part = program // programs_each, program % programs_each
    row = part * ROWS + tl.arange(0, ROWS)
    if ALIGNED:  # without this hint the compiled kernel loads single elements
        cols = cols // 16 * 16
    return matrix, row, cols, matrix.to(tl.int64) * rows * cols


@triton.jit(do_not_specialize=["rows", "cols", "programs_each"])
def _row_squares_kernel(  # type: ignore[no-untyped-def]
    matrices, squares, rows, cols, programs_each, inverse,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # From the end: the matrices that were written last, and those that are read first afterwards, are in the L2 cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    matrix, row, cols, base = rows_of_program(program, programs_each, rows, cols, ROWS, ALIGNED)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(0, cols, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        values = tl.load(matrices + base + row[:, None] * cols + col[None, :], mask=mask, other=0.0).to(tl.float32)
        values *= inverse
        total += values * values
    tl.store(squares + matrix * rows + row, tl.sum(total, axis=1), mask=row < rows)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["moments", "norm_ratios"])
def _row_factors_kernel(values, moments, norm_ratios, rows, beta2, share, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Update the moments of a matrix, and replace its row squares in `values` by 1 / (sqrt(moment) + eps)."""
    start = tl.program_id(0).to(tl.int64) * rows
    before = tl.zeros((BLOCK,), dtype=tl.float32)
    after = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        mask = row < rows
        squares = tl.load(values + start + row, mask=mask, other=0.0)
        moment = beta2 * tl.load(moments + start + row, mask=mask, other=1.0) + share * squares
        factors = 1.0 / (tl.sqrt(moment) + eps)
        norms = factors * tl.sqrt(squares)  # multiplied before it is squared, because factors^2 may overflow
        before += squares
        after += tl.where(mask, norms * norms, 0.0)
        tl.store(moments + start + row, moment, mask=mask)
        tl.store(values + start + row, factors, mask=mask)
    total, rescaled = tl.sqrt(tl.sum(before, axis=0)), tl.sqrt(tl.sum(after, axis=0))
    ratio = total / tl.where(rescaled > 0, rescaled, 1.0)
    tl.store(norm_ratios + tl.program_id(0), tl.where(rescaled > 0, ratio, 0.0))


@triton.jit(do_not_specialize=["rows", "cols", "programs_each"], do_not_specialize_on_alignment=["norm_ratios"])
def _scale_rows_kernel(  # type: ignore[no-untyped-def]
    matrices, factors, norm_ratios, rows, cols, programs_each,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix, row, cols, base = rows_of_program(tl.program_id(0), programs_each, rows, cols, ROWS, ALIGNED)
    scales = tl.load(factors + matrix * rows + row, mask=row < rows, other=0.0) * tl.load(norm_ratios + matrix)
    for first in range(0, cols, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        at = matrices + base + row[:, None] * cols + col[None, :]
        values = tl.load(at, mask=mask, other=0.0).to(tl.float32) * scales[:, None]
        tl.store(at, values.to(matrices.dtype.element_ty), mask=mask)


def rescale_rows(
    matrices: Tensor,  # (B, rows, cols), contiguous
    moments: Tensor,  # (B, rows) float32, contiguous
    factor: float,
    beta2: float,
    eps: float,
) -> None:
    """Do the same as `muon_fsdp.linalg.scaling.rescale_rows` with kernels."""
    count, rows, cols = matrices.shape
    each = triton.cdiv(rows, ROWS)
    # The widths of most models are multiples of 256, and a block that is partly masked wastes a part of each load.
    tiles = {"ALIGNED": has_aligned_rows(matrices), "ROWS": ROWS, "BLOCK": 512 if cols % 512 == 0 else 256}
    variant = (matrices.device, matrices.dtype, is_aligned(matrices), matrices.numel() > INT32_MAX)
    values = torch.empty(count, rows, dtype=torch.float32, device=matrices.device)
    norm_ratios = torch.empty(count, dtype=torch.float32, device=matrices.device)
    sizes = (rows, cols, each)
    launch(_row_squares_kernel, count * each, (matrices, values, *sizes, 1.0 / factor), tiles, variant)
    numbers = (rows, float(beta2), (1.0 - beta2) / cols, float(eps))
    launch(_row_factors_kernel, count, (values, moments, norm_ratios, *numbers), {"BLOCK": 1024}, matrices.device)
    launch(_scale_rows_kernel, count * each, (matrices, values, norm_ratios, *sizes), tiles, variant)
