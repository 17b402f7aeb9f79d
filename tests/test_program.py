"""The training program: the same run on any ranks, resumed, interrupted, killed, and told nonsense."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from experiments import curves
from muon_fsdp.training import checkpoint, launcher, model, stopping
from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.config import TrainConfig, parse
from muon_fsdp.training.parallel import clip_gradient
from muon_fsdp.training.program import main
from muon_fsdp.training.results import read_result
from tests.pool import RankPool
from tests.training_cases import (  # noqa: F401
    DEMO,
    PATIENCE,
    ROOT,
    TINY,
    has_trained,
    lines,
    running,
    surroundings,
    text_fixture,
    wait_for,
)


def flags(text: Path, output: Path, steps: int = 12, *more: str) -> list[str]:
    return ["--data", str(text), "--output", str(output), "--steps", str(steps), "--batch-size", "8", "--device", "cpu",
            "--eval-every", "4", "--eval-windows", "8", *more]  # fmt: skip


def program_with(*arguments: str) -> list[str]:
    """Return the command that runs the program as a process of its own."""
    return [sys.executable, "-m", "muon_fsdp.training", *DEMO, *arguments]


def test_a_run_leaves_metrics_and_a_checkpoint(text: Path, tmp_path: Path, capsys) -> None:
    assert main(flags(text, tmp_path / "out", 12, "--tensorboard")) == 0
    printed = capsys.readouterr().out
    assert "one process, cpu, float32" in printed
    assert "muon on 12 tensors" in printed
    assert re.search(
        r"Muon   step   12/12  loss \d\.\d+  val \d\.\d+  [\d,]+ tokens/s  optimizer \d+%  0 s left", printed
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


def train_in_pool(arguments: list[str]) -> tuple[int, list[float]]:
    """The program on ranks of the pool."""
    model.PRESETS["small"] = TINY
    code = main(arguments)
    return code, read_result(Path(arguments[arguments.index("--output") + 1])).train_losses


def finish(ranks: RankPool, world_size: int, arguments: list[str]) -> list[float]:
    codes, losses = zip(*ranks.run(world_size, train_in_pool, arguments), strict=True)
    assert set(codes) == {0}
    return losses[0]


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


def test_ctrl_c_saves_and_a_run_goes_on(text: Path, tmp_path: Path) -> None:
    output, log = tmp_path / "out", tmp_path / "log"
    with running(program_with(*flags(text, output, 100_000, "--processes", "2", "--fsdp")), log) as process:
        wait_for(lambda: has_trained(output), process, log)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130, log.read_text()
    (saved,) = checkpoint.checkpoints(output / "checkpoints")
    step = int(saved.name.removeprefix("step-"))
    assert f"stopped after step {step} and saved {saved}; pass --resume to continue from there" in log.read_text()
    assert read_result(output).num_steps == step
    assert "Traceback" not in log.read_text()


def test_kill_in_the_middle_of_a_write_leaves_the_last_good_checkpoint(text: Path, tmp_path: Path, capsys) -> None:
    output, log = tmp_path / "out", tmp_path / "log"
    folder = output / "checkpoints"
    with running(program_with(*flags(text, output, 100_000, "--save-every", "1")), log) as process:
        wait_for(lambda: len(checkpoint.checkpoints(folder)) == 2 and list(folder.glob("*.partial/*")), process, log)
        process.kill()
    saved = checkpoint.checkpoints(folder)
    assert saved
    step = int(saved[-1].name.removeprefix("step-"))
    assert main([*DEMO, *flags(text, output, step + 2, "--resume")]) == 0
    assert f"resuming from step {step}" in capsys.readouterr().out
    assert not list(folder.glob("*.partial"))
    assert [line["step"] for line in lines(output) if line["kind"] == "train"] == list(range(1, step + 3))


def test_a_rank_that_dies_ends_the_run(text: Path, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process starts the ranks and waits for them."""
    output, started, popen = tmp_path / "out", [], subprocess.Popen

    def noting_popen(*args: object, **options: object) -> subprocess.Popen:
        process = popen(*args, **options)
        started.append(process)
        if len(started) == 2:
            threading.Thread(target=kill_when_trained, args=(process,)).start()
        return process

    def kill_when_trained(process: subprocess.Popen) -> None:
        try:
            wait_for(lambda: has_trained(output), process)
        finally:
            os.kill(process.pid, signal.SIGKILL)

    monkeypatch.setattr(launcher.subprocess, "Popen", noting_popen)
    assert main([*DEMO, *flags(text, output, 100_000, "--processes", "2", "--fsdp")]) == 1
    assert has_trained(output)
    said = capfd.readouterr().err
    assert "error: rank 1 was ended by SIGKILL" in said
    assert "error: another rank has ended; the last checkpoint is unchanged" in said
    assert "Traceback" not in said


def train_with_little_room(arguments: list[str]) -> tuple[int, str]:
    """Files of at most 64 kB: a write beyond fails as on a full disk. The exit code, and what was said."""
    model.PRESETS["small"] = TINY
    said = io.StringIO()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with redirect_stderr(said):
            return main(arguments), said.getvalue()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_is_told_and_the_last_checkpoint_stays(
    world_size: int, text: Path, tmp_path: Path, ranks: RankPool
) -> None:
    arguments = flags(text, tmp_path / "out", 1, "--fsdp", "--save-every", "1")
    finish(ranks, world_size, arguments)
    folder = tmp_path / "out" / "checkpoints"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    arguments[arguments.index("--steps") + 1] = "3"
    codes, said = zip(*ranks.run(world_size, train_with_little_room, [*arguments, "--resume"]), strict=True)
    assert set(codes) == {1}
    assert "error: the checkpoint of step 2 could not be written" in said[0]
    assert " are free there); the newest complete checkpoint is step-00000001" in said[0]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_damaged_checkpoint_is_named_before_anything_is_loaded(text: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "out"
    assert main(flags(text, output, 4, "--save-every", "2")) == 0
    newest = checkpoint.checkpoints(output / "checkpoints")[-1]
    file = newest / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    told = "__0_0.distcp has changed since it was written"
    for damaged in (bytes(content), b""):
        file.write_bytes(damaged)
        capsys.readouterr()
        assert main(flags(text, output, 8, "--resume")) == 1
        assert f"{newest} is damaged ({told})" in (error := capsys.readouterr().err)
        assert "delete it to resume from step-00000002" in error
    (newest / "manifest.json").write_text("{")
    assert main(flags(text, output, 8, "--resume")) == 1
    assert "is damaged (manifest.json: " in capsys.readouterr().err
    shutil.rmtree(newest)
    assert main(flags(text, output, 8, "--resume")) == 0


_LOCKS = []


def locked(folder: Path) -> Path:
    """As another run leaves it while it trains."""
    folder.mkdir()
    _LOCKS.append((folder / "lock").open("w"))
    fcntl.flock(_LOCKS[-1], fcntl.LOCK_EX)
    return folder


def test_a_manifest_that_is_json_and_nothing_else(text: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "out"
    assert main(flags(text, output, 2)) == 0
    file = output / "checkpoints" / "step-00000002" / "manifest.json"
    manifest = json.loads(file.read_text())
    for damage in ({"files": []}, {"step": 3}, {"step": "2"}, {"model": None}):
        damaged = manifest | damage
        if damaged["model"] is None:
            del damaged["model"]
        file.write_text(json.dumps(damaged))
        capsys.readouterr()
        assert main(flags(text, output, 3, "--resume")) == 1
        assert "is damaged (manifest.json" in capsys.readouterr().err


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


def test_queries_and_keys_without_norm(text: Path, tmp_path: Path, capsys) -> None:
    assert main(flags(text, tmp_path / "out", 1, "--no-qk-norm")) == 0
    assert lines(tmp_path / "out")[0]["model"]["qk_norm"] is False
    assert main(flags(text, tmp_path / "out", 2, "--resume")) == 2
    assert "qk_norm is False in the checkpoint and True here" in capsys.readouterr().err


def test_memory_that_there_is_not(text: Path, tmp_path: Path, capsys) -> None:
    assert main(flags(text, tmp_path / "out", 1, "--vocab-size", str(10**12))) == 1
    error = capsys.readouterr().err
    assert "error: out of memory" in error
    assert error.count("\n") == 1


def fail_alike(arguments: list[str]) -> tuple[int, str]:
    """The exit code of the program on a rank of the pool, and what it said."""
    model.PRESETS["small"] = TINY
    said = io.StringIO()
    with redirect_stderr(said):
        return main(arguments), said.getvalue()


def test_what_rank_0_finds_ends_every_rank(text: Path, tmp_path: Path, ranks: RankPool) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "checkpoints").touch()  # where a folder has to be made
    for output, code, message in ((text, 2, "it is a file"), (blocked, 1, "File exists")):
        codes, said = zip(*ranks.run(2, fail_alike, flags(text, output, 2, "--fsdp")), strict=True)
        assert codes == (code, code)
        assert message in said[0]


def test_a_rank_alone_with_a_wrong_token_says_so(tmp_path: Path, capfd) -> None:
    """Rank 1 reads it; rank 0 would only see that its peer is gone."""
    tokens = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    data = tmp_path / "tokens.bin"
    starts = torch.randint(3600 - 16, (2,), generator=torch.Generator().manual_seed(0)).tolist()
    assert abs(starts[0] - starts[1]) > 16
    tokens[starts[1] + 3] = 300
    data.write_bytes(bytes(tokens.view(torch.uint8).tolist()))
    arguments = flags(data, tmp_path / "out", 2, "--vocab-size", "256", "--batch-size", "2", "--processes", "2")
    assert main([*DEMO, *arguments, "--fsdp"]) in (1, 2)
    said = capfd.readouterr().err
    assert "error: rank 1: the data contains token 300" in said
    assert "error: another rank has ended" in said
    assert "Traceback" not in said


def test_mistakes_are_told_in_a_line(text: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"

    def told(code: int, message: str, *more: str, at: Path = output) -> None:
        capsys.readouterr()
        assert main(flags(text, at, 2, *more)) == code
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1

    told(2, "has no checkpoint to resume from", "--resume")
    told(2, "no such file or folder", "--data", str(tmp_path / "nowhere"))
    told(
        2,
        "--batch-size 8 must be a multiple of 1 data-parallel rank(s) x --micro-batch-size 3",
        "--micro-batch-size",
        "3",
    )
    told(2, "--vocab-size 100 is too small: the data has a vocabulary of 256 tokens", "--vocab-size", "100")
    told(2, "start a multiple of 2", "--replicas", "2")
    told(2, "--cuda-graph needs a GPU", "--cuda-graph", "--optimizer", "adamw")
    told(2, "another run is writing to", at=locked(tmp_path / "locked"))
    told(2, "it is a file", at=text)
    told(2, "Not a directory", at=text / "out")
    if not torch.cuda.is_available():
        told(2, "torch sees no GPU", "--device", "cuda")
    told(1, "lower the learning rate", "--lr", "1e30", "--rest-lr", "1e30", at=tmp_path / "diverged")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    told(2, 'needs the package tensorboard; install it with: pip install -e ".[integrations]"', "--tensorboard")
    assert main(flags(text, output, 2)) == 0
    told(2, "already has a checkpoint, step-00000002: pass --resume to continue that run, or another --output")
    told(2, "optimizer is 'muon' in the checkpoint and 'adamw' here", "--resume", "--optimizer", "adamw")
    told(2, "vocab_size is 256 in the checkpoint and 300 here", "--resume", "--vocab-size", "300")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told(2, "MASTER_ADDR and MASTER_PORT are not set: start with torchrun", "--fsdp", at=tmp_path / "none")
    told(2, "2 processes were started: pass --fsdp", at=tmp_path / "none")
    monkeypatch.setenv("RANK", "0")
    told(2, "leave it out under torchrun", "--processes", "2")


def test_tokens_beyond_the_vocabulary(tmp_path: Path, capsys) -> None:
    tokens = (torch.arange(2000) % 300).to(torch.int16)
    (tmp_path / "tokens.bin").write_bytes(bytes(tokens.view(torch.uint8).tolist()))
    arguments = flags(tmp_path / "tokens.bin", tmp_path / "out", 2)
    assert main([*arguments, "--vocab-size", "256"]) == 2
    assert "but the model's vocabulary has only 256 tokens: pass a larger --vocab-size" in capsys.readouterr().err
    assert main([*arguments, "--vocab-size", "300"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--steps", "1", "--epochs", "2"], "pass --steps or --epochs, not both"),
        (["--epochs", "-1"], "--epochs must be positive"),
        (["--warmup-fraction", "1.5"], "--warmup-fraction must be between 0 and 1"),
        (["--lr", "-1"], "--lr must not be negative"),
        (["--tp", "0"], "--tp must be at least 1"),
        (["--epochs", "inf"], "--epochs must be finite"),
        (["--timeout", "0"], "--timeout must be positive"),
        (["--timeout", "inf"], "--timeout must be finite"),
        (["--seed", "99999999999999999999"], "--seed must be between 0 and"),
        (["--proc", "2"], "unrecognized arguments: --proc"),
        (["--ddp", "--tp", "2"], "--replicas and --tp work only with --fsdp"),
        (["--model", "huge"], "invalid choice: 'huge'"),
        (["--processes", "0"], "--processes must be at least 1"),
    ],
)
def test_flags_that_cannot_work(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


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


def test_a_taken_port_is_told(text: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in job.items():
            monkeypatch.setenv(name, value)
        assert main(flags(text, tmp_path / "out", 2, "--fsdp")) == 2
    error = capsys.readouterr().err
    assert f"cannot connect to 127.0.0.1:{port}" in error
    assert "torchrun --standalone" in error


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
    found = clip_gradient(layers, 0.5)
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


def test_the_second_ctrl_c_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stopping.stop_on_signals() as stop:
        assert not stop.wanted
        signal.raise_signal(signal.SIGINT)
        assert stop.wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


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
    assert (tmp_path / "out" / "one.png").read_bytes().startswith(b"\x89PNG")
    assert "Muon lr 0.02             validation loss" in capsys.readouterr().out
    alone = ["--optimizers", "muon", "--rates", "muon=0.02"]
    assert curves.main(["optimizers", *common, "--name", "none", *alone, "--", "--data", "nowhere"]) == 1
    assert "no such file or folder" in capsys.readouterr().out


def test_a_reader_that_leaves(text: Path, tmp_path: Path) -> None:
    """As `| head` does: the run is saved and ends, and says so."""
    command = [sys.executable, "-m", "muon_fsdp.training", *DEMO, *flags(text, tmp_path / "out", 100_000)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while " step " not in process.stdout.readline():
        assert process.poll() is None
    process.stdout.close()
    assert process.stderr.read() == "note: standard output was closed; stopping\n"
    process.stderr.close()
    assert process.wait() == 130
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 1


def test_names_that_stdout_can_not_show(text: Path, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    assert main(flags(text, tmp_path / "g\u0103\u76ee", 1)) == 0
    assert b"g\\u0103\\u76ee" in shown.getvalue()
    assert capfd.readouterr().err == ""


def test_speed_is_that_of_the_ranks_that_run_now(text: Path, tmp_path: Path, capsys) -> None:
    """A resumed run tells its own times, not those of the run before."""
    assert main(flags(text, tmp_path / "out", 4)) == 0
    file = tmp_path / "out" / "metrics.jsonl"
    slow = [line | ({"seconds": 9.0} if line["kind"] == "train" else {}) for line in lines(tmp_path / "out")]
    file.write_text("".join(json.dumps(line) + "\n" for line in slow))
    assert main(flags(text, tmp_path / "out", 6, "--resume")) == 0
    assert lines(tmp_path / "out")[-1]["seconds_per_step"] < 4
    result = read_result(tmp_path / "out")
    assert (result.num_steps, result.num_steps_before, len(result.step_seconds)) == (6, 4, 6)
    assert result.milliseconds_per_step < 4000
    capsys.readouterr()
    assert main(flags(text, tmp_path / "out", 6, "--resume")) == 0  # nothing is left to do, and nothing to time
    assert "seconds_per_step" not in lines(tmp_path / "out")[-1]
