"""Compute the radius of a sphere of matrices with equal spectral norm, and retract matrices to the sphere."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from muon_fsdp.linalg.power_iteration import spectral_norm

RadiusMode = Literal["spectral_mup", "identity", "initialize"]
RetractMode = Literal["hard", "dynamic"]
RADIUS_MODES: tuple[str, ...] = get_args(RadiusMode)
RETRACT_MODES: tuple[str, ...] = get_args(RetractMode)

# A matrix with a smaller norm counts as zero and is not retracted: scaling it up would amplify rounding errors.
SMALLEST_NORM = 1e-12


def target_radius(rows: int, cols: int, mode: str = "spectral_mup", scaler: float = 1.0) -> float:
    """Return the spectral norm R that a (d_out, d_in) matrix is retracted to.

    In mode "initialize", R is the norm that the matrix had at its first step. The result of this function then only
    applies to matrices that were zero.

    Args:
        rows: d_out.
        cols: d_in.
        mode: "spectral_mup" for scaler * sqrt(rows / cols), "identity" for scaler, or "initialize".
        scaler: a positive number that multiplies the radius.
    """
    if mode not in RADIUS_MODES:
        raise ValueError(f"Unknown radius_mode {mode!r}; valid names are {', '.join(RADIUS_MODES)}")
    return scaler if mode == "identity" else scaler * math.sqrt(rows / cols)


def retraction(
    norm: Tensor,  # (B,), spectral norms
    radius: Tensor,  # (B,)
    mode: str,
    lr: float | Tensor,
    weight_decay: float = 0.0,
    alpha: float = 0.05,
) -> Tensor:
    """Return the factors that bring matrices to the sphere ("hard") or a step towards it ("dynamic").

    Returns:
        (B,), 1 for matrices whose norm is below `SMALLEST_NORM`, and 1 for all matrices at lr = 0.
    """
    if mode not in RETRACT_MODES:
        raise ValueError(f"Unknown retract_mode {mode!r}; valid names are {', '.join(RETRACT_MODES)}")
    if mode == "hard":
        factor = radius / norm.clamp_min(SMALLEST_NORM)
    else:
        decay = 1 - lr * weight_decay
        factor = decay * (1 + alpha * lr * torch.sign(radius - decay * norm))
    factor = torch.where(norm >= SMALLEST_NORM, factor, 1.0)
    if isinstance(lr, Tensor):
        return torch.where(lr.to(factor.device) == 0, 1.0, factor)
    return factor if lr != 0 else torch.ones_like(factor)


def retract(
    matrices: Tensor,  # (..., m, n)
    radius: float | Tensor,  # (...)
    mode: str = "hard",
    *,
    norm: Tensor | None = None,  # (...)
    lr: float = 1.0,
    alpha: float = 0.05,
) -> Tensor:
    """Scale matrices to the sphere of spectral norm `radius`, or a step towards it; zero matrices stay zero.

    Args:
        matrices: (..., m, n), a tensor, not a DTensor.
        radius: the norm to reach, one number or one per matrix.
        mode: "hard" scales to the radius, "dynamic" multiplies by 1 + alpha * lr * sign(radius - norm).
        norm: (...), the spectral norms of the matrices; None computes them.
        lr: the learning rate in mode "dynamic"; at 0 the matrices do not change in either mode.
        alpha: the strength of mode "dynamic".

    Returns:
        The scaled matrices, a new tensor.
    """
    if norm is None:
        norm = spectral_norm(matrices)
    target = torch.as_tensor(radius, dtype=norm.dtype, device=norm.device)
    factor = retraction(norm, target, mode, lr, alpha=alpha)
    return (matrices * factor[..., None, None]).to(matrices.dtype)
