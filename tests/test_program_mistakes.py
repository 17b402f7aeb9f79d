"""The training program with wrong flags, data, ports and checkpoints: one line says what to do."""

from __future__ import annotations

import fcntl
import io
import json
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
import torch

from muon_fsdp.training import checkpoint, model
from muon_fsdp.training.program import main
from tests.pool import RankPool
from tests.program_cases import ForkedProgram, flags, forked_ranks_fixture  # noqa: F401
from tests.training_cases import DEMO, TINY, surroundings, text_fixture  # noqa: F401


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


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """As another run leaves it while it trains."""
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


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


def test_a_rank_alone_with_a_wrong_token_says_so(tmp_path: Path, capfd, forked_ranks: list[ForkedProgram]) -> None:
    """Rank 1 reads it; rank 0 would only see that its peer is gone."""
    tokens = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    data = tmp_path / "tokens.bin"
    starts = torch.randint(3600 - 16, (2,), generator=torch.Generator().manual_seed(0)).tolist()
    assert abs(starts[0] - starts[1]) > 16
    tokens[starts[1] + 3] = 300
    data.write_bytes(bytes(tokens.view(torch.uint8).tolist()))
    arguments = flags(data, tmp_path / "out", 2, "--vocab-size", "256", "--batch-size", "2", "--processes", "2")
    assert main([*DEMO, *arguments, "--fsdp"]) in (1, 2)
    said = "".join(rank.log.read_text() for rank in forked_ranks)
    assert "Traceback" not in capfd.readouterr().err
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
    told(2, "start a multiple of 2, with torchrun or --processes 2", "--replicas", "2")
    told(2, "--cuda-graph needs a GPU", "--cuda-graph", "--optimizer", "adamw")
    with locked(tmp_path / "locked") as folder:
        told(2, "another run is writing to", at=folder)
    told(2, "it is a file", at=text)
    told(2, "Not a directory", at=text / "out")
    if not torch.cuda.is_available():
        told(2, "torch sees no GPU", "--device", "cuda")
    told(1, "lower the learning rate", "--lr", "1e30", "--rest-lr", "1e30", at=tmp_path / "diverged")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    told(2, 'needs the package tensorboard; install it with: pip install "muon_fsdp[integrations]"', "--tensorboard")
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
        (["--rest-weight-decay", "-1"], "--rest-weight-decay must not be negative"),
        (["--rest-betas", "0.9,1.5"], "--rest-betas: "),
        (["--rest-betas", "0.9;0.5"], "argument --rest-betas: must be numbers separated by commas, got '0.9;0.5'"),
        (["--tp", "0"], "--tp must be at least 1"),
        (["--epochs", "inf"], "--epochs must be finite"),
        (["--timeout", "0"], "--timeout must be positive"),
        (["--timeout", "inf"], "--timeout must be finite"),
        (["--seed", "99999999999999999999"], "--seed must be between 0 and"),
        (["--proc", "2"], "unrecognized arguments: --proc 2: did you mean --processes?"),
        (["--learning-rate", "0.1"], "did you mean --lr?"),
        (["--no-nesterv"], "did you mean --nesterov?"),
        (["demo"], "did you mean --model demo?"),
        (["--rule", "muon"], "unrecognized arguments: --rule muon: pass --optimizer"),
        (["--world-size=2"], "pass --processes"),
        (["--strategy", "owner"], "strategy is an argument of MuonOptimizer that this program does not have"),
        (["--set", "attention=per_head"], "pass attention='per_head', or --attention per_head"),
        (["--no-fsdp"], "unrecognized arguments: --no-fsdp: leave out --fsdp"),
        (["--state_dtype", "int8"], "pass --state-dtype"),
        (["--adamw-lr", "0.1"], "unrecognized arguments: --adamw-lr 0.1: pass --rest-lr"),
        (["--set", "adamw_betas=0.9,0.99"], "or --rest-betas 0.9,0.99 ("),
        (["--set", "offload_state=true"], "or --offload-state ("),
        (["--ns-steps", "3"], "unrecognized arguments: --ns-steps 3: pass an option of a rule as --set ns_steps=VALUE"),
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


def test_names_that_stdout_can_not_show(text: Path, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    assert main(flags(text, tmp_path / "g\u0103\u76ee", 1)) == 0
    assert b"g\\u0103\\u76ee" in shown.getvalue()
    assert capfd.readouterr().err == ""
