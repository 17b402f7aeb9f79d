"""Describe a tensor by a few numbers, so that ranks can compare large tensors without sending them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from muon_fsdp.linalg.autocast import without_autocast

NUM_SUMS = 8
_WIDTH = 64  # elements whose signs come from one row of a table
_CHUNK = 2**22  # elements that are read at once, which bounds the memory
_MULTIPLIER, _OTHER_MULTIPLIER = -7046029254386353131, -4658895280553007687  # odd, of 64 bits, from splitmix64
_LARGEST_HASH = 2**31 - 1  # exact in float64


def hash_of(tensor: Tensor) -> Tensor:
    """Return a hash of 31 bits of the bits of a tensor, on its device; integers, so the order of sums is no matter."""
    flat = tensor.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        bits = chunk.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[chunk.itemsize])
        # An odd factor can be divided by modulo 2^64, so one changed element always changes the sum.
        total += (bits.to(torch.int64) * (_mixed(start, len(chunk), chunk.device) | 1)).sum()
    return ((total ^ (total >> 32)) * _MULTIPLIER >> 32) & _LARGEST_HASH


def random_sums(tensor: Tensor, seed: int = 0) -> Tensor:
    """Return sums of all elements with random signs, (NUM_SUMS,) in float64.

    Their norm is about that of the tensor, and the norm of the difference of two tensors' sums is about that of the
    tensors' difference. Without signs they would be rounding errors only where rows of gradients sum to zero.

    Args:
        tensor: of any shape.
        seed: another number gives other signs.
    """
    flat = tensor.reshape(-1)
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    of_rows, of_columns = _signs(dtype, tensor.device)
    columns = torch.zeros(_WIDTH, dtype=torch.float64, device=tensor.device)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].to(dtype)
        missing = -len(chunk) % _WIDTH
        rows = (pad(chunk, (0, missing)) if missing else chunk).view(-1, _WIDTH)
        # Chunks and seeds use the same signs, shifted by a pseudo-random number.
        shift = (seed * 0x9E3779B1 + start // _CHUNK * 0x85EBCA77 >> 16) % _WIDTH
        with without_autocast(tensor.device.type):
            columns += torch.mv(rows.T, of_rows[: len(rows)]).double().roll(shift)
    sums: Tensor = torch.mv(of_columns, columns) / NUM_SUMS**0.5
    return sums


@lru_cache
def _signs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random signs (_CHUNK / _WIDTH,) for rows, in this precision, and (NUM_SUMS, _WIDTH) for columns."""
    of_rows, of_columns = (
        1 - 2 * (_mixed(first, count, device) >> 40 & 1)
        for first, count in ((0, _CHUNK // _WIDTH), (_CHUNK, NUM_SUMS * _WIDTH))
    )
    return of_rows.to(dtype), of_columns.double().view(NUM_SUMS, _WIDTH)


def _mixed(first: int, count: int, device: torch.device) -> Tensor:
    """Return pseudo-random int64 numbers, each a function of its number alone."""
    mixed = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device) * _MULTIPLIER  # wraps around
    return (mixed ^ (mixed >> 29)) * _OTHER_MULTIPLIER
