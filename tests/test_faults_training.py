"""The training program."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from muon_fsdp.rules import RULES
from muon_fsdp.training import checkpoint, heartbeat, inputs, launcher, model
from muon_fsdp.training.config import TrainConfig
from muon_fsdp.training.heartbeat import Beat, find_verdict
from muon_fsdp.training.parallel import connect
from muon_fsdp.training.program import main
from muon_fsdp.training.results import read_result
from muon_fsdp.training.unpickling import Reader
from tests.pool import RankPool
from tests.promises import promise
from tests.training_cases import (  # noqa: F401
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


def flags(text: Path, output: Path, steps: int = 4, *more: str) -> list[str]:
    return ["--data", str(text), "--output", str(output), "--steps", str(steps), "--batch-size", "6", "--device", "cpu",
            "--eval-windows", "6", *more]  # fmt: skip


# ------------------------------------------------------------------------------------- ranks that are waited for


class Job:
    """Ranks of a job as processes that have imported torch already; standard error of each is a file."""

    def __init__(self, folder: Path, arguments: list[str], size: int, hangs: int | None = None) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pytest", "torch._dynamo", "tests.distributed_cases"])
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(size)}
        job |= {"LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
        self.logs = [folder / f"log{rank}" for rank in range(size)]
        self.processes = [
            self._context.Process(target=run_rank, args=(arguments, job | {"RANK": str(rank)}, log, rank == hangs))
            for rank, log in enumerate(self.logs)
        ]

    def __enter__(self) -> Job:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def codes(self, *ranks: int) -> list[int | None]:
        """Exit codes of ranks, which must have ended within the time that `--timeout 4` allows."""
        deadline = time.monotonic() + PATIENCE
        for rank in ranks:
            self.processes[rank].join(deadline - time.monotonic())
        return [self.processes[rank].exitcode for rank in ranks]


def run_rank(arguments: list[str], job: dict[str, str], log: Path, hangs: bool) -> None:
    os.environ.update(job)
    torch.set_num_threads(1)
    model.PRESETS["small"] = TINY
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    if hangs:
        inputs.training_batches = hanging_batches
    os._exit(main(arguments))


def hanging_batches(*arguments: object) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two batches, and then what a file server that does not answer would do."""
    for _ in range(2):
        yield torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int64)
    time.sleep(1000)


@promise(
    "A rank is stopped (`kill -STOP`, a machine that freezes)",
    "After `--timeout` seconds, 600 by default, every other rank ends with an error that names it",
)
def test_a_stopped_rank_is_named_by_all_that_wait_for_it(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with Job(tmp_path, flags(text, output, 100_000, "--fsdp", "--timeout", "4"), 3) as job:
        deadline = time.monotonic() + PATIENCE
        while not has_trained(output):
            assert time.monotonic() < deadline, [log.read_text() for log in job.logs]
            time.sleep(0.05)
        os.kill(job.processes[1].pid, signal.SIGSTOP)
        assert job.codes(0, 2) == [1, 1]
    for rank in (0, 2):
        said = job.logs[rank].read_text()
        assert f"error: rank {rank}: waited 4 s for rank 1 (last seen at " in said
        assert "Traceback" not in said


@promise(
    "A rank hangs, as in reading its data, while its process lives",
    "The same, and the error says that it answers but makes no progress",
)
def test_a_rank_that_hangs_is_named_by_all(text: Path, tmp_path: Path) -> None:
    arguments = flags(text, tmp_path / "out", 100_000, "--fsdp", "--timeout", "4")
    with Job(tmp_path, arguments, 3, hangs=1) as job:
        assert job.codes(0, 1, 2) == [1, 1, 1]
    for rank in range(3):
        expected = f"error: rank {rank}: waited 4 s for rank 1 (at step 3), which answers but makes no progress"
        assert expected in job.logs[rank].read_text()


def judge(rank: int, quiet: float, *collectives: dict[str, int] | None, silent: tuple[int, ...] = ()) -> str | None:
    """What a rank makes of the beats of all, with a timeout of 5 s."""
    now = [None if counts is None else Beat(8, "step 7", counts) for counts in collectives]
    earlier = [beat if other in silent else Beat(4, "step 7", {}) for other, beat in enumerate(now)]
    return find_verdict(rank, earlier, now, quiet, 5.0)


def test_the_culprit_is_who_waits_for_nobody() -> None:
    told = judge(0, 5.0, {}, {}, None, silent=(1,))
    assert "for rank 1 (last seen at step 7), 2 (never seen), which no longer answers" in told
    assert "for rank 0 (at step 7), which answers" in judge(1, 5.0, {"all": 6}, {"all": 7}, {"all": 7})
    # Rank 1 hangs, 0 waits for it in their pair, and 2 and 3 wait for the first pair.
    pairs = ({"a": 4, "all": 2}, {"a": 3, "all": 2}, {"b": 4, "all": 3}, {"b": 4, "all": 3})
    for rank in (0, 2, 3):
        assert "for rank 1 (at step 7), which answers" in judge(rank, 5.0, *pairs)


@promise(
    "All ranks are busy for longer than `--timeout`, as in a long compilation",
    "They continue: no rank waits for another. After twice the time they end",
)
def test_ranks_that_are_equally_slow_go_on() -> None:
    assert judge(0, 5.0, {"all": 7}, {"all": 7}) is None
    assert judge(0, 5.0, {"all": 6}, {"all": 7}) is None  # rank 1 waits, and perhaps for a moment only
    assert judge(1, 10.0, {"all": 7}, {"all": 7}) == "no rank has made progress for 10 s (at step 7)"


def count_collectives() -> tuple[dict[str, int], dict[str, int]]:
    before = heartbeat.collectives_begun()
    torch.distributed.all_reduce(torch.ones(2))
    torch.distributed.barrier()
    return before, heartbeat.collectives_begun()


def test_collectives_are_counted(ranks: RankPool) -> None:
    """By private calls of torch, which may move."""
    for before, after in ranks.run(2, count_collectives):
        assert {after[group] - count for group, count in before.items()} == {2}


def test_a_store_that_does_not_answer_is_told() -> None:
    for keeper, expected in (
        (0, "for rank 0, which hosts the job's store and does not"),
        (None, "and the job's store does not"),
    ):
        beat = heartbeat.Heartbeat(torch.distributed.HashStore(), 1, 2, 5.0, keeper)
        assert expected in beat._unanswered()


def timeouts_of_groups(port: int) -> set[timedelta]:
    """Those of all process groups of a run, on a rank that leaves the pool's job for one of its own."""
    job = {"RANK": str(torch.distributed.get_rank()), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    job |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.distributed.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in job.items():
            patch.setenv(name, value)
        with connect(TrainConfig(parallel="fsdp", device="cpu", timeout=1000.0)) as world:
            groups = (torch.distributed.group.WORLD, *world.mesh.get_all_groups())
            assert len(set(groups)) > 1
            return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_torch_waits_longer_than_the_timeout(ranks: RankPool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks.run(2, timeouts_of_groups, store.port) == [{timedelta(seconds=2060)}] * 2


RANKS_OF_A_LAUNCHER = {
    "0": "raise SystemExit(1)",
    "1": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
}


@promise(
    "A rank of `--processes` is stopped, and the others have ended with an error",
    "The launcher kills it, says so, and exits with 1",
)
def test_the_launcher_kills_a_stopped_rank(capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    started, popen = [], subprocess.Popen

    def start(command: list[str], env: dict[str, str], **options: object) -> subprocess.Popen:
        started.append(popen([sys.executable, "-c", RANKS_OF_A_LAUNCHER[env["RANK"]]], env=env, **options))
        return started[-1]

    monkeypatch.setattr(launcher.subprocess, "Popen", start)
    monkeypatch.setattr(launcher, "_GRACE_SECONDS", 0.2)
    assert launcher.launch([], 2) == 1
    assert "error: rank 1 did not end after another rank had failed, and was killed" in capfd.readouterr().err
    assert [process.returncode for process in started] == [1, -signal.SIGKILL]


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
    assert main(flags(text, whole, 6, "--save-every", "4", "--keep", "9")) == 0
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-00000006")
    change(parts / "metrics.jsonl")
    capsys.readouterr()
    assert main(flags(text, parts, 6, "--resume", "--save-every", "5", "--keep", "9")) == 0
    said = capsys.readouterr()
    (warning,) = said.err.splitlines()
    assert warning.startswith(f"warning: {parts / 'metrics.jsonl'} {told}")
    assert "metrics start again after step 4" in warning
    assert "resuming from step 4" in said.out
    assert ("and the old file is kept as metrics.jsonl.bad" in warning) == (damage != "lost")
    assert (parts / "metrics.jsonl.bad").exists() == (damage != "lost")
    result = read_result(parts)
    assert result.train_losses == read_result(whole).train_losses[4:]
    assert (result.num_steps, result.num_steps_lost, len(result.times()[0])) == (6, 4, 2)
    assert [line["step"] for line in lines(parts) if line["kind"] == "train"] == [5, 6]
    assert [evaluation.step for evaluation in result.evaluations] == [4, 5, 6]
    # What it wrote is as good as any: the next run goes on in it.
    shutil.rmtree(parts / "checkpoints" / "step-00000006")
    assert main(flags(text, parts, 6, "--resume")) == 0
    assert capsys.readouterr().err == ""
    assert read_result(parts).train_losses == result.train_losses


def test_metrics_that_are_bad_again_are_kept_too(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert main(flags(text, output, 1)) == 0
    for steps in (2, 3):
        (output / "metrics.jsonl").write_text(f"{steps}")
        assert main(flags(text, output, steps, "--resume")) == 0
    kept = {file.name: file.read_text() for file in output.glob("metrics.jsonl.bad*")}
    assert kept == {"metrics.jsonl.bad": "2", "metrics.jsonl.bad2": "3"}


def train_in_pool(arguments: list[str]) -> tuple[int, str]:
    """The program on ranks of the pool: its exit code, and what it said."""
    model.PRESETS["small"] = TINY
    said = io.StringIO()
    with redirect_stderr(said):
        return main(arguments), said.getvalue()


def test_ranks_agree_that_metrics_are_lost(text: Path, tmp_path: Path, ranks: RankPool) -> None:
    arguments = flags(text, tmp_path / "out", 2, "--fsdp")
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


@promise(
    "SIGTERM comes while a checkpoint is being written",
    "That one is finished, another is saved at the next step, the exit status is 130, and `--resume` continues from it",
)
def test_sigterm_during_a_save(text: Path, tmp_path: Path, capsys) -> None:
    output, log = tmp_path / "out", tmp_path / "log"
    arguments = ["--model", "demo", "--sequence-length", "16", *flags(text, output, 100_000, "--save-every", "1")]
    command = [sys.executable, "-m", "muon_fsdp.training", *arguments, "--processes", "2", "--fsdp"]
    with running(command, log) as process:
        wait_for(lambda: list((output / "checkpoints").glob("*.partial")), process, log)
        process.terminate()
        assert process.wait(PATIENCE) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
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
    assert main(flags(text, output, 1)) == 0
    (path,) = checkpoint.checkpoints(output / "checkpoints")
    good = (path / ".metadata").read_bytes()
    honest = pickle.loads(good)
    honest.planner_data = Malicious(made)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (path / ".metadata").write_bytes(pickle.dumps(honest, protocol))
        forge(path)
        assert main(flags(text, output, 2, "--resume")) == 1
        error = capsys.readouterr().err
        assert ".metadata names posix.mkdir, which no checkpoint needs; it was not executed" in error
        assert not made.exists()
    (path / ".metadata").write_bytes(pickle.dumps({"no": "metadata"}))
    forge(path)
    assert main(flags(text, output, 2, "--resume")) == 1
    assert ".metadata contains a dict instead of the metadata of a checkpoint" in capsys.readouterr().err
    (path / ".metadata").write_bytes(good)
    forge(path)
    assert main(flags(text, output, 2, "--resume")) == 0


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
        assert main(flags(text, output, 1)) == 0
    assert main(flags(text, output, 2, "--resume")) == 1
    error = capsys.readouterr().err
    assert "momentum' contains posix.mkdir, which no checkpoint needs; it was not executed" in error
    assert not made.exists()


@pytest.mark.parametrize("rule", ["muon", "normuon", "spectral_sphere", "adamw"])
@pytest.mark.parametrize("size", [1, 2])
def test_honest_metadata_is_read_as_pickle_reads_it(
    size: int, rule: str, text: Path, tmp_path: Path, ranks: RankPool
) -> None:
    assert rule in RULES
    arguments = flags(text, tmp_path / "out", 1, "--fsdp", "--optimizer", rule)
    assert {code for code, _ in ranks.run(size, train_in_pool, arguments)} == {0}
    (path,) = checkpoint.checkpoints(tmp_path / "out" / "checkpoints")
    expected, reader = pickle.loads((path / ".metadata").read_bytes()), Reader(path)
    expected.storage_meta.load_id = reader.load_id
    assert reader.read_metadata() == expected
    arguments[arguments.index("--steps") + 1] = "2"
    assert {code for code, _ in ranks.run(size, train_in_pool, [*arguments, "--resume"])} == {0}
