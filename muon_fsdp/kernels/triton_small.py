"""Orthogonalize batches of matrices with at most 128 rows or columns: the whole iteration in one Triton kernel.

One program computes one matrix X, (m, n) with m <= n. All m x m matrices stay on chip, and no iterate is written to
memory: the current iterate is q (I + G) X with an m x m matrix G, so every pass reads X itself. A chain with one
refresh therefore reads X three times and writes the result once.

Operands of tensor cores are float16. Every operand is scaled by a power of two first, which loses nothing, and where
that matters it is split into a float16 number and a float16 remainder, which together hold 22 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon_fsdp.kernels.launch import has_aligned_rows, is_aligned, launch, num_processors

# (degree, products, identity): X <- (Z + identity I) X. Every product holds its factors (alpha, beta[, gamma]).
Step: TypeAlias = tuple[int, Sequence[Sequence[float]], float]

MAX_ROWS = 128
# Up to this many rows all products are computed from split operands, because a single entry can decide a singular
# value, and rounding it to float16 would change the result.
SPLIT_ROWS = 64
NUM_FACTORS: tl.constexpr = tl.constexpr(12)  # numbers per step in FACTORS: four products of three
SCALE: tl.constexpr = tl.constexpr(1024.0)  # of m x m matrices in float16, whose entries are at most about 10
ITERATE_SCALE: tl.constexpr = tl.constexpr(1024.0)  # of iterates in float16, whose singular values are about 1


class SmallConfig(NamedTuple):
    """How a program cuts its matrix into tiles, and which products it computes from split operands."""

    tile: int  # columns of X per tile
    num_warps: int
    num_stages: int
    split_from: int  # the first step, counted from 0, whose m x m products split their operands


@triton.jit
def _load(matrix, first, rows, cols, ROWS: tl.constexpr, TILE: tl.constexpr, TALL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load columns first to first + TILE of X, (ROWS, TILE), with zeros outside the matrix."""
    if TALL:
        c = first + tl.arange(0, TILE)[:, None]
        r = tl.arange(0, ROWS)[None, :]
        tile = tl.load(matrix + c * rows + r, mask=(c < cols) & (r < rows), other=0.0).trans()
    else:
        r = tl.arange(0, ROWS)[:, None]
        c = first + tl.arange(0, TILE)[None, :]
        tile = tl.load(matrix + r * cols + c, mask=(r < rows) & (c < cols), other=0.0)
    return tile


@triton.jit
def _store(matrix, tile, first, rows, cols, ROWS: tl.constexpr, TILE: tl.constexpr, TALL: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tile.to(matrix.dtype.element_ty)
    if TALL:
        c = first + tl.arange(0, TILE)[:, None]
        r = tl.arange(0, ROWS)[None, :]
        tl.store(matrix + c * rows + r, tile.trans(), mask=(c < cols) & (r < rows))
    else:
        r = tl.arange(0, ROWS)[:, None]
        c = first + tl.arange(0, TILE)[None, :]
        tl.store(matrix + r * cols + c, tile, mask=(r < rows) & (c < cols))


@triton.jit
def _inverse_power(size):  # type: ignore[no-untyped-def]
    """Return a power of two p with 1 <= size * p < 2, but at most 2^104, so that 2^23 p is finite."""
    exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 0x0B800000), 0x7E800000)
    return (0x7F000000 - exponent).to(tl.float32, bitcast=True)


@triton.jit
def _symmetrized(a):  # type: ignore[no-untyped-def]
    return 0.5 * (a + a.trans())


@triton.jit
def _low(a, high):  # type: ignore[no-untyped-def]
    return (a - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _add_gram(acc, x, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add x x^T to acc. Split, the sum is h h^T + 2 h l^T, whose symmetric part is (h + l)(h + l)^T up to l l^T."""
    high = x.to(tl.float16)
    acc = tl.dot(high, high.trans(), acc)
    if SPLIT:
        acc = tl.dot(high, (2.0 * _low(x, high)).to(tl.float16).trans(), acc)
    return acc


@triton.jit
def _square(a, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a @ a for a symmetric matrix."""
    a *= SCALE
    high = a.to(tl.float16)
    acc = tl.dot(high, high)
    if SPLIT:
        acc = _symmetrized(tl.dot(high, (2.0 * _low(a, high)).to(tl.float16), acc))
    return acc * (1.0 / (SCALE * SCALE))


@triton.jit
def _product(a, b, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a @ b, which rounding makes slightly asymmetric even if the two matrices commute."""
    a *= SCALE
    b *= SCALE
    high, right = a.to(tl.float16), b.to(tl.float16)
    acc = tl.dot(high, right)
    if SPLIT:
        acc = tl.dot(high, _low(b, right), acc)
        acc = tl.dot(_low(a, high), right, acc)
    return acc * (1.0 / (SCALE * SCALE))


@triton.jit
def _largest(matrix, rows, cols, ROWS: tl.constexpr, TILE: tl.constexpr, TALL: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    largest = tl.zeros((ROWS, TILE), dtype=tl.float32)
    for index in tl.range(0, tl.cdiv(cols, TILE), num_stages=STAGES):
        tile = _load(matrix, index * TILE, rows, cols, ROWS, TILE, TALL)
        largest = tl.maximum(largest, tl.abs(tile.to(tl.float32)))
    return tl.max(tl.max(largest, axis=1), axis=0)


@triton.jit
def _gram(  # type: ignore[no-untyped-def]
    matrix, scale, rows, cols, ROWS: tl.constexpr, TILE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr
):
    """Return S S^T and its trace, for S = scale * X."""
    acc = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    for index in range(0, tl.cdiv(cols, TILE)):
        tile = _load(matrix, index * TILE, rows, cols, ROWS, TILE, TALL)
        acc = _add_gram(acc, tile.to(tl.float32) * scale, WIDE)
    if WIDE:
        acc = _symmetrized(acc)
    diagonal = tl.where(tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :], acc, 0.0)
    return acc, tl.sum(tl.sum(diagonal, axis=1), axis=0)


@triton.jit
def _apply(high, low, tile, scale, LOW: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return SCALE * (I + G) S for a tile S = scale * X.

    With LOW, high + low is SCALE * (I + G) to 22 bits. Otherwise high is SCALE * G: rounding I + G to float16 would
    tilt the singular vectors of matrices of a low rank, whose G has small entries.
    """
    s = tile.to(tl.float32) * scale
    right = s.to(tl.float16)
    if LOW:
        acc = tl.dot(high, right)
        acc = tl.dot(low, right, acc)
    else:
        acc = tl.dot(high, right, tile.to(tl.float32) * (scale * SCALE))
    if WIDE:
        acc = tl.dot(high, _low(s, right), acc)
    return acc


@triton.jit
def _identity(ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.where(tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :], 1.0, 0.0)


@triton.jit
def _refreshed_gram(  # type: ignore[no-untyped-def]
    matrix,
    total,
    scale,
    growth,
    rows,
    cols,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    EXACT: tl.constexpr,
    LOW: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """Return Y Y^T for Y = growth * (I + total) S, S = scale * X.

    The first and the last columns are read in turn first, because those that were read last are still in the L2 cache.
    """
    factor = (total + _identity(ROWS) if LOW else total) * SCALE
    high = factor.to(tl.float16)
    low = _low(factor, high)
    acc = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    tiles = tl.cdiv(cols, TILE)
    for index in range(0, tiles):
        column = (tiles - 1 - index if BACKWARDS else index) * TILE
        tile = _load(matrix, column, rows, cols, ROWS, TILE, TALL)
        y = _apply(high, low, tile, scale, LOW, WIDE) * (growth * (ITERATE_SCALE / SCALE))
        acc = _add_gram(acc, y, EXACT)
    if EXACT:
        acc = _symmetrized(acc)
    return acc * (1.0 / (ITERATE_SCALE * ITERATE_SCALE))


@triton.jit
def _step(r, STEP: tl.constexpr, DEGREE: tl.constexpr, FACTORS: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return Z / identity, a polynomial in R."""
    F: tl.constexpr = STEP * NUM_FACTORS
    u = FACTORS[F] * _square(r, SPLIT) + FACTORS[F + 1] * r
    if DEGREE == 5:
        z = u
    else:
        v = FACTORS[F + 3] * _square(u, SPLIT) + FACTORS[F + 4] * u + FACTORS[F + 5] * r
        if DEGREE == 9:
            z = v
        else:
            z = _symmetrized(_product(v, u, SPLIT)) if DEGREE == 13 else _square(v, SPLIT)
            z = FACTORS[F + 6] * z + FACTORS[F + 7] * v + FACTORS[F + 8] * u
            if DEGREE == 33:
                z = FACTORS[F + 9] * _square(z, SPLIT) + FACTORS[F + 10] * z + FACTORS[F + 11] * v
    return z


@triton.jit(do_not_specialize=["rows", "cols"], do_not_specialize_on_alignment=["inverse_norms"])
def _small_kernel(  # type: ignore[no-untyped-def]
    matrices,
    inverse_norms,  # read with HAS_NORMS, else written
    out,
    rows,
    cols,
    margin,
    factor,
    NUM_STEPS: tl.constexpr,
    DEGREES: tl.constexpr,  # of every step
    PARTS: tl.constexpr,  # how many refreshes precede a step; one more entry than steps
    IDENTITIES: tl.constexpr,
    GROWTHS: tl.constexpr,  # the product of the identities up to and including a step
    FACTORS: tl.constexpr,  # NUM_FACTORS per step
    HAS_NORMS: tl.constexpr,
    WIDE: tl.constexpr,  # whether X does not fit into float16 and is split
    EXACT: tl.constexpr,  # whether everything is split
    SPLIT_FROM: tl.constexpr,
    TALL: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    number = tl.program_id(0)
    start = number.to(tl.int64) * rows * cols
    if ALIGNED:  # without these hints the compiled kernel loads single elements
        start = tl.multiple_of(start, 16)
        if TALL:
            rows = rows // 16 * 16
        else:
            cols = cols // 16 * 16
    matrix = matrices + start
    target = out + start

    # scale * X fits into float16, with as few subnormal entries as possible. The scale is a power of two.
    if HAS_NORMS:
        inverse = tl.load(inverse_norms + number)
        limited = tl.minimum(tl.maximum(inverse, 1.2e-38), 1e31)
        scale = (limited.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 16384.0
        r, trace = _gram(matrix, scale, rows, cols, ROWS, TILE, TALL, WIDE)
        unit = inverse / scale / margin
    else:
        # The first columns tell the size of most matrices. If they are zero or others are 500 times larger, float16
        # overflows. The program then reads all of X for its largest entry and starts again.
        first = _load(matrix, 0, rows, cols, ROWS, TILE, TALL).to(tl.float32)
        scale = _inverse_power(tl.max(tl.max(tl.abs(first), axis=1), axis=0)) * 64.0
        r, trace = _gram(matrix, scale, rows, cols, ROWS, TILE, TALL, WIDE)
        overflows = tl.where(trace < 1e37, 0, 1)  # NaN too
        if overflows != 0:
            scale = _inverse_power(_largest(matrix, rows, cols, ROWS, TILE, TALL, STAGES)) * 8192.0
            r, trace = _gram(matrix, scale, rows, cols, ROWS, TILE, TALL, WIDE)
        unit = 1.0 / (tl.sqrt(tl.where(trace == 0, 1.0, trace)) * margin)
        inverse = tl.where(trace == 0, 1.0, scale * (unit * margin))
        tl.store(inverse_norms + number, tl.where(inverse > 3.0e38, 3.0e38, inverse))  # NaN stays NaN
    r *= unit * unit

    # The iterate is GROWTHS * (I + total) X after a refresh, and (I + g) is its factor since then.
    total = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    g = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    for step in tl.static_range(NUM_STEPS):
        z = _step(r, step, DEGREES[step], FACTORS, EXACT or step >= SPLIT_FROM)
        if step == 0:
            g = z
        else:
            if PARTS[step] != PARTS[step - 1]:
                g = z
            else:
                g += z + _product(g, z, EXACT or step >= SPLIT_FROM)
        if PARTS[step + 1] == PARTS[step]:
            half = r + _product(r, z, EXACT or step >= SPLIT_FROM)
            # Later steps would amplify an asymmetry of r, but not one of g.
            r = _symmetrized(half + _product(z, half, EXACT or step >= SPLIT_FROM))
            r *= IDENTITIES[step] * IDENTITIES[step]
        else:
            if PARTS[step] == 0:
                total = g
            else:
                total += g + _product(g, total, True)
            if step < NUM_STEPS - 1:
                if PARTS[step] == 0 and not EXACT:
                    # The next iterate is computed with the rounded matrix, so the result must be, too.
                    total = (total * SCALE).to(tl.float16).to(tl.float32) * (1.0 / SCALE)
                r = _refreshed_gram(
                    matrix,
                    total,
                    scale,
                    unit * GROWTHS[step],
                    rows,
                    cols,
                    ROWS,
                    TILE,
                    TALL,
                    WIDE,
                    EXACT,
                    EXACT or PARTS[step] > 0,
                    PARTS[step] % 2 == 0,
                )

    total = (total + _identity(ROWS)) * SCALE
    high = total.to(tl.float16)
    low = _low(total, high)
    growth = unit * GROWTHS[NUM_STEPS - 1] * factor * (1.0 / SCALE)
    tiles = tl.cdiv(cols, TILE)
    for index in range(0, tiles):
        column = (tiles - 1 - index if PARTS[NUM_STEPS - 1] % 2 == 0 else index) * TILE
        tile = _load(matrix, column, rows, cols, ROWS, TILE, TALL)
        y = _apply(high, low, tile, scale, True, WIDE) * growth
        _store(target, y, column, rows, cols, ROWS, TILE, TALL)


def orthogonalize_small(
    batch: Tensor,  # (B, rows, cols), contiguous
    steps: tuple[Step, ...],
    refreshes: frozenset[int],
    margin: float,
    factor: float,
    inverse_norms: Tensor | None,  # (B,) float32
    out: Tensor,  # (B, rows, cols), contiguous
    config: SmallConfig | None = None,
) -> Tensor:
    """Compute `factor` times the polar factor of every matrix into `out`, by one launch of one kernel.

    Args:
        batch: the matrices, whose shorter side is at most `MAX_ROWS`.
        steps: the steps of the iteration.
        refreshes: the numbers of the steps, counted from 1, after which the iterate and its Gram matrix are computed.
            The last step ends with the result in any case.
        margin: every matrix is scaled to a Frobenius norm of 1 / margin first.
        factor: a number that the result is multiplied by.
        inverse_norms: one over the Frobenius norms, if the caller has computed them already.
        out: a tensor for the result, in any of the three dtypes.
        config: the tiles; None takes those of `small_config`.

    Returns:
        One over the Frobenius norms, (B,): `inverse_norms`, or those that the kernel has found.
    """
    count, *sides = batch.shape
    rows, cols = min(sides), max(sides)
    tall = sides[0] > sides[1]
    config = small_config(rows, cols, batch.dtype) if config is None else config
    norms = torch.empty(count, dtype=torch.float32, device=batch.device) if inverse_norms is None else inverse_norms
    launch(
        _small_kernel,
        count,
        (batch, norms, out, rows, cols, float(margin), float(factor)),
        {
            **_chain_constants(steps, refreshes),
            "HAS_NORMS": inverse_norms is not None,
            "WIDE": batch.dtype == torch.float32,
            "EXACT": rows <= SPLIT_ROWS,
            "SPLIT_FROM": config.split_from,
            "TALL": tall,
            "ALIGNED": has_aligned_rows(batch, out),
            "ROWS": max(16, triton.next_power_of_2(rows)),
            "TILE": config.tile,
            "STAGES": config.num_stages,
        },
        (batch.device, batch.dtype, out.dtype, is_aligned(batch, out)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return norms


@lru_cache(maxsize=256)
def _chain_constants(steps: tuple[Step, ...], refreshes: frozenset[int]) -> dict[str, Any]:
    """Return the constants of the kernel that describe a chain, with the last product of a step over its identity."""
    parts, growths, factors, growth = [0], [], [], 1.0
    for number, (_, products, identity) in enumerate(steps, start=1):
        parts.append(parts[-1] + (number in refreshes or number == len(steps)))
        growth *= identity
        growths.append(growth)
        for place in range(4):
            numbers = list(products[place]) if place < len(products) else []
            scale = 1 / identity if place == len(products) - 1 else 1.0
            factors += [scale * value for value in numbers] + [0.0] * (3 - len(numbers))
    return {
        "NUM_STEPS": len(steps),
        "DEGREES": tuple(degree for degree, _, _ in steps),
        "PARTS": tuple(parts),
        "IDENTITIES": tuple(identity for _, _, identity in steps),
        "GROWTHS": tuple(growths),
        "FACTORS": tuple(factors),
    }


def small_config(rows: int, cols: int, dtype: torch.dtype) -> SmallConfig:
    """Return the tiles for matrices of a shape, with `rows` as the shorter side."""
    if rows > SPLIT_ROWS:
        return SmallConfig(32, 8, 4 if dtype == torch.float32 else 6, 0)
    return SmallConfig(64 if dtype == torch.float32 else 128, 4, 3, 0)


def is_faster(count: int, rows: int, cols: int, device: torch.device) -> bool:
    """Return whether this kernel can be used and is expected to be faster than separate kernels for every product.

    Source: measured on an H200. Up to `SPLIT_ROWS` rows it is 3 to 9 times as fast. With more rows, one multiprocessor
    computes one matrix at a time, so most of them must have work, and m x m products take most of the time of matrices
    that are not wide.
    """
    small, large = min(rows, cols), max(rows, cols)
    # These sizes were seen to work. For 100 x 333 the H200 computes NaN, although the interpreter is right.
    if small not in (64, 128) or large % 16:
        return False
    if small <= SPLIT_ROWS:
        return True
    processors = num_processors(device)
    rounds = -(-count // processors)
    return large >= 1024 and count >= 0.6 * rounds * processors
