"""The demo's command line: what it trains, writes, shows and refuses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from experiments import demo
from muon_fsdp.training import model, program
from muon_fsdp.training.model import GPT
from muon_fsdp.training.results import read_result
from tests.training_cases import TINY, text_file_fixture  # noqa: F401


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model, and both runs of Muon on one process: other processes would not see this."""
    monkeypatch.setitem(model.PRESETS, "demo", TINY)
    monkeypatch.setitem(demo.RUNS, demo.TOGETHER, demo.MUON)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("training was started")

    monkeypatch.setattr(demo, "train_main", fail)


def test_demo_trains_on_one_process_and_two_and_writes_what_it_says(
    text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "BATCH_SIZE", 4)  # a passage of all code paths needs no more
    output = tmp_path / "new" / "folder"
    assert demo.main(["--steps", "5", "--data", str(text_file), "--output", str(output)]) == 0
    printed = capfd.readouterr().out
    assert str(output / "loss.png") in printed
    assert str(output / "metrics.json") in printed
    assert "FSDP2 on 2 rank(s)" in printed
    assert "Muon   step 5/5" in printed
    assert "AdamW  step 5/5" in printed
    assert "muon on 24 tensors" in printed  # four blocks of six matrices; neither the embedding nor the head

    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    metrics = json.loads((output / "metrics.json").read_text())
    assert list(metrics["runs"]) == ["Muon", "Muon, 2 ranks", "AdamW"]
    for run in metrics["runs"].values():
        assert len(run["train_losses"]) == len(run["step_seconds"]) == 5
        assert sum(group["num_parameters"] for group in run["groups"]) == GPT(model.preset("demo")).num_parameters()
        assert run["evaluations"][0]["loss"] == pytest.approx(math.log(256), abs=1e-4)
        assert run["evaluations"][-1] == run["evaluations"][-1] | {"step": 5, "loss": run["final_validation_loss"]}
        assert run["final_validation_loss"] < 4  # log(256) is 5.5
        assert run["best_validation_loss"] <= run["final_validation_loss"]
        assert 0 < run["optimizer_share"] < 1
    assert metrics["runs"]["AdamW"]["steps_to_baseline"] is not None
    one, two = (metrics["runs"][name]["train_losses"] for name in ("Muon", "Muon, 2 ranks"))
    assert two == pytest.approx(one, abs=2e-3)
    assert metrics["settings"]["largest_distance"] == max(abs(a - b) for a, b in zip(one, two, strict=True))
    # Equal weights and equal batches: before the first update the two can't differ.
    adamw = metrics["runs"]["AdamW"]["train_losses"]
    assert one[0] == adamw[0]
    assert one[-1] != adamw[-1]


@pytest.mark.usefixtures("tiny_demo")
def test_demo_repeats_itself_for_one_seed_and_differs_for_another(text_file: Path, tmp_path: Path) -> None:
    def losses(seed: int, folder: str) -> list[float]:
        arguments = ["--steps", "3", "--seed", str(seed), "--data", str(text_file), "--output", str(tmp_path / folder)]
        assert demo.main(arguments) == 0
        metrics = json.loads((tmp_path / folder / "metrics.json").read_text())
        assert metrics["settings"]["largest_distance"] == 0.0
        losses: list[float] = metrics["runs"]["Muon"]["train_losses"]
        return losses

    first = losses(0, "first")
    assert losses(0, "first") == first  # in the folder of the first, which it replaces
    assert losses(1, "other")[1:] != first[1:]


@pytest.mark.usefixtures("tiny_demo")
def test_demo_shows_a_live_line_on_a_terminal(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert demo.main(["--steps", "3", "--data", str(text_file), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "tok/s" in printed
    assert "3/3" in printed
    assert "tokens/s" not in printed  # no plain lines beside it


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
@pytest.mark.usefixtures("no_training")
def test_demo_without_an_optional_package_says_what_to_install(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # how Python marks a module that can't be imported
    assert demo.main(["--output", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert f"needs {package};" in captured.err
    assert 'pip install "muon_fsdp[cli]"' in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_training")
def test_demo_refuses_bad_arguments_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--data", str(tmp_path / "nowhere"), "--output", str(tmp_path / "out")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("short")
    assert demo.main(["--data", str(tmp_path / "short.txt"), "--output", str(tmp_path / "out")]) == 2
    assert "pass a longer text as --data" in capsys.readouterr().err
    (tmp_path / "taken").touch()
    assert demo.main(["--output", str(tmp_path / "taken")]) == 2
    assert str(tmp_path / "taken") in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--steps", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("code", [1, 130])
def test_demo_ends_where_a_run_ends(
    code: int, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[object] = []

    def fail(flags: list[str]) -> int:
        runs.append(flags)
        return code

    monkeypatch.setattr(demo, "train_main", fail)
    assert demo.main(["--data", str(text_file), "--output", str(tmp_path / "out")]) == code
    assert len(runs) == 1


def test_the_share_of_the_optimizer_is_what_a_profiler_sees(text_file: Path, tmp_path: Path) -> None:
    flags = ["--model", "demo", "--data", str(text_file), "--steps", "6", "--batch-size", "4", "--device", "cpu"]
    flags += ["--sequence-length", "64", "--eval-windows", "4", "--output", str(tmp_path)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        assert program.main(flags) == 0
    (update,) = [event for event in profile.key_averages() if event.key == "Optimizer.step#FSDPMuonOptimizer.step"]
    result = read_result(tmp_path)
    assert update.count == 6
    assert sum(step.optimizer_seconds for step in result.steps) == pytest.approx(update.cpu_time_total / 1e6, rel=0.1)
    assert all(0 < step.optimizer_seconds < step.seconds for step in result.steps)
