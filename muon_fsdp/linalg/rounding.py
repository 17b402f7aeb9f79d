"""Round weights to half precision so that small updates are not lost: at random, or with a remainder of 8 bits.

Kernels round alike, bit for bit (`kernels/triton_rounding.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
_LEAST_EXPONENT = {torch.bfloat16: 1, torch.float16: 113}  # of a normal number, with the bias of float32
_STEPS = 127  # of a remainder, on each side


def round_at_random(values: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values in half precision, rounded up or down so that their mean is right; finite ones stay finite.

    Args:
        values: float32.
        bits: 16 random bits for each, as integers below 65536.
        dtype: bfloat16 or float16.
    """
    if dtype is torch.bfloat16:
        rounded = (values.view(torch.int32) + bits.to(torch.int32) & ~0xFFFF).view(torch.float32)
    else:
        quantum = _half_ulp(values, dtype) * 2
        steps = values.abs() / quantum
        down = steps.floor()
        rounded = (down + (bits < (steps - down) * 65536)).mul_(quantum).copysign_(values)
    largest = torch.finfo(dtype).max
    return torch.where(values.isfinite(), rounded.clamp_(-largest, largest), values).to(dtype)


def remainder_of(values: Tensor, rounded: Tensor) -> Tensor:
    """Return what rounding to the nearest dropped, in units of ulp / 254 of the rounded numbers: int8.

    Args:
        values: float32.
        rounded: the same in half precision.
    """
    stored = rounded.float()
    share = ((values - stored) / _half_ulp(stored, rounded.dtype)).clamp_(-1, 1).mul_(_STEPS)
    return torch.where(share.isfinite(), share, 0.0).round_().to(torch.int8)


def with_remainder(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return float32 numbers from half precision and what rounding dropped."""
    stored = rounded.float()
    return stored + remainder.float() / _STEPS * _half_ulp(stored, rounded.dtype)


def _half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the distance between neighbours in half precision, at float32 values; subnormal numbers included."""
    exponents = (values.view(torch.int32) >> 23 & 0xFF).clamp_min(_LEAST_EXPONENT[dtype]) - (_MANTISSA[dtype] + 1)
    # By its bits, because torch.ldexp is not exact.
    subnormal = torch.bitwise_left_shift(1, (exponents + 22).clamp_min(0))
    return torch.where(exponents > 0, exponents << 23, subnormal).view(torch.float32)
