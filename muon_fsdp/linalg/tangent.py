"""Find the multiplier that makes an update tangent to a sphere of matrices with equal spectral norm, for batches.

On a GPU the host never reads a number, so it never waits for the device and every search makes the same launches. On a
CPU a search stops as soon as all multipliers are found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from muon_fsdp.kernels import unusable
from muon_fsdp.linalg.autocast import outside_autocast
from muon_fsdp.linalg.newton_schulz import Shifted, orthogonalize, orthogonalize_shifted
from muon_fsdp.linalg.subspaces import normalized_or

LambdaMode = Literal["bracketed", "bisection", "projection", "zero"]
LAMBDA_MODES: tuple[str, ...] = get_args(LambdaMode)

# Calls of msign after which a search gives up. One more call, at lambda = 0, follows for matrices without a root.
MAX_CALLS = {"bracketed": 12, "bisection": 26}
# The largest |<u v^T, msign(..)>| that counts as zero. Rounding makes smaller values unreachable.
TOLERANCE, HALF_TOLERANCE = 2e-4, 1e-3
# ||M + lambda u v^T||^2 is a sum of three terms that may cancel, with a rounding error near 1e-6. This number is added
# to the sum, because msign diverges if a norm is 2% too small.
NORM_SLACK = 1e-4


@dataclass(frozen=True)
class Msign:
    """The way in which msign, the polar factor of a matrix, is computed.

    Args:
        orthogonalization: the name of a method, as in the option `orthogonalization` of the optimizers.
        ns_steps: number of Newton-Schulz steps; "exact" ignores it.
    """

    orthogonalization: str = "default"
    ns_steps: int = 5


@dataclass(frozen=True)
class Known:
    """Facts about the matrices of a batch that the caller of `solve_lambda` knows; None means unknown.

    Args:
        multiplier: (B,), multipliers of the previous step. "bracketed" starts there, and from 0 if they are unknown.
        slope: (B,), slopes of the previous step.
        searched: (B,), bool, False for matrices whose multiplier is 0 without a search.
        inverse_norms: (B,), one over the Frobenius norms of the momentum; only kernels use them.
    """

    multiplier: Tensor | None = None
    slope: Tensor | None = None
    searched: Tensor | None = None
    inverse_norms: Tensor | None = None


class Tangent(NamedTuple):
    """The result of `solve_lambda` for every matrix of a batch.

    Args:
        multiplier: (B,), lambda.
        direction: (B, m, n), msign(M + lambda u v^T).
        residual: (B,), f(lambda) = <u v^T, direction>.
        slope: (B,), an estimate of f', to pass to the next search.
        calls: (B,), number of calls of msign.
        failed: (B,), bool, True where no root was found and lambda is 0.
    """

    multiplier: Tensor
    direction: Tensor
    residual: Tensor
    slope: Tensor
    calls: Tensor
    failed: Tensor


@outside_autocast
def solve_lambda(
    momentum: Tensor,  # (B, m, n)
    left: Tensor,  # (B, m)
    right: Tensor,  # (B, n)
    *,
    method: str = "bracketed",
    tolerance: float | None = None,
    known: Known | None = None,
    msign: Msign | None = None,
    out: Tensor | None = None,  # (B, m, n)
) -> Tangent:
    """Find the root lambda of f(lambda) = <u v^T, msign(M + lambda u v^T)>, with M scaled to a Frobenius norm of 1.

    f does not decrease. Its root lies in [-c - 1, -c + 1] with c = u^T M v, because M - c u v^T has no singular value
    above 1. If |f| still exceeds the tolerance after the calls of msign that a method may make, the result has
    lambda = 0, which takes one more call.

    Args:
        momentum: (B, m, n), M at any norm.
        left: (B, m), unit vectors u.
        right: (B, n), unit vectors v.
        method: "bracketed" takes secant steps inside the bracket (Illinois method), at most 12 calls of msign;
            "bisection" halves the bracket, at most 26 calls.
        tolerance: the largest |f| that counts as a root; None is 2e-4 on CPUs and in float64, and 1e-3 on GPUs.
        known: what is known before the search, such as the multipliers of the previous step.
        msign: how msign is computed; None is the default of `Msign`.
        out: (B, m, n), a tensor for the direction.
    """
    if method not in MAX_CALLS:
        raise ValueError(f"Unknown method {method!r}; valid names are {', '.join(MAX_CALLS)}")
    known, msign = known or Known(), msign or Msign()
    result = torch.empty_like(momentum, dtype=_at_least_single(momentum)) if out is None else out
    single = momentum.dtype != torch.float64
    by_kernels = unusable(momentum.device) is None and single and msign.orthogonalization != "exact"
    evaluate: _Evaluation | _EvaluationByKernels
    if by_kernels:
        evaluate = _EvaluationByKernels(momentum, left, right, result, msign, known.inverse_norms)
    else:
        evaluate = _Evaluation(momentum, left, right, result, msign)
    if tolerance is None:
        tolerance = HALF_TOLERANCE if momentum.is_cuda and single else TOLERANCE
    search = _Search(evaluate.component, method, tolerance, known, min(momentum.shape[-2:]))
    on_host = momentum.device.type == "cpu"
    for _ in range(MAX_CALLS[method]):
        search.update(evaluate(search.point, search.active))
        if on_host and not bool(search.active.any()):
            break
    failed = search.active
    point = torch.where(failed, 0.0, search.point)
    residual = search.value
    if not on_host or bool(failed.any()):
        residual = torch.where(failed, evaluate(point, failed), residual)
    return Tangent(point, result, residual, search.slope, search.calls + failed.int(), failed)


def _at_least_single(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _Evaluation:
    """Evaluates f at one point per matrix and stores msign at that point in `result`.

    A call returns f, (B,). Matrices that are not active keep their entry of `result`.
    """

    def __init__(
        self,
        momentum: Tensor,  # (B, m, n)
        left: Tensor,  # (B, m)
        right: Tensor,  # (B, n)
        result: Tensor,  # (B, m, n)
        msign: Msign,
    ) -> None:
        dtype = _at_least_single(momentum)
        flat = momentum.to(dtype).flatten(1)
        self.unit = normalized_or(flat, torch.zeros_like(flat)).view(momentum.shape)
        self.left, self.right, self.result = left.to(dtype), right.to(dtype), result
        self.msign = msign
        self.component = bilinear(self.left, self.unit, self.right)

    def __call__(self, points: Tensor, active: Tensor) -> Tensor:
        if self.unit.device.type != "cpu" or bool(active.all()):
            # The point of an inactive matrix has not moved, so computing it again gives the same result.
            self._evaluate(self.unit, points, self.left, self.right, self.result)
            return bilinear(self.left, self.result, self.right)
        where = active.nonzero().squeeze(-1)
        left, right = self.left[where], self.right[where]
        part = torch.empty_like(self.result[where])
        self._evaluate(self.unit[where], points[where], left, right, part)
        self.result[where] = part
        values = torch.zeros_like(points)
        values[where] = bilinear(left, part, right)
        return values

    def _evaluate(self, unit: Tensor, points: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
        shifted = torch.baddbmm(unit, points[:, None, None] * left[:, :, None], right[:, None, :])
        orthogonalize(shifted, out=out, method=self.msign.orthogonalization, steps=self.msign.ns_steps)


class _EvaluationByKernels:
    """Does the same as `_Evaluation`, with kernels that skip inactive matrices.

    The kernels read on the device which matrices are active, so the host does not wait for that.
    """

    def __init__(
        self,
        momentum: Tensor,  # (B, m, n)
        left: Tensor,  # (B, m)
        right: Tensor,  # (B, n)
        result: Tensor,  # (B, m, n)
        msign: Msign,
        inverse_norms: Tensor | None,  # (B,)
    ) -> None:
        from muon_fsdp.kernels import triton_norms

        self.momentum = momentum.contiguous()
        scales = triton_norms.inverse_norms(self.momentum) if inverse_norms is None else inverse_norms
        self.scales, self.left, self.right = scales, left.contiguous(), right.contiguous()
        self.result = result
        self.msign = msign
        self.component = self.scales * bilinear(self.left, self.momentum, self.right)

    def __call__(self, points: Tensor, active: Tensor) -> Tensor:
        norms = ((1 + 2 * points * self.component + points.square()).clamp_min(0) + NORM_SLACK).sqrt()
        orthogonalize_shifted(
            Shifted(self.momentum, self.scales, self.left, self.right, points),
            norms,
            method=self.msign.orthogonalization,
            steps=self.msign.ns_steps,
            out=self.result,
            active=active,
        )
        return bilinear(self.left, self.result, self.right, active)


def bilinear(
    left: Tensor,  # (B, m)
    matrices: Tensor,  # (B, m, n)
    right: Tensor,  # (B, n)
    active: Tensor | None = None,  # (B,) bool
) -> Tensor:
    """Compute u^T A v for every matrix of a batch.

    Returns:
        (B,), with arbitrary numbers for matrices that are not active.
    """
    if matrices.dtype != torch.float64 and unusable(matrices.device) is None and matrices.is_contiguous():
        from muon_fsdp.kernels import triton_spectral

        flags = None if active is None else active.to(torch.int32)
        return triton_spectral.bilinear(left.float(), matrices, right.float(), flags)
    products = torch.bmm(matrices.to(right.dtype), right.unsqueeze(-1)).squeeze(-1)
    return (left * products).sum(-1)


def project_out(
    matrices: Tensor,  # (B, m, n)
    left: Tensor,  # (B, m)
    right: Tensor,  # (B, n)
    norms: Tensor,  # (B,)
    smallest: float,
) -> None:
    """Subtract (u^T A v) u v^T in place from every matrix A of a batch, unless its norm is below `smallest`."""
    if matrices.dtype != torch.float64 and unusable(matrices.device) is None and matrices.is_contiguous():
        from muon_fsdp.kernels import triton_spectral

        triton_spectral.project_out(matrices, left.float(), right.float(), norms.float(), smallest)
        return
    factors = torch.where(norms >= smallest, -bilinear(left, matrices, right), 0.0)
    outer = (factors[:, None] * left).to(matrices.dtype)[:, :, None]
    matrices.baddbmm_(outer, right[:, None, :].to(matrices.dtype))


class _Search:
    """A search for the root of f for every matrix of a batch.

    All searches advance together. Each choice is a `torch.where`, so the host never reads a value.
    """

    def __init__(
        self,
        component: Tensor,  # (B,), u^T M v
        method: str,
        tolerance: float,
        known: Known,
        rank: int,
    ) -> None:
        self.bisects, self.tolerance = method == "bisection", tolerance
        self.low, self.high = -component - 1, -component + 1
        # The limits of f stand in for its values at the ends: a secant from them is no worse than a bisection.
        self.f_low, self.f_high = -torch.ones_like(component), torch.ones_like(component)
        self.seen_low = torch.zeros_like(component, dtype=torch.bool)
        self.seen_high = torch.zeros_like(self.seen_low)
        # This suits matrices with nearly equal singular values.
        guess = torch.full_like(component, math.sqrt(rank))
        slope, start = known.slope, known.multiplier
        self.slope = guess if slope is None else torch.where(slope > 0, slope.to(guess.dtype), guess)
        point = torch.zeros_like(component) if start is None else start.to(component.dtype)
        if self.bisects:
            point = -component
        self.searched = torch.ones_like(self.seen_low) if known.searched is None else known.searched
        point = torch.minimum(torch.maximum(point, self.low), self.high)
        self.point = torch.where(self.searched, point, 0.0)
        self.value = torch.zeros_like(component)
        self.active = torch.ones_like(self.seen_low)
        self.calls = torch.zeros_like(component, dtype=torch.int32)
        self._last_side = torch.zeros_like(component)
        self._before: tuple[Tensor, Tensor] | None = None

    def update(self, value: Tensor) -> None:
        """Record f at the current points, (B,), and choose new points where |f| exceeds the tolerance."""
        self.calls = self.calls + self.active.int()
        self.value = torch.where(self.active, value, self.value)
        self.active = self.active & self.searched & ~(value.abs() <= self.tolerance)
        x, active = self.point, self.active
        if self._before is not None:
            x_before, before = self._before
            secant = (value - before) / (x - x_before)
            self.slope = torch.where(active & (secant > 0) & torch.isfinite(secant), secant, self.slope)
        self._before = (x, value)
        below, above = active & (value < 0), active & ~(value < 0)
        # Illinois method: halve f at an end of the bracket that stayed fixed in two successive steps. Otherwise secants
        # could leave that end fixed forever.
        self.f_high = torch.where(below & (self._last_side < 0) & self.seen_high, self.f_high / 2, self.f_high)
        self.f_low = torch.where(above & (self._last_side > 0) & self.seen_low, self.f_low / 2, self.f_low)
        self.low, self.f_low = torch.where(below, x, self.low), torch.where(below, value, self.f_low)
        self.high, self.f_high = torch.where(above, x, self.high), torch.where(above, value, self.f_high)
        self.seen_low, self.seen_high = self.seen_low | below, self.seen_high | above
        self._last_side = torch.where(below, -1.0, torch.where(above, 1.0, self._last_side))
        middle = (self.low + self.high) / 2
        if not self.bisects:
            between = (self.low * self.f_high - self.high * self.f_low) / (self.f_high - self.f_low)
            new = torch.where(self.seen_low & self.seen_high, between, x - value / self.slope)
            middle = torch.where((new > self.low) & (new < self.high), new, middle)
        self.point = torch.where(active, middle, x)
