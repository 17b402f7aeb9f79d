"""Rescale the rows of matrices by running second moments."""

from __future__ import annotations

import torch
from torch import Tensor

from muon_fsdp.kernels import unusable


def rescale_rows(
    matrices: Tensor,  # (B, rows, cols)
    moments: Tensor,  # (B, rows)
    *,
    factor: float,
    beta2: float,
    eps: float,
) -> None:
    """Divide every row by the root of its running second moment, and keep the Frobenius norm of every matrix.

    Both tensors are changed in place. The second moment of a row is that of the row divided by `factor`, so that a
    scale of the matrices does not enter it. A zero matrix stays zero.

    Args:
        matrices: (B, rows, cols).
        moments: (B, rows), in working precision.
        factor: the scale of the matrices; 0 counts as 1.
        beta2: the decay of the moments.
        eps: added to the root of a moment.
    """
    factor = factor or 1.0
    kernels_fit = moments.dtype == torch.float32 and matrices.is_contiguous() and moments.is_contiguous()
    if kernels_fit and unusable(matrices.device) is None:
        from muon_fsdp.kernels import triton_rows

        triton_rows.rescale_rows(matrices, moments, factor, beta2, eps)
        return
    cols = matrices.shape[-1]
    norms = torch.linalg.vector_norm(matrices, dim=-1, dtype=moments.dtype) / factor  # (B, rows)
    moments.mul_(beta2).add_(norms.square(), alpha=(1 - beta2) / cols)
    factors = 1 / (moments.sqrt() + eps)  # (B, rows)
    before, after = (torch.linalg.vector_norm(n, dim=-1, keepdim=True) for n in (norms, factors * norms))  # (B, 1)
    factors = factors * torch.where(after > 0, before / after, 0.0)
    matrices.mul_(factors.unsqueeze(-1))
