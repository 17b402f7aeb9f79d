"""TritonMuon and TritonMuonW, the element-wise pair: formulas in float64, and what torch expects of an optimizer."""

from __future__ import annotations

import importlib
import sys
import time
import tracemalloc
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from muon_fsdp import elementwise
from muon_fsdp.cli import checks
from muon_optimizer import TritonMuon, TritonMuonW, benchmark_muon_optimizers
from tests.comparisons import assert_changed, assert_same
from tests.elementwise_cases import DEVICE, PAIR, compare, options

ROOT = Path(__file__).parent.parent


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


@pytest.mark.parametrize("kind", ["module", "package", "ours", "none"])
def test_a_module_of_another_package_is_reported(kind, tmp_path, monkeypatch):
    """The other package may lie before ours in sys.path, or have replaced our file: content decides, not the path."""
    path = tmp_path / ("muon_optimizer/__init__.py" if kind == "package" else "muon_optimizer.py")
    path.parent.mkdir(exist_ok=True)
    if kind != "none":
        path.write_text((ROOT / "muon_optimizer.py").read_text() if kind == "ours" else "class Muon: ...\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not is_root(p))])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])  # an editable installation has a finder of its own
    monkeypatch.delitem(sys.modules, "muon_optimizer")
    importlib.invalidate_caches()
    found = elementwise.find_other_muon_optimizer()
    assert found == (str(path) if kind in ("module", "package") else None)
    if found is None:
        importlib.reload(elementwise)
        return
    with pytest.warns(UserWarning, match=f"belongs to another package: {path}. Import from muon_fsdp.elementwise"):
        importlib.reload(elementwise)
    (finding,) = (f for f in checks.check_settings() if f.name == "module muon_optimizer")
    assert (finding.status, str(path) in finding.detail) == ("warning", True)


def is_root(path: str) -> bool:
    return Path(path or ".").resolve() == ROOT
