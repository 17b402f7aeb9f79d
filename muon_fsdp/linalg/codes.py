"""Store tensors in 8 bits: blocks along the last dimension with one scale each, and codes that relate to the scale.

Codes and scales are chosen so that `decode` is exact in float32, and `encode` of its result returns the same codes and
scales. A state that is saved as float32 and loaded again is therefore the same bit for bit.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from muon_fsdp.kernels.tables import LEAST_SCALED, STATE_BLOCK

# "linear": integers from -127 to 127 times the scale. "positive": floating-point numbers with 5 bits of exponent and 3
# of mantissa times the scale, for numbers that are not negative and differ by orders of magnitude.
Code: TypeAlias = Literal["linear", "positive"]
CODES: tuple[str, ...] = get_args(Code)
_DTYPES = {"linear": torch.int8, "positive": torch.uint8}

_LARGEST = 127
_LOW_BITS = 20  # of a float32 that the code "positive" drops
_FIRST = ((127 - 31) << 3) - 1  # the upper bits of 2^-31, which has code 1, less 1


class Encoded(NamedTuple):
    """A tensor in 8 bits: codes of its shape, and the scales of its blocks, (*leading dimensions, blocks of a row)."""

    codes: Tensor
    scales: Tensor


def dtype_of(code: Code) -> torch.dtype:
    """Return the dtype in which the codes of a tensor are stored."""
    return _DTYPES[code]


def num_blocks(cols: int, first: int) -> int:
    """Return the number of blocks in a row of `cols` elements, of which the first is element `first` of the whole row.

    Blocks begin at multiples of STATE_BLOCK elements of the whole row, and end where the row ends.
    """
    return -(-(first % STATE_BLOCK + cols) // STATE_BLOCK) if cols else 0


def encode(values: Tensor, code: Code, first: int = 0, dither: Tensor | None = None) -> Encoded:
    """Return a tensor in 8 bits. Numbers are rounded to the nearest code, or up or down at random.

    Args:
        values: float32, of at least one dimension.
        code: which numbers 8 bits stand for.
        first: the index of the first column in the whole rows that these are a part of.
        dither: for "positive" codes, integers of 16 random bits, of the shape of the values. A number is then rounded
            up with the probability that makes its mean right, so that small changes add up.

    Returns:
        Codes and scales. A block whose largest absolute value is below LEAST_SCALED is zero. A value that is not finite
        makes its whole block NaN.
    """
    blocks = _in_blocks(values, first)  # (rows, blocks, STATE_BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = _rounded_up(largest / _LARGEST if code == "linear" else largest)
    scales = torch.where(largest < LEAST_SCALED, 0.0, scales)
    relative = torch.where(scales == 0, 0.0, blocks / scales)
    relative = torch.where(relative.isfinite(), relative, 0.0)  # the scale is NaN
    if code == "linear":
        codes = relative.round()
    else:
        bits = torch.where(relative > 1 - 2.0**-14, 1.0, relative).view(torch.int32)  # the largest gets its own code
        added: Tensor | int = 1 << _LOW_BITS - 1
        if dither is not None:
            added = _in_blocks(dither.to(torch.int32), first) << _LOW_BITS - 16
        codes = torch.where(relative > 0, ((bits + added >> _LOW_BITS) - _FIRST).clamp_min(1), 0)
    in_rows = codes.flatten(1)[:, first % STATE_BLOCK :][:, : values.shape[-1]]
    return Encoded(in_rows.to(_DTYPES[code]).view(values.shape), scales.view(*values.shape[:-1], blocks.shape[1]))


def decode(encoded: Encoded, code: Code, first: int = 0) -> Tensor:
    """Return the float32 tensor that is stored in 8 bits."""
    codes, scales = encoded
    rows, cols = codes.shape[:-1].numel(), codes.shape[-1]
    if code == "linear":
        numbers = codes.to(torch.float32)
    else:
        numbers = torch.where(codes > 0, codes.to(torch.int32) + _FIRST << _LOW_BITS, 0).view(torch.float32)
    of_elements = scales.reshape(rows, scales.shape[-1], 1).expand(-1, -1, STATE_BLOCK).flatten(1)
    return numbers * of_elements[:, first % STATE_BLOCK :][:, :cols].reshape(codes.shape)


def dithered(values: Tensor, dither: Tensor) -> Tensor:
    """Return float32 values in bfloat16, rounded up or down by 16 random bits so that their mean is right."""
    upper = (values.view(torch.int32) + dither.to(torch.int32) & ~0xFFFF).view(torch.float32)
    return torch.where(values.isfinite(), upper, values).to(torch.bfloat16)


def _in_blocks(values: Tensor, first: int) -> Tensor:
    """Return the blocks of all rows, (rows, blocks, STATE_BLOCK), filled up with zeros."""
    cols, before = values.shape[-1], first % STATE_BLOCK
    count = num_blocks(cols, first)
    rows = values.reshape(values.shape[:-1].numel(), cols)
    return pad(rows, (before, count * STATE_BLOCK - before - cols)).view(len(rows), count, STATE_BLOCK)


def _rounded_up(scales: Tensor) -> Tensor:
    """Round positive numbers up to 16 significant bits, so that their products with codes are exact."""
    rounded = (scales.view(torch.int32) + 0xFF & ~0xFF).view(torch.float32)
    return torch.where(scales.isfinite(), rounded, torch.nan)
