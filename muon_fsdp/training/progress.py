"""Show the progress of a run: a live line on a terminal, plain lines elsewhere.

The package `rich` is optional, so it is imported where it is used.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

from muon_fsdp.training.results import RunResult

if TYPE_CHECKING:
    from rich.progress import Progress

_RECENT_STEPS = 10  # loss and speed are averaged over these, because those of single steps vary


def describe(result: RunResult, tokens_per_step: int) -> str:
    """Return losses, speed and the optimizer's share of the time over the last steps, as text."""
    losses, seconds = result.train_losses[-_RECENT_STEPS:], _recent_seconds(result)
    share = median(result.times()[1][-_RECENT_STEPS:]) / seconds
    return (
        f"loss {sum(losses) / len(losses):.3f}  val {result.final_validation_loss:.3f}  "
        f"{tokens_per_step / seconds:,.0f} tokens/s  optimizer {share:.0%}"
    )


def _recent_seconds(result: RunResult) -> float:
    return median(result.times()[0][-_RECENT_STEPS:])


@contextmanager
def show_progress(
    name: str, steps: int, tokens_per_step: int, plain_every: int
) -> Iterator[Callable[[RunResult], None]]:
    """Yield a function that shows the result so far; call it after every log update."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield _plain_lines(steps, tokens_per_step, plain_every)
        return
    with _live_progress() as progress:
        task = progress.add_task(name, total=steps, detail="starting")
        yield lambda result: progress.update(task, completed=result.num_steps, detail=describe(result, tokens_per_step))


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
    shown = 0

    def show(result: RunResult) -> None:
        nonlocal shown
        step = result.num_steps
        if step // every == shown // every and step != steps:
            return
        shown = step
        seconds_left = (steps - step) * _recent_seconds(result)
        print(
            f"{result.name:<6} step {step:>4}/{steps}  {describe(result, tokens_per_step)}  {seconds_left:.0f} s left",
            flush=True,  # else a pipe would buffer the lines until the end
        )

    return show
