"""The spectral sphere on a GPU: kernels against float64 on the CPU, no look at the device, and the same as a graph."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from torch import nn

from muon_fsdp import SpectralSphereOptimizer
from muon_fsdp.linalg.tangent import solve_lambda
from muon_fsdp.spectral import compute_spectral_norm
from tests.comparisons import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(256, 512), (300, 200), (384, 384), (1, 64), (130, 77), (192, 768), (64, 64)]
# The float64 half of a comparison runs on the CPU: a quarter of the sides, and as odd.
SMALL_SHAPES = [(64, 128), (75, 50), (96, 96), (1, 64), (33, 19), (48, 192), (64, 64)]
MODES = ["bracketed", "bisection", "projection", "zero"]


def numbers(shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(s, generator=generator) / s[1] ** 0.5 for s in shapes]
    steps = []
    for _ in range(6):
        low = [torch.randn(s[0], 2, generator=generator) @ torch.randn(2, s[1], generator=generator) for s in shapes]
        steps.append([a + 0.5 * torch.randn(a.shape, generator=generator) for a in low])
    return weights, steps


def train(device, dtype=torch.float32, lrs=None, between=None, shapes=SHAPES, **options):
    weights, gradients = numbers(shapes)
    params = [nn.Parameter(w.to(device, dtype)) for w in weights]
    named = [(f"w{index}", p) for index, p in enumerate(params)]
    rows = {f"w{index}": "spectral_sphere" for index, shape in enumerate(shapes) if 1 in shape}  # matrices all the same
    optimizer = SpectralSphereOptimizer(named, **{"lr": 0.02, "overrides": rows, **options})
    for step, grads in enumerate(gradients):
        if lrs is not None:
            optimizer.param_groups[0]["lr"] = lrs[step]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(device, dtype)
        optimizer.step()
        if between is not None:
            between(step, params, optimizer)
    return [p.detach().cpu().double() for p in params], optimizer


@functools.cache
def in_float64(mode):
    return train("cpu", torch.float64, shapes=SMALL_SHAPES, lambda_mode=mode)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_follows_float64(mode, dtype):
    expected = in_float64(mode)
    found, optimizer = train("cuda", dtype, shapes=SMALL_SHAPES, lambda_mode=mode)
    moved = 0.02 * len(numbers(SMALL_SHAPES)[1])
    for shape, a, b in zip(SMALL_SHAPES, found, expected, strict=True):
        limit = (0.03 if dtype == torch.float32 else 0.06) * moved
        assert float((a - b).norm() / b.norm()) < limit, shape
    metrics = optimizer.metrics()
    assert metrics["lambda_fallbacks"] == 0
    assert metrics["msign_calls_max"] <= (27 if mode == "bisection" else 12)


@pytest.mark.parametrize(
    "options", [*({"lambda_mode": mode} for mode in MODES), {"lambda_mode": "zero", "power_iteration_steps": 50}]
)
def test_norms_after_every_step(options):
    def check(_, params, optimizer):
        for p in params:
            radius = (p.shape[0] / p.shape[1]) ** 0.5
            assert abs(float(torch.linalg.matrix_norm(p.detach().double(), 2)) / radius - 1) < 0.03

    train("cuda", between=check, **options)


@pytest.mark.parametrize("mode", MODES)
def test_no_step_looks_at_the_device(mode):
    weights, gradients = numbers()
    params = [nn.Parameter(w.cuda()) for w in weights]
    optimizer = SpectralSphereOptimizer(params, lambda_mode=mode, cuda_graph=False)
    gradients = [[g.cuda() for g in grads] for grads in gradients]
    for step, grads in enumerate(gradients):
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        torch.cuda.synchronize()
        if step == 0:
            optimizer.step()  # compiles, and puts tables on the device
            continue
        # Some versions warn of events that other cycles would lose, though there is one only.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
                    torch.cuda.set_sync_debug_mode("error")
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert not [event.key for event in profile.key_averages() if "DtoH" in event.key]


@pytest.mark.parametrize(
    "options", [{}, {"lambda_mode": "projection"}, {"retract_mode": "dynamic", "weight_decay": 0.1}]
)
def test_graph_is_the_same(options):
    lrs = [0.02, 0.03, 0.01, 0.0, 0.02, 0.015]
    expected, _ = train("cuda", lrs=lrs, cuda_graph=False, **options)
    found, optimizer = train("cuda", lrs=lrs, cuda_graph=True, **options)
    assert optimizer._planned.graph is not None
    for shape, a, b in zip(SHAPES, found, expected, strict=True):
        assert_same(a, b, str(shape))


def test_graph_survives_loading():
    def reload(step, params, optimizer):
        if step == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    expected, _ = train("cuda")
    found, _ = train("cuda", cuda_graph=True, between=reload)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_search_that_skips_gives_what_one_that_does_not():
    torch.manual_seed(0)
    momentum = torch.randn(5, 256, 384, device="cuda")
    weights = torch.randn(5, 256, 384, device="cuda", dtype=torch.float64)
    u, _, vh = torch.linalg.svd(weights, full_matrices=False)
    left, right = u[..., 0].float(), vh[:, 0].float()
    together = solve_lambda(momentum, left, right)
    assert together.residual.abs().max() < 1e-3
    assert len(set(together.calls.tolist())) > 1  # some were skipped in the end
    for i in range(5):
        alone = solve_lambda(momentum[i : i + 1], left[i : i + 1], right[i : i + 1])
        assert_same(alone.calls, together.calls[i : i + 1])
        torch.testing.assert_close(alone.direction[0], together.direction[i], rtol=1e-3, atol=1e-4)


def test_spectral_norm():
    for shape in [(50, 100), (3, 300, 200), (1, 77), (2048, 512)]:
        matrices = torch.randn(shape, device="cuda")
        expected = torch.linalg.matrix_norm(matrices.double(), 2)
        assert float((compute_spectral_norm(matrices) / expected - 1).abs().max()) < 1e-2
