"""Launch plans on a GPU: the same bits as without a plan, at any addresses, on any stream, with the same memory."""

from __future__ import annotations

import pytest
import torch

from muon_fsdp import MuonOptimizer
from muon_fsdp.linalg.newton_schulz import Request, orthogonalize, orthogonalize_together

CUDA = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from muon_fsdp.kernels import launch_plan

# Every kernel: Hopper's and Triton's products, aligned and not, wide, tall and square, and the one for few rows.
SHAPES = [(4, 768, 768), (3, 256, 700), (3, 700, 256), (2, 96, 200), (2, 200, 333), (8, 64, 1024), (2, 2048, 4096)]


@pytest.fixture(autouse=True)
def plans(monkeypatch):
    monkeypatch.setattr(launch_plan, "_plans", {})
    yield
    assert launch_plan._is_usable


def num_plans() -> int:
    return sum(isinstance(plan, launch_plan.LaunchPlan) for plan in launch_plan._plans.values())


def without_plans(compute):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_plan, "_is_usable", False)
        return compute()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_planned_calls_have_the_same_bits(shape, dtype):
    generator = torch.Generator(CUDA).manual_seed(0)
    batches = [torch.randn(shape, device=CUDA, generator=generator).to(dtype) for _ in range(3)]
    expected = without_plans(lambda: [orthogonalize(batch) for batch in batches])
    kept = []
    for number in range(9):
        kept.append(torch.empty(100_000 * number, device=CUDA))  # so that addresses change
        assert torch.equal(orthogonalize(batches[number % 3]), expected[number % 3])
    assert num_plans() == 1


def test_batches_together_on_another_stream():
    batches = [torch.randn(shape, device=CUDA).bfloat16() for shape in [(3, 768, 768), (2, 768, 3072), (1, 3072, 768)]]

    def compute():
        outs = [torch.empty_like(batch, dtype=torch.float16) for batch in batches]
        orthogonalize_together(
            [Request(batch, out, factor) for batch, out, factor in zip(batches, outs, (1.0, 0.5, 2.0), strict=True)]
        )
        return outs

    expected = without_plans(compute)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(3):
            with torch.cuda.stream(stream):
                found = compute()
            stream.synchronize()
            assert all(map(torch.equal, found, expected))
    assert num_plans() == 1


def test_a_plan_takes_no_more_memory():
    batch = torch.randn(4, 2048, 4096, device=CUDA).bfloat16()

    def peak() -> int:
        for _ in range(4):
            orthogonalize(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        orthogonalize(batch)
        return torch.cuda.max_memory_allocated() - before

    usual = without_plans(peak)
    assert peak() <= 1.01 * usual
    assert num_plans() == 1


def test_a_planned_call_can_be_captured():
    batch = torch.randn(4, 768, 768, device=CUDA).bfloat16()
    expected = without_plans(lambda: orthogonalize(batch))
    for _ in range(3):
        orthogonalize(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = orthogonalize(batch)
    for _ in range(2):
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)


def test_steps_with_and_without_plans_have_the_same_bits():
    def train():
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, device=CUDA)) for s in [(256, 256), (256, 1024), (1024, 256)] * 3]
        optimizer = MuonOptimizer(params, lr=0.1, cuda_graph=False)
        for _ in range(6):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        return params

    assert all(map(torch.equal, without_plans(train), train()))
    assert num_plans() > 0
