"""The multiplier that makes an update tangent to a sphere of matrices of equal spectral norm; batched.

Nothing here looks at a number on the host, so nothing stalls a GPU; on CPUs a search ends when all have been found.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from muon_fsdp.kernels import unusable
from muon_fsdp.linalg.autocast import outside_autocast
from muon_fsdp.linalg.newton_schulz import orthogonalize, orthogonalize_shifted
from muon_fsdp.linalg.subspaces import normalized_or

LambdaMode = Literal["bracketed", "bisection", "projection", "zero"]
LAMBDA_MODES: tuple[str, ...] = get_args(LambdaMode)

# Calls of msign after which a search gives up. One more, at zero, follows for what it has not found.
MAX_CALLS = {"bracketed": 12, "bisection": 26}
# How near zero <u v^T, msign(..)> must come: what rounding leaves reachable.
TOLERANCE, HALF_TOLERANCE = 2e-4, 1e-3
# ||M + lambda u v^T||^2 is the sum of three terms that may cancel; below this their rounding is all that is left.
SMALLEST_SQUARE = 1e-5


class Tangent(NamedTuple):
    """What `solve_lambda` found for every matrix of a batch.

    Args:
        multiplier: (B,), lambda.
        direction: (B, m, n), msign(M + lambda u v^T).
        residual: (B,), f(lambda) = <u v^T, direction>.
        slope: (B,), an estimate of f', for the next search.
        calls: (B,), calls of msign.
        failed: (B,), bool: not found, so lambda is 0.
    """

    multiplier: Tensor
    direction: Tensor
    residual: Tensor
    slope: Tensor
    calls: Tensor
    failed: Tensor


@outside_autocast
def solve_lambda(
    momentum: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    method: str = "bracketed",
    tolerance: float | None = None,
    start: Tensor | None = None,
    slope: Tensor | None = None,
    searched: Tensor | None = None,
    orthogonalization: str = "default",
    ns_steps: int = 5,
    inverse_norms: Tensor | None = None,
    out: Tensor | None = None,
) -> Tangent:
    """The root of f(lambda) = <u v^T, msign(M + lambda u v^T)>, with M at a Frobenius norm of 1.

    f is non-decreasing, and its root lies in [-c - 1, -c + 1] with c = u^T M v: every singular value of the rest of
    M is at most 1. Where |f| is not below the tolerance after the calls that a method has, lambda = 0 is taken, with
    one more call.

    Args:
        momentum: (B, m, n), M at any norm.
        left: (B, m), unit vectors u.
        right: (B, n), unit vectors v.
        method: "bracketed" goes from `start` by secants that stay inside the bracket (Illinois), at most 12 calls of
            msign; "bisection" halves it, at most 26.
        tolerance: of |f|; None is 2e-4 on CPUs and in float64, 1e-3 on GPUs.
        start: (B,), the multipliers of the last step; None starts from 0.
        slope: (B,), the slopes of the last step.
        searched: (B,), bool: where False, lambda is 0.
        orthogonalization: what msign is computed with, as the option of the optimizers.
        ns_steps: its steps.
        inverse_norms: (B,), one over the Frobenius norms of `momentum`, where they are known.
        out: (B, m, n), takes the direction.
    """
    if method not in MAX_CALLS:
        raise ValueError(f"Unknown method {method!r}; valid names are {', '.join(MAX_CALLS)}")
    result = torch.empty_like(momentum, dtype=_at_least_single(momentum)) if out is None else out
    by_kernels = unusable(momentum.device) is None and momentum.dtype != torch.float64 and orthogonalization != "exact"
    make = _EvaluationByKernels if by_kernels else _Evaluation
    evaluate = make(momentum, inverse_norms, left, right, result, orthogonalization, ns_steps)
    if tolerance is None:
        tolerance = HALF_TOLERANCE if momentum.is_cuda and momentum.dtype != torch.float64 else TOLERANCE
    search = _Search(evaluate.component, method, tolerance, start, slope, searched, min(momentum.shape[-2:]))
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
    """f at one point per matrix, and msign there in `result`; those that are not active keep what they have."""

    def __init__(
        self,
        momentum: Tensor,
        inverse_norms: Tensor | None,
        left: Tensor,
        right: Tensor,
        result: Tensor,
        orthogonalization: str,
        ns_steps: int,
    ) -> None:
        dtype = _at_least_single(momentum)
        if inverse_norms is None:
            flat = momentum.to(dtype).flatten(1)
            self.unit = normalized_or(flat, torch.zeros_like(flat)).view(momentum.shape)
        else:
            self.unit = momentum.to(dtype) * inverse_norms[:, None, None].to(dtype)
        self.left, self.right, self.result = left.to(dtype), right.to(dtype), result
        self.options: dict[str, Any] = {"method": orthogonalization, "steps": ns_steps}
        self.component = bilinear(self.left, self.unit, self.right)

    def __call__(self, points: Tensor, active: Tensor) -> Tensor:
        if self.unit.device.type != "cpu" or bool(active.all()):
            # A point that is not active has not moved, so it gets the same result again.
            self._msign(self.unit, points, self.left, self.right, self.result)
            return bilinear(self.left, self.result, self.right)
        where = active.nonzero().squeeze(-1)
        left, right = self.left[where], self.right[where]
        part = torch.empty_like(self.result[where])
        self._msign(self.unit[where], points[where], left, right, part)
        self.result[where] = part
        values = torch.zeros_like(points)
        values[where] = bilinear(left, part, right)
        return values

    def _msign(self, unit: Tensor, points: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
        shifted = torch.baddbmm(unit, points[:, None, None] * left[:, :, None], right[:, None, :])
        orthogonalize(shifted, out=out, **self.options)


class _EvaluationByKernels:
    """The same, where inactive matrices cost no time though nobody looks which they are."""

    def __init__(
        self,
        momentum: Tensor,
        inverse_norms: Tensor | None,
        left: Tensor,
        right: Tensor,
        result: Tensor,
        orthogonalization: str,
        ns_steps: int,
    ) -> None:
        from muon_fsdp.kernels import triton_norms

        self.momentum = momentum.contiguous()
        scales = triton_norms.inverse_norms(self.momentum) if inverse_norms is None else inverse_norms
        self.scales, self.left, self.right = scales, left.contiguous(), right.contiguous()
        self.result = result
        self.options: dict[str, Any] = {"method": orthogonalization, "steps": ns_steps}
        self.component = self.scales * bilinear(self.left, self.momentum, self.right)

    def __call__(self, points: Tensor, active: Tensor) -> Tensor:
        norms = (1 + 2 * points * self.component + points.square()).clamp_min(SMALLEST_SQUARE).sqrt()
        orthogonalize_shifted(
            self.momentum,
            self.scales,
            self.left,
            self.right,
            points,
            norms,
            out=self.result,
            active=active,
            **self.options,
        )
        return bilinear(self.left, self.result, self.right, active)


def bilinear(left: Tensor, matrices: Tensor, right: Tensor, active: Tensor | None = None) -> Tensor:
    """u^T A v for every matrix of a batch; where not active, anything."""
    if matrices.dtype != torch.float64 and unusable(matrices.device) is None and matrices.is_contiguous():
        from muon_fsdp.kernels import triton_spectral

        flags = None if active is None else active.to(torch.int32)
        return triton_spectral.bilinear(left.float(), matrices, right.float(), flags)
    products = torch.bmm(matrices.to(right.dtype), right.unsqueeze(-1)).squeeze(-1)
    return (left * products).sum(-1)


def add_outer(matrices: Tensor, left: Tensor, right: Tensor, factors: Tensor) -> None:
    """A <- A + factor u v^T for every matrix of a batch."""
    if matrices.dtype != torch.float64 and unusable(matrices.device) is None and matrices.is_contiguous():
        from muon_fsdp.kernels import triton_spectral

        ones = torch.ones_like(factors)
        triton_spectral.shifted_cast(matrices, ones, left.float(), right.float(), factors, matrices)
        return
    outer = (factors[:, None] * left).to(matrices.dtype)[:, :, None]
    matrices.baddbmm_(outer, right[:, None, :].to(matrices.dtype))


class _Search:
    """A root of a non-decreasing function per matrix; all of them step together, without a look at their values."""

    def __init__(
        self,
        component: Tensor,
        method: str,
        tolerance: float,
        start: Tensor | None,
        slope: Tensor | None,
        searched: Tensor | None,
        rank: int,
    ) -> None:
        self.bisects, self.tolerance = method == "bisection", tolerance
        self.low, self.high = -component - 1, -component + 1
        # What f tends to: a secant from there is no worse than a bisection.
        self.f_low, self.f_high = -torch.ones_like(component), torch.ones_like(component)
        self.seen_low = torch.zeros_like(component, dtype=torch.bool)
        self.seen_high = torch.zeros_like(self.seen_low)
        guess = torch.full_like(component, math.sqrt(rank))  # for singular values that are all alike
        self.slope = guess if slope is None else torch.where(slope > 0, slope.to(guess.dtype), guess)
        point = torch.zeros_like(component) if start is None else start.to(component.dtype)
        if self.bisects:
            point = -component
        self.searched = torch.ones_like(self.seen_low) if searched is None else searched
        point = torch.minimum(torch.maximum(point, self.low), self.high)
        self.point = torch.where(self.searched, point, 0.0)
        self.value = torch.zeros_like(component)
        self.active = torch.ones_like(self.seen_low)
        self.calls = torch.zeros_like(component, dtype=torch.int32)
        self._last_side = torch.zeros_like(component)
        self._before: tuple[Tensor, Tensor] | None = None

    def update(self, value: Tensor) -> None:
        """Take f at the points, and move on where it is not small enough."""
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
        # Illinois: an end that stays twice counts half, else it would stay for ever.
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
