"""Chains of steps of degree 5 to 65: the solver against published numbers and the definition of a minimax fit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from experiments.chains import best_form, evaluate, num_products, solve, widest
from muon_fsdp.linalg.chains import FAST_CHAIN, SQUARE_CHAIN, WIDE_CHAIN
from muon_fsdp.linalg.coefficients import minimax

CHAINS = {"square": SQUARE_CHAIN, "wide": WIDE_CHAIN}
CUSHIONS = {"square": 0.0, "wide": 0.05}
# An independent solution for 17, 17, 9 on [4e-3, 1] with a safety of 1.01: per step u, s and (alpha, beta, gamma, d, e,
# f, h) of U = t^2 + alpha t, V = U^2 + beta U + gamma t, p(x) = x (d V^2 + e V + f U + h) / s with t = (x / u)^2; for
# degree 9 (alpha, c, beta, gamma, h) of p(x) = x (c U^2 + beta U + gamma t + h) / s.
PUBLISHED = (
    (1.01, 1.01, (-1.07338802, 0.346571404, 0.00404969168, 59251.3462, 2494.09067, 1.11303903, 26.7112241)),
    (
        1.913212743589651,
        1.01,
        (-1.35693677, 0.593347003, 0.0180477139, 1405.82686, 180.369038, 2.02262881, 7.18013469),
    ),
    (
        1.2933617598028455,
        1.0,
        (-1.6419199353785434, 2.213901403209537, 3.4094283749848593, -0.5337847012892327, 2.584136294560065),
    ),
)


def points(lower: float, upper: float, count: int = 20001) -> torch.Tensor:
    return torch.linspace(lower, upper, count, dtype=torch.float64)


def compose(steps, x):
    for step in steps:
        x = evaluate(step, x)
    return x


def published(step, x):
    u, s, form = step
    t = (x / u) ** 2
    inner = t * t + form[0] * t
    if len(form) == 5:
        _, c, beta, gamma, h = form
        return x * (c * inner**2 + beta * inner + gamma * t + h) / s
    _, beta, gamma, d, e, f, h = form
    outer = inner**2 + beta * inner + gamma * t
    return x * (d * outer**2 + e * outer + f * inner + h) / s


def test_reproduces_the_published_chain():
    x = points(0.0, 1.0)
    for ours, theirs in zip(solve((17, 17, 9), 4e-3, 1.01), PUBLISHED, strict=True):
        # The published numbers are near the optimum, not at it: their errors are larger than ours by 3e-4.
        torch.testing.assert_close(evaluate(ours, x), published(theirs, x), rtol=0, atol=3e-3)
        x = evaluate(ours, x)


def test_quintic_chains_are_those_of_the_quintic_solver():
    for step, (a, b, c) in zip(solve((5,) * 5, 4e-3, 1.01), minimax(5, lower=4e-3, safety=1.01), strict=True):
        ((alpha, beta, gamma),) = step.products
        assert gamma == 0
        assert (step.identity, beta, alpha) == pytest.approx((a, b, c), rel=1e-7)


@pytest.mark.parametrize("name", CHAINS)
def test_the_stored_chains_are_what_the_solver_gives(name):
    chain = CHAINS[name]
    assert max(chain.refreshes) == len(chain.steps)
    solved = solve(tuple(step.degree for step in chain.steps), 4e-3, cushion=CUSHIONS[name])
    x = points(0.0, 1.0)
    for stored, step in zip(chain.steps, solved, strict=True):
        torch.testing.assert_close(evaluate(stored, x), evaluate(step, x), rtol=0, atol=1e-5)
        x = evaluate(stored, x)


@pytest.mark.parametrize("lower", [1e-4, 1e-3, 4e-3, 0.03, 0.1])
@pytest.mark.parametrize("degree", [5, 9])
def test_fits_of_full_families_alternate(lower, degree):
    """Equal errors of alternating sign on one point more than there are coefficients make a best approximation."""
    (step,) = solve((degree,), lower)
    x = points(lower, 1.0, 200001)
    error = evaluate(step, x) - 1
    rise = error.diff()
    inner = torch.nonzero(rise[1:] * rise[:-1] < 0).flatten() + 1
    extrema = torch.cat([error[:1], error[inner], error[-1:]])
    assert len(extrema) == (degree + 3) // 2
    assert (extrema[1:] * extrema[:-1] < 0).all()
    torch.testing.assert_close(extrema.abs(), error.abs().max().expand_as(extrema), rtol=1e-6, atol=1e-9)


def nested(form, x):
    """Evaluate a form of degree 17, 33 or 65 as experiments/chains.py describes it, at (..., 1) singular values."""
    t = x * x
    before, last = t, t * t + form[0] * t
    for beta, gamma in zip(form[1:-4:2], form[2:-4:2], strict=True):
        before, last = last, last * last + beta * last + gamma * before
    d, e, f, identity = form[-4:]
    return x * (d * last**2 + e * last + f * before + identity)


@pytest.mark.parametrize(("degree", "lower"), [(17, 1e-4), (17, 4e-3), (17, 0.06), (33, 1e-3), (33, 0.03), (65, 0.015)])
def test_no_small_change_improves_degrees_from_17_on(degree, lower):
    form = torch.tensor(best_form(degree, lower), dtype=torch.float64)
    x = lower + (1 - lower) * torch.sin(points(0.0, 1.0, 4001) * torch.pi / 2)

    def worst(parameters):
        return (nested(parameters, x) - 1).abs().max()

    generator = torch.Generator().manual_seed(0)
    for size in (1e-2, 1e-3, 1e-4):
        for _ in range(100):
            change = 1 + size * torch.randn(len(form), generator=generator, dtype=torch.float64)
            assert worst(form * change) > worst(form) * (1 - 1e-4)


@pytest.mark.parametrize("degrees", [(17, 17, 9), (9, 9, 9, 5)])
@pytest.mark.parametrize("lower", [1e-4, 4e-3, 0.1])
def test_chains_converge_everywhere(degrees, lower):
    steps = solve(degrees, lower)
    x = points(lower, 1.0)
    errors = []
    for step in steps:
        x = evaluate(step, x)
        errors.append(float((x - 1).abs().max()))
    assert all(later < max(earlier, 1e-8) for earlier, later in itertools.pairwise([1.0, *errors]))


def test_errors_of_the_stored_chains():
    x = points(4e-3, 1.0, 200001)
    assert (compose(SQUARE_CHAIN.steps, x) - 1).abs().max() < 1.15e-3
    assert (compose(WIDE_CHAIN.steps, x) - 1).abs().max() < 2.2e-4


def test_degrees_have_the_products_that_they_need():
    for degree in (5, 9, 17, 33, 65):
        (step,) = solve((degree,), 0.015)
        assert len(step.products) == num_products(degree)


def test_the_fast_chain_has_the_largest_slope_in_its_band():
    """The solver gives it, and a chain that is solved from a lower end 5% smaller leaves the band."""
    x, lower = points(0.0, 1.0), 1.037409e-3
    for stored, step in zip(FAST_CHAIN.steps, solve((33, 33), lower, last_safety=1.01), strict=True):
        torch.testing.assert_close(evaluate(stored, x), evaluate(step, x), rtol=0, atol=1e-5)
        x = evaluate(stored, x)
    inside = points(lower, 1.0, 200001)
    values = compose(FAST_CHAIN.steps, inside)
    assert values.min() == pytest.approx(0.65, abs=1e-3)
    assert 1.34 < values.max() <= 1.35
    further = compose(solve((33, 33), 0.95 * lower, last_safety=1.01), inside)
    assert (further - 1).abs().max() > 0.355
    assert math.prod(step.identity for step in FAST_CHAIN.steps) == pytest.approx(656, abs=1)


@pytest.mark.parametrize("excess", [1.0, 1.005, 1.01])
def test_rounding_does_not_push_values_out_of_the_band_of_the_fast_chain(excess):
    """A norm may be 2% too small, of which the margin covers 1%, and rounding may add 1% before every step."""
    x = torch.cat([points(0.0, 1e-3), points(1.1e-3, 1.0, 200001)])
    start = x
    for step in FAST_CHAIN.steps:
        x = evaluate(step, x * excess)
    assert x.max() < 1.351
    assert x.min() >= 0
    assert x[start > 1.05e-3].min() > 0.649


@pytest.mark.parametrize("degrees", [(9, 5), (17, 9)])
def test_the_widest_chain_fills_its_band_and_no_more(degrees):
    values = compose(widest(degrees, 0.35), points(0.0, 1.0, 200001))
    assert 1.34 < values.max() <= 1.35  # the contraction costs a little
    assert 0.65 <= values[values.cummax(0).values > 1].min() < 0.66  # after 1 has first been reached


def test_no_lower_end_fills_an_impossible_band():
    with pytest.raises(RuntimeError, match="No lower end gives an error of 2"):
        widest((5,), 2.0)


def test_a_cushion_keeps_large_singular_values_from_becoming_the_smallest():
    """Rank 2 has both singular values near 0.7, where the first step without a cushion maps to its minimum."""
    x = points(0.1, 1.0)
    plain, cushioned = (evaluate(solve((5, 17), 4e-3, cushion=cushion)[0], x) for cushion in (0.0, 0.05))
    assert plain.min() < 0.04
    assert cushioned.min() > 0.3


@pytest.mark.parametrize("chain", [SQUARE_CHAIN, WIDE_CHAIN, FAST_CHAIN])
def test_smaller_singular_values_are_lifted_in_order(chain):
    x = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-9, -2.4, 4000, dtype=torch.float64)])
    fast = chain is FAST_CHAIN
    x = x[x < (1.04e-3 if fast else 4e-3)]
    lifted = compose(chain.steps, x)
    assert (lifted.diff() > 0).all()
    assert (lifted >= (600 if fast else 100) * x).all()
    assert lifted[0] == 0


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("excess", [1.002, 1.005, 1.01])
def test_rounding_may_push_values_above_an_interval(name, excess):
    """The safety factor leaves room for 1% between two steps; only the last step has none, and it is gentle."""
    steps = CHAINS[name].steps
    x = points(4e-3, 1.0)
    for step in steps:
        x = evaluate(step, x * excess)
    assert (x - 1).abs().max() < 0.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(((), 4e-3), "degrees must be"), (((7,), 4e-3), "degrees must be"), (((5,), 0.0), "lower must be")],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        solve(*arguments)
