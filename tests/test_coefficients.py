"""The minimax solver against published coefficient sets and against the definition of what it solves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_fsdp import MuonOptimizer
from muon_fsdp.linalg.coefficients import NORM_MARGINS, best_quintic, coefficients, minimax
from muon_fsdp.linalg.newton_schulz import orthogonalization_flops

# arXiv 2505.16932: lower end 1e-3, cushion 0.024..., no safety factor.
PAPER = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]
# The five-step set in wide use with a safety factor of 1.02 and a cushion of 0.02.
FIVE_STEPS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def evaluate(triple, x):
    a, b, c = triple
    return a * x + b * x**3 + c * x**5


def compose(triples, x):
    for triple in triples:
        x = evaluate(triple, x)
    return x


def test_reproduces_the_paper():
    np.testing.assert_allclose(minimax(8, lower=1e-3, cushion=0.02407327424182761), PAPER, rtol=1e-8)


def test_reproduces_the_five_step_set():
    np.testing.assert_allclose(minimax(5, lower=1e-3, safety=1.02, cushion=0.02), FIVE_STEPS, rtol=1e-12)


@given(lower=st.floats(1e-4, 0.95), upper=st.floats(1.0, 1.9))
def test_best_quintic_is_optimal(lower, upper):
    """Equal error of alternating sign on four points is what makes the best of three coefficients (Chebyshev)."""
    triple = best_quintic(lower, upper)
    x = np.linspace(lower, upper, 20001)
    error = 1 - evaluate(triple, x)
    worst = np.abs(error).max()
    a, b, c = triple
    extrema = np.sqrt(np.roots([5 * c, 3 * b, a]).real)
    points = np.array([lower, *sorted(extrema), upper])
    signed = 1 - evaluate(triple, points)
    np.testing.assert_allclose(np.abs(signed), worst, rtol=1e-4, atol=1e-9)
    assert (np.sign(signed) == [1, -1, 1, -1]).all() or worst < 1e-9


def test_more_steps_are_more_accurate():
    x = np.linspace(4e-3, 1, 5000)
    errors = [np.abs(1 - compose(coefficients("default", steps), x)).max() for steps in range(1, 8)]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert errors[4] < 1.8e-3
    assert errors[6] < 1e-14


def test_a_nearly_closed_interval_is_the_limit_of_newton_schulz():
    np.testing.assert_allclose(best_quintic(1 - 1e-7, 1 + 1e-7), (1.875, -1.25, 0.375), rtol=1e-6)


@pytest.mark.parametrize("name", ["keller", "polar_express", "quintic", "default"])
def test_any_number_of_steps(name):
    for steps in (1, 4, 5, 9):
        assert len(coefficients(name, steps)) == steps
    assert coefficients("quintic", 7)[-1] == coefficients("quintic", 5)[-1]
    assert coefficients("polar_express", 9)[-1] == (1.875, -1.25, 0.375)


# The published coefficients of CANS, typed a second time; the package contracts all but the last by 1.01.
CANS = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)


def test_cans_is_what_was_published_but_for_the_contraction():
    x = np.linspace(0, 1, 1001)
    for number, (ours, published) in enumerate(zip(coefficients("cans", 5), CANS, strict=True)):
        np.testing.assert_allclose(evaluate(ours, x), evaluate(published, x / (1.01 if number < 4 else 1)), rtol=1e-12)


def test_deepseek_v4_has_ten_steps():
    assert coefficients("deepseek_v4", 5) == coefficients("deepseek_v4", 10)
    assert coefficients("deepseek_v4", 5) == ((3.4445, -4.775, 2.0315),) * 8 + ((2, -1.5, 0.5),) * 2


@pytest.mark.parametrize(
    ("name", "lower", "band", "slope"),
    [("cans", 1e-3, (0.862, 1.114), 1008), ("deepseek_v4", 1e-3, (0.9999, 1.0006), 79263)],
)
def test_bands_and_slopes_that_the_docs_state(name, lower, band, slope):
    x = compose(coefficients(name, 5), np.linspace(lower, 1 / NORM_MARGINS[name], 200001))
    assert band[0] < x.min()
    assert x.max() < band[1]
    assert compose(coefficients(name, 5), 1e-9) / 1e-9 == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize(("name", "steps"), [("cans", 4), ("cans", 10), ("deepseek_v4", 9), ("deepseek_v4", 1)])
def test_published_lists_are_used_whole(name, steps):
    with pytest.raises(ValueError, match=f"Invalid ns_steps: {steps} .*{name}.* leave ns_steps at 5"):
        coefficients(name, steps)
    with pytest.raises(ValueError, match=f"Invalid ns_steps: {steps} "):
        MuonOptimizer([torch.nn.Parameter(torch.ones(2, 2))], orthogonalization=name, ns_steps=steps)
    assert orthogonalization_flops(64, 96, 5, name) == orthogonalization_flops(
        64, 96, len(coefficients(name, 5)), "keller"
    )


def test_bad_input():
    with pytest.raises(ValueError, match="exact"):
        coefficients("nope", 5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        minimax(5, lower=1.5)
    with pytest.raises(ValueError, match="ns_steps"):
        minimax(0, lower=0.1)
