"""The report of routing has the options in force: of every group, and what an override sets for a parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, create_hybrid_optimizer


def test_the_report_has_the_values_that_each_constructor_uses():
    """The classes have different defaults."""
    model = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    plain = {group.rule: group.options for group in MuonOptimizer(model).routing_report().groups}
    assert (plain["muon"]["nesterov"], plain["muon"]["weight_decay"]) == (False, 0.0)
    assert (plain["adamw"]["lr"], plain["adamw"]["betas"]) == (0.003, (0.9, 0.95))
    hybrid = {group.rule: group.options for group in create_hybrid_optimizer(model).routing_report().groups}
    assert (hybrid["adamw"]["lr"], hybrid["adamw"]["weight_decay"]) == (1e-3, 0.01)
    report = FSDPMuonOptimizer(model).routing_report()
    matrices, tables, vectors = report.groups
    assert (matrices.options["nesterov"], matrices.options["weight_decay"]) == (True, 0.01)
    assert (tables.options["weight_decay"], tables.options["betas"]) == (0.01, (0.9, 0.99))
    assert vectors.options["weight_decay"] == 0.0
    by_name = {row.name: row.group for row in report.rows}
    assert by_name == {"2.weight": 0, "0.weight": 1, "1.weight": 2, "1.bias": 2, "2.bias": 2}
    text = " ".join(str(report).split())
    assert "group 2 (adamw, 3 parameters): lr=0.003, weight_decay=0, betas=(0.9, 0.99), eps=1e-08; lr began as" in text


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02)])
def test_the_report_shows_the_lr_of_a_scheduler(lr):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = MuonOptimizer(model, lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = optimizer.routing_report()
    optimizer.step()
    scheduler.step()
    after = optimizer.routing_report()
    assert [group.options["lr"] for group in before.groups] == pytest.approx([0.02, 0.003])  # a report does not change
    assert [group.options["lr"] for group in after.groups] == pytest.approx([0.01, 0.0015])
    assert "group 0 (muon, 1 parameter): lr=0.01, " in str(after)


def test_the_report_names_what_an_override_sets_for_each_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    overrides = {"0.*": {"lr": 0.5, "adamw_eps": 1e-6}, "1.weight": {"rule": "adamw", "betas": (0.8, 0.9)}}
    optimizer = MuonOptimizer(model, overrides=overrides)
    optimizer.param_groups[0]["lr"] = 0.25  # the value in force
    overridden = {row.name: row.overridden for row in optimizer.routing_report().rows}
    assert overridden == {
        "0.weight": {"lr": 0.25},
        "0.bias": {"eps": 1e-6},
        "1.weight": {"betas": (0.8, 0.9)},
        "1.bias": {},
    }
    text = str(optimizer.routing_report())
    assert "matrix; override: lr=0.25\n" in text
    assert "override '1.weight'; override: betas=(0.8, 0.9)\n" in text
    assert len(set(optimizer.routing_report().rows)) == 4


def test_the_report_shows_the_options_of_a_rule_that_was_changed_by_hand():
    optimizer = MuonOptimizer(nn.Linear(4, 4, bias=False), overrides={"weight": {"momentum": 0.5}})
    optimizer.param_groups[0]["rule"] = "adamw"
    (row,), (group,) = optimizer.routing_report().rows, optimizer.routing_report().groups
    assert (group.rule, group.options["betas"], row.overridden) == ("adamw", (0.9, 0.95), {})
    assert "momentum" not in group.options
