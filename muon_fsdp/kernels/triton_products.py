"""Compute the two products of the iteration in Triton: a symmetric one that computes one triangle, and a multiply-add.

Both work on batches of contiguous matrices and accumulate in float32. Tiles are read and written through tensor
descriptors (the bulk copy engine of Hopper and later GPUs) if rows are aligned, and through masked pointers otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from muon_fsdp.kernels.launch import (
    Addend,
    TileConfig,
    has_aligned_rows,
    is_aligned,
    launch,
    num_processors,
    unpack,
)

INTERPRETED_PROGRAMS = 4  # programs of a persistent kernel in Triton's interpreter, which has no multiprocessors


@triton.jit
def _load(source, batch, row, col, rows, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BULK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a tile of matrix number `batch`, with zeros outside the matrix."""
    if BULK:
        tile = source.load([batch, row, col]).reshape(BLOCK_R, BLOCK_C)
    else:
        r = row + tl.arange(0, BLOCK_R)[:, None]
        c = col + tl.arange(0, BLOCK_C)[None, :]
        offset = (batch.to(tl.int64) * rows + r) * cols + c
        tile = tl.load(source + offset, mask=(r < rows) & (c < cols), other=0.0)
    return tile


@triton.jit
def _store(target, tile, batch, row, col, rows, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BULK: tl.constexpr):  # type: ignore[no-untyped-def]
    if BULK:
        target.store([batch, row, col], tile.reshape(1, BLOCK_R, BLOCK_C))
    else:
        r = row + tl.arange(0, BLOCK_R)[:, None]
        c = col + tl.arange(0, BLOCK_C)[None, :]
        offset = (batch.to(tl.int64) * rows + r) * cols + c
        tl.store(target + offset, tile, mask=(r < rows) & (c < cols))


@triton.jit
def _triangle_row(index):  # type: ignore[no-untyped-def]
    """Return the row of the index-th element of a lower triangle.

    The square root in float32 may be off by one row, which the last two lines correct.
    """
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    return tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)


@triton.jit
def _triangle_tile(index, rows_of_tiles, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the index-th tile (i, j), j <= i, of a lower triangle; `GROUP` rows are walked column by column."""
    first = _triangle_row(index) // GROUP * GROUP
    height = tl.minimum(GROUP, rows_of_tiles - first)
    within = index - first * (first + 1) // 2
    # A group consists of a rectangle with `first` columns and a triangle to the right of it.
    rest = within - height * first
    corner = _triangle_row(tl.maximum(rest, 0))
    in_rectangle = rest < 0
    i = tl.where(in_rectangle, first + within % height, first + corner)
    j = tl.where(in_rectangle, within // height, first + rest - corner * (corner + 1) // 2)
    return i, j


@triton.jit(do_not_specialize=["num_matrices", "rows", "inner"], do_not_specialize_on_alignment=["active"])
def _symmetric_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    e,
    d,
    active,
    num_matrices,
    rows,
    inner,
    alpha,
    beta,
    gamma,
    SAME: tl.constexpr,
    SYMMETRIZE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_C: tl.constexpr,
    HAS_E: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    BULK_IN: tl.constexpr,
    BULK_OUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if ALIGNED:  # without this hint the compiled kernel loads single elements
        rows = rows // 16 * 16
        if not TRANSPOSED:
            inner = inner // 16 * 16
    rows_of_tiles = tl.cdiv(rows, BLOCK)
    tiles_each = rows_of_tiles * (rows_of_tiles + 1) // 2
    for tile in tl.range(tl.program_id(0), tiles_each * num_matrices, tl.num_programs(0), flatten=PERSISTENT):
        batch = tile // tiles_each
        computes = True
        if HAS_ACTIVE:
            computes = tl.load(active + batch) != 0
        if computes:
            i, j = _triangle_tile(tile % tiles_each, rows_of_tiles, GROUP)
            row, col = i * BLOCK, j * BLOCK
            acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            for k in range(0, inner, BLOCK_K):
                if TRANSPOSED:
                    left = _load(a, batch, k, row, inner, rows, BLOCK_K, BLOCK, BULK_IN).T
                    right = _load(a if SAME else b, batch, k, col, inner, rows, BLOCK_K, BLOCK, BULK_IN)
                else:
                    left = _load(a, batch, row, k, rows, inner, BLOCK, BLOCK_K, BULK_IN)
                    right = _load(a if SAME else b, batch, col, k, rows, inner, BLOCK, BLOCK_K, BULK_IN).T
                acc = tl.dot(left, right, acc, input_precision=PRECISION)
            acc *= alpha
            if HAS_C:
                acc += beta * _load(c, batch, row, col, rows, rows, BLOCK, BLOCK, BULK_OUT).to(tl.float32)
            if HAS_E:
                acc += gamma * _load(e, batch, row, col, rows, rows, BLOCK, BLOCK, BULK_OUT).to(tl.float32)
            result = acc.to(d.dtype if BULK_OUT else d.dtype.element_ty)
            if SYMMETRIZE:  # noqa: SIM102 - a constant when the kernel is compiled, unlike the next condition
                if row == col:
                    below = tl.arange(0, BLOCK)[:, None] >= tl.arange(0, BLOCK)[None, :]
                    result = tl.where(below, result, result.T)
            _store(d, result, batch, row, col, rows, rows, BLOCK, BLOCK, BULK_OUT)
            # On the diagonal this stores the same tile again.
            _store(d, result.T, batch, col, row, rows, rows, BLOCK, BLOCK, BULK_OUT)


@triton.jit(
    do_not_specialize=["num_matrices", "rows", "cols", "inner"], do_not_specialize_on_alignment=["c_scale", "active"]
)
def _multiply_add_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    c,
    d,
    c_scale,
    active,
    num_matrices,
    rows,
    cols,
    inner,
    alpha,
    beta,
    HAS_C: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    BULK_IN: tl.constexpr,
    BULK_OUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if ALIGNED:  # without this hint the compiled kernel loads single elements
        inner = inner // 16 * 16
        cols = cols // 16 * 16
    HALF: tl.constexpr = BLOCK_N // 2  # the result is written in two halves to save shared memory
    tile_rows, tile_cols = tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    tiles_each = tile_rows * tile_cols
    for tile in tl.range(tl.program_id(0), tiles_each * num_matrices, tl.num_programs(0), flatten=PERSISTENT):
        batch = tile // tiles_each
        computes = True
        if HAS_ACTIVE:
            computes = tl.load(active + batch) != 0
        if computes:
            within = tile % tiles_each
            first = within // (GROUP * tile_cols) * GROUP
            height = tl.minimum(GROUP, tile_rows - first)
            row = (first + within % (GROUP * tile_cols) % height) * BLOCK_M
            col = within % (GROUP * tile_cols) // height * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for k in range(0, inner, BLOCK_K):
                left = _load(a, batch, row, k, rows, inner, BLOCK_M, BLOCK_K, BULK_IN)
                right = _load(b, batch, k, col, inner, cols, BLOCK_K, BLOCK_N, BULK_IN)
                acc = tl.dot(left, right, acc, input_precision=PRECISION)
            acc *= alpha
            scale = 1.0
            if HAS_SCALE:
                # c_scale is near the largest float32 for tiny matrices, so beta * scale could overflow. The kernel
                # therefore multiplies c by the scale first, which gives a number of ordinary size.
                scale = tl.load(c_scale + batch)
            first_half, second_half = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
            if HAS_C:
                added = _load(c, batch, row, col, rows, cols, BLOCK_M, HALF, BULK_OUT).to(tl.float32)
                first_half += beta * (scale * added)
            element = d.dtype if BULK_OUT else d.dtype.element_ty
            _store(d, first_half.to(element), batch, row, col, rows, cols, BLOCK_M, HALF, BULK_OUT)
            col += HALF
            if HAS_C:
                second_half += beta * (
                    scale * _load(c, batch, row, col, rows, cols, BLOCK_M, HALF, BULK_OUT).to(tl.float32)
                )
            _store(d, second_half.to(element), batch, row, col, rows, cols, BLOCK_M, HALF, BULK_OUT)


def symmetric_product(
    a: Tensor,  # (B, m, k), or (B, k, m) if transposed
    b: Tensor,  # the same shape as a
    addends: Sequence[Addend],  # at most two, (B, m, m), symmetric
    out: Tensor,  # (B, m, m)
    config: TileConfig,
    *,
    alpha: float = 1.0,
    transposed: bool = False,
    active: Tensor | None = None,  # (B,) int32
) -> Tensor:
    """Compute alpha * a @ b^T plus all addends into `out`, exactly symmetric. All operands must be contiguous.

    Returns:
        `out`. Where `active` is 0, its matrices keep their numbers.
    """
    c, beta, e, gamma = unpack(addends)
    config = config if active is None else config._replace(persistent=False)
    rows, inner = (a.shape[2], a.shape[1]) if transposed else (a.shape[1], a.shape[2])
    side, block = config.rows, (config.inner, config.rows) if transposed else (config.rows, config.inner)
    bulk_in, bulk_out = _can_be_tiled(a, b), _can_be_tiled(out, c, e)
    tiles = -(-rows // side)  # triton.cdiv takes microseconds of host time
    launch(
        _symmetric_kernel,
        _num_programs(tiles * (tiles + 1) // 2 * a.shape[0], config, a),
        (
            _operand(a, block, bulk_in),
            None if a is b else _operand(b, block, bulk_in),
            _operand(c, (side, side), bulk_out),
            _operand(e, (side, side), bulk_out),
            _operand(out, (side, side), bulk_out),
            active,
            a.shape[0],
            rows,
            inner,
            float(alpha),
            float(beta),
            float(gamma),
        ),
        {
            "SAME": a is b,
            # Rounding makes the product of two different matrices asymmetric, and every product in tf32x3.
            "SYMMETRIZE": a is not b or a.dtype == torch.float32,
            "TRANSPOSED": transposed,
            "HAS_C": c is not None,
            "HAS_E": e is not None,
            "HAS_ACTIVE": active is not None,
            "BLOCK": side,
            "BLOCK_K": config.inner,
            "GROUP": config.group,
            "PERSISTENT": config.persistent,
            "BULK_IN": bulk_in,
            "BULK_OUT": bulk_out,
            "ALIGNED": not (bulk_in and bulk_out) and has_aligned_rows(a, b, c, e, out),
            "PRECISION": precision(a.dtype),
        },
        (a.device, _dtypes(a, b, c, e, out), (bulk_in and bulk_out) or is_aligned(a, b, c, e, out)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def multiply_add(
    a: Tensor,  # (B, m, k)
    b: Tensor,  # (B, k, n)
    c: Addend | None,  # (B, m, n)
    out: Tensor,  # (B, m, n)
    config: TileConfig,
    *,
    alpha: float = 1.0,
    c_scale: Tensor | None = None,  # (B,) float32
    active: Tensor | None = None,  # (B,) int32
) -> Tensor:
    """Compute alpha * a @ b + c.factor * c_scale * c.matrices into `out`. All operands must be contiguous.

    Returns:
        `out`. Where `active` is 0, its matrices keep their numbers.
    """
    summand, beta = (None, 0.0) if c is None else c
    config = config if active is None else config._replace(persistent=False)
    (num_matrices, rows, inner), cols = a.shape, b.shape[2]
    bulk_in, bulk_out = _can_be_tiled(a, b), _can_be_tiled(out, summand)
    half = (config.rows, config.cols // 2)
    tiles = -(-rows // config.rows) * -(-cols // config.cols) * num_matrices
    launch(
        _multiply_add_kernel,
        _num_programs(tiles, config, a),
        (
            _operand(a, (config.rows, config.inner), bulk_in),
            _operand(b, (config.inner, config.cols), bulk_in),
            _operand(summand, half, bulk_out),
            _operand(out, half, bulk_out),
            c_scale,
            active,
            num_matrices,
            rows,
            cols,
            inner,
            float(alpha),
            float(beta),
        ),
        {
            "HAS_C": summand is not None,
            "HAS_SCALE": c_scale is not None,
            "HAS_ACTIVE": active is not None,
            "BLOCK_M": config.rows,
            "BLOCK_N": config.cols,
            "BLOCK_K": config.inner,
            "GROUP": config.group,
            "PERSISTENT": config.persistent,
            "BULK_IN": bulk_in,
            "BULK_OUT": bulk_out,
            "ALIGNED": not (bulk_in and bulk_out) and has_aligned_rows(a, b, summand, out),
            "PRECISION": precision(a.dtype),
        },
        (a.device, _dtypes(a, b, summand, out), (bulk_in and bulk_out) or is_aligned(a, b, summand, out)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def _num_programs(tiles: int, config: TileConfig, tensor: Tensor) -> int:
    if not config.persistent:
        return tiles
    if not tensor.is_cuda:
        return min(tiles, INTERPRETED_PROGRAMS)
    return min(tiles, num_processors(tensor.device))


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])


def precision(dtype: torch.dtype) -> str:
    """Return the precision of tl.dot: for float32 operands three TF32 products, as accurate as float32 arithmetic.

    No AMD GPU accepts that, so `select` chooses the library there. Some reject TF32 even for half-precision operands,
    for which every name means the same product.
    """
    return "tf32x3" if dtype == torch.float32 else "ieee"


def _can_be_tiled(*tensors: Tensor | None) -> bool:
    """Return whether tensor descriptors can address all tensors.

    This needs a Hopper or later GPU, rows of multiples of 16 bytes, and 16-byte aligned addresses.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if not tensor.is_cuda or tensor.shape[-1] * tensor.itemsize % 16 or tensor.data_ptr() % 16:
            return False
        if not _has_bulk_copies(tensor.device):
            return False
    return True


def _operand(tensor: Tensor | None, block: tuple[int, int], bulk: bool) -> Any:
    if tensor is None or not bulk:
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, *block])


@lru_cache(maxsize=64)
def _has_bulk_copies(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
