"""Flags of a run of the training program, and ways to run it: on ranks of the pool, or as processes that are forked."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from muon_fsdp.training import launcher, model
from muon_fsdp.training.program import main
from muon_fsdp.training.results import read_result
from tests.pool import RankPool, fork_context
from tests.training_cases import TINY


def flags(text: Path, output: Path, steps: int = 12, *more: str) -> list[str]:
    return ["--data", str(text), "--output", str(output), "--steps", str(steps), "--batch-size", "8", "--device", "cpu",
            "--eval-every", "4", "--eval-windows", "8", *more]  # fmt: skip


class ForkedProgram:
    """`python -m muon_fsdp.training`, begun by a fork of a process that has imported torch: that takes seconds.

    It has the part of `subprocess.Popen` that the launcher uses. What it prints is in the file `log`.
    """

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] = os.environ) -> None:
        self.log = log
        self._process = fork_context().Process(target=_run_program, args=(list(arguments), log, dict(environment)))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it is still running"
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run_program(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    if launcher.is_launched():
        os.environ[launcher._LAUNCHER] = str(os.getppid())  # the fork server, which is the parent here
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server ignores it
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv[1:] = arguments
    try:
        runpy.run_module("muon_fsdp.training", run_name="__main__", alter_sys=True)
    except SystemExit:
        atexit._run_exitfuncs()  # as the end of Python does: the last one ends this process with the status


@pytest.fixture(name="forked_ranks")
def forked_ranks_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ForkedProgram]:
    """Let `--processes` start its ranks by forks, and return those that have been started."""
    started: list[ForkedProgram] = []

    def start(command: list[str], env: dict[str, str], start_new_session: bool) -> ForkedProgram:
        assert command[:3] == [sys.executable, "-m", "muon_fsdp.training"]
        assert start_new_session
        started.append(ForkedProgram(command[3:], tmp_path / f"log{env['RANK']}", env))
        return started[-1]

    monkeypatch.setattr(launcher.subprocess, "Popen", start)
    return started


@contextmanager
def meanwhile(what: Callable[[], object], action: Callable[[], object]) -> Iterator[None]:
    """Do something once `what()` is true while the block runs, which may be in a call of the program."""
    ended = threading.Event()

    def watch() -> None:
        while not what():
            if ended.wait(0.001):
                return
        action()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def train_in_pool(arguments: list[str]) -> tuple[int, list[float]]:
    """The program on ranks of the pool."""
    model.PRESETS["small"] = TINY
    code = main(arguments)
    return code, read_result(Path(arguments[arguments.index("--output") + 1])).train_losses


def finish(ranks: RankPool, world_size: int, arguments: list[str]) -> list[float]:
    codes, losses = zip(*ranks.run(world_size, train_in_pool, arguments), strict=True)
    assert set(codes) == {0}
    return losses[0]
