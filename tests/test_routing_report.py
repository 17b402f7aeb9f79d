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
    assert "group 2 (adamw, 3 parameters): lr=0.003, weight_decay=0, betas=(0.9, 0.99), eps=1e-08, " in text
    assert "cautious_weight_decay=False; lr began as" in text


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


def row_of(report: object, start: str) -> str:
    """Return the line of the printed report that starts with a text, with single spaces."""
    (line,) = [line for line in str(report).splitlines() if line.startswith(start)]
    return " ".join(line.split())


class Layer(nn.Module):
    def __init__(self, width: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 20), nn.Linear(20, width)
        self.experts = nn.ModuleList(nn.ModuleDict({"w1": nn.Linear(width, 6)}) for _ in range(experts))


def test_repeated_layers_share_a_row():
    model = nn.ModuleDict({"wte": nn.Embedding(50, 8), "layers": nn.ModuleList(Layer() for _ in range(3))})
    optimizer = MuonOptimizer(model)
    report = optimizer.routing_report()
    assert row_of(report, "layers.*.up.weight") == "layers.*.up.weight x 3 20x8 20x8 muon 0 1.581 matrix"
    assert row_of(report, "layers.*.experts.*.w1.weight") == "layers.*.experts.*.w1.weight x 12 6x8 6x8 muon 0 1 matrix"
    assert "layers.0" not in str(report)
    assert len(report.rows) == len(list(model.parameters()))  # one row per parameter, however it is printed
    full = optimizer.routing_report(full=True)
    assert full.rows == report.rows
    assert [line.split()[0] for line in str(full).splitlines()[2 : 2 + len(full.rows)]] == [
        row.name for row in full.rows
    ]


def test_only_equal_rows_are_printed_as_one():
    layers = [Layer() for _ in range(4)]
    layers[2].up = nn.Linear(8, 24)  # another shape and scale
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    overrides = {"layers.3.down.weight": "adamw", "layers.1.down.weight": {"lr": 0.5}}
    text = str(MuonOptimizer(model, overrides=overrides).routing_report())
    assert row_of(text, "layers.*.up.weight") == "layers.*.up.weight x 3 20x8 20x8 muon 0 1.581 matrix"
    assert row_of(text, "layers.2.up.weight") == "layers.2.up.weight 24x8 24x8 muon 0 1.732 matrix"
    assert row_of(text, "layers.*.down.weight") == "layers.*.down.weight x 2 8x20 8x20 muon 0 1 matrix"
    assert row_of(text, "layers.1.down.weight") == "layers.1.down.weight 8x20 8x20 muon 1 1 matrix; override: lr=0.5"
    assert row_of(text, "layers.3.down.weight").startswith("layers.3.down.weight 8x20 adamw")


def test_numbers_that_do_not_differ_are_shown():
    model = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 9)) for _ in range(2))
    assert row_of(MuonOptimizer(model).routing_report(), "*.1.weight") == "*.1.weight x 2 9x8 9x8 muon 0 1.061 matrix"
    bare = MuonOptimizer([nn.Parameter(torch.randn(3, 4)) for _ in range(5)]).routing_report()
    assert row_of(bare, "param") == "param[*] x 5 3x4 3x4 muon 0 1 matrix"


def test_frozen_parameters_share_a_row():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).requires_grad_(False)
    model[3].weight.requires_grad_(True)
    optimizer = MuonOptimizer(model)
    assert row_of(optimizer.routing_report(), "7 p") == "7 parameters none frozen (requires_grad is False), 64 elements"
    assert len(str(optimizer.routing_report()).splitlines()) < len(
        str(optimizer.routing_report(full=True)).splitlines()
    )
    assert (
        row_of(optimizer.routing_report(full=True), "0.weight") == "0.weight 4x4 none frozen (requires_grad is False)"
    )
    for layer in list(model)[1:]:
        layer.requires_grad_(True)
    model[0].weight.requires_grad_(True)
    alone = MuonOptimizer(model).routing_report()
    assert row_of(alone, "0.bias") == "0.bias 4 none frozen (requires_grad is False)"


def test_a_report_of_a_large_model_is_short():
    model = nn.ModuleDict({"layers": nn.ModuleList(Layer(experts=16) for _ in range(24))})
    assert len(str(MuonOptimizer(model).routing_report()).splitlines()) < 20
