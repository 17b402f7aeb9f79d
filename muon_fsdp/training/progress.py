"""Show the progress of a run: a live line on a terminal, plain lines elsewhere.

The package `rich` is optional, so it is imported where it is used.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from muon_fsdp.text import format_count
from muon_fsdp.training.results import RunResult

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_RECENT_STEPS = 10  # loss and speed are averaged over these, because those of single steps vary
_SHORTEST_BAR, _LONGEST_BAR = 6, 30


@dataclass(frozen=True)
class Progress:
    """How far a run is, and how fast it was in its last steps."""

    name: str
    step: int
    steps: int
    loss: float
    validation_loss: float
    tokens_per_second: float
    optimizer_share: float
    seconds_left: float

    @classmethod
    def of(cls, result: RunResult, steps: int, tokens_per_step: int) -> Progress:
        """Return the progress of a run that has taken at least one step since it was started."""
        losses = result.train_losses[-_RECENT_STEPS:]
        seconds, optimizer_seconds = (median(times[-_RECENT_STEPS:]) for times in result.times())
        return cls(
            name=result.name,
            step=result.num_steps,
            steps=steps,
            loss=sum(losses) / len(losses),
            validation_loss=result.final_validation_loss,
            tokens_per_second=tokens_per_step / seconds,
            optimizer_share=optimizer_seconds / seconds,
            seconds_left=(steps - result.num_steps) * seconds,
        )

    def long(self) -> str:
        """Return all figures."""
        return (
            f"step {self._steps()}  loss {self.loss:.3f}  val {self.validation_loss:.3f}  "
            f"{self.tokens_per_second:,.0f} tokens/s  optimizer {self.optimizer_share:.0%}  {self._left()}"
        )

    def medium(self) -> str:
        """Return the figures without the validation loss, which changes rarely."""
        return (
            f"{self._steps()}  loss {self.loss:.3f}  {self.tokens_per_second:,.0f} tok/s  "
            f"optimizer {self.optimizer_share:.0%}  {self._left()}"
        )

    def short(self) -> str:
        """Return the same figures as `medium` in fewer characters."""
        return (
            f"{self._steps()}  loss {self.loss:.3f}  {format_count(round(self.tokens_per_second), 3)} tok/s  "
            f"opt {self.optimizer_share:.0%}  {self._left()}"
        )

    def _steps(self) -> str:
        return f"{self.step:>{len(str(self.steps))}}/{self.steps}"

    def _left(self) -> str:
        for unit, seconds in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
            if self.seconds_left >= 2 * seconds:
                return f"{self.seconds_left / seconds:.3g} {unit} left"
        return f"{self.seconds_left:.0f} s left"


def fit(now: Progress, width: int) -> tuple[str, int, str]:
    """Choose what a line of `width` columns shows. The figures come first, then a bar, then the name of the run.

    Returns:
        The name or "", the length of the bar or 0, and the figures. Two spaces separate the three.
    """
    for name, figures in ((now.name, now.long()), (now.name, now.medium()), (now.name, now.short()), ("", now.short())):
        room = width - len(figures) - 2 - (len(name) + 2 if name else 0)
        if room >= _SHORTEST_BAR:
            return name, min(room, _LONGEST_BAR), figures
    return "", 0, now.short()[:width]


@contextmanager
def show_progress(
    name: str, steps: int, tokens_per_step: int, plain_every: int
) -> Iterator[Callable[[RunResult], None]]:
    """Yield a function that shows the result so far; call it after every log update."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield _plain_lines(steps, tokens_per_step, plain_every)
        return
    from rich.live import Live

    line = _LiveLine(name)
    with Live(line):

        def show(result: RunResult) -> None:
            line.now = Progress.of(result, steps, tokens_per_step)

        yield show


class _LiveLine:
    """A line that Rich draws again and again, and that fits the terminal of the moment."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.now: Progress | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        if self.now is None:
            yield Text(f"{self._name}  waiting for the first step", no_wrap=True, overflow="ellipsis")
            return
        name, length, figures = fit(self.now, options.max_width)
        full, empty = ("=", "-") if options.ascii_only else ("━", "─")  # a reader without colours sees a bar too
        done = round(length * self.now.step / self.now.steps)
        bar = Text.assemble((full * done, "green"), (empty * (length - done), "dim"))
        parts = [part for part in (Text(name, "bold"), bar, Text(figures)) if part]
        yield Text("  ", no_wrap=True, overflow="crop").join(parts)


def _plain_lines(steps: int, tokens_per_step: int, every: int) -> Callable[[RunResult], None]:
    shown = 0

    def show(result: RunResult) -> None:
        nonlocal shown
        step = result.num_steps
        if step // every == shown // every and step != steps:
            return
        shown = step
        line = f"{result.name:<6} {Progress.of(result, steps, tokens_per_step).long()}"
        print(line, flush=True)  # else a pipe would buffer the lines until the end

    return show
