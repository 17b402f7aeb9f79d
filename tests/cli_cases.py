"""Helpers for the tests of the command `muon-fsdp`: run it here or as a process, and read what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muon_fsdp.cli import checks
from muon_fsdp.cli.app import app

ROOT = Path(__file__).parent.parent


def run(*args: str, code: int = 0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def plan(*args: str) -> dict:
    result = run("plan", *args, "--json")
    assert result.stderr == ""
    return json.loads(result.stdout)


def error_of(*args: str) -> str:
    """Run the command line with a mistake; return the one line of its error."""
    result = run(*args, code=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture(name="folder")
def folder_fixture(tmp_path, monkeypatch):
    """Change to an empty folder, from which modules can be imported during the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def subprocess_run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def warnings_of_the_comparison() -> list[str]:
    """Compare a sharded step with one on a single device, as `muon-fsdp doctor` does, and return what warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks.sharded_difference()
    return [str(warning.message) for warning in caught]


# As published with the weights (of DeepSeek-V3 without the module that predicts further tokens).
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "moonlight-16b-a3b": 15.96e9,
    "deepseek-v3": 671.03e9,
    "kimi-k2": 1.03e12,
}
