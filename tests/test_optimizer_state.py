"""State dicts and copies of MuonOptimizer: identical steps after loading, and states that do not fit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from tests.comparisons import assert_same
from tests.optimizer_cases import mlp, train, weights


def test_state_dict_round_trip_gives_identical_steps(tmp_path):
    model = mlp()
    optimizer = MuonOptimizer(model, nesterov=True)
    train(optimizer, model, 5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)
    resumed_model = mlp(seed=1)
    resumed = MuonOptimizer(resumed_model, lr=1.0, nesterov=False)
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(optimizer, model, 5, seed=1)
    train(resumed, resumed_model, 5, seed=1)
    assert_same(weights(model), weights(resumed_model))


def test_a_loaded_state_shares_no_memory():
    model, other = mlp(), mlp()
    optimizer, resumed = MuonOptimizer(model), MuonOptimizer(other)
    train(optimizer, model, 2)
    resumed.load_state_dict(optimizer.state_dict())
    before = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    train(resumed, other, 2)
    assert_same(optimizer.state[model[0].weight]["momentum_buffer"], before)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float64, torch.float32, torch.float32),
    ],
)
def test_load_into_another_dtype_keeps_the_precision_of_the_state(source, target, expected):
    model, other = mlp(dtype=source), mlp(dtype=target)
    optimizer, resumed = MuonOptimizer(model), MuonOptimizer(other)
    train(optimizer, model, 3)
    resumed.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in resumed.state[q].items():
            assert value.dtype == (torch.float32 if name == "step" else expected)
            assert_same(value.float(), optimizer.state[p][name].float(), name)
    train(resumed, other, 2)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deepcopy_and_pickle(duplicate):
    model = mlp()
    optimizer = MuonOptimizer(model, nesterov=True, nonfinite="skip", overrides={"0.weight": {"num_heads": 2}})
    train(optimizer, model, 3)
    other_model, other = duplicate((model, optimizer))
    train(optimizer, model, 3, seed=1)
    train(other, other_model, 3, seed=1)
    assert_same(weights(model), weights(other_model))
    assert str(other.routing_report()) == str(optimizer.routing_report())
    other.add_param_group({"params": [("extra", nn.Parameter(torch.randn(3, 3)))]})


def test_load_hooks_of_the_user_run_around_the_check():
    model = mlp()
    optimizer = MuonOptimizer(model)
    train(optimizer, model, 1)
    saved = optimizer.state_dict()
    renamed = {**saved, "state": {f"p{key}": value for key, value in saved["state"].items()}}
    renamed["param_groups"] = [{**g, "params": [f"p{i}" for i in g["params"]]} for g in saved["param_groups"]]
    broken = {**renamed, "state": {}, "param_groups": []}
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: renamed)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[model[0].weight]["momentum_buffer"].dtype)
    )
    optimizer.load_state_dict(broken)
    assert seen == [torch.float32]
    optimizer.load_state_dict(broken)  # hooks are still there, and each runs once more
    assert seen == [torch.float32] * 2


def test_a_state_that_does_not_fit_is_refused_whole():
    model = mlp()
    optimizer = MuonOptimizer(model.named_parameters())
    train(optimizer, model, 2)
    before = copy.deepcopy(optimizer.state_dict())

    def refused(other_optimizer: torch.optim.Optimizer) -> str:
        with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for MuonOptimizer") as caught:
            optimizer.load_state_dict(other_optimizer.state_dict())
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert_same(
            [v for s in before["state"].values() for v in s.values()],
            [v for s in after["state"].values() for v in s.values()],
        )
        return str(caught.value)

    wider = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 6))
    other = MuonOptimizer(wider.named_parameters())
    train(other, wider, 1)
    text = refused(other)
    assert "0.weight: saved momentum_buffer of shape (30, 12), expected (20, 12)" in text
    assert "2.weight" in text
    assert "0.bias: saved momentum_buffer" in text
    assert "0.bias: saved second_moment" in text

    routed = refused(MuonOptimizer(mlp().named_parameters(), rule="adamw"))
    assert "groups of 4 parameters were saved, groups of 2, 2 are here" in routed
    assert "2.weight: saved with rule 'adamw', but takes 'muon' here" in routed
    assert "0.bias:" not in routed
    smaller = refused(
        MuonOptimizer([("0.weight", nn.Parameter(torch.zeros(20, 12))), ("x", nn.Parameter(torch.zeros(3)))])
    )
    assert "2.weight: not saved" in smaller
    assert "x: saved, but not here" in smaller
    layers = {"a": nn.Linear(12, 20), "b": nn.Linear(20, 6)}
    renamed = MuonOptimizer([(f"{n}.{m}", p) for n, layer in layers.items() for m, p in layer.named_parameters()])
    assert "0.weight: the saved parameter in its place is 'a.weight'" in refused(renamed)
    swapped = MuonOptimizer(
        [
            {
                "params": [
                    ("0.weight", nn.Parameter(torch.zeros(20, 12))),
                    ("2.weight", nn.Parameter(torch.zeros(6, 20))),
                ],
                "rule": "adamw",
            },
            {"params": [("0.bias", nn.Parameter(torch.zeros(20))), ("2.bias", nn.Parameter(torch.zeros(6)))]},
        ]
    )
    assert "2.weight: saved with rule 'adamw', but takes 'muon' here" in refused(swapped)
    lacking = MuonOptimizer(mlp().named_parameters())
    for p in lacking._parameters():
        p.grad = torch.ones_like(p)
    lacking.step()
    lacking.register_state_dict_post_hook(lambda _, saved: {**saved, "state": {2: {"step": torch.tensor(1.0)}}})
    assert "0.bias: saved state ['step'], but rule 'adamw' has ['momentum_buffer', 'second" in refused(lacking)


def test_parameters_in_another_order_are_refused():
    """Both are (4, 4): loaded by position, their momentum would be exchanged silently."""
    x, y = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    saved = MuonOptimizer(nn.ModuleDict({"x": x, "y": y}))
    for p in saved._parameters():
        p.grad = torch.randn_like(p)
    saved.step()
    with pytest.raises(RuntimeError, match=r"y.weight: the saved parameter in its place is 'x.weight'"):
        MuonOptimizer(nn.ModuleDict({"y": y, "x": x})).load_state_dict(saved.state_dict())


def test_state_that_did_not_exist_yet_can_be_loaded():
    model, extra = mlp(), nn.Linear(6, 6)
    optimizer = MuonOptimizer(model)
    train(optimizer, model, 2)
    optimizer.add_param_group({"params": extra.named_parameters("extra")})
    optimizer.load_state_dict(optimizer.state_dict())
    extra(torch.randn(2, 6)).sum().backward()
    train(optimizer, model, 1)
    assert "momentum_buffer" in optimizer.state[extra.weight]


def test_a_group_key_that_was_not_saved_keeps_its_value():
    model = mlp()
    optimizer = MuonOptimizer(model, ns_stepsize=0.5)
    train(optimizer, model, 1)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["ns_stepsize"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["ns_stepsize"] == 0.5
    train(optimizer, model, 1)
    with pytest.raises(RuntimeError, match="it needs 'state' and 'param_groups'"):
        optimizer.load_state_dict({"state": {}})
