"""Draw random numbers with Philox4x32-10 (Salmon et al., SC 2011), a function of a key and a counter.

Integer operations on tensors give the same bits on CPUs and GPUs. There is no generator whose state a CUDA graph or a
checkpoint would have to keep.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_MASK = 2**32 - 1
ELEMENTWISE = 2**31  # in the last word of a counter: no call of `batch.random` has this number
_BITS = 23  # of a number: with one half added, float32 holds it exactly


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four random integers of 32 bits for every counter.

    Args:
        counter: four int64 tensors with values below 2^32, which broadcast to one shape.
        key: two int64 tensors with values below 2^32, which broadcast to the same shape.
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(_ROUNDS):
        # Both factors are below 2^32. The product wraps around to a negative number, whose bits are right.
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            (right >> 32 & _MASK) ^ b ^ first,
            right & _MASK,
            (left >> 32 & _MASK) ^ d ^ second,
            left & _MASK,
        )
        first, second = (first + _INCREMENTS[0]) & _MASK, (second + _INCREMENTS[1]) & _MASK
    return a, b, c, d


def element_bits(key: tuple[int, int], step: int, seed: int, elements: Tensor) -> Tensor:
    """Return 32 random bits for elements of a parameter, a function of key, step, seed and number of the element.

    Four neighbours share a call of `philox`. Kernels draw the same bits (`kernels/triton_random.py`).

    Args:
        key: of the parameter.
        step: the number of the step.
        seed: below 2^31.
        elements: int64, the numbers of the elements in the whole parameter.

    Returns:
        int64 below 2^32, of the shape of `elements`.
    """
    quads = elements >> 2
    of_call = (quads & _MASK, quads >> 32, torch.full_like(quads, step), torch.full_like(quads, ELEMENTWISE + seed))
    words = philox(of_call, (torch.full_like(quads, key[0]), torch.full_like(quads, key[1])))
    return torch.stack(words, -1).gather(-1, (elements & 3).unsqueeze(-1)).squeeze(-1)


def uniform(key: Tensor, counter: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Return random numbers, uniform in (0, 1): odd multiples of 2^-24, which float32 holds exactly.

    Args:
        key: (B, 2), int64, below 2^32: a stream of numbers for every row.
        counter: (B, 3), int64, below 2^32: where in its stream every row begins.
        numel: how many numbers every row gets.
        dtype: float32 or float64.

    Returns:
        (B, numel). A row does not depend on the others.
    """
    block = torch.arange(-(-numel // 4), dtype=torch.int64, device=key.device)  # four numbers each
    rest = counter.unsqueeze(-1).unbind(1)  # three times (B, 1)
    integers = philox((block, rest[0], rest[1], rest[2]), (key[:, :1], key[:, 1:]))
    bits = torch.stack(integers, -1).flatten(1)[:, :numel] >> 32 - _BITS
    return (bits.to(dtype) + 0.5) * 2.0**-_BITS


def parameter_key(seed: object, name: str) -> tuple[int, int]:
    """Return a key of twice 32 bits for a parameter, the same in every process."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
