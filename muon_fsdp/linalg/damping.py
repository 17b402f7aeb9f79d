"""Scale down the updates of idle matrices: those whose momentum has nearly vanished."""

from __future__ import annotations

import torch
from torch import Tensor

from muon_fsdp.kernels import on_device, unusable


def damp(updates: Tensor, inverse_norms: Tensor, eps: float) -> None:
    """Multiply every update in place by min(1, norm / eps), norm being that of what it was computed from.

    Without this, a matrix whose gradients are zero moves at full learning rate until its momentum underflows, because
    an orthogonalized matrix has the same size whatever the size of its input. Updates with a factor of 1 keep every
    bit. A kernel reads the norms, so that the host does not wait for them and other updates are not read.

    Args:
        updates: (B, m, n).
        inverse_norms: (B,), one over the Frobenius norms, as `newton_schulz.inverse_norms` returns them.
        eps: 0 changes nothing.
    """
    if eps == 0 or updates.numel() == 0:
        return
    if updates.dtype != torch.float64 and updates.is_contiguous() and unusable(updates.device) is None:
        from muon_fsdp.kernels import triton_norms

        with on_device(updates.device):
            triton_norms.damp(updates, inverse_norms, eps)
        return
    norms = 1 / inverse_norms
    updates.mul_(torch.where(norms < eps, norms / eps, 1.0)[:, None, None])
