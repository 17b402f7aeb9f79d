"""Spheres of matrices of equal spectral norm: their radius, and the way back to them."""

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

# A matrix of a smaller norm has no direction to retract along.
SMALLEST_NORM = 1e-12


def target_radius(rows: int, cols: int, mode: str = "spectral_mup", scaler: float = 1.0) -> float:
    """The spectral norm R at which a (d_out, d_in) matrix is kept.

    For "initialize", where it is the norm that the matrix had at its first step, this is what a zero matrix gets.

    Args:
        rows: d_out.
        cols: d_in.
        mode: "spectral_mup": scaler * sqrt(rows / cols); "identity": scaler; or "initialize".
        scaler: see there, positive.
    """
    if mode not in RADIUS_MODES:
        raise ValueError(f"Unknown radius_mode {mode!r}; valid names are {', '.join(RADIUS_MODES)}")
    return scaler if mode == "identity" else scaler * math.sqrt(rows / cols)


def retraction(
    norm: Tensor, radius: Tensor, mode: str, lr: float | Tensor, weight_decay: float = 0.0, alpha: float = 0.05
) -> Tensor:
    """By what to multiply matrices of these norms: to the sphere ("hard"), or a little towards it ("dynamic").

    Matrices without a norm, and all at lr = 0, stay as they are.
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
    radius: float | Tensor,
    mode: str = "hard",
    *,
    norm: Tensor | None = None,
    lr: float = 1.0,
    alpha: float = 0.05,
) -> Tensor:
    """The matrices on the sphere of spectral norm `radius`, or a step towards it; zero matrices stay zero.

    Args:
        matrices: (..., m, n), not DTensors.
        radius: the norm to reach, one number or one per matrix.
        mode: "hard" scales to the radius, "dynamic" by 1 + alpha * lr * sign(radius - norm).
        norm: (...), their spectral norms, where they are known.
        lr: of "dynamic"; at 0 nothing is changed, in both modes.
        alpha: of "dynamic".
    """
    if norm is None:
        norm = spectral_norm(matrices)
    target = torch.as_tensor(radius, dtype=norm.dtype, device=norm.device)
    factor = retraction(norm, target, mode, lr, alpha=alpha)
    return (matrices * factor[..., None, None]).to(matrices.dtype)
