"""Report runs: a table and an image that compare several, and the history of losses of one.

The package `matplotlib` is optional, so it is imported where it is used.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from muon_fsdp.text import plain_table
from muon_fsdp.training.results import RunResult
from muon_fsdp.training.terminal import print_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS_PLOT = "loss.png"
# Colours that colour-blind readers can tell apart too.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_MOST_ROWS = 21  # of a history: a run validates 20 times by default, and once before its first step


def summarize(result: RunResult, baseline: RunResult) -> dict[str, float | int | None]:
    """Return the figures of one run; `steps_to_baseline` is when it reached the baseline's final validation loss."""
    reached = result.first_reaching(baseline.final_validation_loss)
    timed = bool(result.timed)
    return {
        "final_train_loss": result.final_train_loss,
        "final_validation_loss": result.final_validation_loss,
        "best_validation_loss": result.best_validation_loss,
        "steps_to_baseline": None if reached is None else reached.step,
        "seconds_to_baseline": result.training_seconds(reached.step) if reached is not None and timed else None,
        "milliseconds_per_step": result.milliseconds_per_step if timed else None,
        "optimizer_share": result.optimizer_share if timed else None,
    }


# ------------------------------------------------------------------------------------------------------- several runs


def print_comparison(results: Sequence[RunResult], baseline: RunResult) -> None:
    """Print a table with one row per run, and below it how each run compares with the baseline."""
    goal = f"steps to {baseline.final_validation_loss:.3f}"
    header = ("run", "steps", "train", "val", "best val", goal, "ms/step", "opt")
    rows = []
    for result in results:
        losses = (result.final_train_loss, result.final_validation_loss, result.best_validation_loss)
        reached = result.first_reaching(baseline.final_validation_loss)
        steps = "never" if reached is None else str(reached.step)
        speed = ("-", "-")
        if result.timed:
            speed = (f"{result.milliseconds_per_step:.0f}", f"{result.optimizer_share:.0%}")
        rows.append((result.name, str(result.num_steps), *(f"{loss:.3f}" for loss in losses), steps, *speed))
    best = min(range(len(results)), key=lambda number: results[number].final_validation_loss)
    title = f"Losses, compared with {baseline.name}; opt is the optimizer's share of the time"
    print_table(title, header, rows, marked={best: "green"})
    for result in results:
        if result is not baseline:
            print(_comparison(result, baseline))


def _comparison(result: RunResult, baseline: RunResult) -> str:
    figures, goal = summarize(result, baseline), baseline.evaluations[-1]
    steps, seconds = figures["steps_to_baseline"], figures["seconds_to_baseline"]
    loss = f"{baseline.name}'s final validation loss of {goal.loss:.3f}"
    if steps is None:
        return f"{result.name} did not reach {loss}."
    text = f"{result.name} reached {loss} after {steps} of {goal.step} steps"
    if seconds is None or not baseline.timed:
        return f"{text}."
    return f"{text}, in {seconds:.1f} s of training instead of {baseline.training_seconds(goal.step):.1f} s."


def write_plot(path: Path, title: str, results: Sequence[RunResult], baseline: RunResult) -> None:
    """Plot the validation loss over steps and over seconds of training, as a PNG."""
    with _figure(path, (11, 4.8)) as figure:
        by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
        for index, (result, color) in enumerate(zip(results, cycle(_COLORS), strict=False)):
            # The loss before training would squeeze all others into the lower third.
            trained = result.evaluations[1:] or result.evaluations
            steps = [evaluation.step for evaluation in trained]
            losses = [evaluation.loss for evaluation in trained]
            label = f"{result.name}: {result.final_validation_loss:.3f}"
            # Each curve is thinner than the one before it, so that curves on top of each other are all visible.
            width = max(1.0, 4.5 - 1.4 * index)
            style: dict[str, Any] = {"color": color, "marker": "o", "markersize": width + 1.5, "linewidth": width}
            by_steps.plot(steps, losses, label=label, **style)
            if result.timed:
                by_seconds.plot([result.training_seconds(step) for step in steps], losses, label=label, **style)
        for axes, quantity in ((by_steps, "step"), (by_seconds, "seconds of training, at the median time per step")):
            axes.axhline(baseline.final_validation_loss, color="grey", linestyle="--", linewidth=1, zorder=0)
            axes.set_xlabel(quantity)
            axes.grid(alpha=0.3)
            axes.legend(title="final validation loss")
        by_steps.set_ylabel("validation loss (nats per token)")
        by_steps.set_title("by steps")
        by_seconds.set_title("by time")
        figure.suptitle(title)


# ------------------------------------------------------------------------------------------------------------ one run


def history(result: RunResult) -> str:
    """Return a table of the validation losses of a run, each with the mean training loss since the one before."""
    evaluations, last = result.evaluations, len(result.evaluations) - 1
    shown = list(range(len(evaluations)))
    if len(evaluations) > _MOST_ROWS:  # then some at even distances, with the first, the last and the lowest
        lowest = min(shown, key=lambda number: evaluations[number].loss)
        shown = sorted({round(index * last / (_MOST_ROWS - 1)) for index in range(_MOST_ROWS)} | {lowest})
    rows = []
    for number in shown:
        evaluation, before = evaluations[number], evaluations[number - 1].step if number else 0
        losses = [step.loss for step in result.steps if before < step.step <= evaluation.step]
        mark = "lowest" if evaluation.loss == result.best_validation_loss else ""
        train_loss = f"{mean(losses):.4f}" if losses else ""
        rows.append((str(evaluation.step), train_loss, f"{evaluation.loss:.4f}", mark))
    left_out = len(evaluations) - len(rows)
    more = f"\n({left_out} more are in metrics.jsonl)" if left_out else ""
    return plain_table(("step", "train loss", "val loss", ""), rows, left=0) + more


def write_loss_plot(folder: Path, result: RunResult) -> Path | None:
    """Plot the losses of a run over its steps as `loss.png`; return its path, or None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    with _figure(folder / LOSS_PLOT, (7.2, 4.4)) as figure:
        axes = figure.subplots()
        steps = [step.step for step in result.steps]
        axes.plot(steps, result.train_losses, color=_COLORS[0], linewidth=0.8, alpha=0.6, label="training")
        points = [(evaluation.step, evaluation.loss) for evaluation in result.evaluations]
        label = f"validation: {result.final_validation_loss:.3f} at the end"
        axes.plot(*zip(*points, strict=True), color=_COLORS[1], marker="o", markersize=4, label=label)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.set_title(result.name)
        axes.grid(alpha=0.3)
        axes.legend()
    return folder / LOSS_PLOT


@contextmanager
def _figure(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield an empty figure, and write it as a PNG of that name afterwards."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it reports that it looks for fonts
    from matplotlib.figure import Figure  # not pyplot, which needs a window system and has global state

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    yield figure
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name may have letters that the font does not
        figure.savefig(path, format="png")
