"""Describe what a kernel adds to a matrix product: batches of matrices, each with a factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Addend(NamedTuple):
    """A batch of matrices that is multiplied by a factor and added to a product.

    Args:
        matrices: (B, m, n), the matrices before the multiplication.
        factor: one number for the whole batch.
    """

    matrices: Tensor
    factor: float = 1.0


def contiguous(addends: Sequence[Addend]) -> Sequence[Addend]:
    """Return the addends with contiguous matrices, which kernels require."""
    if all(addend.matrices.is_contiguous() for addend in addends):
        return addends
    return [Addend(matrices.contiguous(), factor) for matrices, factor in addends]


def unpack(addends: Sequence[Addend]) -> tuple[Tensor | None, float, Tensor | None, float]:
    """Split up to two addends into the arguments that a kernel has for them.

    Returns:
        The matrices and the factor of the first addend, then those of the second one. A missing addend is None and 0.
    """
    padded: list[tuple[Tensor | None, float]] = [*addends, *[(None, 0.0)] * (2 - len(addends))]
    (first, first_factor), (second, second_factor) = padded
    return first, first_factor, second, second_factor
