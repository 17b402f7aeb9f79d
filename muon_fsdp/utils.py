"""The public import path of the orthogonalization."""

from __future__ import annotations

from torch import Tensor

from muon_fsdp.linalg.newton_schulz import orthogonalize

__all__ = ["zeropower_via_newtonschulz5"]


def zeropower_via_newtonschulz5(G: Tensor, steps: int = 5) -> Tensor:  # noqa: N803 - the name users know
    """The orthogonal factor of G by quintic iterations; same shape and dtype, and G is not changed.

    Args:
        G: a matrix, or a batch (..., m, n) of them, in any real floating-point precision and of any scale; zero
            matrices stay zero.
        steps: iterations, at least 1. Coefficients are solved for that number.
    """
    return orthogonalize(G, steps=steps)
