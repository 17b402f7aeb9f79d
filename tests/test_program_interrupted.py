"""The training program, interrupted: Ctrl-C, a killed process, a rank that dies, a full disk, a reader that leaves."""

from __future__ import annotations

import io
import resource
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from muon_fsdp.training import checkpoint, ending, model
from muon_fsdp.training.program import main
from muon_fsdp.training.results import read_result
from tests.pool import RankPool
from tests.program_cases import ForkedProgram, finish, flags, forked_ranks_fixture, meanwhile  # noqa: F401
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


def program_with(*arguments: str) -> list[str]:
    """Return the command that runs the program as a process of its own."""
    return [sys.executable, "-m", "muon_fsdp.training", *DEMO, *arguments]


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
    process = ForkedProgram([*DEMO, *flags(text, output, 100_000, "--save-every", "1")], log)
    try:
        wait_for(lambda: len(checkpoint.checkpoints(folder)) == 2 and list(folder.glob("*.partial/*")), process, log)
    finally:
        process.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL
    saved = checkpoint.checkpoints(folder)
    assert saved
    step = int(saved[-1].name.removeprefix("step-"))
    assert main([*DEMO, *flags(text, output, step + 2, "--resume")]) == 0
    assert f"resuming from step {step}" in capsys.readouterr().out
    assert not list(folder.glob("*.partial"))
    assert [line["step"] for line in lines(output) if line["kind"] == "train"] == list(range(1, step + 3))


def test_a_rank_that_dies_ends_the_run(text: Path, tmp_path: Path, capfd, forked_ranks: list[ForkedProgram]) -> None:
    """This process starts the ranks and waits for them."""
    output = tmp_path / "out"
    with meanwhile(lambda: has_trained(output), lambda: forked_ranks[1].kill()):
        assert main([*DEMO, *flags(text, output, 100_000, "--processes", "2", "--fsdp")]) == 1
    assert has_trained(output)
    said = capfd.readouterr().err + forked_ranks[0].log.read_text()
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


def test_the_second_ctrl_c_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ending.stop_on_signals() as stop:
        assert not stop.wanted
        signal.raise_signal(signal.SIGINT)
        assert stop.wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reader_that_leaves(text: Path, tmp_path: Path) -> None:
    """As `| head` does: the run is saved and ends, and says so."""
    command = [sys.executable, "-m", "muon_fsdp.training", *DEMO, *flags(text, tmp_path / "out", 100_000)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while " step " not in process.stdout.readline():
        assert process.poll() is None
    process.stdout.close()
    assert process.stderr.read().splitlines()[1:] == ["note: standard output was closed; stopping"]
    process.stderr.close()
    assert process.wait() == 130
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 1
