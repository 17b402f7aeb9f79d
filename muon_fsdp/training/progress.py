"""How far a run is: a live line on a terminal, plain lines elsewhere. `rich` is optional, so imported where used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muon_fsdp.training.loop import RunResult

if TYPE_CHECKING:
    from rich.progress import Progress

_RECENT_STEPS = 10  # speed and loss are averaged over these, because single steps jump


def _recent_loss(result: RunResult) -> float:
    recent = result.train_losses[-_RECENT_STEPS:]
    return sum(recent) / len(recent)


def _tokens_per_second(result: RunResult, tokens_per_step: int) -> float:
    recent = result.step_seconds[-_RECENT_STEPS:]
    return tokens_per_step * len(recent) / sum(recent)


@contextmanager
def show_progress(
    name: str, steps: int, tokens_per_step: int, plain_every: int
) -> Iterator[Callable[[RunResult], None]]:
    """Yields the `on_step` callback of one run, for the kind of output there is."""
    if not sys.stdout.isatty():
        yield _plain_lines(steps, tokens_per_step, plain_every)
        return
    with _live_progress() as progress:
        task = progress.add_task(name, total=steps, detail="starting")

        def on_step(result: RunResult) -> None:
            speed = _tokens_per_second(result, tokens_per_step)
            detail = f"loss {_recent_loss(result):.3f}  val {result.final_validation_loss:.3f}  {speed:,.0f} tokens/s"
            progress.update(task, completed=len(result.train_losses), detail=detail)

        yield on_step


def _live_progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description:<6}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
    )


def _plain_lines(steps: int, tokens_per_step: int, every: int) -> Callable[[RunResult], None]:
    def on_step(result: RunResult) -> None:
        step = len(result.train_losses)
        if step % every != 0 and step != steps:
            return
        speed = _tokens_per_second(result, tokens_per_step)
        seconds_left = (steps - step) * tokens_per_step / speed
        print(
            f"{result.name:<6} step {step:>4}/{steps}  train loss {_recent_loss(result):.3f}  "
            f"validation loss {result.final_validation_loss:.3f}  {speed:,.0f} tokens/s  {seconds_left:.0f} s left",
            flush=True,  # a pipe would hold the lines back until the end
        )

    return on_step
