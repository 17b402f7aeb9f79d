"""Spectral norms, the multiplier and retraction: against an SVD in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muon_fsdp import SpectralSphereOptimizer
from muon_fsdp.linalg.power_iteration import power_iteration
from muon_fsdp.linalg.sphere import retract, target_radius
from muon_fsdp.linalg.subspaces import num_products
from muon_fsdp.linalg.tangent import MAX_CALLS, Known, Msign, solve_lambda
from muon_fsdp.spectral import compute_spectral_norm
from tests.comparisons import assert_same
from tests.reference import ReferenceSphere, matrix_with_condition, polar
from tests.sso_cases import norm_of

# ------------------------------------------------------------------------------------------------------ spectral norms


def with_singular_values(values, rows, cols, seed=0):
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(rng.standard_normal((rows, len(values))))[0]
    v = np.linalg.qr(rng.standard_normal((cols, len(values))))[0]
    return torch.tensor((u * values) @ v.T, dtype=torch.float32)


@pytest.mark.parametrize(
    "matrix",
    [
        torch.randn(50, 100, generator=torch.Generator().manual_seed(0)),
        torch.randn(300, 200, generator=torch.Generator().manual_seed(1)),
        with_singular_values(np.r_[1.0, np.full(199, 0.985)], 200, 300),  # one that stands out a little
        with_singular_values(np.linspace(1, 0.9, 200), 200, 200),
        with_singular_values(np.r_[1.0, 1.0, np.full(30, 0.2)], 40, 60),  # equal top ones
        with_singular_values(np.ones(1), 30, 20),
        torch.eye(64),
        torch.randn(1, 77, generator=torch.Generator().manual_seed(2)),
        torch.randn(77, 1, generator=torch.Generator().manual_seed(3)),
        torch.full((1, 1), -3.0),
        1e-18 * torch.randn(40, 30, generator=torch.Generator().manual_seed(4)),
        1e18 * torch.randn(40, 30, generator=torch.Generator().manual_seed(5)),
        torch.randn(40, 30, generator=torch.Generator().manual_seed(6)).bfloat16(),
    ],
)
def test_spectral_norm(matrix):
    assert float(compute_spectral_norm(matrix)) == pytest.approx(norm_of(matrix), rel=1e-2)
    triple = power_iteration(matrix, 400)
    assert float(triple.norm) == pytest.approx(norm_of(matrix), rel=1e-2)
    warm = compute_spectral_norm(matrix, right=triple.right, steps=2)
    assert float(warm) == pytest.approx(norm_of(matrix), rel=1e-2)


def test_spectral_norm_of_many_and_of_nothing():
    batch = torch.randn(2, 3, 20, 30)
    norms = compute_spectral_norm(batch)
    assert norms.shape == (2, 3)
    torch.testing.assert_close(norms.double(), torch.linalg.matrix_norm(batch.double(), 2), rtol=1e-2, atol=0)
    assert float(compute_spectral_norm(torch.zeros(4, 5))) == 0
    parameter = nn.Parameter(torch.randn(8, 8))
    assert not compute_spectral_norm(parameter).requires_grad
    with pytest.raises(ValueError, match="a matrix"):
        compute_spectral_norm(torch.ones(3))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10_000))
def test_triples_are_triples(rows, cols, seed):
    matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    norm, left, right = power_iteration(matrix, 300)
    assert float(left.norm()) == pytest.approx(1)
    assert float(right.norm()) == pytest.approx(1)
    torch.testing.assert_close(matrix @ right, norm * left)
    assert float(norm) <= norm_of(matrix) * (1 + 1e-9)


def test_few_products_do_what_many_steps_do():
    assert [num_products(steps) for steps in (1, 10, 50, 500)] == [2, 2, 6, 21]
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(200, 300, generator=generator)
    after = before + 0.02 * torch.linalg.matrix_norm(before, 2) * torch.randn(200, 300, generator=generator) / 30
    right = power_iteration(before, 300).right
    by_steps = float(power_iteration(after, 10, right).norm)
    model = nn.Linear(300, 200, bias=False)
    with torch.no_grad():
        model.weight.copy_(before)
    optimizer = SpectralSphereOptimizer(model.parameters(), lr=0.0)
    for weight in (before, before, before, after):  # three in which the first vector is found
        with torch.no_grad():
            model.weight.copy_(weight)
        model.weight.grad = torch.randn(200, 300, generator=generator)
        optimizer.step()
    state = optimizer.state[model.weight]
    found = float(after.double() @ state["right_singular_vector"].double() @ state["left_singular_vector"].double())
    assert found >= by_steps - 1e-4 * by_steps
    assert found == pytest.approx(norm_of(after), rel=5e-3)


# ------------------------------------------------------------------------------------------------------- the multiplier


def problem(rows, cols, seed, condition=30.0):
    rng = np.random.default_rng(seed)
    momentum = matrix_with_condition(rng, rows, cols, condition)
    u, _, vt = np.linalg.svd(rng.standard_normal((rows, cols)), full_matrices=False)
    return momentum, u[:, 0], vt[0]


@pytest.mark.parametrize("method", ["bracketed", "bisection"])
@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (25, 25), (2, 9), (1, 12)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_root_is_that_of_the_reference(method, shape, sign):
    momentum, u, v = problem(*shape, seed=3)
    momentum = sign * momentum + 0.5 * np.outer(u, v)
    unit, outer = momentum / np.linalg.norm(momentum), np.outer(u, v)
    expected = ReferenceSphere(np.ones(shape)).solve(unit, outer)
    left, right = torch.tensor(u)[None], torch.tensor(v)[None]
    found = solve_lambda(torch.tensor(momentum)[None], left, right, method=method, msign=Msign("exact"))
    assert not found.failed.any()
    assert int(found.calls) <= MAX_CALLS[method]
    assert abs(float(found.residual)) <= 2e-4
    assert float(found.multiplier) == pytest.approx(expected, abs=2e-3)
    np.testing.assert_allclose(found.direction[0].numpy(), polar(unit + float(found.multiplier) * outer), atol=1e-6)
    assert abs(np.sum(outer * found.direction[0].numpy())) <= 2e-4


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 1000), st.floats(-3, 3), st.floats(0.01, 2))
def test_f_does_not_decrease_and_the_bracket_holds(rows, cols, seed, point, step):
    momentum, u, v = problem(rows, cols, seed)
    unit, outer = momentum / np.linalg.norm(momentum), np.outer(u, v)

    def f(x):
        return np.sum(outer * polar(unit + x * outer))

    assert f(point) <= f(point + step) + 1e-9
    component = np.sum(outer * unit)
    assert f(-component - 1) <= 1e-9
    assert f(-component + 1) >= -1e-9


def test_a_batch_is_searched_as_its_matrices_are():
    problems = [problem(16, 24, seed) for seed in range(6)]
    momentum, left, right = (torch.tensor(np.stack(parts)) for parts in zip(*problems, strict=True))
    together = solve_lambda(momentum, left, right)
    for i in range(6):
        alone = solve_lambda(momentum[i : i + 1], left[i : i + 1], right[i : i + 1])
        torch.testing.assert_close(alone.multiplier, together.multiplier[i : i + 1])
        assert_same(alone.calls, together.calls[i : i + 1])
        torch.testing.assert_close(alone.direction[0], together.direction[i])
    warm = solve_lambda(momentum, left, right, known=Known(together.multiplier, together.slope))
    assert int(warm.calls.max()) == 1


def test_what_is_not_found_falls_back_to_zero(monkeypatch):
    momentum, u, v = problem(16, 24, 0)
    momentum = momentum - 3 * np.outer(u, v)
    monkeypatch.setitem(MAX_CALLS, "bracketed", 1)
    arguments = [torch.tensor(x)[None] for x in (momentum, u, v)]
    found = solve_lambda(*arguments)
    assert found.failed.all()
    assert float(found.multiplier) == 0
    assert int(found.calls) == 2
    at_zero = solve_lambda(*arguments, known=Known(searched=torch.tensor([False])))
    torch.testing.assert_close(found.direction, at_zero.direction)
    p = nn.Parameter(torch.tensor(problem(16, 24, 1)[0]))
    optimizer = SpectralSphereOptimizer([p])
    p.grad = torch.randn_like(p) - 100 * p.detach()
    optimizer.step()
    assert optimizer.metrics()["lambda_fallbacks"] == 1


def test_zero_momentum_and_not_finite_momentum():
    _, u, v = problem(6, 8, 0)
    left, right = torch.tensor(u)[None], torch.tensor(v)[None]
    found = solve_lambda(torch.zeros(1, 6, 8, dtype=torch.float64), left, right)
    assert not found.failed.any()
    assert int(found.calls) == 1
    assert float(found.multiplier) == 0
    assert not found.direction.any()
    bad = torch.full((1, 6, 8), torch.nan, dtype=torch.float64)
    assert solve_lambda(bad, left, right).failed.all()
    with pytest.raises(ValueError, match="Unknown method"):
        solve_lambda(bad, left, right, method="newton")


# ------------------------------------------------------------------------------------------------ radius and retraction


def test_radius_and_retraction():
    assert target_radius(8, 2) == 2.0
    assert target_radius(8, 2, "identity", 0.5) == 0.5
    assert target_radius(8, 2, "spectral_mup", 3.0) == 6.0
    with pytest.raises(ValueError, match="Unknown radius_mode"):
        target_radius(8, 2, "other")
    matrix = torch.randn(5, 7)
    assert norm_of(retract(matrix, 2.0)) == pytest.approx(2.0, rel=1e-4)
    small = retract(matrix, 1e6, "dynamic", lr=0.1, alpha=0.5)
    torch.testing.assert_close(small, 1.05 * matrix)
    assert_same(retract(torch.zeros(3, 4), 1.0), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="Unknown retract_mode"):
        retract(matrix, 1.0, "soft")
