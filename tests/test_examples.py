"""The examples run and do what they say."""

from __future__ import annotations

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
