"""Whole steps by Triton kernels: the same numbers as steps without them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer, SpectralSphereOptimizer
from muon_fsdp.linalg import sphere, tangent
from muon_fsdp.linalg.newton_schulz import orthogonalize
from muon_fsdp.step import fused

pytest.importorskip("triton")

from tests.comparisons import assert_same
from tests.kernel_cases import DEVICE, Net, error, kernels_fixture, random  # noqa: F401

pytestmark = pytest.mark.no_cover  # coverage makes the interpreter of kernels more than twice as slow


def train(nesterov, dtype, accumulated=False, decay=1.0, **options):
    torch.manual_seed(0)
    model = Net().to(DEVICE, dtype)
    groups = [
        {"params": [model.qkv], "split_sizes": (8, 8, 8), "lr": 0.1},
        {"params": [model.weight, model.other, model.stack, model.odd, model.bias], "weight_decay": 0.1 * decay},
    ]
    optimizer = MuonOptimizer(
        groups,
        lr=torch.tensor(0.05, device=DEVICE),
        nesterov=nesterov,
        ns_steps=2,  # every product takes the interpreter long; all five have tests of their own
        adamw_lr=0.01,
        adamw_weight_decay=0.2 * decay,
        adamw_betas=(0.9, 0.99999),  # 1 - beta must not be rounded
        **options,
    )
    generator = torch.Generator().manual_seed(1)
    optimizer._accumulation_steps = 2 if accumulated else 1
    for step in range(4 if accumulated else 3):
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE, dtype)
            if step == 1 and name in ("other", "bias"):
                p.grad = None
            elif name == "weight":
                p.grad = p.grad.t().contiguous().t()  # not contiguous
        optimizer.step()
    states = [value.clone() for p in model.parameters() for value in optimizer.state[p].values()]
    return [p.detach().clone() for p in model.parameters()], states


@pytest.mark.filterwarnings("ignore:gradient_accumulation_steps=2")  # gradients are assigned, not accumulated
@pytest.mark.parametrize(
    ("nesterov", "dtype", "accumulated"), [(False, torch.float32, False), (True, torch.bfloat16, True)]
)
def test_a_step_by_kernels_is_the_step_without(request, monkeypatch, nesterov, dtype, accumulated):
    monkeypatch.setenv("MUON_FSDP_KERNELS", "torch")
    expected, expected_states = train(nesterov, dtype, accumulated)
    monkeypatch.delenv("MUON_FSDP_KERNELS")
    launched = request.getfixturevalue("kernels_everywhere")
    parameters, states = train(nesterov, dtype, accumulated)
    assert {"_muon_prepare_kernel", "_apply_kernel", "_adamw_count_kernel", "_adamw_kernel"} <= set(launched)
    # A bfloat16 weight may be rounded the other way, and on a GPU half-precision products differ.
    tolerance = 1e-5 if dtype == torch.float32 and DEVICE == "cpu" else 3e-2
    for result, reference in zip(parameters, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance * 0.1)
    for result, reference in zip(states, expected_states, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cautious_decay_by_kernels(request, monkeypatch, dtype):
    options = {"cautious_weight_decay": True, "adamw_cautious_weight_decay": True, "decay": 40.0}
    monkeypatch.setenv("MUON_FSDP_KERNELS", "torch")
    plain, _ = train(True, dtype, decay=40.0)
    expected, _ = train(True, dtype, **options)
    monkeypatch.delenv("MUON_FSDP_KERNELS")
    launched = request.getfixturevalue("kernels_everywhere")
    found, _ = train(True, dtype, **options)
    assert {"_apply_kernel", "_adamw_kernel"} <= set(launched)
    tolerance = 1e-5 if dtype == torch.float32 and DEVICE == "cpu" else 3e-2
    for result, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance * 0.1)
    # `qkv` has no decay; in bfloat16 rounding hides the difference of one more
    differ = [not torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(plain, found, strict=True)]
    assert sum(differ) >= len(found) - 2


def test_norms_that_prepare_computes_are_those_of_the_matrices(kernels_everywhere):
    shapes = [(3, 40, 300), (20, 30), (20, 30), (2, 20, 30), (30, 20)]  # several batches, one of three parameters
    params = [nn.Parameter(random(*shape)) for shape in shapes]
    for number, p in enumerate(params):
        sizes = 10.0 ** (3 * torch.arange(len(p) if p.ndim == 3 else 1, device=DEVICE) - 4 * number)
        p.grad = random(*p.shape) * (sizes[:, None, None] if p.ndim == 3 else sizes)
    before = [p.detach().clone() for p in params]
    MuonOptimizer(params, lr=1.0, scale=1.0, ns_steps=2, momentum_eps=0.0).step()
    for p, old in zip(params, before, strict=True):
        expected = orthogonalize(p.grad.double().cpu(), steps=2, form="standard").to(DEVICE)
        assert error(old - p.detach(), expected) < 2e-2
    assert "_partials_kernel" not in kernels_everywhere  # not computed a second time


@pytest.mark.skipif(DEVICE == "cuda", reason="about machines without a GPU")
def test_a_graph_is_refused_by_name_without_a_gpu():
    model = nn.Linear(4, 4)
    optimizer = MuonOptimizer(model, cuda_graph=True)
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"cuda_graph=True can't capture the step: parameter 'weight'.*'cpu'"):
        optimizer.step()
    with pytest.raises(TypeError, match="cuda_graph"):
        MuonOptimizer(model, cuda_graph=1)


@pytest.mark.parametrize("mode", ["bracketed", "projection"])
@pytest.mark.parametrize("retract_mode", ["hard", "dynamic"])
def test_a_step_on_spheres(monkeypatch, mode, retract_mode):
    def trained():
        torch.manual_seed(0)
        model = Net().to(DEVICE)
        groups = [
            {"params": [model.qkv], "split_sizes": (8, 4, 12)},
            {"params": [model.stack], "transposed": True},
            {"params": [model.weight, model.other, model.odd, model.bias]},
        ]
        optimizer = SpectralSphereOptimizer(groups, lambda_mode=mode, retract_mode=retract_mode)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(DEVICE)
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()], optimizer.metrics()

    expected, expected_metrics = trained()
    for module in (fused, sphere, tangent):
        monkeypatch.setattr(module, "unusable", lambda device: None)
    found, metrics = trained()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=2e-3)
    assert metrics["lambda_fallbacks"] == pytest.approx(expected_metrics["lambda_fallbacks"], abs=2)


def of_size(memory: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the beginning of some memory as a tensor of this shape."""
    return memory[: math.prod(shape)].view(shape)


@pytest.mark.parametrize("shape", [(8, 32), (17,), (24, 32)])
def test_a_parameter_that_gets_another_shape_is_planned_anew(kernels_everywhere, shape):
    """Structured pruning: kernels must not write behind the new data, for which the old plan is too large."""
    torch.manual_seed(0)
    params = [nn.Parameter(random(16, 32)), nn.Parameter(random(33))]
    p = params[len(shape) % 2]
    optimizer = MuonOptimizer(params, lr=0.1, adamw_lr=0.1, cuda_graph=False)
    for _ in range(2):
        for each in params:
            each.grad = random(*each.shape)
        optimizer.step()
    memory, gradients = torch.full((1024,), 7.0, device=DEVICE), torch.zeros(1024, device=DEVICE)
    start, grad = random(*shape), random(*shape)
    p.grad, p.data = None, of_size(memory, shape).copy_(start)
    p.grad = of_size(gradients, shape).copy_(grad)
    with pytest.warns(UserWarning, match=r"starts anew: its rule, view or shape was changed"):
        optimizer.step()
    assert (memory[p.numel() :] == 7).all()
    if p.ndim == 2:
        twin = nn.Parameter(start.clone())
        twin.grad = grad.clone()
        MuonOptimizer([twin], lr=0.1, cuda_graph=False).step()
        torch.testing.assert_close(p.detach(), twin.detach(), rtol=1e-5, atol=1e-5)
    assert not torch.equal(p.detach(), start)


def test_a_gradient_of_another_shape_is_an_error(kernels_everywhere):
    p = nn.Parameter(random(16, 32))
    optimizer = MuonOptimizer([("w", p)], cuda_graph=False)
    p.grad = random(16, 32)
    optimizer.step()
    p.data = random(24, 32)
    with pytest.raises(RuntimeError, match=r"gradient of parameter 'w' has shape \(16, 32\), and the parameter \(24"):
        optimizer.step()


def test_state_that_gets_another_dtype_is_not_written_by_kernels_of_the_old_one(kernels_everywhere):
    p = nn.Parameter(random(16, 32))
    optimizer = MuonOptimizer([p], cuda_graph=False)
    for _ in range(2):
        p.grad = random(16, 32)
        optimizer.step()
    buffer = optimizer.state[p]["momentum_buffer"]
    memory = torch.full((1024,), 7.0, dtype=torch.bfloat16, device=DEVICE)
    buffer.data = of_size(memory, (16, 32)).copy_(buffer)
    optimizer.step()
    assert (memory[512:] == 7).all()
    assert buffer.isfinite().all()


def test_state_that_gets_another_shape_is_an_error(kernels_everywhere):
    p = nn.Parameter(random(16, 32))
    optimizer = MuonOptimizer([("w", p)], cuda_graph=False)
    p.grad = random(16, 32)
    optimizer.step()
    optimizer.state[p]["momentum_buffer"].data = torch.zeros(8, 32, device=DEVICE)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=r"state 'momentum_buffer' of parameter 'w' has shape \(8, 32\) instead of"):
        optimizer.step()
    assert_same(p.detach(), before)


def test_tensors_of_another_alignment_have_a_list_of_their_own(kernels_everywhere):
    """In one list with them, the embedding would be loaded element by element."""
    shapes = [(64, 16), (32,), (33,), (), (48,), (16, 16), (5, 7)]
    params = [nn.Parameter(random(*shape)) for shape in shapes]
    groups = [{"params": params[:5], "rule": "adamw"}, {"params": params[5:]}]
    optimizer = MuonOptimizer(groups, cuda_graph=False)
    for p in params:
        p.grad = random(*p.shape)
    params[4].grad = random(49)[1:]  # as FSDP2 makes it: behind another gradient in a flat buffer
    optimizer.step()
    lists = {tuple(sorted(each.positions)): each.aligned for each in optimizer._planned._fused.lists}
    assert lists == {(0, 1): True, (2, 3, 4): False, (5,): True, (6,): False}
