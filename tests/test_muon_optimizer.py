"""TritonMuon and TritonMuonW, the element-wise pair: formulas in float64, and what torch expects of an optimizer."""

from __future__ import annotations

import copy
import io
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muon_fsdp import elementwise
from muon_fsdp.step import fused
from muon_optimizer import TritonMuon, TritonMuonW, benchmark_muon_optimizers
from tests import elementwise_cases
from tests.comparisons import assert_changed, assert_near, assert_same
from tests.pool import RankPool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIR = [TritonMuon, TritonMuonW]


class Reference:
    """The published formulas, one tensor, NumPy float64."""

    def __init__(self, weight, *, coupled, lr, momentum, velocity, weight_decay, nesterov, layerwise_norm):
        self.w = np.array(weight, dtype=np.float64)
        self.m, self.v = np.zeros_like(self.w), np.zeros_like(self.w)
        self.coupled, self.lr, self.b1, self.b2 = coupled, lr, momentum, velocity
        self.decay, self.nesterov, self.norm = weight_decay, nesterov, layerwise_norm

    def step(self, grad):
        g = np.array(grad, dtype=np.float64)
        if self.coupled:
            g = g + self.decay * self.w
        if self.norm:
            g = g / (np.sqrt((g**2).sum()) + 1e-8)
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        direction = self.b1 * self.m + (1 - self.b1) * g if self.nesterov else self.m
        if not self.coupled:
            self.w = self.w * (1 - self.lr * self.decay)
        self.w = self.w - self.lr / (np.sqrt(self.v) + 1e-8) * direction


def options(**changed):
    base = {
        "lr": 0.01,
        "momentum": 0.9,
        "velocity": 0.99,
        "weight_decay": 0.1,
        "nesterov": False,
        "layerwise_norm": False,
    }
    return {**base, **changed}


def compare(cls, shapes, dtype=torch.float32, steps=3, tolerance=1e-5, **changed):
    """Train tensors by the optimizer and by the reference on the same gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]
    chosen = options(**changed)
    optimizer = cls(params, **chosen)
    references = [Reference(p.detach().cpu().double().numpy(), coupled=cls is TritonMuon, **chosen) for p in params]
    # Where decay and gradient cancel, rounding is all that is left, and the velocity makes it large.
    cancelled = [np.zeros(p.shape, dtype=bool) for p in params]
    for _ in range(steps):
        for p, reference, mask in zip(params, references, cancelled, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE, dtype)
            grad = p.grad.cpu().double().numpy()
            decay = chosen["weight_decay"] * reference.w if cls is TritonMuon else np.zeros_like(grad)
            mask |= np.abs(grad + decay) < 1e-2 * (np.abs(grad) + np.abs(decay))
            reference.step(grad)
        optimizer.step()
    for p, reference, mask in zip(params, references, cancelled, strict=True):
        for result, expected in (
            (p.detach(), reference.w),
            (optimizer.state[p]["momentum"], reference.m),
            (optimizer.state[p]["velocity"], reference.v),
        ):
            found = np.where(mask, expected, result.cpu().double().numpy())
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    return optimizer


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


# --------------------------------------------------------------------------------------------- the 29 named tests


def one_step(cls, **changed):
    p = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], device=DEVICE))
    p.grad = torch.tensor([0.5, 0.5, -1.0], device=DEVICE)
    optimizer = cls([p], **options(**changed))
    before = p.detach().clone()
    optimizer.step()
    return p, before, optimizer


def test_basic_muon_step():
    p, before, _ = one_step(TritonMuon, weight_decay=0.0)
    # After one step m = 0.1 g and v = 0.01 g^2: every entry moves by lr against its gradient.
    torch.testing.assert_close(before - p.detach(), 0.01 * p.grad.sign(), rtol=1e-5, atol=0)


def test_muon_weight_decay():
    p, before, optimizer = one_step(TritonMuon, weight_decay=10.0)
    torch.testing.assert_close(optimizer.state[p]["momentum"], 0.1 * (p.grad + 10.0 * before))


def test_muon_momentum_coefficients():
    for momentum, velocity in ((0.0, 0.0), (0.5, 0.9), (0.99, 0.9999)):
        p, _, optimizer = one_step(TritonMuon, momentum=momentum, velocity=velocity, weight_decay=0.0)
        torch.testing.assert_close(optimizer.state[p]["momentum"], (1 - momentum) * p.grad)
        torch.testing.assert_close(optimizer.state[p]["velocity"], (1 - velocity) * p.grad**2)


def test_muon_nesterov():
    plain, before, _ = one_step(TritonMuon, weight_decay=0.0)
    ahead, _, _ = one_step(TritonMuon, weight_decay=0.0, nesterov=True)
    torch.testing.assert_close(before - ahead.detach(), 1.9 * (before - plain.detach()), rtol=1e-5, atol=0)


def test_muon_layerwise_norm():
    p, _, optimizer = one_step(TritonMuon, weight_decay=0.0, layerwise_norm=True)
    torch.testing.assert_close(optimizer.state[p]["momentum"], 0.1 * p.grad / p.grad.norm())


def test_muon_state_initialization():
    p = nn.Parameter(torch.randn(3, 4, device=DEVICE))
    optimizer = TritonMuon([p])
    assert not optimizer.state[p]
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert set(optimizer.state[p]) == {"step", "momentum", "velocity"}
    assert optimizer.state[p]["momentum"].shape == p.shape
    assert not optimizer.state[p]["momentum"].any()
    assert not optimizer.state[p]["velocity"].any()


def test_muon_step_counter():
    p, _, optimizer = one_step(TritonMuon)
    for expected in (2, 3, 4):
        optimizer.step()
        assert optimizer.state[p]["step"] == expected


def test_muon_zero_grad():
    p, _, optimizer = one_step(TritonMuon)
    optimizer.zero_grad()
    assert p.grad is None
    p.grad = torch.ones_like(p)
    optimizer.zero_grad(set_to_none=False)
    assert not p.grad.any()


def test_muon_multiple_parameters():
    compare(TritonMuon, [(3,), (4, 5), (), (2, 3, 4), (9000,)])


def test_muon_learning_rates():
    steps = {}
    for lr in (0.0, 1e-3, 1e-2):
        p, before, _ = one_step(TritonMuon, lr=lr, weight_decay=0.0)
        steps[lr] = (before - p.detach()).norm().item()
    assert steps[0.0] == 0
    assert steps[1e-2] == pytest.approx(10 * steps[1e-3], rel=1e-3)
    p, before, _ = one_step(TritonMuon, lr=torch.tensor(1e-2, device=DEVICE), weight_decay=0.0)
    assert (before - p.detach()).norm().item() == pytest.approx(steps[1e-2], rel=1e-5)


def test_muon_parameter_groups():
    a, b = (nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(2))
    optimizer = TritonMuon([{"params": a, "lr": 0.1}, {"params": [b]}], lr=0.01)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device=DEVICE))], "momentum": 0.5})
    for p in (a, b):
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(1 - a.detach(), 10 * (1 - b.detach()), rtol=1e-4, atol=0)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.9, 0.5]


def test_basic_muonw_step():
    p, before, _ = one_step(TritonMuonW, weight_decay=0.5)
    torch.testing.assert_close(p.detach(), before * (1 - 0.01 * 0.5) - 0.01 * p.grad.sign(), rtol=1e-5, atol=1e-6)


def test_muonw_vs_muon():
    coupled, _, _ = one_step(TritonMuon)
    decoupled, _, _ = one_step(TritonMuonW)
    assert not torch.allclose(coupled, decoupled)
    without = [one_step(cls, weight_decay=0.0)[0] for cls in PAIR]
    assert_same(without[0], without[1], "without weight decay")


def test_muonw_state_initialization():
    p, _, optimizer = one_step(TritonMuonW)
    assert set(optimizer.state[p]) == {"step", "momentum", "velocity"}
    torch.testing.assert_close(optimizer.state[p]["momentum"], 0.1 * p.grad)  # decay is not in it


def test_muonw_weight_decay_values():
    assert TritonMuonW([nn.Parameter(torch.ones(1))]).defaults["weight_decay"] == 1e-2
    assert TritonMuon([nn.Parameter(torch.ones(1))]).defaults["weight_decay"] == 0.0
    for decay in (0.0, 0.1, 1.0):
        p, before, _ = one_step(TritonMuonW, weight_decay=decay)
        torch.testing.assert_close(p.detach(), before * (1 - 0.01 * decay) - 0.01 * p.grad.sign(), rtol=1e-5, atol=1e-6)


KEYS = [
    "triton_muon_time",
    "triton_muonw_time",
    "torch_adam_time",
    "torch_sgd_time",
    "muon_vs_adam_speedup",
    "muonw_vs_adam_speedup",
    "muon_vs_sgd_speedup",
    "model_size",
    "num_steps",
    "parameters",
]


def test_benchmark_muon_optimizers():
    result = benchmark_muon_optimizers(model_size=50, num_steps=5, lr=1e-3)
    assert list(result) == KEYS
    assert (result["model_size"], result["num_steps"], result["parameters"]) == (50, 5, 2550)
    assert all(result[key] > 0 for key in KEYS)


def test_benchmark_consistency(monkeypatch):
    # Time of this process alone: on a busy machine it may wait longer than a short run takes.
    monkeypatch.setattr("muon_fsdp.timing.time", SimpleNamespace(perf_counter=time.process_time))
    result = benchmark_muon_optimizers(model_size=200, num_steps=20)
    assert result["muon_vs_adam_speedup"] == pytest.approx(result["torch_adam_time"] / result["triton_muon_time"])
    assert result["muonw_vs_adam_speedup"] == pytest.approx(result["torch_adam_time"] / result["triton_muonw_time"])
    assert result["muon_vs_sgd_speedup"] == pytest.approx(result["torch_sgd_time"] / result["triton_muon_time"])
    longer = benchmark_muon_optimizers(model_size=200, num_steps=200)
    assert longer["triton_muon_time"] > 2 * result["triton_muon_time"]


@pytest.mark.parametrize("cls", PAIR)
@pytest.mark.parametrize("lr", [-1e-3, float("nan"), torch.ones(2)])
def test_invalid_learning_rate(cls, lr):
    with pytest.raises(ValueError, match="Invalid learning rate: "):
        cls([nn.Parameter(torch.ones(1))], lr=lr)


@pytest.mark.parametrize("cls", PAIR)
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5])
def test_invalid_momentum(cls, value):
    with pytest.raises(ValueError, match="Invalid momentum parameter"):
        cls([nn.Parameter(torch.ones(1))], momentum=value)


@pytest.mark.parametrize("cls", PAIR)
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5])
def test_invalid_velocity(cls, value):
    with pytest.raises(ValueError, match="Invalid velocity parameter"):
        cls([nn.Parameter(torch.ones(1))], velocity=value)


@pytest.mark.parametrize("cls", PAIR)
def test_invalid_weight_decay(cls):
    with pytest.raises(ValueError, match="Invalid weight_decay value"):
        cls([nn.Parameter(torch.ones(1))], weight_decay=-1.0)
    optimizer = cls([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="Invalid weight_decay value"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "weight_decay": -1.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", PAIR)
def test_empty_parameters(cls):
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        cls([])


@pytest.mark.parametrize("cls", PAIR)
def test_cpu_tensors(cls):
    p = nn.Parameter(torch.randn(3, 4))
    p.grad = torch.randn(3, 4)
    storage, before = p.data_ptr(), p.detach().clone()
    optimizer = cls(p)  # one tensor will do
    optimizer.step()
    assert p.device.type == "cpu"
    assert p.data_ptr() == storage
    assert_changed(p, before)
    assert all(optimizer.state[p][name].device.type == "cpu" for name in ("momentum", "velocity"))


@pytest.mark.parametrize("cls", PAIR)
def test_no_gradients(cls):
    a, b = (nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(2))
    optimizer = cls([a, b])
    optimizer.step()
    assert not optimizer.state
    a.grad = torch.ones_like(a)
    optimizer.step()
    assert (b == 1).all()
    assert (a != 1).all()
    assert not optimizer.state[b]


@pytest.mark.parametrize("cls", PAIR)
def test_closure_functionality(cls):
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = cls([p], lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("cls", PAIR)
def test_large_model(cls):
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(8)]
    model = nn.Sequential(*[module for layer in layers for module in (layer, nn.Tanh())]).to(DEVICE)
    optimizer = cls(model.parameters(), lr=1e-3)
    x = torch.randn(64, 256, device=DEVICE)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("cls", "name"), [(TritonMuon, "Muon"), (TritonMuonW, "MuonW")])
def test_sparse_gradients(cls, name):
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = cls(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match=f"^{name} does not support sparse gradients"):
        optimizer.step()
    assert_same(embedding.weight, before)
    assert not optimizer.state
    dense = nn.Parameter(torch.ones(2))
    dense.grad = torch.ones(2)
    both = cls([{"params": [dense]}, {"params": embedding.parameters()}])
    with pytest.raises(RuntimeError, match="sparse"):
        both.step()
    assert (dense == 1).all()  # nothing is half done


def test_memory_efficiency():
    """Two moments, and nothing that grows from step to step."""
    params = [nn.Parameter(torch.randn(500, 500, device=DEVICE)) for _ in range(4)]
    optimizer = TritonMuon(params)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    state = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    assert state == 2 * sum(p.nbytes for p in params)
    tracemalloc.start()
    optimizer.step()
    before = tracemalloc.take_snapshot()
    for _ in range(20):
        optimizer.step()
    growth = sum(entry.size_diff for entry in tracemalloc.take_snapshot().compare_to(before, "filename"))
    tracemalloc.stop()
    assert growth < 100_000


@pytest.mark.parametrize("cls", PAIR)
def test_different_configurations(cls):
    for changed in (
        {},
        {"nesterov": True},
        {"layerwise_norm": True},
        {"nesterov": True, "layerwise_norm": True, "weight_decay": 0.0},
        {"momentum": 0.0, "velocity": 0.0},
    ):
        compare(cls, [(7, 5), (300,)], **changed)


# ------------------------------------------------------------------------------------------------------- and more


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
