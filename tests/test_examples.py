"""The examples run and do what they say."""

from __future__ import annotations

import muon_fsdp
from examples import mixed_adamw


def test_mixed_adamw(capsys):
    assert mixed_adamw.create_hybrid_optimizer is muon_fsdp.create_hybrid_optimizer
    assert mixed_adamw.main(steps=100) < 0.5
    text = capsys.readouterr().out
    assert "embedding.weight" in text
    assert "step  100" in text
