"""The training program."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from muon_fsdp.rules import RULES
from muon_fsdp.training import checkpoint, launcher, model
from muon_fsdp.training.program import main
from muon_fsdp.training.results import read_result
from muon_fsdp.training.unpickling import Reader
from tests.pool import RankPool
from tests.program_cases import ForkedProgram, forked_ranks_fixture, meanwhile  # noqa: F401
from tests.promises import promise
from tests.training_cases import PATIENCE, ROOT, TINY, fault_flags, lines, surroundings, text_fixture  # noqa: F401


@promise(
    "Another program wants a port while `--processes` starts its ranks",
    "It can't get that of the run: the launcher holds it, on this machine alone, before the first rank starts",
)
def test_the_port_of_processes_is_taken_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def start(command: list[str], env: dict[str, str], **options: object) -> subprocess.Popen:
        address = (env["MASTER_ADDR"], int(env["MASTER_PORT"]))
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(address)
        store = TCPStore(*address, is_master=False)  # what a rank does
        store.set("rank", env["RANK"])
        return popen([sys.executable, "-c", ""], **options)

    monkeypatch.setattr(launcher.subprocess, "Popen", start)
    assert launcher.launch([], 2) == 0


# ------------------------------------------------------------------------------------------------------- metrics


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: content.index(b'"step": 3') + 4])


def without_a_step(file: Path) -> None:
    told = [line for line in lines(file.parent) if (line["kind"], line.get("step")) != ("train", 2)]
    file.write_text("".join(json.dumps(line) + "\n" for line in told))


def other_run(file: Path) -> None:
    told = lines(file.parent)
    told[0]["config"]["seed"] = 7
    file.write_text("".join(json.dumps(line) + "\n" for line in told))


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = {
    "lost": (Path.unlink, "is missing"),
    "cut": (cut, "records 2 steps, but the checkpoint is of step 4"),
    "hole": (without_a_step, "is not the record of a run"),
    "garbage": (lambda file: file.write_bytes(bytes(range(256)) * 20), "is not the record of a run"),
    "JSON": (lambda file: file.write_text('{"kind": "start"}\n[1, 2]\n'), "is not the record of a run"),
    "fields": (
        lambda file: file.write_text(file.read_text().replace('"loss"', '"lose"')),
        "is not the record of a run",
    ),
    "other run": (other_run, "belongs to another run than the checkpoint"),
    "folder": (a_folder, "cannot be read: Is a directory"),
}


@promise(
    "`metrics.jsonl` is lost, cut, foreign or no journal at all, and the checkpoint is good",
    "A warning; the run resumes bit for bit, its metrics start again, and the old file is kept as `metrics.jsonl.bad`",
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_metrics_do_not_stop_a_good_checkpoint(damage: str, text: Path, tmp_path: Path, capsys) -> None:
    change, told = DAMAGES[damage]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(fault_flags(text, whole, 6, "--save-every", "4", "--keep", "9")) == 0
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-00000006")
    change(parts / "metrics.jsonl")
    capsys.readouterr()
    assert main(fault_flags(text, parts, 6, "--resume", "--save-every", "5", "--keep", "9")) == 0
    said = capsys.readouterr()
    (warning,) = said.err.splitlines()
    assert warning.startswith(f"warning: {parts / 'metrics.jsonl'} {told}")
    assert "metrics start again after step 4" in warning
    assert "resuming from step 4" in said.out
    assert ("and the old file is kept as metrics.jsonl.bad" in warning) == (damage != "lost")
    assert (parts / "metrics.jsonl.bad").exists() == (damage != "lost")
    result = read_result(parts)
    assert result.train_losses == read_result(whole).train_losses[4:]
    assert (result.num_steps, result.num_steps_before, len(result.timed)) == (6, 4, 2)
    assert [line["step"] for line in lines(parts) if line["kind"] == "train"] == [5, 6]
    assert [evaluation.step for evaluation in result.evaluations] == [4, 5, 6]
    # What it wrote is as good as any: the next run goes on in it.
    shutil.rmtree(parts / "checkpoints" / "step-00000006")
    assert main(fault_flags(text, parts, 6, "--resume")) == 0
    assert capsys.readouterr().err == ""
    assert read_result(parts).train_losses == result.train_losses


def test_metrics_that_are_bad_again_are_kept_too(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert main(fault_flags(text, output, 1)) == 0
    for steps in (2, 3):
        (output / "metrics.jsonl").write_text(f"{steps}")
        assert main(fault_flags(text, output, steps, "--resume")) == 0
    kept = {file.name: file.read_text() for file in output.glob("metrics.jsonl.bad*")}
    assert kept == {"metrics.jsonl.bad": "2", "metrics.jsonl.bad2": "3"}


def train_in_pool(arguments: list[str]) -> tuple[int, str]:
    """The program on ranks of the pool: its exit code, and what it said."""
    model.PRESETS["small"] = TINY
    said = io.StringIO()
    with redirect_stderr(said):
        return main(arguments), said.getvalue()


def test_ranks_agree_that_metrics_are_lost(text: Path, tmp_path: Path, ranks: RankPool) -> None:
    arguments = fault_flags(text, tmp_path / "out", 2, "--fsdp")
    assert {code for code, _ in ranks.run(2, train_in_pool, arguments)} == {0}
    (tmp_path / "out" / "metrics.jsonl").write_bytes(b"\0" * 100)
    arguments[arguments.index("--steps") + 1] = "3"
    (first, said), (second, nothing) = ranks.run(2, train_in_pool, [*arguments, "--resume"])
    assert (first, second, nothing) == (0, 0, "")
    assert "metrics start again after step 2" in said
    assert read_result(tmp_path / "out").num_steps == 3


# --------------------------------------------------------------------------------------------- the end of a process


ENDS_WHILE_GLOO_FREES_A_TENSOR = """
import atexit, sys, time
import torch, torch.distributed as dist
from muon_fsdp.training.ending import end_process
atexit.register(print, "handler", end="")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
held = dist.group.WORLD  # as by DTensor's caches
sys.setswitchinterval(1000)  # this thread keeps the GIL, so that the other is still waiting for it at the end
tensor = torch.ones(4)
dist.all_reduce(tensor, async_op=True)
del tensor
end = time.perf_counter() + 0.5
while time.perf_counter() < end:
    pass
print("printed ", end="")
end_process(3)
"""


@promise(
    "A rank ends while a thread of gloo still frees a tensor",
    "It ends with its own status, not with SIGABRT and `terminate called without an active exception`",
)
def test_the_end_of_a_process_does_not_abort() -> None:
    command = [sys.executable, "-c", ENDS_WHILE_GLOO_FREES_A_TENSOR]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [3, 3, 3]
    assert outputs == ["printed handler"] * 3


ENDS_WHILE_GLOO_FREES_A_TENSOR_OF_OURS = """
import os, sys, time
import torch, torch.distributed as dist
from muon_fsdp.comm.process_groups import group_of, make_group
children = []
for _ in range(3):  # by forks, because each process would import torch for seconds
    children.append(os.fork())
    if not children[-1]:
        break
else:
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    sys.exit()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
held = dist.group.WORLD  # as by DTensor's caches
make_group((0,), torch.device("cpu"), None)
sys.setswitchinterval(1000)  # as above
tensor = torch.ones(4)
dist.all_reduce(tensor, group=group_of((0,), tensor.device), async_op=True)
del tensor
end = time.perf_counter() + 0.5
while time.perf_counter() < end:
    pass
dist.destroy_process_group()
sys.exit(3)
"""


@promise(
    "A program ends by `destroy_process_group()` and `sys.exit` while a thread of gloo still frees a tensor of ours",
    "It ends with its own status: our process groups and their threads end with the default group",
)
def test_our_process_groups_end_with_the_default_group() -> None:
    command = [sys.executable, "-c", ENDS_WHILE_GLOO_FREES_A_TENSOR_OF_OURS]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "[3, 3, 3]\n"


@promise(
    "SIGTERM comes while a checkpoint is being written",
    "That one is finished, another is saved at the next step, the exit status is 130, and `--resume` continues from it",
)
def test_sigterm_during_a_save(text: Path, tmp_path: Path, capsys, forked_ranks: list[ForkedProgram]) -> None:
    output = tmp_path / "out"
    arguments = ["--model", "demo", "--sequence-length", "16", *fault_flags(text, output, 100_000, "--save-every", "1")]
    kept = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it must not end the tests if the ranks end too early
    try:
        is_saving = lambda: list((output / "checkpoints").glob("*.partial"))  # noqa: E731
        with meanwhile(is_saving, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            code = main([*arguments, "--processes", "2", "--fsdp"])
    finally:
        signal.signal(signal.SIGTERM, kept)
    logs = "".join(rank.log.read_text() for rank in forked_ranks)
    assert code == 130, logs
    assert "Traceback" not in logs
    step = int(checkpoint.checkpoints(output / "checkpoints")[-1].name.removeprefix("step-"))
    arguments[arguments.index("--steps") + 1] = str(step + 1)
    assert main([*arguments, "--resume"]) == 0
    assert f"resuming from step {step}" in capsys.readouterr().out


# --------------------------------------------------------------------------------- checkpoints that are not trusted


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._file),)


def forge(path: Path) -> None:
    """Make the manifest fit files that were changed."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name] = checkpoint._fingerprint(path / name)
    (path / "manifest.json").write_text(json.dumps(manifest))


@promise(
    "A checkpoint's `.metadata`, which is a pickle, names a function or a class that no checkpoint needs",
    "An error that names it, before anything of the file is executed",
)
def test_metadata_that_would_run_code_is_refused(text: Path, tmp_path: Path, capsys) -> None:
    output, made = tmp_path / "out", tmp_path / "made"
    assert main(fault_flags(text, output, 1)) == 0
    (path,) = checkpoint.checkpoints(output / "checkpoints")
    good = (path / ".metadata").read_bytes()
    honest = pickle.loads(good)
    honest.planner_data = Malicious(made)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (path / ".metadata").write_bytes(pickle.dumps(honest, protocol))
        forge(path)
        assert main(fault_flags(text, output, 2, "--resume")) == 1
        error = capsys.readouterr().err
        assert ".metadata names posix.mkdir, which no checkpoint needs; it was not executed" in error
        assert not made.exists()
    (path / ".metadata").write_bytes(pickle.dumps({"no": "metadata"}))
    forge(path)
    assert main(fault_flags(text, output, 2, "--resume")) == 1
    assert ".metadata contains a dict instead of the metadata of a checkpoint" in capsys.readouterr().err
    (path / ".metadata").write_bytes(good)
    forge(path)
    assert main(fault_flags(text, output, 2, "--resume")) == 0


@promise(
    "A value in a checkpoint that is not a tensor would run code when it is loaded",
    "An error that names the value and the function, before anything of it is executed",
)
def test_values_that_would_run_code_are_refused(
    text: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, made = tmp_path / "out", tmp_path / "made"
    honest = checkpoint._state

    def poisoned(*arguments: object) -> dict:
        state = honest(*arguments)
        state["optimizer"]["param_groups"][0]["momentum"] = Malicious(made)
        return state

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_state", poisoned)
        assert main(fault_flags(text, output, 1)) == 0
    assert main(fault_flags(text, output, 2, "--resume")) == 1
    error = capsys.readouterr().err
    assert "momentum' contains posix.mkdir, which no checkpoint needs; it was not executed" in error
    assert not made.exists()


@pytest.mark.parametrize("rule", ["muon", "normuon", "spectral_sphere", "adamw"])
@pytest.mark.parametrize("size", [1, 2])
def test_honest_metadata_is_read_as_pickle_reads_it(
    size: int, rule: str, text: Path, tmp_path: Path, ranks: RankPool
) -> None:
    assert rule in RULES
    arguments = fault_flags(text, tmp_path / "out", 1, "--fsdp", "--optimizer", rule)
    assert {code for code, _ in ranks.run(size, train_in_pool, arguments)} == {0}
    (path,) = checkpoint.checkpoints(tmp_path / "out" / "checkpoints")
    expected, reader = pickle.loads((path / ".metadata").read_bytes()), Reader(path)
    expected.storage_meta.load_id = reader.load_id
    assert reader.read_metadata() == expected
    arguments[arguments.index("--steps") + 1] = "2"
    assert {code for code, _ in ranks.run(size, train_in_pool, [*arguments, "--resume"])} == {0}
