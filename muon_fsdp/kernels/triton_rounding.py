"""Read half-precision weights with what rounding dropped, and round them, as `linalg/rounding.py` does, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# The constant ROUNDING of kernels.
ROUNDINGS = {"nearest": 0, "stochastic": 1, "remainder": 2}
NEAREST, STOCHASTIC, WITH_REMAINDER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_STEPS = tl.constexpr(127.0)
_LARGEST_BFLOAT16 = tl.constexpr(torch.finfo(torch.bfloat16).max)
_LARGEST_FLOAT16 = tl.constexpr(torch.finfo(torch.float16).max)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer


@triton.jit
def _half_ulp(values, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    exponents = (values.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponents = tl.maximum(exponents, 1) - 8 if tl.bfloat16 == TYPE else tl.maximum(exponents, 113) - 11
    subnormal = (exponents * 0 + 1) << tl.maximum(exponents + 22, 0)
    return tl.where(exponents > 0, exponents << 23, subnormal).to(tl.float32, bitcast=True)


@triton.jit
def load_weight(pointer, remainders, element, mask, ROUNDING: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return weights in float32."""
    weight = tl.load(pointer + element, mask=mask, other=0.0).to(tl.float32)
    if ROUNDING == WITH_REMAINDER:
        remainder = tl.load(remainders + element, mask=mask, other=0).to(tl.float32)
        weight += tl.div_rn(remainder, _STEPS) * _half_ulp(weight, TYPE)
    return weight


@triton.jit
def store_weight(pointer, remainders, element, mask, weight, random, ROUNDING: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round weights and store them; at random by the lower 16 of 32 random bits."""
    if ROUNDING == STOCHASTIC:
        bits = (random & 0xFFFF).to(tl.int32)
        if tl.bfloat16 == TYPE:
            rounded = ((weight.to(tl.int32, bitcast=True) + bits) & -65536).to(tl.float32, bitcast=True)
        else:
            quantum = 2.0 * _half_ulp(weight, TYPE)
            steps = tl.div_rn(tl.abs(weight), quantum)
            down = tl.floor(steps)
            size = (down + tl.where(bits.to(tl.float32) < (steps - down) * 65536.0, 1.0, 0.0)) * quantum
            rounded = tl.where(weight < 0, -size, size)
        largest = _LARGEST_BFLOAT16 if tl.bfloat16 == TYPE else _LARGEST_FLOAT16
        rounded = tl.minimum(tl.maximum(rounded, -largest), largest)
        weight = tl.where(tl.abs(weight) < float("inf"), rounded, weight)
    elif ROUNDING == WITH_REMAINDER:
        stored = weight.to(TYPE).to(tl.float32)
        if tl.bfloat16 == TYPE:  # in integers, because Triton's interpreter cuts off instead of rounding
            bits = weight.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            stored = tl.where(tl.abs(weight) < float("inf"), bits.to(tl.float32, bitcast=True), weight)
        share = tl.div_rn(weight - stored, _half_ulp(stored, TYPE))
        share = tl.minimum(tl.maximum(tl.where(tl.abs(share) < float("inf"), share, 0.0), -1.0), 1.0) * _STEPS
        tl.store(remainders + element, ((share + _ROUNDER) - _ROUNDER).to(tl.int8), mask=mask)
        weight = stored
    tl.store(pointer + element, weight.to(TYPE), mask=mask)
