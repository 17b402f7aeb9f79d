"""The fine-tuning experiment in a reduced form."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from experiments import finetuning
from muon_fsdp import MuonOptimizer

TINY = replace(
    finetuning.SIZES["small"], width=32, hidden=64, num_layers=1, num_heads=2, sequence_length=64, pretraining_steps=3,
    pretraining_batch=4, steps=2, batch=4, num_answers=8, num_windows=4,
)  # fmt: skip


@pytest.mark.parametrize("scale", ["v1", "v2", "v3", "v4"])
def test_rates_give_square_matrices_equal_updates(scale):
    layer = nn.Linear(16, 16, bias=False)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(16, 16)
    rate = finetuning.muon_rate(scale, 0.01, 16)
    MuonOptimizer(layer, lr=rate, scale=scale, orthogonalization="exact").step()
    size = (layer.weight.detach() - before).square().mean().sqrt()
    assert float(size) == pytest.approx(0.2 * 0.01, rel=1e-4)  # v4: the usual size of AdamW's update


def test_every_cell_runs_and_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(finetuning.SIZES, "small", TINY)
    rates = ["--adamw-rates", "1e-3", "3e-3", "--muon-rates", "1e-3", "3e-3"]
    finetuning.main(["--seeds", "1", "--processes", "1", "--output", str(tmp_path), *rates])
    text = capsys.readouterr().out
    with (tmp_path / "finetuning_small.csv").open() as file:
        rows = list(csv.DictReader(file))
    cells = {(row["pretraining"], row["finetuning"], float(row["rate"])) for row in rows}
    assert len(cells) == len(rows) == 2 * 5 * 2
    assert all(math.isfinite(float(row["answer_loss"])) and math.isfinite(float(row["text_loss"])) for row in rows)
    assert len({row["text_loss_before"] for row in rows}) == 2  # one for each way of pre-training
    assert "held-out answers" in (tmp_path / "finetuning_small-dark.svg").read_text()
    assert text.count("\n| Muon | Muon v") == 4
    by_cell = {(row["pretraining"], row["finetuning"], row["rate"]): row for row in rows}
    one, four = by_cell["Muon", "Muon v1", "0.001"], by_cell["Muon", "Muon v4", "0.001"]
    assert float(one["answer_loss"]) == pytest.approx(
        float(four["answer_loss"]), abs=1e-4
    )  # 5 times the scale, a fifth of lr
    assert by_cell["Muon", "AdamW", "0.001"]["answer_loss"] != by_cell["Muon", "AdamW", "0.003"]["answer_loss"]


def test_the_budget_leaves_runs_out_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(finetuning.SIZES, "small", TINY)
    clock = map(float, range(10_000))
    monkeypatch.setattr(finetuning, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    finetuning.main(["--seeds", "1", "--processes", "1", "--seconds", "40", "--output", str(tmp_path)])
    text = capsys.readouterr().out
    assert "of 30 runs were left out: 40 s had passed" in text
    with (tmp_path / "finetuning_small.csv").open() as file:
        assert 0 < len(list(csv.DictReader(file))) < 30


def test_the_best_rate_is_that_of_the_lowest_mean():
    rows = [
        {"pretraining": "Muon", "finetuning": "AdamW", "rate": rate, "seed": seed, "answer_loss": loss}
        for rate, losses in {1e-3: (2.0, 2.0), 3e-3: (1.0, 2.5), 1e-2: (0.5,)}.items()  # the last one is not complete
        for seed, loss in enumerate(losses)
    ]
    ((rate, runs),) = finetuning.best_rates(rows).values()
    assert rate == 3e-3
    assert len(runs) == 2
