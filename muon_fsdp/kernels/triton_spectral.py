"""Kernels of a step on the spectral sphere: u^T A v, and A + c u v^T, for batches of matrices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon_fsdp.kernels.launch import is_aligned, launch
from muon_fsdp.kernels.triton_norms import ALIGNMENT, INT32_MAX


@triton.jit(do_not_specialize=["rows", "cols", "programs_each"], do_not_specialize_on_alignment=["partials", "active"])
def _bilinear_kernel(  # type: ignore[no-untyped-def]
    left, matrices, right, active, partials, rows, cols, programs_each,
    HAS_ACTIVE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix, part = tl.program_id(0) // programs_each, tl.program_id(0) % programs_each
    computes = True
    if HAS_ACTIVE:
        computes = tl.load(active + matrix) != 0
    if computes:
        row = part * ROWS + tl.arange(0, ROWS)
        if ALIGNED:
            cols = cols // 16 * 16
        base = matrix.to(tl.int64) * rows * cols
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for first in range(0, cols, BLOCK):
            col = first + tl.arange(0, BLOCK)
            mask = (row < rows)[:, None] & (col < cols)[None, :]
            values = tl.load(matrices + base + row[:, None] * cols + col[None, :], mask=mask, other=0.0).to(tl.float32)
            total += values * tl.load(right + matrix * cols + col, mask=col < cols, other=0.0)[None, :]
        weights = tl.load(left + matrix * rows + row, mask=row < rows, other=0.0)
        tl.store(partials + tl.program_id(0), tl.sum(tl.sum(total, axis=1) * weights, axis=0))


@triton.jit(do_not_specialize=["rows", "cols", "programs_each"], do_not_specialize_on_alignment=["active"])
def _shifted_cast_kernel(  # type: ignore[no-untyped-def]
    matrices, scales, left, right, shifts, active, out, rows, cols, programs_each,
    HAS_ACTIVE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix, part = tl.program_id(0) // programs_each, tl.program_id(0) % programs_each
    computes = True
    if HAS_ACTIVE:
        computes = tl.load(active + matrix) != 0
    if computes:
        row = part * ROWS + tl.arange(0, ROWS)
        if ALIGNED:
            cols = cols // 16 * 16
        base = matrix.to(tl.int64) * rows * cols
        scale = tl.load(scales + matrix)
        weights = tl.load(shifts + matrix) * tl.load(left + matrix * rows + row, mask=row < rows, other=0.0)
        for first in range(0, cols, BLOCK):
            col = first + tl.arange(0, BLOCK)
            mask = (row < rows)[:, None] & (col < cols)[None, :]
            at = base + row[:, None] * cols + col[None, :]
            values = scale * tl.load(matrices + at, mask=mask, other=0.0).to(tl.float32)
            values += weights[:, None] * tl.load(right + matrix * cols + col, mask=col < cols, other=0.0)[None, :]
            tl.store(out + at, values.to(out.dtype.element_ty), mask=mask)


def bilinear(left: Tensor, matrices: Tensor, right: Tensor, active: Tensor | None = None) -> Tensor:
    """u^T A v of every matrix (B, m, n), for float32 vectors; where not active, anything."""
    count, rows, cols = matrices.shape
    each, options = _grid(rows, cols, matrices)
    partials = torch.zeros(count, each, dtype=torch.float32, device=matrices.device)
    launch(
        _bilinear_kernel,
        count * each,
        (left, matrices, right, active, partials, rows, cols, each),
        {"HAS_ACTIVE": active is not None, **options},
        (matrices.device, matrices.dtype, is_aligned(left, matrices, right), matrices.numel() > INT32_MAX),
    )
    return partials.sum(-1)


def shifted_cast(
    matrices: Tensor,  # (B, m, n)
    scales: Tensor,  # (B,)
    left: Tensor,  # (B, m)
    right: Tensor,  # (B, n)
    shifts: Tensor,  # (B,)
    out: Tensor,  # (B, m, n), in any precision; may be `matrices`
    active: Tensor | None = None,
) -> Tensor:
    """scales * matrices + shifts * left right^T, into `out`; where not active, it stays."""
    count, rows, cols = matrices.shape
    each, options = _grid(rows, cols, matrices)
    launch(
        _shifted_cast_kernel,
        count * each,
        (matrices, scales, left, right, shifts, active, out, rows, cols, each),
        {"HAS_ACTIVE": active is not None, **options},
        (
            matrices.device,
            matrices.dtype,
            out.dtype,
            is_aligned(matrices, scales, left, right, shifts, out),
            matrices.numel() > INT32_MAX,
        ),
    )
    return out


def _grid(rows: int, cols: int, matrices: Tensor) -> tuple[int, dict[str, int | bool]]:
    at_once = 8
    aligned = cols % ALIGNMENT == 0 and all(is_aligned(matrices))
    return triton.cdiv(rows, at_once), {"ALIGNED": aligned, "ROWS": at_once, "BLOCK": 512}
