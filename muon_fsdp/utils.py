"""Provide the public import path of the orthogonalization."""

from __future__ import annotations

from torch import Tensor

from muon_fsdp.linalg.newton_schulz import orthogonalize

__all__ = ["zeropower_via_newtonschulz5"]


def zeropower_via_newtonschulz5(G: Tensor, steps: int = 5) -> Tensor:  # noqa: N803 - the name users know
    """Return the orthogonal factor of G, computed by quintic Newton-Schulz iterations.

    The result is a new tensor with the shape and dtype of G. Zero matrices stay zero.

    Args:
        G: a matrix, or a batch (..., m, n) of matrices, in any real floating-point precision and of any scale. It is
            not changed.
        steps: the number of iterations, at least 1. The coefficients are solved for this number.
    """
    return orthogonalize(G, steps=steps)
