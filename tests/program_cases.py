"""Flags of a run of the training program, and a run on ranks of the pool."""

from __future__ import annotations

from pathlib import Path

from muon_fsdp.training import model
from muon_fsdp.training.program import main
from muon_fsdp.training.results import read_result
from tests.pool import RankPool
from tests.training_cases import TINY


def flags(text: Path, output: Path, steps: int = 12, *more: str) -> list[str]:
    return ["--data", str(text), "--output", str(output), "--steps", str(steps), "--batch-size", "8", "--device", "cpu",
            "--eval-every", "4", "--eval-windows", "8", *more]  # fmt: skip


def train_in_pool(arguments: list[str]) -> tuple[int, list[float]]:
    """The program on ranks of the pool."""
    model.PRESETS["small"] = TINY
    code = main(arguments)
    return code, read_result(Path(arguments[arguments.index("--output") + 1])).train_losses


def finish(ranks: RankPool, world_size: int, arguments: list[str]) -> list[float]:
    codes, losses = zip(*ranks.run(world_size, train_in_pool, arguments), strict=True)
    assert set(codes) == {0}
    return losses[0]
