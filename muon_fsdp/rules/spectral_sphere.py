"""Update matrices by the Spectral Sphere Optimizer (arXiv 2601.08393), which keeps their spectral norm fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from muon_fsdp.declarations.option import Option, PlannedOptions, number, positive
from muon_fsdp.declarations.state import PerMatrix
from muon_fsdp.linalg.newton_schulz import inverse_norms, orthogonalization_flops
from muon_fsdp.linalg.scaling import ADAMW_RATIO, RELATIVE_LRS, damp
from muon_fsdp.linalg.sphere import RADIUS_MODES, RETRACT_MODES, SMALLEST_NORM, retraction_of_step, target_radius
from muon_fsdp.linalg.tangent import LAMBDA_MODES, MAX_CALLS, Known, Msign, project_out, solve_lambda
from muon_fsdp.rules.base import GroupOptions, MatrixBatch, MatrixValues
from muon_fsdp.rules.muon import MOMENTUM_OPTIONS, Muon, unusual_lr
from muon_fsdp.statistics.top_singular import TopSingular

# Orthogonalizations per matrix that the planner assumes: the median once lambda starts from the last step's value.
USUAL_CALLS = 4


class SpectralSphere(Muon):
    """The Spectral Sphere rule: each matrix keeps the spectral norm R and moves along the sphere of such matrices.

        W = f W - lr R msign(M + lambda u v^T) * min(1, ||M||_F / momentum_eps)

    M is Muon's momentum; u and v are the top singular vectors of W. lambda makes the update tangent to the sphere, and
    the factor f brings W back to it.
    """

    name = "spectral_sphere"
    title = "SSO"
    paper = "arXiv 2601.08393"
    aliases = ("sso",)
    options = (
        *MOMENTUM_OPTIONS,
        Option(
            "radius_mode",
            "spectral_mup",
            'the radius R: radius_scaler sqrt(d_out/d_in), radius_scaler ("identity"), or the spectral norm at the '
            'first step ("initialize")',
            choices=RADIUS_MODES,
        ),
        Option("radius_scaler", 1.0, 'factor of R, positive; unused with "initialize"', check=positive),
        Option(
            "retract_mode",
            "hard",
            '"hard" brings W back to its sphere at every step; "dynamic" does so at the first step only, and then '
            "multiplies W by 1 +- retract_alpha lr",
            choices=RETRACT_MODES,
        ),
        Option("retract_alpha", 0.05, 'strength of "dynamic" retraction', check=number),
        Option(
            "lambda_mode",
            "bracketed",
            'how lambda is found: "bracketed" (secants), "bisection", "projection" of msign(M), or "zero" (MuonSphere)',
            choices=LAMBDA_MODES,
        ),
    )
    state = (
        *Muon.state,
        PerMatrix("lagrange_multiplier", "scalar"),
        PerMatrix("lagrange_slope", "scalar"),
        PerMatrix("radius", "scalar"),
    )
    statistics = ("top_singular",)
    diagnostics = ("norm_over_radius", "without_norm", "lambda", "msign_calls", "lambda_failed")
    hints: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("scale", "ns_stepsize"), "the radius of each matrix replaces it (pass radius_mode, radius_scaler)"
        ),
        "cautious_weight_decay": "the factor that brings each matrix back to its sphere replaces weight decay",
    }
    recipe: ClassVar[dict[str, float]] = {"lr": 0.02, "weight_decay": 0.0}

    def factors(self, values: MatrixValues) -> tuple[Tensor, Tensor]:
        """Return the factors of weights and updates.

        Returns:
            The retraction f, which at the first step always reaches the sphere, and the radius R, both (B,).
        """
        options, saved = values.options, values.state["radius"]
        norm, lr = values.statistics["top_singular"].norm, options["lr"]
        modes = options["radius_mode"], options["retract_mode"]
        found = retraction_of_step(
            norm,
            saved,
            target_radius(values.rows, values.cols, modes[0], options["radius_scaler"]),
            lr,
            options["weight_decay"],
            options["retract_alpha"],
            modes,
        )
        values.state["radius"] = found.saved
        values.diagnostics.update(norm_over_radius=found.ratio, without_norm=found.without_norm)
        return found.factor, found.radius

    def factor(self, options: PlannedOptions, rows: int, cols: int) -> float:
        return 1.0

    def direction(self, batch: MatrixBatch) -> None:
        SpectralSphere.directions(self, [batch])

    def directions(self, batches: Sequence[MatrixBatch]) -> None:
        searched = [batch for batch in batches if batch.options["lambda_mode"] in MAX_CALLS]
        once = [batch for batch in batches if batch.options["lambda_mode"] not in MAX_CALLS]
        found = [*map(_solve, searched), *self._orthogonalize(once)]
        for batch in once:
            multiplier = batch.state["lagrange_multiplier"].zero_()
            batch.diagnostics.update(msign_calls=torch.ones_like(multiplier), lambda_failed=multiplier)
            if batch.options["lambda_mode"] == "projection":
                top: TopSingular = batch.statistics["top_singular"]
                project_out(batch.update, top.left, top.right, top.norm, SMALLEST_NORM)
        for batch, norms in zip([*searched, *once], found, strict=True):
            damp(batch.update, norms, batch.options["momentum_eps"])
            batch.diagnostics["lambda"] = batch.state["lagrange_multiplier"]

    def flops(self, options: PlannedOptions, rows: int, cols: int) -> float:
        calls = USUAL_CALLS if options["lambda_mode"] in MAX_CALLS else 1
        return calls * orthogonalization_flops(rows, cols, options["ns_steps"], options["orthogonalization"])

    def update_scale(self, group: GroupOptions, rows: int, cols: int) -> float | None:
        return target_radius(rows, cols, group["radius_mode"], group["radius_scaler"])

    def residual(self, batch: MatrixBatch) -> Tensor | None:
        return None  # the update orthogonalizes M + lambda u v^T, so the residual of M would mislead

    def other_lr_ratio(self, options: GroupOptions) -> float | None:
        return ADAMW_RATIO

    def warnings(self, group: GroupOptions) -> list[str]:
        effect = "With rule='spectral_sphere' the spectral norm of an update is lr times the radius"
        found = unusual_lr(group, RELATIVE_LRS, effect)
        if group["retract_mode"] != "hard" or group["weight_decay"] == 0:
            return found
        return [
            *found,
            "weight_decay has no effect on matrices with retract_mode='hard', which brings them back to their "
            "sphere at every step. Pass weight_decay=0, or retract_mode='dynamic'.",
        ]

    def metrics(self, last: Mapping[str, Tensor], total: Mapping[str, float]) -> dict[str, float]:
        """Return numbers for a logger.

        Keys:
            lambda_fallbacks: how often the search for lambda failed and lambda = 0 was used, over matrices and steps.
            matrices_without_norm: how often a matrix was zero and could not be retracted, over matrices and steps.
            spectral_norm_over_radius_min: the smallest ratio of spectral norm and R before the last step's retraction.
            spectral_norm_over_radius_max: the largest ratio.
            lambda_abs_mean: the mean of |lambda| in the last step, over all matrices.
            lambda_abs_max: the largest |lambda|.
            msign_calls_median: the median number of orthogonalizations per matrix in the last step.
            msign_calls_max: the largest number.
        """
        numbers = {"lambda_fallbacks": total["lambda_failed"], "matrices_without_norm": total["without_norm"]}
        if not len(last["lambda"]):
            return numbers
        ratios, multipliers = last["norm_over_radius"], last["lambda"].abs()
        ratios = ratios[~ratios.isnan()]
        return {
            **numbers,
            "spectral_norm_over_radius_min": float(ratios.min()) if len(ratios) else 0.0,
            "spectral_norm_over_radius_max": float(ratios.max()) if len(ratios) else 0.0,
            "lambda_abs_mean": float(multipliers.mean()),
            "lambda_abs_max": float(multipliers.max()),
            "msign_calls_median": float(last["msign_calls"].median()),
            "msign_calls_max": float(last["msign_calls"].max()),
        }


def _solve(batch: MatrixBatch) -> Tensor:
    """Find the lambda that makes updates tangent, write them, and return one over the norms of M, (B,)."""
    mode, method, steps = (batch.options[name] for name in ("lambda_mode", "orthogonalization", "ns_steps"))
    top: TopSingular = batch.statistics["top_singular"]
    multiplier, slope = batch.state["lagrange_multiplier"], batch.state["lagrange_slope"]
    norms = batch.inverse_norms if batch.inverse_norms is not None else inverse_norms(batch.matrices)
    tangent = solve_lambda(
        batch.matrices,
        top.left,
        top.right,
        method=mode,
        known=Known(multiplier, slope, top.norm >= SMALLEST_NORM, norms),
        msign=Msign(method, steps),
        out=batch.update,
    )
    batch.state.update(lagrange_multiplier=tangent.multiplier, lagrange_slope=tangent.slope)
    batch.diagnostics.update(msign_calls=tangent.calls, lambda_failed=tangent.failed)
    return norms
