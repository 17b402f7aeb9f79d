"""The examples run and do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import muon_fsdp
from examples import mixed_adamw, train_sso


def test_mixed_adamw(capsys):
    assert mixed_adamw.create_hybrid_optimizer is muon_fsdp.create_hybrid_optimizer
    assert mixed_adamw.main(steps=100) < 0.5
    text = capsys.readouterr().out
    assert "embedding.weight" in text
    assert "step  100" in text


def test_train_sso(capsys):
    assert train_sso.main(["--steps", "12", "--batch-size", "4"]) < 4.5
    text = capsys.readouterr().out
    assert "spectral_sphere" in text
    distances = [float(part.split()[0]) for part in text.split("|s/R - 1| at most ")[1:]]
    assert len(distances) == 2
    assert max(distances) < 0.05


def test_train_gpt_under_torchrun(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["examples/train_gpt.py", "--model", "small", "--sequence-length", "16", "--steps", "3", "--fsdp"]
    command += ["--data", str(text), "--output", str(tmp_path / "out"), "--batch-size", "4", "--eval-windows", "4"]
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "FSDP2 on 2 rank(s)" in done.stdout
    assert done.stdout.count("validation loss") == 1  # rank 0 alone speaks
    assert (tmp_path / "out" / "checkpoints" / "step-00000003").is_dir()
