"""One CUDA device: the orthogonality contract in half precision, and training that follows the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.linalg.newton_schulz import Request, orthogonalize, orthogonalize_together
from muon_fsdp.utils import zeropower_via_newtonschulz5
from tests.comparisons import assert_changed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def residual(o: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(o.double() @ o.double().mT - torch.eye(o.shape[-2], device=o.device).double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_contract_on_1000_seeds(dtype, form):
    batch = torch.stack([torch.randn(50, 100, generator=torch.Generator().manual_seed(seed)) for seed in range(1000)])
    result = orthogonalize(batch.to("cuda", dtype), form=form)
    assert result.dtype == dtype
    assert residual(result).max() < (0.05 if dtype == torch.bfloat16 else 0.03)
    one = zeropower_via_newtonschulz5(batch[0].to("cuda", dtype), steps=5)
    assert torch.norm(one @ one.T - torch.eye(50, device="cuda", dtype=dtype)) < 0.1


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (3, 129, 300), (2, 300, 129), (128, 4096), (1024, 1024)])
@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
def test_half_precision_iterations_follow_float32(shape, factor):
    matrices = torch.randn(shape, device="cuda") * factor
    expected = orthogonalize(matrices.cpu()).cuda()
    difference = (orthogonalize(matrices) - expected).norm() / expected.norm()
    assert difference < 5e-3


@pytest.mark.parametrize("method", ["default", "fast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 768, 3072), (3, 3072, 768), (2, 257, 771), (8, 128, 512), (2, 2048, 4096)])
def test_an_iterate_in_the_memory_of_the_matrices_changes_nothing(shape, dtype, method):
    """The first refresh reads bfloat16 numbers where it writes float16 ones."""
    matrices = torch.randn(shape, device="cuda").to(dtype)
    out, again = (torch.full(shape, torch.nan, dtype=torch.float16, device="cuda") for _ in range(2))
    norms = orthogonalize_together([Request(matrices, out, 0.5)], method=method)[0]
    before, peaks = matrices.clone(), []
    for request in (Request(matrices, again, 0.5), Request(matrices, again, 0.5, norms, True)):
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        orthogonalize_together([request], method=method)
        peaks.append(torch.cuda.max_memory_allocated() - allocated)
        assert torch.equal(again, out)
        again.fill_(torch.nan)
        assert request.overwrites or torch.equal(matrices, before)
    if min(shape[1:]) > 256:  # smaller ones may be iterated in one kernel, or refreshed three times
        assert peaks[0] - peaks[1] == pytest.approx(matrices.nbytes, rel=0.05)
        assert not torch.equal(matrices, before)


def test_float64_is_iterated_in_float64():
    matrices = torch.randn(3, 40, 90, device="cuda", dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(matrices).cpu(), orthogonalize(matrices.cpu()), atol=1e-11, rtol=0)


def test_degenerate_input():
    matrices = torch.randn(3, 20, 30, device="cuda")
    matrices[0] = 0
    matrices[1, 0, 0] = torch.nan
    result = orthogonalize(matrices)
    assert not result[0].any()
    assert result[1].isnan().all()
    assert result[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr", [0.02, "tensor"])
def test_training_follows_the_cpu(dtype, lr):
    def run(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24)).to(device, dtype)
        rate = torch.tensor(0.02, device=device) if lr == "tensor" else lr
        optimizer = MuonOptimizer(model, lr=rate, nesterov=True, weight_decay=0.1, adamw_lr=0.01, nonfinite="skip")
        generator = torch.Generator().manual_seed(0)
        losses = []
        for _ in range(20):
            x = torch.randn(64, 24, generator=generator).to(device, dtype)
            loss = (model(x) - x.roll(1, -1)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert all(value.device.type == device for state in optimizer.state.values() for value in state.values())
        return losses

    on_cpu, on_gpu = run("cpu"), run("cuda")
    tolerance = 1e-2 if dtype == torch.float32 else 3e-2
    assert on_gpu == pytest.approx(on_cpu, rel=tolerance)
    assert on_gpu[-1] < 0.8 * on_gpu[0]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_step_does_not_synchronize_with_the_host():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    optimizer = MuonOptimizer(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    torch.cuda.set_sync_debug_mode("error")  # a synchronization raises
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_changed(list(model.parameters()), before)
