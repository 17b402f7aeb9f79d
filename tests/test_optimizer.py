"""MuonOptimizer on one device: the update against the float64 reference, what a step leaves alone, and metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muon_fsdp import MuonOptimizer, create_hybrid_optimizer
from muon_fsdp.rules.muon import _residual
from tests.comparisons import assert_same
from tests.optimizer_cases import mlp, train, weights
from tests.reference import ReferenceAdamW, ReferenceMuon, matrix_with_condition

SHAPES = [(1, 7), (7, 1), (5, 5), (16, 40), (40, 16), (3, 33), (24, 24)]


def parameter(array: np.ndarray, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.tensor(array).to(dtype))


def set_grad(p: nn.Parameter, array: np.ndarray) -> np.ndarray:
    """Give p the gradient, and give back what it is after rounding to p's dtype."""
    p.grad = torch.tensor(array).to(p.dtype)
    return p.grad.double().numpy()


# ------------------------------------------------------------------------------------------ against the reference


@st.composite
def muon_options(draw):
    return {
        "lr": draw(st.sampled_from([1e-3, 0.02, 0.1])),
        "momentum": draw(st.sampled_from([0.0, 0.5, 0.95])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "nesterov": draw(st.booleans()),
        "scale": draw(st.sampled_from(["v1", "v2", "v3", "v4", 0.7])),
        "ns_stepsize": draw(st.sampled_from([1.0, 0.5])),
    }


@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(
        st.tuples(muon_options(), st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)), min_size=1, max_size=3
    ),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    condition=st.sampled_from([1.0, 30.0, 1e3]),
    seed=st.integers(0, 2**16),
)
def test_exact_orthogonalization_follows_the_reference_for_20_steps(groups, dtype, condition, seed):
    rng = np.random.default_rng(seed)
    torch_groups, references, parameters = [], [], []
    for options, shapes in groups:
        starts = [rng.standard_normal(shape) for shape in shapes]
        members = [parameter(start, dtype) for start in starts]
        named = [(f"w{len(parameters) + index}", p) for index, p in enumerate(members)]
        torch_groups.append({"params": named, **options})
        references += [ReferenceMuon(p.detach().double().numpy(), **options) for p in members]
        parameters += members
    full_names = {f"w{index}": "muon" for index in range(len(parameters))}  # one row or column too
    optimizer = MuonOptimizer(torch_groups, orthogonalization="exact", overrides=full_names)
    for _ in range(20):
        for p, reference in zip(parameters, references, strict=True):
            reference.step(set_grad(p, matrix_with_condition(rng, *p.shape, condition)))
        optimizer.step()
    # 2e-5 and 1e-10 of the size of what was added up: 20 updates of spectral norm lr * scale on top of the start.
    for p, reference in zip(parameters, references, strict=True):
        error = np.abs(p.detach().double().numpy() - reference.w).max()
        size = max(1.0, np.abs(reference.w).max())
        assert error <= (1e-10 if dtype == torch.float64 else 2e-5) * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_half_precision_is_one_rounding_a_step(dtype, nesterov):
    rng = np.random.default_rng(0)
    p = parameter(rng.standard_normal((16, 40)), dtype)
    bias = parameter(rng.standard_normal(16), dtype)
    optimizer = MuonOptimizer(
        [p, bias],
        lr=0.1,
        weight_decay=0.3,
        nesterov=nesterov,
        orthogonalization="exact",
        adamw_lr=0.1,
        adamw_weight_decay=0.3,
    )
    matrix = ReferenceMuon(p.detach().double().numpy(), lr=0.1, weight_decay=0.3, nesterov=nesterov)
    vector = ReferenceAdamW(bias.detach().double().numpy(), lr=0.1, weight_decay=0.3)
    for _ in range(20):
        matrix.step(set_grad(p, rng.standard_normal((16, 40))))
        vector.step(set_grad(bias, rng.standard_normal(16)))
        optimizer.step()
        for reference, ours in ((matrix, p), (vector, bias)):
            rounded = torch.tensor(reference.w).to(dtype)
            neighbours = (
                torch.nextafter(rounded, torch.full_like(rounded, torch.inf)),
                torch.nextafter(rounded, torch.full_like(rounded, -torch.inf)),
            )
            # The reference rounded once, or its neighbour where float32 lands on the other side of a tie.
            is_neighbour = (ours == neighbours[0]) | (ours == neighbours[1])
            assert_same(ours, torch.where(is_neighbour, ours, rounded))
            assert (ours == rounded).float().mean() > 0.98
            reference.w = ours.detach().double().numpy()
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32
    assert optimizer.state[bias]["second_moment"].dtype == torch.float32


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from([(9,), (), (4, 5), (2, 3, 4)]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    betas=st.sampled_from([(0.9, 0.95), (0.0, 0.999), (0.9, 0.0)]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**16),
)
def test_adamw_follows_the_reference_for_20_steps(shape, dtype, betas, weight_decay, seed):
    rng = np.random.default_rng(seed)
    p = parameter(rng.standard_normal(shape), dtype)
    group = {"params": [p], "rule": "adamw", "lr": 0.01, "betas": betas, "eps": 1e-6, "weight_decay": weight_decay}
    reference = ReferenceAdamW(p.detach().double().numpy(), lr=0.01, betas=betas, eps=1e-6, weight_decay=weight_decay)
    optimizer = MuonOptimizer([group])
    for _ in range(20):
        reference.step(set_grad(p, rng.standard_normal(shape)))
        optimizer.step()
    error = np.abs(p.detach().double().numpy() - reference.w).max()
    assert error <= (1e-10 if dtype == torch.float64 else 2e-5)


def test_adamw_equals_torch():
    ours, theirs = nn.Parameter(torch.randn(7, 5)), None
    theirs = nn.Parameter(ours.detach().clone())
    mine = MuonOptimizer([{"params": [ours], "rule": "adamw", "lr": 0.01, "weight_decay": 0.1}])
    torchs = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(20):
        ours.grad = torch.randn(7, 5)
        theirs.grad = ours.grad.clone()
        mine.step()
        torchs.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_default_orthogonalization_stays_within_its_tolerance():
    """Singular values above 4e-3 of the Frobenius norm come out within 1.75e-3 of 1, so 20 steps may differ from the
    exact polar factor by 20 * lr * scale * 1.75e-3 in the spectral norm, and float32 adds little to that."""
    rng = np.random.default_rng(0)
    p = parameter(rng.standard_normal((40, 16)), torch.float32)
    reference = ReferenceMuon(p.detach().double().numpy(), lr=0.02, momentum=0.9)
    optimizer = MuonOptimizer([p], lr=0.02, momentum=0.9)
    for _ in range(20):
        reference.step(set_grad(p, rng.standard_normal((40, 16))))
        optimizer.step()
    error = np.linalg.norm(p.detach().double().numpy() - reference.w, ord=2)
    assert error <= 20 * 0.02 * (40 / 16) ** 0.5 * 1.75e-3 + 1e-5


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("scale", "adjust"), [("v2", "original"), ("v4", "match_rms_adamw")])
def test_agrees_with_torch_muon(nesterov, scale, adjust):
    """torch.optim.Muon iterates in bfloat16, so the two agree to bfloat16's rounding of an orthogonal matrix."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in [(48, 20), (20, 48), (32, 32)]]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    mine = MuonOptimizer(ours, orthogonalization="keller", scale=scale, **options)
    torchs = torch.optim.Muon(theirs, adjust_lr_fn=adjust, **options)
    for _ in range(10):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        torchs.step()
    for a, b in zip(ours, theirs, strict=True):
        moved = 10 * 0.02 * (0.2 * 48**0.5 if scale == "v4" else (48 / 20) ** 0.5) * min(a.shape) ** 0.5
        assert (a - b).norm() < 0.02 * moved


# -------------------------------------------------------------------------------- what a step does and leaves alone


def test_closure_and_hooks():
    model, other = mlp(), mlp()
    with_closure, without = MuonOptimizer(model), MuonOptimizer(other)
    events = []
    with_closure.register_step_pre_hook(lambda *_: events.append("pre"))
    with_closure.register_step_post_hook(lambda *_: events.append("post"))
    train(with_closure, model, 2, closure=True)
    train(without, other, 2)
    assert_same(weights(model), weights(other))
    assert events == ["pre", "post"] * 2
    assert with_closure.step(lambda: torch.tensor(3.0)) == 3.0


def test_two_runs_are_bit_identical():
    results = []
    for _ in range(2):
        model = mlp()
        train(MuonOptimizer(model, nesterov=True, weight_decay=0.1), model, 10)
        results.append(weights(model))
    assert_same(*results)


def test_gradients_are_not_changed():
    model = mlp()
    optimizer = MuonOptimizer(model, nesterov=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    optimizer.step()
    assert_same(grads, [p.grad for p in model.parameters()])


def test_momentum_is_not_overwritten_by_the_update():
    p = nn.Parameter(torch.randn(6, 8).bfloat16())
    optimizer = MuonOptimizer([p], nesterov=False, momentum=0.5)
    p.grad = torch.randn_like(p)
    expected = torch.zeros(6, 8)
    for _ in range(3):
        optimizer.step()
        expected = 0.5 * expected + p.grad.float()
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], expected)


def test_grad_scaler_unscales_and_skips_infinite_gradients():
    model, other = mlp(), mlp()
    scaled, plain = MuonOptimizer(model), MuonOptimizer(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    x = torch.randn(4, 12)
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(scaled)
    scaler.update()
    other(x).square().mean().backward()
    plain.step()
    for a, b in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(a, b)
    model[0].weight.grad.fill_(torch.inf)
    before = weights(model)
    scaler.scale(torch.tensor(1.0))
    scaler.step(scaled)
    assert_same(weights(model), before)


@pytest.mark.parametrize("shape", [(50, 100), (64, 64)])
def test_a_step_inside_autocast_is_the_same_step(shape):
    def run(enabled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(shape))
        p.grad = torch.randn(shape)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            MuonOptimizer([p]).step()
        return p.detach()

    assert_same(run(True), run(False))


def test_exact_keeps_a_gradient_that_is_not_finite_to_its_own_matrix():
    good, bad = (nn.Parameter(torch.randn(5, 6)) for _ in range(2))
    optimizer = MuonOptimizer([good, bad], orthogonalization="exact")
    good.grad, bad.grad = torch.randn(5, 6), torch.full((5, 6), torch.inf)
    optimizer.step()
    assert good.isfinite().all()
    assert bad.isnan().all()


# -------------------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("is_tall", [False, True])
def test_the_residual_of_a_large_matrix_is_summed_in_parts(is_tall):
    matrices = torch.randn(2, 256, 20_000) / 20_000**0.5  # two parts, of at most 16,384 columns
    gram = matrices.double() @ matrices.double().mT
    expected = (gram - torch.eye(256)).norm(dim=(1, 2)) / 16
    found = _residual(matrices.mT if is_tall else matrices)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_metrics_report_the_update_and_skipped_steps():
    model = mlp()
    optimizer = MuonOptimizer(model, nonfinite="skip")
    assert optimizer.metrics() == {"skipped_steps": 0.0}
    train(optimizer, model, 2)
    numbers = optimizer.metrics()
    assert 0 <= numbers["orthogonality_residual"] < 1.1
    assert 0 < numbers["update_rms"] < 0.02
    model[0].bias.grad.fill_(torch.nan)
    optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == 1


def test_a_profile_names_the_phases_of_a_step_and_the_shapes_of_matrices():
    model = mlp()
    optimizer = create_hybrid_optimizer(model)
    train(optimizer, model, 1)
    with torch.profiler.profile(acc_events=True) as profiler:
        optimizer.step()
    names = {event.key for event in profiler.key_averages() if event.key.startswith("muon_fsdp.")}
    assert any(name.startswith("muon_fsdp.orthogonalize stage 0 muon") and "20x12" in name for name in names), names
    assert {name.split()[0] for name in names} == {"muon_fsdp.prepare", "muon_fsdp.orthogonalize", "muon_fsdp.apply"}
