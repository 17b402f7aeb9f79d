"""The training program: the same run on any ranks, resumed, and what it writes."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from experiments import curves
from muon_fsdp import FSDPMuonOptimizer
from muon_fsdp.training import checkpoint, unpickling
from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.config import TrainConfig, parse
from muon_fsdp.training.program import main
from muon_fsdp.training.results import read_result
from tests.pool import RankPool
from tests.program_cases import finish, flags
from tests.training_cases import lines, surroundings, text_fixture  # noqa: F401


def test_a_run_leaves_metrics_and_a_checkpoint(text: Path, tmp_path: Path, capsys) -> None:
    assert main(flags(text, tmp_path / "out", 12, "--tensorboard")) == 0
    printed = capsys.readouterr().out
    assert "one process, cpu, float32" in printed
    assert "muon on 12 tensors" in printed
    assert re.search(
        r"Muon   step 12/12  loss \d\.\d+  val \d\.\d+  [\d,]+ tokens/s  optimizer \d+%  0 s left", printed
    )
    found = lines(tmp_path / "out")
    assert [line["kind"] for line in found if line["kind"] != "train"] == ["start", *["validation"] * 4, "end"]
    train = [line for line in found if line["kind"] == "train"]
    assert [line["step"] for line in train] == list(range(1, 13))
    assert train[0]["lr"] == pytest.approx(0.02)  # of one warmup step
    assert train[-1]["loss"] < train[0]["loss"]
    assert all(0 < line["optimizer_seconds"] < line["seconds"] for line in train)
    # One momentum for a matrix, two moments and a counter for the rest.
    matrices, rest = 2 * 12 * 32 * 32, 2 * 256 * 32 + 5 * 32 + 4 * 16
    assert found[-1]["optimizer_state_bytes_per_rank"] == pytest.approx(4 * matrices + 8 * rest, rel=0.01)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "out" / "checkpoints")] == ["step-00000012"]
    assert list((tmp_path / "out" / "tensorboard").iterdir())


@pytest.mark.parametrize("optimizer", ["muon", "normuon", "sso", "adamw"])
def test_a_resumed_run_is_the_same_bit_for_bit(optimizer: str, text: Path, tmp_path: Path, capsys) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ("--optimizer", optimizer, "--save-every", "3", "--keep", "9", "--schedule", "trapezoid")
    assert main(flags(text, whole, 12, *options)) == 0
    shutil.copytree(whole, parts)
    for path in checkpoint.checkpoints(parts / "checkpoints")[2:]:
        shutil.rmtree(path)
    with (parts / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "tra')  # as a kill leaves it
    assert main(flags(text, parts, 12, "--resume", *options)) == 0
    assert "resuming from step 6" in capsys.readouterr().out
    assert read_result(parts).train_losses == read_result(whole).train_losses
    assert read_result(parts).evaluations == read_result(whole).evaluations
    files = [path / "checkpoints" / "step-00000012" / "__0_0.distcp" for path in (whole, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_old_checkpoints_go_and_leftovers_too(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "checkpoints"
    (folder / "step-00000001.partial").mkdir(parents=True)
    (folder / "step-00000001.partial" / "half").write_text("half")
    assert main(flags(text, tmp_path / "out", 8, "--save-every", "2", "--keep", "3")) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000006", "step-00000008"]


def test_many_layouts_give_one_curve_and_resume_each_other(text: Path, tmp_path: Path, ranks: RankPool) -> None:
    """A run begun by two ranks ends on four with another layout, as one process would have ended."""
    assert main(flags(text, tmp_path / "one", 6, "--micro-batch-size", "4")) == 0
    one = read_result(tmp_path / "one").train_losses
    two = finish(ranks, 2, flags(text, tmp_path / "two", 6, "--fsdp", "--save-every", "3"))
    assert two == pytest.approx(one, abs=1e-3)
    shutil.rmtree(checkpoint.checkpoints(tmp_path / "two" / "checkpoints")[-1])
    four = finish(ranks, 4, flags(text, tmp_path / "two", 6, "--replicas", "2", "--resume"))
    assert lines(tmp_path / "two")[-1]["kind"] == "end"
    assert four[:3] == two[:3]
    assert four == pytest.approx(one, abs=1e-3)
    for name, world_size, more in (
        ("ddp", 2, ("--ddp", "--micro-batch-size", "2")),
        ("accumulated", 2, ("--fsdp", "--micro-batch-size", "2")),
        ("tensor", 2, ("--tp", "2")),
        ("both", 4, ("--tp", "2", "--micro-batch-size", "2")),
    ):
        assert finish(ranks, world_size, flags(text, tmp_path / name, 6, *more)) == pytest.approx(one, abs=1e-3), name


def test_the_length_of_a_resumed_run(text: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "out"
    assert main(flags(text, output, 4, "--save-every", "2")) == 0
    assert main(flags(text, output, 3, "--resume")) == 2
    assert (
        "the checkpoint is already at step 4, but the run has only 3 steps: pass more --steps"
        in capsys.readouterr().err
    )
    assert main(flags(text, output, 4, "--resume")) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    shutil.rmtree(output / "checkpoints" / "step-00000004")
    without = flags(text, output, 4, "--resume", "--clip-norm", "0.5")
    position = without.index("--steps")
    assert main(without[:position] + without[position + 2 :]) == 0
    printed = capsys.readouterr().out
    assert "note: settings that differ from the checkpoint's: clip_norm 1.0 -> 0.5\n" in printed
    assert read_result(output).num_steps == 4  # as it was told at first, not the default of 100


def test_a_checkpoint_without_remainders_begins_with_zeros(text: Path, tmp_path: Path, ranks: RankPool, capsys) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    options = ("--weights", "bfloat16", "--save-every", "2", "--rounding")
    assert main(flags(text, folders[0], 4, *options, "nearest")) == 0
    shutil.rmtree(folders[0] / "checkpoints" / "step-00000004")
    shutil.copytree(folders[0], folders[1])
    resumed = ("--resume", *options, "remainder")
    assert main(flags(text, folders[0], 4, *resumed)) == 0
    assert "note: settings that differ from the checkpoint's: rounding nearest -> remainder" in capsys.readouterr().out
    finish(ranks, 2, flags(text, folders[1], 4, "--fsdp", *resumed))
    for folder in folders:
        saved = FileSystemReader(folder / "checkpoints" / "step-00000004").read_metadata().state_dict_metadata
        assert any(key.endswith(".weight_remainder") for key in saved)
        assert read_result(folder).num_steps == 4
    shutil.rmtree(folders[0] / "checkpoints" / "step-00000004")
    with patch.object(unpickling, "REMAINDER", "momentum_buffer"):  # nothing else may be missing
        assert main(flags(text, folders[0], 4, *resumed)) == 1
    assert "Missing key in checkpoint state_dict" in capsys.readouterr().err


def test_queries_and_keys_without_norm(text: Path, tmp_path: Path, capsys) -> None:
    assert main(flags(text, tmp_path / "out", 1, "--no-qk-norm")) == 0
    assert lines(tmp_path / "out")[0]["model"]["qk_norm"] is False
    assert main(flags(text, tmp_path / "out", 2, "--resume")) == 2
    assert "qk_norm is False in the checkpoint and True here" in capsys.readouterr().err
    assert main(flags(text, tmp_path / "out", 8, "--resume", "--no-qk-norm", "--rest-weight-decay", "0.1")) == 2
    assert "rest_weight_decay is 0 in the checkpoint and 0.1 here" in capsys.readouterr().err


def test_flags_and_configuration_are_one() -> None:
    assert parse([], "x") == (TrainConfig(), None)
    config, processes = parse(["--tp", "2", "--processes", "4", "--lr", "0.1", "--compile"], "x")
    assert (config, processes) == (TrainConfig(parallel="fsdp", tensor_parallel=2, lr=0.1, compile=True), 4)
    with pytest.raises(ConfigError, match="clip-norm"):
        TrainConfig(clip_norm=0.0)


def test_epochs_are_so_many_readings_of_the_text(text: Path, tmp_path: Path) -> None:
    arguments = flags(text, tmp_path / "out")
    steps = arguments.index("--steps")
    assert main([*arguments[:steps], *arguments[steps + 2 :], "--epochs", "0.1"]) == 0
    assert read_result(tmp_path / "out").num_steps == round(0.1 * 400 * 45 * 0.9 / (8 * 16))


def clip_on_two_meshes() -> tuple[float, float, float]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 40))
    whole = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 40))
    whole.load_state_dict(layers.state_dict())
    fully_shard(layers[0], mesh=init_device_mesh("cpu", (4,)))
    fully_shard(layers[1], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    for network in (layers, whole):
        network[1](network[0](torch.ones(3, 24))).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    found = FSDPMuonOptimizer(layers).clip_grad_norm_(0.5)["all"]
    difference = max(
        float((a.grad.full_tensor() - b.grad).abs().max())
        for a, b in zip(layers.parameters(), whole.parameters(), strict=True)
    )
    return float(found), float(expected), difference


def test_gradients_on_several_meshes_are_clipped_together(ranks: RankPool) -> None:
    for found, expected, difference in ranks.run(4, clip_on_two_meshes):
        assert expected > 1
        assert found == pytest.approx(expected, rel=1e-5)
        assert difference < 1e-6


def test_half_precision_on_a_cpu_is_autocast(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = nn.Linear.forward
    monkeypatch.setattr(
        nn.Linear, "forward", lambda self, x: seen.append(torch.is_autocast_enabled("cpu")) or forward(self, x)
    )
    assert main(flags(text, tmp_path / "out", 1, "--precision", "bfloat16")) == 0
    assert all(seen)


def in_this_process(command: list[str], **_: object) -> subprocess.CompletedProcess:
    """A run of the program without the seconds that a process needs to begin."""
    assert command[:3] == [sys.executable, "-m", "muon_fsdp.training"]
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        return subprocess.CompletedProcess(command, main(command[3:]), "", said.getvalue())


def test_curves_of_the_program_are_written(text: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["--model", "small", "--steps", "2", "--output", str(tmp_path / "out")]
    program_flags = ["--", "--data", str(text), "--sequence-length", "16", "--batch-size", "4", "--eval-windows", "4"]
    rates = "muon=0.02:adamw=0.001,0.001/0.1"
    with monkeypatch.context() as patch:
        patch.setattr(curves.subprocess, "run", in_this_process)
        assert curves.main(["optimizers", *common, "--name", "one", "--rates", rates, *program_flags]) == 0
    rows = [row.split(",") for row in (tmp_path / "out" / "one.csv").read_text().splitlines()]
    assert rows[0] == ["run", "step", "train_loss", "validation_loss"]
    runs = ("AdamW lr 0.001", "AdamW lr 0.001/0.1", "Muon lr 0.02")
    assert [row[:2] for row in rows[1:]] == [[run, step] for run in runs for step in "02"]
    assert rows[2][3] != rows[4][3]  # the rate of the rest counts
    assert "Muon lr 0.02" in (tmp_path / "out" / "one-light.svg").read_text()
    assert "Muon lr 0.02             validation loss" in capsys.readouterr().out
    alone = ["--optimizers", "muon", "--rates", "muon=0.02"]
    assert curves.main(["optimizers", *common, "--name", "none", *alone, "--", "--data", "nowhere"]) == 1
    assert "no such file or folder" in capsys.readouterr().out


def test_speed_is_that_of_the_ranks_that_run_now(text: Path, tmp_path: Path, capsys) -> None:
    """A resumed run tells its own times, not those of the run before."""
    assert main(flags(text, tmp_path / "out", 4)) == 0
    file = tmp_path / "out" / "metrics.jsonl"
    slow = [line | ({"seconds": 9.0} if line["kind"] == "train" else {}) for line in lines(tmp_path / "out")]
    file.write_text("".join(json.dumps(line) + "\n" for line in slow))
    assert main(flags(text, tmp_path / "out", 6, "--resume")) == 0
    assert lines(tmp_path / "out")[-1]["seconds_per_step"] < 4
    result = read_result(tmp_path / "out")
    assert (result.num_steps, result.num_steps_before, len(result.steps), len(result.timed)) == (6, 4, 6, 2)
    assert result.milliseconds_per_step < 4000
    capsys.readouterr()
    assert main(flags(text, tmp_path / "out", 6, "--resume")) == 0  # nothing is left to do, and nothing to time
    assert "seconds_per_step" not in lines(tmp_path / "out")[-1]
