"""Fixtures and helpers for tests of the training programs: a tiny model, a text, and the metrics of a run.

A test module that imports a fixture uses it: `surroundings` in every test, `text_fixture` as `text`, and
`text_file_fixture` as `text_file`.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from muon_fsdp.training import model
from muon_fsdp.training.model import GPT, GPTConfig

ROOT = Path(__file__).parent.parent
TINY = GPTConfig(num_layers=2, num_heads=2, d_model=32, sequence_length=16)
PATIENCE = 300.0  # seconds to wait for a process: on a busy machine, starting one takes minutes
DEMO = ["--model", "demo", "--sequence-length", "16"]  # unlike TINY, a preset that other processes know too


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make preset "small" one that trains in a moment, and remove the variables of a job that pytest may run in."""
    monkeypatch.setitem(model.PRESETS, "small", TINY)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(name="text")
def text_fixture(tmp_path: Path) -> Path:
    """Write a text to train on, and return its path."""
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    return file


def lines(output: Path) -> list[dict]:
    """Return the lines of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def has_trained(output: Path) -> bool:
    """Return whether a run has taken its first step."""
    file = output / "metrics.jsonl"
    return file.exists() and '"train"' in file.read_text()


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen]:
    """Run a command as a process of its own, with its output in a file; kill it if the test leaves it running."""
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(what: Callable[[], object], process: subprocess.Popen, log: Path | None = None) -> None:
    """Wait until something is true while a process runs; fail with its output if that never happens."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert process.poll() is None, ("the process ended before", log and log.read_text())
        assert time.monotonic() < end, ("waited in vain", log and log.read_text())
        time.sleep(0.001)


def tiny_gpt(config: GPTConfig = TINY) -> GPT:
    """A GPT with a head that is not zero, so that its logits say something."""
    torch.manual_seed(0)
    gpt = GPT(config)
    torch.nn.init.normal_(gpt.lm_head.weight)
    return gpt


@pytest.fixture(name="text_file")
def text_file_fixture(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    return file


def fault_flags(text: Path, output: Path, steps: int = 4, *more: str) -> list[str]:
    """Return the flags of a run of a few steps, for the tests of faults."""
    return ["--data", str(text), "--output", str(output), "--steps", str(steps), "--batch-size", "6", "--device", "cpu",
            "--eval-windows", "6", *more]  # fmt: skip
