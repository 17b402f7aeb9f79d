"""Read and write state that is stored in float32, in bfloat16, or in 8 bits with a scale for every block of a row.

The codes are those of `linalg/codes.py`, bit for bit, and the random bits those of `linalg/philox.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from muon_fsdp.kernels.tables import LEAST_SCALED, PLACE, STATE_BLOCK

# How state is stored: the constant CODE of kernels.
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
PLAIN, HALF, IN_BLOCKS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_BLOCK = tl.constexpr(STATE_BLOCK)
_LEAST = tl.constexpr(LEAST_SCALED)
_WORDS = tl.constexpr(len(PLACE))
_COLS = tl.constexpr(PLACE.index("cols"))
_BLOCKS = tl.constexpr(PLACE.index("blocks"))
_BEFORE = tl.constexpr(PLACE.index("before"))
_FIRST = tl.constexpr(PLACE.index("first"))
_LENGTH = tl.constexpr(PLACE.index("length"))
_STRIDE = tl.constexpr(PLACE.index("stride"))
_KEY = tl.constexpr(PLACE.index("key"))
_ELEMENTWISE = tl.constexpr(2**31)
_LOW_BITS = tl.constexpr(20)
_LEAST_EXPONENT = tl.constexpr(((127 - 31) << 3) - 1)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer


@triton.jit
def blocks_of_chunk(places, tensor, first, count, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the blocks of a chunk of blocks, which of them exist, and the same of their elements, a row per block."""
    number = tl.arange(0, CHUNK // _BLOCK)
    block = first + number
    place = places + _WORDS * tensor
    cols, blocks, before = tl.load(place + _COLS), tl.load(place + _BLOCKS), tl.load(place + _BEFORE)
    if ALIGNED:  # without this hint the compiled kernel loads single elements
        cols, before = tl.multiple_of(cols, 16), tl.multiple_of(before, 16)
    row, within = block // blocks, block % blocks
    edge = within * _BLOCK - before
    column = tl.maximum(edge, 0)[:, None] + tl.arange(0, _BLOCK)[None, :]
    here = (number < count)[:, None] & (column < tl.minimum(edge + _BLOCK, cols)[:, None])
    return block, number < count, (row * cols)[:, None] + column, here


@triton.jit
def element_bits(places, tensor, random, element, ONE_RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 32 random bits for every element of a shard, as `philox.element_bits` does.

    `random` points to the number of the step and the seed.
    """
    place = places + _WORDS * tensor
    number = tl.load(place + _FIRST) + element
    if not ONE_RUN:
        length = tl.load(place + _LENGTH)
        number = tl.load(place + _FIRST) + element // length * tl.load(place + _STRIDE) + element % length
    quad = number >> 2
    low, high = (quad & 0xFFFFFFFF).to(tl.uint32), (quad >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox_impl(
        low,
        high,
        zero + tl.load(random).to(tl.uint32),
        zero + (tl.load(random + 1) + _ELEMENTWISE).to(tl.uint32),
        zero + tl.load(place + _KEY).to(tl.uint32),
        zero + tl.load(place + _KEY + 1).to(tl.uint32),
    )
    word = number & 3
    return tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))


@triton.jit
def load_state(pointer, scales, element, mask, block, has_block, CODE: tl.constexpr, POSITIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return elements of state in float32."""
    if CODE == IN_BLOCKS:
        codes = tl.load(pointer + element, mask=mask, other=0)
        scale = tl.load(scales + block, mask=has_block, other=0.0)
        if POSITIVE:
            bits = tl.where(codes > 0, (codes.to(tl.int32) + _LEAST_EXPONENT) << _LOW_BITS, 0)
            values = bits.to(tl.float32, bitcast=True) * scale[:, None]
        else:
            values = codes.to(tl.float32) * scale[:, None]
    else:
        values = tl.load(pointer + element, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def store_state(  # type: ignore[no-untyped-def]
    pointer, scales, element, mask, block, has_block, value, random, CODE: tl.constexpr, POSITIVE: tl.constexpr
):
    """Store elements of state. Codes of positive numbers are rounded up or down by the upper 16 of 32 random bits."""
    if CODE == IN_BLOCKS:
        size = tl.where(mask, tl.abs(value), 0.0)
        is_wrong = tl.max((size < float("inf")).to(tl.int32) ^ 1, axis=1) > 0
        largest = tl.max(tl.where(size < float("inf"), size, 0.0), axis=1)
        scale = largest if POSITIVE else tl.div_rn(largest, 127.0)
        scale = ((scale.to(tl.int32, bitcast=True) + 0xFF) & -256).to(tl.float32, bitcast=True)
        scale = tl.where(largest < _LEAST, 0.0, scale)
        is_zero = ((scale == 0.0) | is_wrong)[:, None]
        relative = tl.div_rn(tl.where(is_zero, 0.0, value), tl.where(is_zero, 1.0, scale[:, None]))
        if POSITIVE:
            relative = tl.where(relative > 1 - 0.00006103515625, 1.0, relative)
            added = ((random >> 16) << (_LOW_BITS - 16)).to(tl.int32)
            codes = ((relative.to(tl.int32, bitcast=True) + added) >> _LOW_BITS) - _LEAST_EXPONENT
            codes = tl.where(relative > 0, tl.maximum(codes, 1), 0)
        else:
            codes = (relative + _ROUNDER) - _ROUNDER
        tl.store(pointer + element, codes.to(pointer.dtype.element_ty), mask=mask)
        tl.store(scales + block, tl.where(is_wrong, float("nan"), scale), mask=has_block)
    elif CODE == HALF and POSITIVE:
        bits = value.to(tl.int32, bitcast=True) + (random >> 16).to(tl.int32)
        rounded = tl.where(tl.abs(value) < float("inf"), (bits & -65536).to(tl.float32, bitcast=True), value)
        tl.store(pointer + element, rounded.to(tl.bfloat16), mask=mask)
    else:
        tl.store(pointer + element, value.to(pointer.dtype.element_ty), mask=mask)
