"""SpectralSphereOptimizer: the engine of MuonOptimizer with the rule "spectral_sphere" for matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from muon_fsdp.groups import Params
from muon_fsdp.optimizer import NO_SCALE, MuonOptimizer


class SpectralSphereOptimizer(MuonOptimizer):
    """Keeps every matrix at a spectral norm R and moves it along that sphere (arXiv 2601.08393); AdamW for the rest.

        M       = momentum as in Muon, at a Frobenius norm of 1
        s, u, v = top singular triple of W, by power iteration from the last step's v
        W       = (R / s) W
        W       = W - lr R msign(M + lambda u v^T),   lambda such that the step is tangent: <u v^T, msign(..)> = 0

    `FSDPMuonOptimizer(model, rule="spectral_sphere")` is the same for a model that FSDP2 has wrapped. Parameters may
    be sharded in any way; W is never assembled.

    Args:
        params: as for `MuonOptimizer`.
        lr: length of a step along the sphere, relative to R.
        momentum: as for `MuonOptimizer`.
        weight_decay: applied before retraction, so it does nothing to matrices under "hard".
        nesterov: as for `MuonOptimizer`.
        ns_steps: as for `MuonOptimizer`, of one msign.
        power_iteration_steps: what finding s, u and v is worth at every step, in steps of power iteration; they are
            found with fewer products, and with as many as it takes at the first step of a matrix.
        radius_mode: R is "spectral_mup" radius_scaler sqrt(d_out/d_in), "identity" radius_scaler, or "initialize" the
            norm that a matrix has at its first step.
        radius_scaler: factor of R, positive; not under "initialize".
        retract_mode: "hard" brings W to its sphere at every step, "dynamic" by a factor of 1 +- retract_alpha lr, but
            for the first step.
        retract_alpha: strength of "dynamic".
        lambda_mode: "bracketed" finds lambda by secants inside a bracket, from the last step's; "bisection" by halving
            it; "projection" takes msign(M) and removes its part along u v^T; "zero" takes msign(M) (MuonSphere).
        options: all others of `MuonOptimizer` but `scale`, whose place R takes.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        ns_steps: int = 5,
        power_iteration_steps: int = 10,
        radius_mode: str = "spectral_mup",
        radius_scaler: float = 1.0,
        retract_mode: str = "hard",
        *,
        retract_alpha: float = 0.05,
        lambda_mode: str = "bracketed",
        **options: Any,
    ) -> None:
        if "scale" in options:
            raise ValueError(NO_SCALE)
        options.setdefault("rule", "spectral_sphere")
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
            ns_steps=ns_steps,
            power_iteration_steps=power_iteration_steps,
            radius_mode=radius_mode,
            radius_scaler=radius_scaler,
            retract_mode=retract_mode,
            retract_alpha=retract_alpha,
            lambda_mode=lambda_mode,
            **options,
        )
