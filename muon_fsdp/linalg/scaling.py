"""Scale orthogonalized updates: by the shape of a matrix, by running second moments of rows, and down if it is idle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from muon_fsdp.kernels import on_device, unusable


@dataclass(frozen=True)
class Scale:
    """A formula for the scale, and the learning rates that go with it.

    Args:
        version: its other name.
        formula: the factor of an orthogonalized update by (d_out, d_in).
        meaning: the formula and what it is for, in words.
        usual_lrs: the range of learning rates that are not likely a mistake; None if there is no usual lr.
        adamw_ratio: AdamW's learning rate relative to that of the matrices; None if there is no usual ratio.
    """

    version: str
    formula: Callable[[int, int], float]
    meaning: str
    usual_lrs: tuple[float, float] | None = None
    adamw_ratio: float | None = None


# Around 0.02 the spectral norm of an update is the learning rate. AdamW's ratio: docs/guides/hyperparameters.md.
_AROUND_0_02 = (2e-3, 0.3)
RELATIVE_LRS = (2e-3, math.inf)  # of rules that keep the norm of a matrix, which tame a large lr
ADAMW_RATIO = 0.15

_SCALES: dict[str, Scale] = {
    "original": Scale(
        "v2",
        lambda d_out, d_in: math.sqrt(max(1.0, d_out / d_in)),
        "sqrt(max(1, d_out/d_in)), Keller Jordan's, for lr around 0.02",
        _AROUND_0_02,
        ADAMW_RATIO,
    ),
    "match_rms_adamw": Scale(
        "v4",
        lambda d_out, d_in: 0.2 * math.sqrt(max(d_out, d_in)),
        "0.2 sqrt(max(d_out, d_in)), Moonshot's, which keeps the learning rate of AdamW",
        adamw_ratio=1.0,
    ),
    "spectral": Scale(
        "v3",
        lambda d_out, d_in: math.sqrt(d_out / d_in),
        "sqrt(d_out/d_in), muP's, which keeps one learning rate across widths",
        _AROUND_0_02,
        ADAMW_RATIO,
    ),
    "size": Scale(
        "v1",
        lambda d_out, d_in: math.sqrt(max(d_out, d_in)),
        "sqrt(max(d_out, d_in)), the first version of 2024",
    ),
}
_BY_NAME = {**_SCALES, **{scale.version: scale for scale in _SCALES.values()}}
DEFAULT_SCALE = "original"
SCALE_NAMES = tuple(_BY_NAME)
SCALE_MEANINGS = {name: f"also {scale.version}: {scale.meaning}" for name, scale in _SCALES.items()}


def scale_named(scale: str | float) -> Scale | None:
    """Return the named formula; None if `scale` is a number."""
    return _BY_NAME[scale] if isinstance(scale, str) else None


def update_scale(scale: str | float, d_out: int, d_in: int) -> float:
    """Return the factor for a (d_out, d_in) matrix: that of a named formula, or the number that `scale` is."""
    if d_out == 0 or d_in == 0:
        return 1.0  # the formulas would divide by zero, and an empty matrix needs no scale
    return _BY_NAME[scale].formula(d_out, d_in) if isinstance(scale, str) else float(scale)


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
