"""The public import path of the orthogonalization."""

from __future__ import annotations

from torch import Tensor

from muon_fsdp.newton_schulz import orthogonalize


def zeropower_via_newtonschulz5(G: Tensor, steps: int = 5) -> Tensor:  # noqa: N803 - the name users know
    """The orthogonal factor of G, or of every matrix of a batch (..., m, n), by `steps` quintic iterations.

    >>> O = zeropower_via_newtonschulz5(torch.randn(50, 100))
    >>> assert torch.norm(O @ O.T - torch.eye(50)) < 0.1
    """
    return orthogonalize(G, steps=steps)
