"""Solve for the chains of Newton-Schulz steps that muon_fsdp/linalg/chains.py stores."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from muon_fsdp.linalg.chains import Step

# Coefficients in t = (x / upper)^2 of U = t^2 + alpha t, V = U^2 + beta U + gamma t and of Z + identity. Degree 17:
# (alpha, beta, gamma, d, e, f, identity) with Z = d V V + e V + f U. Degree 9: (alpha, c, beta, gamma, identity) with
# Z = c U^2 + beta U + gamma t. Degree 5: (c, b, identity) with Z = c t^2 + b t.
_Form: TypeAlias = tuple[float, ...]

DEGREES = (5, 9, 17)
_GRID_POINTS = 2001
# A coarser grid for the exchange: neighbours must differ by more than rounding even if the error is small.
_EXCHANGE_POINTS = 401
# The smoothed maximum of degree 17 exceeds the true one by at most log(2 * _GRID_POINTS) / _SHARPNESS of it.
_SHARPNESS = 1e6
# Below this error, rounding in float64 hides the extrema of 1 - p. The solver then fits a slightly larger interval.
_SMALLEST_ERROR = 1e-8
# Where the continuation for degree 17 starts: solutions for [lower, 1] by the lower end, to a few digits.
_STARTS: dict[float, _Form] = {
    0.004: (-1.0733853, 0.34656926, 0.0040483713, 59252.358, 2494.1897, 1.1140939, 26.712984),
    0.0558: (-1.3570055, 0.59337344, 0.018029732, 2662.2599, 341.62787, 3.8307295, 13.601574),
}


def evaluate(step: Step, x: Tensor) -> Tensor:
    """Return the odd polynomial of a step at the singular values `x`, in the dtype of `x`."""
    before, last = x * x, x * x
    for number, (alpha, beta, gamma) in enumerate(step.products):
        before, last = last, alpha * last * last + beta * last + (gamma * before if number else 0.0)
    return x * (last + step.identity)


@lru_cache(maxsize=64)
def solve(degrees: tuple[int, ...], lower: float, safety: float = 1.01, cushion: float = 0.0) -> tuple[Step, ...]:
    """Compose minimax odd polynomials for singular values in [lower, 1].

    Each step is the best approximation of 1 on the interval that the previous step maps to. This greedy choice is
    optimal for the composition.

    Args:
        degrees: the degree of every step: 5, 9 or 17.
        lower: the smallest singular value that is brought close to 1.
        safety: divides the argument of every step but the last, so that rounding does not push a singular value above
            the interval of the next step, where a polynomial of high degree grows quickly.
        cushion: fits the first step on [max(lower, cushion), 1] and recentres it around 1. The slope at zero hardly
            changes, but the largest singular values are no longer mapped to the smallest ones. Without a refresh after
            the first step, these would drown in the rounding of the Gram matrix.
    """
    if not degrees or not set(degrees) <= set(DEGREES):
        raise ValueError(f"degrees must be one or more of {', '.join(map(str, DEGREES))}, got {degrees}")
    if not 0.0 < lower < 1.0:
        raise ValueError(f"lower must be between 0 and 1, got {lower}")
    upper = 1.0
    steps: list[Step] = []
    for number, degree in enumerate(degrees, start=1):
        contraction = safety if number < len(degrees) else 1.0
        form = best_form(degree, max(lower / upper, cushion if number == 1 else 0.0))
        step = _step(degree, form, upper * contraction)
        values = evaluate(step, _grid(lower, upper))
        if number == 1 and lower < cushion:
            centre = float(values.min() + values.max()) / 2
            step = _step(degree, form, upper * contraction, 1 / centre)
            values = values / centre
        # Symmetric around 1, so that the next step need not know which end was reached.
        error = max(1.0 - float(values.min()), float(values.max()) - 1.0)
        if not error < 1.0:
            raise RuntimeError(f"The solver did not converge for degree {degree} on [{lower}, {upper}]; change degrees")
        lower, upper = 1.0 - error, 1.0 + error
        steps.append(step)
    return tuple(steps)


@lru_cache(maxsize=64)
def best_form(degree: int, lower: float) -> _Form:
    """Return the coefficients of the polynomial p of a degree that minimizes max |1 - p(x)| over [lower, 1]."""
    if degree == 17:
        return _best_degree_17(lower)
    inner = (degree - 1) // 2
    # The error is about q^(inner + 1), q = (1 - lower) / (1 + lower).
    q = _SMALLEST_ERROR ** (1 / (inner + 1))
    return _decode(_remez(inner, min(lower, (1 - q) / (1 + q))))


def _remez(inner: int, lower: float) -> list[float]:
    """Return c that minimizes max |1 - x sum_k c_k x^(2k)| over [lower, 1] with k up to `inner`, by Remez exchange.

    The error equioscillates on both ends and on all `inner` extrema of the polynomial in between.
    """
    x = _grid(lower, 1.0, _EXCHANGE_POINTS)
    angles = torch.arange(inner + 2, dtype=torch.float64, device="cpu") / (inner + 1)
    points = lower + (1 - lower) * torch.sin(angles * math.pi / 2)
    signs = 1.0 - 2.0 * (torch.arange(inner + 2, device="cpu") % 2).to(torch.float64)
    powers = 2 * torch.arange(inner + 1, device="cpu") + 1
    error = math.inf
    for _ in range(100):
        system = torch.cat([points[:, None] ** powers, signs[:, None]], dim=1)
        solution: list[float] = torch.linalg.solve(system, torch.ones_like(points)).tolist()
        c, new_error = solution[:-1], solution[-1]
        values = x[:, None] ** powers @ torch.tensor(c, dtype=torch.float64, device="cpu")
        extrema = _extrema(x, values)
        if len(extrema) != inner:
            break
        points = torch.cat([x[:1], extrema, x[-1:]])
        if abs(new_error - error) < 1e-14 + 1e-12 * abs(error):
            return c
        error = new_error
    raise RuntimeError(f"The exchange did not converge for degree {2 * inner + 1} on [{lower}, 1]; change lower")


def _extrema(x: Tensor, values: Tensor) -> Tensor:
    """Return where values on a grid have interior extrema, each as the vertex of the parabola through three points."""
    rise = values[1:] - values[:-1]
    at = torch.nonzero(rise[1:] * rise[:-1] < 0).flatten() + 1
    before, after = x[at] - x[at - 1], x[at + 1] - x[at]
    slope_before, slope_after = rise[at - 1] / before, rise[at] / after
    curvature = (slope_after - slope_before) / (before + after)
    slope = (slope_before * after + slope_after * before) / (before + after)
    return x[at] - slope / (2 * curvature)


def _decode(c: list[float]) -> _Form:
    """Return the form of degree 5 or 9 of the polynomial sum_k c_k t^k. There is exactly one."""
    if len(c) == 3:
        return (c[2], c[1], c[0])
    alpha = c[3] / (2 * c[4])
    beta = c[2] - c[4] * alpha**2
    return (alpha, c[4], beta, c[1] - alpha * beta, c[0])


def _best_degree_17(lower: float) -> _Form:
    """Follow the solution from a stored one to the interval [lower, 1], then sharpen the maximum.

    The seven parameters reach only some of the polynomials of degree 17, so that the error need not alternate in sign
    on eight points and an exchange has no reference to start from. Newton's method on a smoothed maximum needs none.
    """
    lower = min(lower, 0.6)
    here = min(_STARTS, key=lambda start: abs(math.log(start / lower)))
    form = torch.tensor(_STARTS[here], dtype=torch.float64, device="cpu")
    count = max(1, math.ceil(abs(math.log(lower / here)) / 0.1))
    for index in range(1, count + 1):
        x = _grid(here * (lower / here) ** (index / count), 1.0)
        form = _minimize(form, x, 1e2)
    sharpness = 1e2
    while sharpness < _SHARPNESS:
        sharpness *= 4
        form = _minimize(form, x, sharpness)
    return tuple(form.tolist())


def _minimize(form: Tensor, x: Tensor, sharpness: float) -> Tensor:
    """Minimize the smoothed maximum of |1 - p| on the grid `x` over the form of degree 17, by damped Newton steps."""
    error = float((_values_17(form, x) - 1).abs().max())
    kappa, damping = sharpness / error, 1e-6
    best, gradient, hessian = _smoothed(form, x, kappa)
    for _ in range(200):
        scale = hessian.diagonal().abs().clamp_min(1e-300).rsqrt()
        scaled = hessian * scale[:, None] * scale
        eigenvalues, vectors = torch.linalg.eigh(scaled)
        move = vectors @ ((vectors.T @ (gradient * scale)) / (eigenvalues.abs() + damping)) * scale
        if float(gradient @ move) < 1e-13 * error / sharpness:
            return form
        trial = _smoothed(form - move, x, kappa)
        if trial[0] < best:
            form, (best, gradient, hessian), damping = form - move, trial, max(damping / 10, 1e-14)
        elif damping > 1e6:
            return form
        else:
            damping *= 10
    return form


def _smoothed(form: Tensor, x: Tensor, kappa: float) -> tuple[float, Tensor, Tensor]:
    """Return log sum exp(kappa |1 - p|) / kappa, both signs summed, with its gradient and Hessian in the form."""
    alpha, beta, gamma, d, e, f, _ = form.unbind()
    t = x * x
    u = t * t + alpha * t
    v = u * u + beta * u + gamma * t
    slope = 2 * d * v + e  # of Z in V
    of_v = torch.stack([(2 * u + beta) * t, u, t])  # derivatives of V in alpha, beta, gamma
    jacobian = torch.cat([slope * of_v, torch.stack([v * v, v, u, torch.ones_like(t)])])
    jacobian[0] += f * t
    jacobian *= x
    residual = _values_17(form, x) - 1
    exponents = torch.cat([residual, -residual]) * kappa
    plus, minus = torch.softmax(exponents, 0).view(2, -1)
    signed = plus - minus
    gradient = jacobian @ signed
    hessian = kappa * ((jacobian * (plus + minus)) @ jacobian.T - torch.outer(gradient, gradient))
    weight = signed * x
    hessian[:3, :3] += 2 * d * (of_v * weight) @ of_v.T
    hessian[0, 0] += 2 * (weight * slope * t * t).sum()
    crossed = torch.zeros_like(hessian)
    crossed[0, 1] = (weight * slope * t).sum()
    crossed[:3, 3] = of_v @ (2 * weight * v)
    crossed[:3, 4] = of_v @ weight
    crossed[0, 5] = (weight * t).sum()
    return float(torch.logsumexp(exponents, 0)) / kappa, gradient, hessian + crossed + crossed.T


def _values_17(form: Tensor, x: Tensor) -> Tensor:
    alpha, beta, gamma, d, e, f, identity = form.unbind()
    t = x * x
    u = t * t + alpha * t
    v = u * u + beta * u + gamma * t
    return x * (d * v * v + e * v + f * u + identity)


def _step(degree: int, form: _Form, upper: float, factor: float = 1.0) -> Step:
    """Return the step of factor * p(x / upper). Powers of two scale U and V to about 1, because float16 stores them."""
    square, factor = upper**2, factor / upper
    t = _grid(0.0, 1.0) ** 2
    identity = factor * form[-1]
    if degree == 5:
        c, b, _ = form
        return Step(5, ((factor * c / square**2, factor * b / square, 0.0),), identity)
    u = t * t + form[0] * t
    of_u = _power_of_two(u)
    first = (of_u / square**2, of_u * form[0] / square, 0.0)
    if degree == 9:
        _, c, beta, gamma, _ = form
        second = (factor * c / of_u**2, factor * beta / of_u, factor * gamma / square)
        return Step(9, (first, second), identity)
    _, beta, gamma, d, e, f, _ = form
    of_v = _power_of_two(u * u + beta * u + gamma * t)
    second = (of_v / of_u**2, of_v * beta / of_u, of_v * gamma / square)
    third = (factor * d / of_v**2, factor * e / of_v, factor * f / of_u)
    return Step(17, (first, second, third), identity)


def _power_of_two(values: Tensor) -> float:
    """Return the power of two that brings the largest absolute value to between 0.5 and 1."""
    return 2.0 ** -math.ceil(math.log2(float(values.abs().max())))


def _grid(lower: float, upper: float, points: int = _GRID_POINTS) -> Tensor:
    """Return points of [lower, upper], denser at both ends."""
    angles = torch.linspace(0, math.pi, points, dtype=torch.float64, device="cpu")
    return lower + (upper - lower) * (1 - torch.cos(angles)) / 2
