"""NorMuon and rules of users on a GPU: the same as without a graph, and a clear refusal where none can be captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tests.toy_rules  # noqa: F401 (registers them)
from muon_fsdp import MuonOptimizer
from muon_fsdp.step import matrix_state
from tests.comparisons import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(96, 64), (64, 96), (96, 64), (3, 32, 48), (33, 70), (64,)]


def train(rule: str, device: str = "cuda", dtype: torch.dtype = torch.float32, steps: int = 6, **options):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]
    optimizer = MuonOptimizer(params, lr=0.05, weight_decay=0.1, rule=rule, **options)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        for index, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator).to(device, dtype)
            p.grad = None if (step, index) == (3, 1) else grad  # a gradient that is missing for once
        optimizer.step()
    return [p.detach().double().cpu() for p in params], optimizer


@pytest.mark.parametrize("rule", ["normuon", "row_normed", "toy_sphere", "toy_magnitudes"])
def test_follows_the_cpu_in_float64(rule):
    expected, _ = train(rule, "cpu", torch.float64)
    found, _ = train(rule)
    for shape, a, b in zip(SHAPES, found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.02, shape


@pytest.mark.parametrize("rule", ["normuon", "row_normed", "toy_sphere"])
def test_a_graph_is_the_same(rule):
    expected, _ = train(rule, cuda_graph=False)
    found, optimizer = train(rule, cuda_graph=True)
    assert optimizer._planned.graph is not None
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_statistics_on_a_stream_of_their_own_are_the_same(monkeypatch, cuda_graph):
    def trained():
        torch.manual_seed(0)
        shapes = [(768, 3072), (3072, 768), (768, 768), (768,)] * 4
        params = [nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in shapes]
        optimizer = MuonOptimizer(params, rule="spectral_sphere", lambda_mode="projection", cuda_graph=cuda_graph)
        for step in range(7):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
            optimizer.step()
        return [p.detach() for p in params], optimizer

    found, optimizer = trained()
    assert optimizer._planned.matrices._stream is not None
    monkeypatch.setattr(matrix_state.MatrixStates, "_own_stream", lambda self, stages: None)
    expected, _ = trained()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(4, 768, 3072), (3, 2304, 768), (2, 100, 333)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_are_rescaled_as_in_float64(shape, dtype):
    from muon_fsdp.linalg.scaling import rescale_rows

    sizes = torch.logspace(-2, 0, shape[1], device="cuda")[:, None]
    matrices = (torch.randn(shape, device="cuda") * sizes).to(dtype)
    moments = torch.rand(shape[:2], device="cuda")
    expected, expected_moments = matrices.double().cpu(), moments.double().cpu()
    again, moments_again = matrices.clone(), moments.clone()
    for a, b in ((expected, expected_moments), (matrices, moments), (again, moments_again)):
        rescale_rows(a, b, factor=2.0, beta2=0.9, eps=1e-8)
    torch.testing.assert_close(moments.cpu().double(), expected_moments, rtol=1e-5, atol=0)
    precision = 2 * torch.finfo(dtype).eps + 1e-5
    torch.testing.assert_close(matrices.cpu().double(), expected, rtol=precision, atol=1e-7)
    assert torch.equal(again, matrices)  # replicas round alike
    assert torch.equal(moments_again, moments)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("toy_signs", "rule 'toy_signs' has no kernels for prepare and apply"),
        ("toy_magnitudes", "multiplies its rows or columns by factors"),
    ],
)
def test_what_can_not_be_captured_is_refused(rule, text):
    with pytest.raises(RuntimeError, match=text):
        train(rule, cuda_graph=True)
    train(rule)  # and works without


@pytest.mark.parametrize("cuda_graph", ["auto", True])
def test_a_rule_that_waits_for_the_host_runs_eagerly_and_warns_once(cuda_graph):
    expected, _ = train("toy_that_waits", cuda_graph=False)
    with pytest.warns(
        RuntimeWarning, match="not captured as a CUDA graph: the capture failed.*It runs eagerly"
    ) as told:
        found, optimizer = train("toy_that_waits", cuda_graph=cuda_graph)
    assert len(told) == 1
    assert optimizer._planned.graph is None
    assert "the capture failed" in optimizer.plan_report().cuda_graph
    assert_same(found, expected)
    torch.randn(4, device="cuda")  # the generator is not left in a capture that broke off
    torch.cuda.empty_cache()  # nor is the allocator


def test_an_element_wise_rule_of_a_user():
    expected, _ = train("muon", "cpu", torch.float64, other_rule="toy_momentum", toy_momentum_lr=0.01)
    found, _ = train("muon", other_rule="toy_momentum", toy_momentum_lr=0.01)
    torch.testing.assert_close(found[-1], expected[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["muon", "normuon", "spectral_sphere"])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_idle_matrices_stop(rule, cuda_graph):
    """Small and large kernels: every second matrix has gradients of zero from the second step on."""
    torch.manual_seed(0)
    shapes = [(768, 768), (64, 1024), (768, 3072), (40, 70)]
    params = [nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in shapes for _ in range(2)]
    optimizer = MuonOptimizer(params, rule=rule, momentum=0.01, cuda_graph=cuda_graph)

    def moved_by(p, old):
        """Return how far a matrix has moved, apart from its scale: a sphere brings it back to its norm in any case."""
        scale = (p * old).sum() / (old * old).sum()
        return float((p - scale * old).norm())

    moved = []
    for step in range(9):
        before = [p.detach().clone() for p in params]
        for number, p in enumerate(params):
            p.grad = torch.randn_like(p) if step == 0 or number % 2 else torch.zeros_like(p)
        optimizer.step()
        moved = [moved_by(p.detach(), old) for p, old in zip(params, before, strict=True)]
    assert max(moved[::2]) < 1e-3 < min(moved[1::2])
    assert all(p.isfinite().all() for p in params)
