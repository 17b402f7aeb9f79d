"""Provide coefficients of the iteration X <- aX + (bA + cA^2)X, A = XX^T: named sets and a minimax solver.

One step maps every singular value s of X to p(s) = as + bs^3 + cs^5 and does not change the singular vectors. A good
set of coefficients therefore brings all singular values in [lower, 1] close to 1 in a given number of steps.
"""

from __future__ import annotations

import math
from functools import lru_cache
from numbers import Integral
from typing import TypeAlias

import torch

from muon_fsdp.linalg.chains import STORED_CHAINS

Quintic: TypeAlias = tuple[float, float, float]  # (a, b, c)

# For matrices of Frobenius norm at most 1, the default set brings singular values of at least this to 1 and lifts
# smaller ones.
DEFAULT_LOWER = 4e-3
# Every step but the last is contracted by this factor. Otherwise rounding could push a singular value above the
# interval on which the next step was fitted.
DEFAULT_SAFETY = 1.01


def _contract(quintic: Quintic, factor: float) -> Quintic:
    """Return the quintic of the polynomial p(x / factor)."""
    a, b, c = quintic
    return (a / factor, b / factor**3, c / factor**5)


def _safe(quintics: tuple[Quintic, ...]) -> tuple[Quintic, ...]:
    """Return these quintics, of which all but the last are contracted."""
    return (*(_contract(quintic, DEFAULT_SAFETY) for quintic in quintics[:-1]), quintics[-1])


# Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024. The slope at zero is as steep
# as possible. Singular values end between about 0.7 and 1.2 and do not converge to 1.
_KELLER: Quintic = (3.4445, -4.7750, 2.0315)

# Source: Amsel, Persson, Musco, Gower, "The Polar Express", arXiv 2505.16932: minimax for [1e-3, 1]. As in the paper,
# all quintics but the last are contracted by 1.01, which `_safe` does.
_POLAR_EXPRESS: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# Source: Franz Cesista, "Squeezing 1-2% efficiency gains out of Muon by optimizing the Newton-Schulz coefficients",
# 2025.
_QUINTIC: tuple[Quintic, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Source: Grishina, Smirnov, Rakhuba, "Accelerating Newton-Schulz Iteration for Orthogonalization via Chebyshev-type
# Polynomials" (CANS), arXiv 2506.10935. As published, each step maps some values to the very end of the interval of the
# next, so that float16's rounding leaves singular values of up to 2.2. `_safe` therefore contracts all but the last
# by 1.01, as in "The Polar Express".
_CANS: tuple[Quintic, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)

# Source: DeepSeek-V4, arXiv 2606.19348. Eight steps of Keller Jordan's set, then two that converge to 1.
_DEEPSEEK_V4: tuple[Quintic, ...] = (_KELLER,) * 8 + ((2.0, -1.5, 0.5),) * 2

# Of these, the first steps are used; if more are wanted, the last one is repeated.
_LISTS: dict[str, tuple[Quintic, ...]] = {
    "keller": (_KELLER,),
    "polar_express": _safe(_POLAR_EXPRESS),
    "quintic": _QUINTIC,
}

# The default number of steps, and the sets that were published as a whole: no other number of their steps is useful,
# because each step is fitted to what the one before leaves. The default then means the number of the set.
DEFAULT_STEPS = 5
WHOLE_SETS: dict[str, tuple[Quintic, ...]] = {"cans": _safe(_CANS), "deepseek_v4": _DEEPSEEK_V4}

# The input is scaled to a Frobenius norm of 1 / margin. The margin is 1 for sets that were published without one.
NORM_MARGINS: dict[str, float] = {
    "default": 1.01,
    "accurate": 1.01,
    "fast": 1.01,
    "keller": 1.0,
    "polar_express": 1.01,
    "quintic": 1.0,
    "cans": 1.01,
    "deepseek_v4": 1.0,
}


def coefficients(name: str, steps: int) -> tuple[Quintic, ...]:
    """Return one quintic (a, b, c) per step of the named set; a published list is cut, or its last one repeated.

    "cans" and "deepseek_v4" are used whole, with the default number of steps or their own.
    """
    check_steps(steps, name)
    if name == "default":
        return minimax(steps, lower=DEFAULT_LOWER, safety=DEFAULT_SAFETY)
    if name in WHOLE_SETS:
        return WHOLE_SETS[name]
    if name in _LISTS:
        known = _LISTS[name]
        return known[:steps] + known[-1:] * (steps - len(known))
    names = ", ".join(("default", *_LISTS, *WHOLE_SETS, "exact"))
    raise ValueError(f"Unknown orthogonalization {name!r}; valid names are {names}")


def check_steps(steps: object, name: str = "default") -> None:
    """Raise an error unless `steps` is an int of at least 1, and one that the named set has."""
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        raise TypeError(f"Invalid ns_steps: {steps!r} (must be an int >= 1)")
    if int(steps) < 1:
        raise ValueError(f"Invalid ns_steps: {steps} (must be >= 1)")
    if name in STORED_CHAINS and steps != DEFAULT_STEPS:
        raise ValueError(
            f"Invalid ns_steps: {steps} (orthogonalization={name!r} is a stored chain, whose steps are made for each "
            f'other: leave ns_steps at {DEFAULT_STEPS}, or pass orthogonalization="default", which is solved for any '
            "number of steps)"
        )
    own = len(WHOLE_SETS[name]) if name in WHOLE_SETS else steps
    if steps not in (DEFAULT_STEPS, own):
        raise ValueError(
            f"Invalid ns_steps: {steps} (orthogonalization={name!r} is a list of {own} steps, each made for what the "
            f"one before leaves: leave ns_steps at {DEFAULT_STEPS}, which uses the whole list)"
        )


@lru_cache(maxsize=64)
def minimax(steps: int, *, lower: float, safety: float = 1.0, cushion: float = 0.0) -> tuple[Quintic, ...]:
    """Compose minimax odd quintics for singular values in [lower, 1], as in "The Polar Express" (arXiv 2505.16932).

    Each step is the best approximation of 1 on the interval that the previous step maps to. This greedy choice is
    optimal for the composition.

    Args:
        steps: number of steps.
        lower: the smallest singular value that is brought close to 1.
        safety: divides the argument of every step but the last.
        cushion: fits a step on [max(lower, cushion * upper), upper] and recentres it around 1. Without a cushion, very
            small singular values cost accuracy for all others.
    """
    check_steps(steps)
    if not 0.0 < lower < 1.0:
        raise ValueError(f"lower must be between 0 and 1, got {lower}")
    upper = 1.0
    quintics: list[Quintic] = []
    for step in range(steps):
        fitted_from = max(lower, cushion * upper)
        quintic = best_quintic(fitted_from, upper)
        if fitted_from > lower:
            centre = (_evaluate(quintic, lower) + _evaluate(quintic, upper)) / 2
            quintic = (quintic[0] / centre, quintic[1] / centre, quintic[2] / centre)
        if step < steps - 1:
            quintic = _contract(quintic, safety)
        quintics.append(quintic)
        lower = _evaluate(quintic, lower)
        upper = 2.0 - lower
    return tuple(quintics)


def best_quintic(lower: float, upper: float) -> Quintic:
    """Return the odd quintic p that minimizes max |1 - p(x)| over [lower, upper], found by Remez exchange.

    The error equioscillates on four points: both ends and the two inner extrema of p. The extrema are the roots of a
    quadratic in x^2, so an exchange is one 4x4 solve and one square root.
    """
    if 1.0 - lower / upper < 5e-6:  # the linear system would be numerically singular; this is the limit of its solution
        return (1.875 / upper, -1.25 / upper**3, 0.375 / upper**5)
    inner_low, inner_high = (3 * lower + upper) / 4, (lower + 3 * upper) / 4
    error = math.inf
    a = b = c = 0.0
    for _ in range(100):
        points = (lower, inner_low, inner_high, upper)
        system = [[x, x**3, x**5, sign] for x, sign in zip(points, (1.0, -1.0, 1.0, -1.0), strict=True)]
        matrix = torch.tensor(system, dtype=torch.float64, device="cpu")
        ones = torch.ones(4, dtype=torch.float64, device="cpu")
        a, b, c, new_error = torch.linalg.solve(matrix, ones).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner_low, inner_high = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
        if abs(new_error - error) < 1e-15:
            break
        error = new_error
    return (a, b, c)


def _evaluate(quintic: Quintic, x: float) -> float:
    a, b, c = quintic
    return a * x + b * x**3 + c * x**5
