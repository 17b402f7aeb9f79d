"""The training program: ranks that stop or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from muon_fsdp.training import heartbeat, inputs, launcher, model
from muon_fsdp.training.config import TrainConfig
from muon_fsdp.training.heartbeat import Beat, find_verdict
from muon_fsdp.training.parallel import connect
from muon_fsdp.training.program import main
from tests.pool import RankPool, fork_context
from tests.promises import promise
from tests.training_cases import PATIENCE, TINY, fault_flags, has_trained, surroundings, text_fixture  # noqa: F401


class Job:
    """Ranks of a job as processes that have imported torch already; standard error of each is a file."""

    def __init__(self, folder: Path, arguments: list[str], size: int, hangs: int | None = None) -> None:
        context = fork_context()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(size)}
        job |= {"LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
        self.logs = [folder / f"log{rank}" for rank in range(size)]
        self.processes = [
            context.Process(target=run_rank, args=(arguments, job | {"RANK": str(rank)}, log, rank == hangs))
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
    with Job(tmp_path, fault_flags(text, output, 100_000, "--fsdp", "--timeout", "4"), 3) as job:
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
    arguments = fault_flags(text, tmp_path / "out", 100_000, "--fsdp", "--timeout", "4")
    with Job(tmp_path, arguments, 3, hangs=1) as job:
        assert job.codes(0, 1, 2) == [1, 1, 1]
    for rank in range(3):
        expected = f"error: rank {rank}: waited 4 s for rank 1 (at step 3), which answers but makes no progress"
        assert expected in job.logs[rank].read_text()


def judge(rank: int, quiet: float, *collectives: dict[str, int] | None, silent: tuple[int, ...] = ()) -> str | None:
    """Return what a rank concludes from the heartbeats of all ranks, with a timeout of 5 s."""
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
