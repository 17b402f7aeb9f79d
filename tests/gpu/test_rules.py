"""Rules of users on a GPU: the same as without a graph, and a clear refusal where a step can't be captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tests.toy_rules  # noqa: F401 (registers them)
from muon_fsdp import MuonOptimizer

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


@pytest.mark.parametrize("rule", ["row_normed", "toy_sphere", "toy_magnitudes"])
def test_follows_the_cpu_in_float64(rule):
    expected, _ = train(rule, "cpu", torch.float64)
    found, _ = train(rule)
    for shape, a, b in zip(SHAPES, found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.02, shape


@pytest.mark.parametrize("rule", ["row_normed", "toy_sphere"])
def test_a_graph_is_the_same(rule):
    expected, _ = train(rule)
    found, optimizer = train(rule, cuda_graph=True)
    assert optimizer._planned.graph is not None
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("toy_that_waits", "can't capture the step.*rule.*'toy_that_waits'.*Leave cuda_graph out"),
        ("toy_signs", "rule 'toy_signs' has no kernels for prepare and apply"),
        ("toy_magnitudes", "multiplies its rows or columns by factors"),
    ],
)
def test_what_can_not_be_captured_is_refused(rule, text):
    with pytest.raises(RuntimeError, match=text):
        train(rule, cuda_graph=True)
    torch.randn(4, device="cuda")  # the generator is not left in a capture that broke off
    train(rule)  # and works without


def test_an_element_wise_rule_of_a_user():
    expected, _ = train("muon", "cpu", torch.float64, other_rule="toy_momentum", toy_momentum_lr=0.01)
    found, _ = train("muon", other_rule="toy_momentum", toy_momentum_lr=0.01)
    torch.testing.assert_close(found[-1], expected[-1], rtol=1e-4, atol=1e-5)
