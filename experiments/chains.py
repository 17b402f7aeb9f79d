"""Solve for the chains of Newton-Schulz steps that muon_fsdp/linalg/chains.py stores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from muon_fsdp.linalg.chains import Step

# Coefficients in t = (x / upper)^2. Degree 5: (c, b, identity) with Z = c t^2 + b t. Degree 9: (alpha, c, beta, gamma,
# identity) with U = t^2 + alpha t and Z = c U^2 + beta U + gamma t. Degree 17: (alpha, beta, gamma, d, e, f, identity)
# with V = U^2 + beta U + gamma t and Z = d V^2 + e V + f U. Degree 33 and 65 have one and two more pairs (beta, gamma),
# each for one more W = V^2 + beta V + gamma U.
_Form: TypeAlias = tuple[float, ...]

DEGREES = (5, 9, 17, 33, 65)
_GRID_POINTS = 2001
# For the way from a stored solution, and for the exchange: there neighbours must differ by more than rounding even if
# the error is small.
_COARSE_POINTS = 401
# The smoothed maximum of degrees from 17 on exceeds the true one by at most log(2 * _GRID_POINTS) / _SHARPNESS of it.
_SHARPNESS = 1e6
# Below this error, rounding in float64 hides the extrema of 1 - p. The solver then fits a slightly larger interval.
_SMALLEST_ERROR = 1e-8
# Where the continuation from degree 17 on starts: solutions for [lower, 1] by degree and lower end, to a few digits.
# Those of degree 33 and 65 are the best of hundreds of random starts: there are other local optima.
_STARTS: dict[int, dict[float, _Form]] = {
    17: {
        0.004: (-1.0733853, 0.34656926, 0.0040483713, 59252.358, 2494.1897, 1.1140939, 26.712984),
        0.0558: (-1.3570055, 0.59337344, 0.018029732, 2662.2599, 341.62787, 3.8307295, 13.601574),
    },
    33: {
        0.0267: (
            -1.110704,
            0.39491486,
            -0.013991358,
            0.067506426,
            -0.0011222352,
            35435675,
            54521.331,
            77.98294,
            25.446553,
        ),
        0.00109: (
            -1.1044909,
            0.33498479,
            0.0013369561,
            0.034058921,
            -0.00018697745,
            1.2682227e9,
            509065.21,
            11.999221,
            51.556346,
        ),
    },
    65: {
        0.01506: (
            -1.1776797,
            0.41783348,
            0.014981109,
            0.053298993,
            0.00074801116,
            0.0012272651,
            -2.3165386e-06,
            5.5548452e14,
            2.8734158e08,
            7939.2949,
            45.192656,
        ),
        0.0016: (
            -1.0753494,
            0.33943022,
            0.0081163725,
            0.03023591,
            9.1339192e-06,
            0.00030269575,
            -1.8860745e-07,
            3.47654e17,
            1.0972702e10,
            6454.3203,
            88.708049,
        ),
    },
}


def evaluate(step: Step, x: Tensor) -> Tensor:
    """Return the odd polynomial of a step at the singular values `x`, in the dtype of `x`."""
    before, last = x * x, x * x
    for number, (alpha, beta, gamma) in enumerate(step.products):
        before, last = last, alpha * last * last + beta * last + (gamma * before if number else 0.0)
    return x * (last + step.identity)


@lru_cache(maxsize=64)
def solve(
    degrees: tuple[int, ...], lower: float, safety: float = 1.01, cushion: float = 0.0, last_safety: float = 1.0
) -> tuple[Step, ...]:
    """Compose minimax odd polynomials for singular values in [lower, 1].

    Each step is the best approximation of 1 on the interval that the previous step maps to. This greedy choice is
    optimal for the composition.

    Args:
        degrees: the degree of every step: 5, 9, 17, 33 or 65.
        lower: the smallest singular value that is brought close to 1.
        safety: divides the argument of every step but the last, so that rounding does not push a singular value above
            the interval of the next step, where a polynomial of high degree grows quickly.
        cushion: fits the first step on [max(lower, cushion), 1] and recentres it around 1. The slope at zero hardly
            changes, but the largest singular values are no longer mapped to the smallest ones. Without a refresh after
            the first step, these would drown in the rounding of the Gram matrix.
        last_safety: divides the argument of the last step. A last step that leaves a band as wide as those before it
            grows as quickly beyond its interval, and needs the same room.
    """
    if not degrees or not set(degrees) <= set(DEGREES):
        raise ValueError(f"degrees must be one or more of {', '.join(map(str, DEGREES))}, got {degrees}")
    if not 0.0 < lower < 1.0:
        raise ValueError(f"lower must be between 0 and 1, got {lower}")
    upper = 1.0
    steps: list[Step] = []
    for number, degree in enumerate(degrees, start=1):
        contraction = safety if number < len(degrees) else last_safety
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


def num_products(degree: int) -> int:
    """Return how many products among m x m matrices a step of a degree needs."""
    return (degree - 1).bit_length() - 2


@lru_cache(maxsize=64)
def widest(degrees: tuple[int, ...], error: float, safety: float = 1.01, cushion: float = 0.0) -> tuple[Step, ...]:
    """Return the chain with the largest slope at zero whose singular values end within `error` of 1.

    It is the minimax chain from the lower end where its error is just that. For degrees 5 and 9, a polynomial of the
    largest slope within a band touches both ends of the band in turn at all of its extrema, as a minimax one does, so
    the two are the same. For higher degrees this was checked by rewarding the slope in the fit: it gains less than
    0.1%. All steps are contracted by `safety`, which costs as much of the slope at every step.
    """
    low, high = math.log(1e-5), math.log(0.5)  # of the lower end
    guess = math.log(0.95 / math.prod(degrees))
    for _ in range(40):
        try:
            steps = solve(degrees, math.exp(guess), safety, cushion, safety)
        except RuntimeError:  # the error is too large to continue the chain
            steps, excess = (), 0.5
        else:
            excess = _error(steps, math.exp(guess)) - error
        if steps and abs(excess) < 2e-4:
            return steps
        low, high = (guess, high) if excess > 0 else (low, guess)
        guess += min(0.5, max(-0.5, 3 * excess))  # the error falls by about 0.3 per unit
        guess = guess if low < guess < high else (low + high) / 2
    raise RuntimeError(f"No lower end gives an error of {error} for degrees {degrees}")


def _error(steps: tuple[Step, ...], lower: float) -> float:
    """Return the largest |1 - p| of a chain on [lower, 1]."""
    values = _grid(lower, 1.0, 20 * _GRID_POINTS)
    for step in steps:
        values = evaluate(step, values)
    return float((values - 1).abs().max())


@lru_cache(maxsize=64)
def best_form(degree: int, lower: float) -> _Form:
    """Return the coefficients of the polynomial p of a degree that minimizes max |1 - p(x)| over [lower, 1]."""
    if degree > 9:
        return _best_nested(degree, lower)
    inner = (degree - 1) // 2
    # The error is about q^(inner + 1), q = (1 - lower) / (1 + lower).
    q = _SMALLEST_ERROR ** (1 / (inner + 1))
    return _decode(_remez(inner, min(lower, (1 - q) / (1 + q))))


def _remez(inner: int, lower: float) -> list[float]:
    """Return c that minimizes max |1 - x sum_k c_k x^(2k)| over [lower, 1] with k up to `inner`, by Remez exchange.

    The error equioscillates on both ends and on all `inner` extrema of the polynomial in between.
    """
    x = _grid(lower, 1.0, _COARSE_POINTS)
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


def _best_nested(degree: int, lower: float) -> _Form:
    """Follow the solution from a stored one to the interval [lower, 1], then sharpen the maximum.

    From degree 17 on the parameters reach only some of the polynomials (seven parameters for nine coefficients, nine
    for 17, eleven for 33), so that the error need not alternate in sign on one point more than there are coefficients,
    and an exchange has no reference to start from. Newton's method on a smoothed maximum needs none.
    """
    lower = min(lower, 0.6)
    starts = _STARTS[degree]
    here = min(starts, key=lambda start: abs(math.log(start / lower)))
    form = torch.tensor(starts[here], dtype=torch.float64, device="cpu")
    count = max(1, math.ceil(abs(math.log(lower / here)) / 0.1))
    for index in range(1, count + 1):
        x = _grid(here * (lower / here) ** (index / count), 1.0, _COARSE_POINTS)
        form = _minimize(form, x, 1e2)
    x = _grid(lower, 1.0)
    sharpness = 1e2
    while sharpness < _SHARPNESS:
        sharpness *= 4
        form = _minimize(form, x, sharpness)
    return tuple(form.tolist())


def _minimize(form: Tensor, x: Tensor, sharpness: float) -> Tensor:
    """Minimize the smoothed maximum of |1 - p| on the grid `x` over the form, by damped Newton steps."""
    error = float((_values(form, x) - 1).abs().max())
    kappa, damping = sharpness / error, 1e-6
    best, gradient, hessian = _smoothed(form, x, kappa)
    for _ in range(200):
        scale = hessian.diagonal().abs().clamp_min(1e-300).rsqrt()
        scaled = hessian * scale[:, None] * scale
        eigenvalues, vectors = torch.linalg.eigh(scaled)
        move = vectors @ ((vectors.T @ (gradient * scale)) / (eigenvalues.abs() + damping)) * scale
        if float(gradient @ move) < 1e-9 * error / sharpness:
            return form
        while (value := _smoothed_value(form - move, x, kappa)) >= best or math.isnan(value):
            damping *= 10
            if damping > 1e7:
                return form
            move = vectors @ ((vectors.T @ (gradient * scale)) / (eigenvalues.abs() + damping)) * scale
        form, damping = form - move, max(damping / 10, 1e-14)
        best, gradient, hessian = _smoothed(form, x, kappa)
    return form


def _smoothed_value(form: Tensor, x: Tensor, kappa: float) -> float:
    """Return log sum exp(kappa |1 - p|) / kappa, both signs summed."""
    residual = _values(form, x) - 1
    return float(torch.logsumexp(torch.cat([residual, -residual]) * kappa, 0)) / kappa


def _smoothed(form: Tensor, x: Tensor, kappa: float) -> tuple[float, Tensor, Tensor]:
    """Return what `_smoothed_value` returns, with its gradient and Hessian in the form."""
    values, jacobian, hessians = _derivatives(form, x)
    exponents = torch.cat([values - 1, 1 - values]) * kappa
    plus, minus = torch.softmax(exponents, 0).view(2, -1)
    gradient = jacobian @ (plus - minus)
    hessian = kappa * ((jacobian * (plus + minus)) @ jacobian.T - torch.outer(gradient, gradient))
    return float(torch.logsumexp(exponents, 0)) / kappa, gradient, hessian + hessians @ (plus - minus)


def _products(form: _Form) -> Iterator[tuple[float, float, float]]:
    """Yield (alpha, beta, gamma) of every product of a form from degree 9 on, as in `Step`."""
    yield 1.0, form[0], 0.0
    for place in range(1, len(form) - 4, 2):
        yield 1.0, form[place], form[place + 1]
    yield form[-4], form[-3], form[-2]


def _values(form: Tensor, x: Tensor) -> Tensor:
    """Return p of a form from degree 9 on."""
    numbers = tuple(form.tolist())
    before, last = x * x, x * x
    for alpha, beta, gamma in _products(numbers):
        before, last = last, alpha * last * last + beta * last + gamma * before
    result: Tensor = x * (last + numbers[-1])
    return result


def _derivatives(form: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return p (points), its gradient (parameters, points) and its Hessian (parameters, parameters, points)."""
    numbers = tuple(form.tolist())
    size, points = len(numbers), len(x)
    no_gradient, no_hessian = x.new_zeros(size, points), x.new_zeros(size, size, points)
    before = last = (x * x, no_gradient, no_hessian)
    place = 0  # in the form, of the first parameter of a product
    for alpha, beta, gamma in _products(numbers):
        is_first, is_last = place == 0, place == size - 4
        (w, dw, ddw), (v, dv, ddv) = before, last
        slope = 2 * alpha * v + beta
        gradient = slope * dv + gamma * dw
        hessian = slope * ddv + gamma * ddw + 2 * alpha * dv[:, None] * dv
        # By (alpha,) beta and gamma: the numbers that they multiply, with the gradients of these.
        terms = [(v * v, 2 * v * dv)] if is_last else []
        terms += [(v, dv)] if is_first else [(v, dv), (w, dw)]
        for parameter, (term, of_term) in enumerate(terms, start=place):
            gradient[parameter] += term
            hessian[parameter] += of_term
            hessian[:, parameter] += of_term
        place += len(terms)
        before, last = last, (alpha * v * v + beta * v + gamma * w, gradient, hessian)
    z, gradient, hessian = last
    gradient[-1] += 1
    return x * (z + numbers[-1]), x * gradient, x * hessian


def _step(degree: int, form: _Form, upper: float, factor: float = 1.0) -> Step:
    """Return the step of factor * p(x / upper). Powers of two scale U and V to about 1, because float16 stores them."""
    square, factor = upper**2, factor / upper
    t = _grid(0.0, 1.0) ** 2
    identity = factor * form[-1]
    if degree == 5:
        c, b, _ = form
        return Step(5, ((factor * c / square**2, factor * b / square, 0.0),), identity)
    before = last = (t, square)  # every matrix with the number by which its stored values are multiplied
    products = []
    for number, (alpha, beta, gamma) in enumerate(_products(form), start=1):
        values = alpha * last[0] ** 2 + beta * last[0] + gamma * before[0]
        scale = factor if number == num_products(degree) else _power_of_two(values)
        products.append((scale * alpha / last[1] ** 2, scale * beta / last[1], scale * gamma / before[1]))
        before, last = last, (values, scale)
    return Step(degree, tuple(products), identity)


def _power_of_two(values: Tensor) -> float:
    """Return the power of two that brings the largest absolute value to between 0.5 and 1."""
    return 2.0 ** -math.ceil(math.log2(float(values.abs().max())))


def _grid(lower: float, upper: float, points: int = _GRID_POINTS) -> Tensor:
    """Return points of [lower, upper], denser at both ends."""
    angles = torch.linspace(0, math.pi, points, dtype=torch.float64, device="cpu")
    return lower + (upper - lower) * (1 - torch.cos(angles)) / 2
