"""Kernels of the spectral sphere: W^T W x for many matrices in one read of them, and what a tangent step needs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon_fsdp.kernels.launch import is_aligned, launch
from muon_fsdp.kernels.triton_elementwise import TYPES
from muon_fsdp.kernels.triton_norms import ALIGNMENT, INT32_MAX

ROWS = 64  # of a matrix that one program multiplies
MAX_WIDTH = 16384  # a row must fit into the registers of a program
ELEMENTS_AT_ONCE = 16384
TABLE_COLUMNS = 8
BOTH, LEFT, RIGHT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_TABLES = ["table", "addresses", "left", "right", "partials"]


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def _gram_kernel(  # type: ignore[no-untyped-def]
    table,  # per program: tensor, first element, stride, rows, width, where its left, right and partial vectors begin
    addresses,
    left,
    right,
    partials,
    MODE: tl.constexpr,
    TYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """u = W x and a partial sum of W^T u, each row being read once; or one of the two."""
    entry = table + 8 * tl.program_id(0)
    start, stride, width = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 4)
    rows, left_start = tl.load(entry + 3), tl.load(entry + 5)
    base = tl.load(addresses + tl.load(entry)).to(tl.pointer_type(TYPE))
    if ALIGNED:
        base, width = tl.multiple_of(base, 16), tl.multiple_of(width, 16)
        start, stride = tl.multiple_of(start, 16), tl.multiple_of(stride, 16)
    cols = tl.arange(0, WIDTH)
    inside = cols < width
    vector = tl.load(right + tl.load(entry + 6) + cols, mask=inside, other=0.0)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for first in range(0, rows, ROWS_AT_ONCE):
        row = first + tl.arange(0, ROWS_AT_ONCE)
        mask = (row < rows)[:, None] & inside[None, :]
        values = tl.load(base + start + row[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if MODE == RIGHT:
            product = tl.load(left + left_start + row, mask=row < rows, other=0.0)
        else:
            product = tl.sum(values * vector[None, :], axis=1)
            tl.store(left + left_start + row, product, mask=row < rows)
        if MODE != LEFT:
            total += tl.sum(values * product[:, None], axis=0)
    if MODE != LEFT:
        tl.store(partials + tl.load(entry + 7) + cols, total, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["table", "partials", "out"])
def _add_partials_kernel(table, partials, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    entry = table + 4 * tl.program_id(0)
    first, count, width = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    target = out + tl.load(entry + 3)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for number in range(0, count):
            total += tl.load(partials + first + number * width + cols, mask=cols < width, other=0.0)
        tl.store(target + cols, total, mask=cols < width)


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


def gram(
    table: Tensor,  # (programs, TABLE_COLUMNS) int64
    addresses: Tensor,
    left: Tensor,
    right: Tensor,
    partials: Tensor,
    *,
    mode: str,  # "both", "left" or "right"
    dtype: torch.dtype,
    width: int,  # the largest of the table
    aligned: bool,
) -> None:
    padded = triton.next_power_of_2(width)
    launch(
        _gram_kernel,
        len(table),
        (table, addresses, left, right, partials),
        {
            "MODE": {"both": 0, "left": 1, "right": 2}[mode],
            "TYPE": TYPES[dtype],
            "WIDTH": padded,
            "ROWS_AT_ONCE": max(1, min(16, ELEMENTS_AT_ONCE // padded)),
            "ALIGNED": aligned,
        },
        table.device,
        num_warps=8,
    )


def add_partials(table: Tensor, partials: Tensor, out: Tensor) -> None:
    """Sums of partial vectors; `table` has (first, count, width, where it goes) int64."""
    launch(_add_partials_kernel, len(table), (table, partials, out), {"BLOCK": 1024}, table.device)


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
