"""Spectral Sphere Optimizer (arXiv 2601.08393): matrices keep their spectral norm and move along its sphere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muon_fsdp.newton_schulz import orthogonalization_flops, orthogonalize
from muon_fsdp.rules.base import GroupOptions, Spectrum, StateSpec
from muon_fsdp.rules.muon import Muon
from muon_fsdp.spectral import add_outer, bilinear, solve_lambda

# Calls of msign that the balance of ranks reckons with: the median when warm.
USUAL_CALLS = 4


class SphereBatchKey(NamedTuple):
    method: str
    steps: int
    lambda_mode: str
    factor: float = 1.0  # the radius is multiplied in `apply`, with the retraction


class SpectralSphere(Muon):
    """W <- f W - lr R msign(M + lambda u v^T), tangent to the sphere of spectral norm R at (u, v); f retracts to it.

    Momentum is Muon's. `muon_fsdp.sphere` finds u, v, f and R, from shards.
    """

    name = "spectral_sphere"
    spherical = True
    state = (
        StateSpec("momentum_buffer"),
        StateSpec("singular_subspace", like="subspaces"),
        StateSpec("right_singular_vector", like="columns"),
        StateSpec("left_singular_vector", like="rows"),
        StateSpec("lagrange_multiplier", like="matrices"),
        StateSpec("lagrange_slope", like="matrices"),
        StateSpec("radius", like="matrices"),
    )

    def batch_key(self, group: GroupOptions, rows: int, cols: int) -> SphereBatchKey:  # type: ignore[override]
        return SphereBatchKey(group["orthogonalization"], group["ns_steps"], group["lambda_mode"])

    def flops(self, key: SphereBatchKey, rows: int, cols: int) -> float:  # type: ignore[override]
        calls = USUAL_CALLS if key.lambda_mode in ("bracketed", "bisection") else 1
        return calls * orthogonalization_flops(rows, cols, key.steps)

    def tangent(
        self,
        key: SphereBatchKey,
        matrices: Tensor,
        out: Tensor,
        inverse_norms: Tensor | None,
        spectrum: Spectrum,
    ) -> None:
        if key.lambda_mode in ("bracketed", "bisection"):
            tangent = solve_lambda(
                matrices,
                spectrum.left,
                spectrum.right,
                method=key.lambda_mode,
                start=spectrum.multiplier,
                slope=spectrum.slope,
                searched=spectrum.regular,
                orthogonalization=key.method,
                ns_steps=key.steps,
                inverse_norms=inverse_norms,
                out=out,
            )
            spectrum.multiplier, spectrum.slope = tangent.multiplier, tangent.slope
            spectrum.calls, spectrum.failed = tangent.calls, tangent.failed
            return
        orthogonalize(matrices, method=key.method, steps=key.steps, inverse_norms=inverse_norms, out=out)
        if key.lambda_mode == "projection":
            radial = torch.where(spectrum.regular, bilinear(spectrum.left, out, spectrum.right), 0.0)
            add_outer(out, spectrum.left, spectrum.right, -radial)
        spectrum.multiplier = torch.zeros_like(spectrum.multiplier)
