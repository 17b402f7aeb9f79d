"""The Spectral Sphere Optimizer on one device: against an SVD in float64, and on its sphere after every step."""

from __future__ import annotations

import copy
import io
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer
from muon_fsdp.linalg.power_iteration import COLD_STEPS
from muon_fsdp.linalg.tangent import MAX_CALLS
from muon_fsdp.spectral import compute_spectral_norm
from tests.comparisons import assert_same
from tests.reference import ReferenceSphere, matrix_with_condition
from tests.sso_cases import norm_of

MODES = ["bracketed", "bisection", "projection", "zero"]


def test_the_snippet_of_the_documentation():
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    optim = SpectralSphereOptimizer(model.parameters(), lr=0.02)
    for _ in range(10):
        model(torch.randn(10, 100)).sum().backward()
        optim.step()
    assert abs(compute_spectral_norm(model.weight) - 1.0) < 0.1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (15, 16)])  # of square ones the exact f may jump over zero
def test_follows_the_reference(mode, nesterov, shape):
    rng = np.random.default_rng(0)
    start = matrix_with_condition(rng, *shape, 20.0)
    reference = ReferenceSphere(
        start, nesterov=nesterov, momentum=0.9, mode="exact" if mode in ("bracketed", "bisection") else mode
    )
    p = nn.Parameter(torch.tensor(start))
    optimizer = SpectralSphereOptimizer(
        [p], momentum=0.9, nesterov=nesterov, lambda_mode=mode, orthogonalization="exact", power_iteration_steps=50
    )
    for _ in range(20):
        grad = rng.standard_normal(shape)
        p.grad = torch.tensor(grad)
        optimizer.step()
        reference.step(grad)
        np.testing.assert_allclose(p.detach().numpy(), reference.w, atol=2e-4)
    assert optimizer.metrics()["lambda_fallbacks"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_fast_chain_stays_on_the_sphere(mode):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(24, 40))
    optimizer = SpectralSphereOptimizer([p], lr=0.01, lambda_mode=mode, orthogonalization="fast")
    for _ in range(5):
        p.grad = torch.randn(24, 40)
        optimizer.step()
    assert norm_of(p) / math.sqrt(24 / 40) == pytest.approx(1, abs=0.03)  # a step of the chain is up to 1.35 times lr


@pytest.mark.parametrize(
    ("radius_mode", "retract_mode", "lr"),  # every pair of a radius and a retraction, and of a retraction and an lr
    [
        ("spectral_mup", "hard", 0.005),
        ("identity", "hard", 0.02),
        ("initialize", "hard", 0.1),
        ("spectral_mup", "dynamic", 0.1),
        ("identity", "dynamic", 0.005),
        ("initialize", "dynamic", 0.02),
    ],
)
def test_on_the_sphere_after_every_step_of_a_training_run(radius_mode, retract_mode, lr):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 8))
    before = [norm_of(layer.weight) for layer in model if isinstance(layer, nn.Linear)]
    optimizer = SpectralSphereOptimizer(
        model.parameters(), lr=lr, radius_mode=radius_mode, radius_scaler=1.5, retract_mode=retract_mode
    )
    x = torch.randn(64, 24)
    y = torch.sin(x[:, :8] * 3)
    first = last = 0.0
    for step in range(25):
        loss = nn.functional.mse_loss(model(x), y)
        first, last = (loss.item(), loss.item()) if step == 0 else (first, loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for initial, layer in zip(before, [m for m in model if isinstance(m, nn.Linear)], strict=True):
            rows, cols = layer.weight.shape
            radius = {"spectral_mup": 1.5 * math.sqrt(rows / cols), "identity": 1.5, "initialize": initial}[radius_mode]
            off = abs(norm_of(layer.weight) / radius - 1)
            if retract_mode == "hard" or step == 0:
                assert off <= min(lr + 0.01, max(lr, 0.02))
            else:  # only drawn towards it, by 0.05 lr a step, while other directions than the top one grow
                assert off <= 0.01 + 20 * lr
    assert last < first


@pytest.mark.parametrize(
    ("shape", "options", "blocks"),
    [
        ((12, 8), {"num_heads": 3}, [slice(0, 4), slice(4, 8), slice(8, 12)]),
        ((12, 8), {"split_sizes": (2, 4, 6)}, [slice(0, 2), slice(2, 6), slice(6, 12)]),
    ],
)
def test_every_logical_matrix_has_its_own_sphere(shape, options, blocks):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape))
    optimizer = SpectralSphereOptimizer([p], **options)
    for _ in range(3):
        p.grad = torch.randn(shape)
        optimizer.step()
    for block in blocks:
        part = p.detach()[block]
        assert norm_of(part) == pytest.approx(math.sqrt(part.shape[0] / part.shape[1]), rel=0.03)
    state = optimizer.state[p]
    assert state["radius"].shape == (3,)
    assert state["left_singular_vector"].shape == (12,)
    assert state["right_singular_vector"].shape == (24,)


@pytest.mark.parametrize("view", ["attn", "stacked", "flatten"])
def test_views(view):
    torch.manual_seed(0)
    shape = {"attn": (6, 20), "stacked": (3, 6, 5), "flatten": (6, 2, 3, 3)}[view]
    p = nn.Parameter(torch.randn(shape))
    optimizer = SpectralSphereOptimizer([p], view=view)
    for _ in range(3):
        p.grad = torch.randn(shape)
        optimizer.step()
    matrices = {"attn": (4, 6, 5), "stacked": (3, 6, 5), "flatten": (1, 6, 18)}[view]
    for matrix in p.detach().reshape(matrices):
        assert norm_of(matrix) == pytest.approx(math.sqrt(matrices[1] / matrices[2]), rel=0.03)


def test_groups_share_batches():
    torch.manual_seed(0)
    weights = [torch.randn(6, 8) for _ in range(3)]
    gradients = [[torch.randn(6, 8) for _ in range(3)] for _ in range(4)]

    def trained(grouped):
        params = [nn.Parameter(weight.clone()) for weight in weights]
        options = [{"radius_scaler": 2.0}, {"lr": 0.05}, {"power_iteration_steps": 20}]
        if grouped:
            optimizers = [SpectralSphereOptimizer([{"params": [p], **o} for p, o in zip(params, options, strict=True)])]
        else:
            optimizers = [SpectralSphereOptimizer([p], **o) for p, o in zip(params, options, strict=True)]
        for grads in gradients:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach() for p in params]

    for a, b in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_odd_matrices():
    torch.manual_seed(0)
    zero, rank_one, row, half = (
        nn.Parameter(torch.zeros(6, 9)),
        nn.Parameter(torch.outer(torch.randn(7), torch.randn(5))),
        nn.Parameter(torch.randn(1, 11)),
        nn.Parameter(torch.randn(8, 6).bfloat16()),
    )
    equal = nn.Parameter(torch.eye(6))
    everything = [zero, rank_one, row, half, equal]
    named = [(f"w{index}", p) for index, p in enumerate(everything)]
    optimizer = SpectralSphereOptimizer(named, lr=0.02, overrides={"w2": "spectral_sphere"})
    for step in range(4):
        for p in everything:
            p.grad = torch.randn(p.shape).to(p.dtype)
        optimizer.step()
        assert optimizer.metrics()["matrices_without_norm"] == 1  # in the first step only
        for p in everything if step > 0 else everything[1:]:
            assert norm_of(p) == pytest.approx(math.sqrt(p.shape[0] / p.shape[1]), rel=0.03), (step, p.shape)
        if step == 0:
            assert norm_of(zero) == pytest.approx(0.02 * math.sqrt(6 / 9), rel=0.1)
    assert optimizer.state[half]["right_singular_vector"].dtype == torch.float32


def test_lr_zero_moves_nothing():
    for lr in (0.0, torch.tensor(0.0)):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(6, 9))
        before = p.detach().clone()
        optimizer = SpectralSphereOptimizer([p], lr=lr)
        p.grad = torch.zeros_like(p)
        optimizer.step()  # inert: as torch.distributed.checkpoint does before loading
        assert_same(p, before)
        assert not optimizer.state[p]["radius"].any()
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert_same(p, before)
        assert optimizer.state[p]["momentum_buffer"].any()
        optimizer.param_groups[0]["lr"] = 0.02
        optimizer.step()
        assert norm_of(p) == pytest.approx(math.sqrt(6 / 9), rel=0.03)


def test_a_parameter_without_a_gradient_is_left_alone():
    torch.manual_seed(0)
    used, unused = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5, 6))
    optimizer = SpectralSphereOptimizer([used, unused], retract_mode="dynamic")
    before = unused.detach().clone()
    used.grad = torch.randn(5, 6)
    optimizer.step()
    assert_same(unused, before)
    assert not optimizer.state[unused]["momentum_buffer"].any()
    assert not optimizer.state[unused]["radius"].any()
    unused.grad = torch.randn(5, 6)
    optimizer.step()  # its first step goes all the way to the sphere, also here
    assert norm_of(unused) == pytest.approx(math.sqrt(5 / 6), rel=0.03)


def test_decay_says_once_that_it_does_nothing():
    p = nn.Parameter(torch.randn(5, 6))
    with pytest.warns(UserWarning, match="weight_decay has no effect"):
        optimizer = SpectralSphereOptimizer([p], weight_decay=0.1)
    assert "weight_decay has no effect" in str(optimizer.routing_report())
    other = nn.Parameter(p.detach().clone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = SpectralSphereOptimizer([other])
        SpectralSphereOptimizer([nn.Parameter(torch.randn(5, 6))], weight_decay=0.1, retract_mode="dynamic")
        for parameter, each in ((p, optimizer), (other, same)):
            parameter.grad = torch.ones(5, 6) + torch.eye(5, 6)
            each.step()
    torch.testing.assert_close(p.detach(), other.detach())


def test_options_are_checked():
    p = nn.Parameter(torch.randn(5, 6))
    for options, message in [
        ({"scale": "v2"}, "no scale"),
        ({"radius_mode": "other"}, "Unknown radius_mode"),
        ({"retract_mode": "other"}, "Unknown retract_mode"),
        ({"lambda_mode": "other"}, "Unknown lambda_mode"),
        ({"power_iteration_steps": 0}, "power_iteration_steps"),
        ({"radius_scaler": 0.0}, "radius_scaler"),
        ({"radius_scaler": -1.0}, "radius_scaler"),
        ({"retract_alpha": -1.0}, "retract_alpha"),
    ]:
        with pytest.raises(ValueError, match=message):
            SpectralSphereOptimizer([p], **options)
    with pytest.raises(ValueError, match="no scale"):
        SpectralSphereOptimizer([{"params": [p], "scale": "v3"}])
    with pytest.raises(ValueError, match="no scale"):
        MuonOptimizer([p], rule="spectral_sphere", scale="v4")


def test_the_same_by_every_door():
    def trained(make):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 10))
        optimizer = make(model)
        for step in range(4):
            x = torch.randn(8, 10, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    options = {"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 0.0, "adamw_betas": (0.9, 0.99)}
    expected = trained(lambda m: SpectralSphereOptimizer(m.named_parameters(), **options))
    by_model = trained(lambda m: FSDPMuonOptimizer(m, rule="spectral_sphere", **options))
    by_rule = trained(lambda m: MuonOptimizer(m.named_parameters(), rule="spectral_sphere", **options))
    torch.testing.assert_close(by_rule, expected, rtol=0, atol=0)
    torch.testing.assert_close(by_model, expected, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(29, 73), (33, 72), (114, 45)])
def test_resume_with_weights_that_stay(shape):
    """Half-precision weights may not move in a step. What is left are rounding errors, which the layout decides."""
    torch.manual_seed(0)
    p = nn.Parameter((0.1 * torch.randn(shape)).half())
    q = nn.Parameter(p.detach().clone())
    optimizer, resumed = (SpectralSphereOptimizer([each], lr=1e-6, radius_mode="identity") for each in (p, q))
    for step in range(6):
        if step == 3:
            q.data.copy_(p)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step)).half()
        optimizer.step()
        if step >= 3:
            q.grad = p.grad
            resumed.step()
            for name, value in optimizer.state[p].items():
                assert torch.equal(resumed.state[q][name], value), (name, step)
    assert_same(p, q)


@pytest.mark.parametrize("radius_mode", ["spectral_mup", "identity", "initialize"])
def test_resume(radius_mode):
    def gradients(step):
        return torch.randn(9, 7, generator=torch.Generator().manual_seed(step))

    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(9, 7))
    optimizer = SpectralSphereOptimizer([p], radius_mode=radius_mode)
    for step in range(8):
        if step == 5:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            saved, weights = file.getvalue(), p.detach().clone()
        p.grad = gradients(step)
        optimizer.step()
    q = nn.Parameter(weights)
    resumed = SpectralSphereOptimizer([q], radius_mode=radius_mode)
    resumed.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
    for step in range(5, 8):
        q.grad = gradients(step)
        resumed.step()
    assert_same(p, q)
    copied = copy.deepcopy(resumed)
    assert_same(copied.state_dict()["state"][0]["radius"], resumed.state[q]["radius"])
    with pytest.raises(RuntimeError, match="right_singular_vector"):
        SpectralSphereOptimizer([nn.Parameter(torch.randn(9, 7))], num_heads=3).load_state_dict(
            torch.load(io.BytesIO(saved), weights_only=True)
        )


def test_counted_calls_and_metrics():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24))
    optimizer = SpectralSphereOptimizer(model.parameters())
    medians, worst = [], []
    for step in range(15):
        x = torch.randn(32, 24, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - torch.sin(x)).square().mean().backward()
        optimizer.step()
        metrics = optimizer.metrics()
        medians.append(metrics["msign_calls_median"])
        worst.append(metrics["msign_calls_max"])
        assert 0.9 < metrics["spectral_norm_over_radius_min"] <= metrics["spectral_norm_over_radius_max"] or step == 0
    assert np.median(medians) <= 5
    assert max(worst) <= MAX_CALLS["bracketed"]
    assert metrics["lambda_fallbacks"] == 0
    assert COLD_STEPS <= 200
