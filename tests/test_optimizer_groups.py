"""Parameter groups of MuonOptimizer: one rule for each, their options, and groups that are added later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer, create_hybrid_optimizer
from muon_fsdp.rules import RULES
from tests.comparisons import assert_changed
from tests.optimizer_cases import mlp, train, updates_of, weights


def test_a_mixed_group_becomes_one_group_per_rule():
    w, b, s = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(()))
    optimizer = MuonOptimizer([b, w, s], lr=0.03, weight_decay=0.2, adamw_lr=0.004, adamw_weight_decay=0.05)
    matrices, rest = optimizer.param_groups
    assert (matrices["rule"], matrices["lr"], matrices["weight_decay"]) == ("muon", 0.03, 0.2)
    assert (rest["rule"], rest["lr"], rest["weight_decay"]) == ("adamw", 0.004, 0.05)
    assert rest["betas"] == (0.9, 0.95)
    assert matrices["params"] == [w]
    assert [id(p) for p in rest["params"]] == [id(b), id(s)]


def test_options_of_a_mixed_group_and_of_one_without_matrices():
    def pair():
        return [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4))]

    groups = [
        {"params": pair(), "lr": 0.5, "weight_decay": 0.1, "momentum": 0.8},
        {"params": pair(), "lr": 0.6, "adamw_lr": 0.007, "adamw_betas": (0.8, 0.9)},
        {"params": pair()[1:], "lr": 0.02, "weight_decay": 0.3},
    ]
    optimizer = MuonOptimizer(groups, adamw_lr=0.001)
    seen = [(g["rule"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert seen == [
        ("muon", 0.5, 0.1),
        ("adamw", 0.001, 0.0),
        ("muon", 0.6, 0.0),
        ("adamw", 0.007, 0.0),
        ("adamw", 0.02, 0.3),
    ]
    assert optimizer.param_groups[0]["momentum"] == 0.8
    assert optimizer.param_groups[3]["betas"] == (0.8, 0.9)


def test_a_group_holds_the_common_keys_and_those_of_its_rule():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    optimizer = create_hybrid_optimizer(model, overrides={"1.weight": {"num_heads": 2}})
    common = {"params", "param_names", "rule", "micro_step", "started", "num_updates"}
    for group in optimizer.param_groups:
        assert set(group) == common | set(RULES[group["rule"]].all_options)


@pytest.mark.parametrize(
    "as_params",
    [
        lambda w: w,
        lambda w: [w],
        lambda w: iter([w]),
        lambda w: [("w", w)],
        lambda w: {"w": w}.items(),
        lambda w: [{"params": w}],
        lambda w: [{"params": [("w", w)]}],
    ],
)
def test_every_form_of_params_is_trained(as_params):
    w = nn.Parameter(torch.randn(4, 5))
    optimizer = MuonOptimizer(as_params(w))
    w.grad = torch.randn_like(w)
    (update,) = updates_of(optimizer, w)
    assert update.norm() > 0


def test_add_param_group_after_training_began():
    model = mlp()
    optimizer = MuonOptimizer(model)
    train(optimizer, model, 3)
    extra = nn.Linear(6, 6)
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.01})
    assert [g["rule"] for g in optimizer.param_groups] == ["muon", "adamw", "muon", "adamw"]
    assert optimizer.param_groups[2]["lr"] == 0.01
    extra(torch.randn(2, 6)).sum().backward()
    before = weights(extra)
    optimizer.step()
    assert_changed(weights(extra), before)
    assert set(optimizer.state[extra.bias]) == {"momentum_buffer", "second_moment", "step"}


def test_a_refused_group_changes_nothing():
    model = mlp()
    optimizer = MuonOptimizer(model)
    with pytest.raises(ValueError, match="given twice"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3, 3)), model[0].weight]})
    with pytest.raises(ValueError, match="does not divide"):
        optimizer.add_param_group(
            {"params": [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3, 3))], "num_heads": 2}
        )
    assert len(optimizer.param_groups) == 2
    train(optimizer, model, 1)


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
def test_an_empty_group_stays_a_group():
    optimizer = MuonOptimizer([{"params": []}, {"params": [nn.Parameter(torch.randn(3, 3))]}])
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]
    optimizer.step()


def test_the_rule_of_a_group_can_be_set():
    w = nn.Parameter(torch.randn(4, 5))
    optimizer = MuonOptimizer([w])
    w.grad = torch.randn_like(w)
    optimizer.step()
    optimizer.param_groups[0].update(rule="adamw", lr=1e-3)
    before = w.detach().clone()
    optimizer.step()
    assert 0 < (w - before).abs().max() < 0.05
    assert optimizer.routing_report().rows[0].rule == "adamw"
    resumed = MuonOptimizer([{"params": [w], "rule": "adamw"}])
    resumed.load_state_dict(optimizer.state_dict())


def test_initial_lr_of_a_mixed_group_keeps_its_ratio_to_lr():
    """A scheduler that resumes (last_epoch >= 0) wants it in every group."""
    params = [nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))]
    optimizer = MuonOptimizer([{"params": params, "lr": 0.05, "initial_lr": 0.1, "adamw_lr": 0.001}])
    matrices, vectors = optimizer.param_groups
    assert matrices["initial_lr"] == 0.1
    assert vectors["initial_lr"] == pytest.approx(0.002)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5, last_epoch=3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.001])
