"""The element-wise pair by kernels, in half precision, in every memory layout, and on ranks."""

from __future__ import annotations

import copy
import io
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muon_fsdp import elementwise
from muon_fsdp.step import fused
from muon_optimizer import TritonMuon, TritonMuonW
from tests import elementwise_cases
from tests.comparisons import assert_near, assert_same
from tests.elementwise_cases import DEVICE, PAIR, Reference, compare, options
from tests.pool import RankPool


@pytest.fixture
def kernels(monkeypatch):
    """Use the Triton kernels, in the interpreter on CPUs; give the names of those launched."""
    pytest.importorskip("triton")
    from muon_fsdp.kernels import launch, triton_pair

    launched = []
    monkeypatch.setattr(fused, "unusable", lambda device: None)
    monkeypatch.setattr(
        triton_pair, "launch", lambda k, *a, **o: launched.append(k.fn.__name__) or launch.launch(k, *a, **o)
    )
    return launched


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(PAIR),
    st.lists(st.lists(st.integers(1, 12), max_size=3).map(tuple), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float64]),
    st.fixed_dictionaries(
        {
            "lr": st.floats(1e-4, 0.1),
            "momentum": st.floats(0, 0.99),
            "velocity": st.floats(0.5, 0.9999),
            "weight_decay": st.floats(0, 1),
            "nesterov": st.booleans(),
            "layerwise_norm": st.booleans(),
        }
    ),
)
def test_random_shapes_and_options_follow_float64(cls, shapes, dtype, chosen):
    compare(cls, shapes, dtype, tolerance=1e-10 if dtype == torch.float64 and DEVICE == "cpu" else 2e-4, **chosen)


@pytest.mark.parametrize("cls", PAIR)
@pytest.mark.parametrize("norm", [False, True])
def test_kernels_follow_float64(monkeypatch, kernels, cls, norm):
    """Odd sizes, several chunks in one tensor (a norm per chunk would be wrong), an empty tensor."""
    from muon_fsdp.kernels import triton_pair

    monkeypatch.setattr(triton_pair, "PARTIALS_AT_ONCE", 2)  # fewer than a tensor has
    compare(cls, [(3, 7), (20_000,), (0, 4), (129, 65), ()], layerwise_norm=norm, nesterov=norm, steps=2)
    expected = ["_sums_of_squares_kernel", "_update_kernel"] if norm else ["_update_kernel"]
    assert kernels == 2 * expected  # all tensors in one launch


def test_a_step_by_kernels_does_not_keep_gradients(kernels):
    """Their tables stay for the next step; a gradient that they kept would not free its memory at zero_grad()."""
    p = nn.Parameter(torch.ones(4, device=DEVICE))
    p.grad = torch.ones(4, device=DEVICE)
    optimizer, grad = TritonMuon([p], layerwise_norm=True), weakref.ref(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert kernels
    assert grad() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_half_precision_weights_with_float32_state(request, dtype, by_kernels):
    if by_kernels:
        request.getfixturevalue("kernels")
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(40, 30).to(DEVICE, dtype))
    optimizer = TritonMuonW([p], lr=0.01)
    reference = Reference(
        p.detach().cpu().double().numpy(), coupled=False, **options(velocity=0.999, weight_decay=0.01)
    )
    for _ in range(3):
        reference.w = p.detach().cpu().double().numpy()  # rounded once a step
        p.grad = torch.randn(40, 30).to(DEVICE, dtype)
        reference.step(p.grad.cpu().double().numpy())
        optimizer.step()
        np.testing.assert_allclose(p.detach().cpu().double().numpy(), reference.w, rtol=8e-3, atol=1e-4)
    assert optimizer.state[p]["momentum"].dtype == torch.float32
    np.testing.assert_allclose(optimizer.state[p]["velocity"].cpu().double().numpy(), reference.v, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("by_kernels", [False, True])
def test_memory_layout_does_not_matter(request, by_kernels):
    if by_kernels:
        request.getfixturevalue("kernels")
    base = torch.randn(6, 8, device=DEVICE)
    params = [nn.Parameter(base.clone().t()), nn.Parameter(base.clone().t().contiguous())]
    optimizer = TritonMuon(params, layerwise_norm=True)
    for p in params:
        p.grad = torch.arange(48.0, device=DEVICE).reshape(8, 6)
    params[1].grad = params[1].grad.t().contiguous().t()
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), params[1].detach())


def test_extreme_gradients_do_not_break_the_norm():
    for size in (1e-25, 1e25):
        p = nn.Parameter(torch.ones(4, device=DEVICE))
        p.grad = torch.full((4,), size, device=DEVICE)
        optimizer = TritonMuon([p], layerwise_norm=True)
        optimizer.step()
        expected = size / (2 * size + 1e-8)
        torch.testing.assert_close(optimizer.state[p]["momentum"], torch.full((4,), 0.1 * expected, device=DEVICE))


@pytest.mark.parametrize("cls", PAIR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_keeps_precision_and_memory_apart(cls, dtype):
    p = nn.Parameter(torch.randn(8, 8).to(DEVICE, dtype))
    optimizer = cls([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = cls([p], lr=1.0)
    other.load_state_dict(loaded)
    assert other.param_groups[0]["lr"] == 1e-3
    assert other.state[p]["step"] == 1
    for name in ("momentum", "velocity"):
        assert other.state[p][name].dtype == torch.float32
        assert_same(other.state[p][name], optimizer.state[p][name], name)
        assert other.state[p][name].data_ptr() != loaded["state"][0][name].data_ptr()
    copied = copy.deepcopy(optimizer)
    (copied_p,) = copied.param_groups[0]["params"]
    copied_p.grad = p.grad.clone()
    copied.step()
    optimizer.step()
    assert_same(copied_p, p)


def test_schedulers_and_hooks_work():
    p = nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = TritonMuon([p], lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=True)
    seen = set()
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step()
        seen.add((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    assert len(seen) == 5
    assert calls == ["pre", "post"] * 5


def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match="floating-point"):
        TritonMuon([torch.ones(2, dtype=torch.complex64, requires_grad=True)])


def test_the_module_says_that_it_does_not_orthogonalize():
    assert "NOT the orthogonalizing optimizer" in (elementwise.__doc__ or "")


@pytest.mark.parametrize("norm", [False, True])
def test_training_on_ranks_equals_one_device(ranks: RankPool, norm):
    (expected,) = ranks.run(1, elementwise_cases.train_plain, norm)
    for layout in ("fsdp", "hsdp", "tp", "ddp"):
        for rank, found in enumerate(ranks.run(4, elementwise_cases.train_sharded, layout, norm)):
            assert_near(found, expected, f"{layout}, rank {rank}", rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_gradient_that_is_missing_on_one_rank_counts_as_zero_there(ranks: RankPool, missing):
    for partial, whole in ranks.run(2, elementwise_cases.one_rank_without_a_gradient, missing):
        assert partial == pytest.approx(1.0)  # of what there is
        assert whole == pytest.approx(1.0)
