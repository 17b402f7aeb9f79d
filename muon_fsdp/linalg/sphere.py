"""Compute the radius of a sphere of matrices with equal spectral norm, and retract matrices to the sphere."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from muon_fsdp.kernels import unusable
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
    weight_decay: float | Tensor = 0.0,
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


class Retraction(NamedTuple):
    """The retraction of one step, with one number per matrix in every field, (B,).

    Args:
        factor: what the weights are multiplied by.
        radius: the norm R of the sphere.
        saved: the radius to keep as state; zero until a step has moved the matrix.
        ratio: the norm over R, NaN for matrices without a norm.
        without_norm: 1 for matrices without a norm, else 0.
    """

    factor: Tensor
    radius: Tensor
    saved: Tensor
    ratio: Tensor
    without_norm: Tensor


def retraction_of_step(
    norm: Tensor,  # (B,), spectral norms
    saved: Tensor,  # (B,), the saved radius of the previous step
    target: float,
    lr: Tensor,  # (B,)
    weight_decay: Tensor,  # (B,)
    alpha: float,
    modes: tuple[str, str],  # radius_mode and retract_mode
) -> Retraction:
    """Return the retraction of one step, which always reaches the sphere where no radius is saved: at the first step.

    Radius mode "initialize" uses the norm at the first step as the radius, and the target only for zero matrices.
    """
    if norm.dtype == saved.dtype == torch.float32 and unusable(norm.device) is None:
        from muon_fsdp.kernels import triton_spectral

        rates = lr.contiguous(), weight_decay.contiguous()
        numbers = norm.contiguous(), saved.contiguous()
        found = triton_spectral.sphere_factors(*numbers, *rates, target, alpha, smallest=SMALLEST_NORM, modes=modes)
        return Retraction(*found.unbind())
    is_regular, is_first = norm >= SMALLEST_NORM, saved == 0
    radius = torch.full_like(norm, target)
    if modes[0] == "initialize":
        radius = torch.where(is_first, torch.where(is_regular, norm, radius), saved)
    factor = retraction(norm, radius, "hard", lr)
    if modes[1] == "dynamic":
        gentle = retraction(norm, radius, "dynamic", lr, weight_decay, alpha)
        factor = torch.where(is_first, factor, gentle.to(factor.dtype))
    new = torch.where(is_regular & (lr != 0), radius, saved)
    ratio = torch.where(is_regular, norm / radius, torch.nan)
    return Retraction(factor, radius, new, ratio, (~is_regular).to(norm.dtype))


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
