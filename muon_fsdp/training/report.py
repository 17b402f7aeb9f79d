"""Report a comparison of runs as a table, an image of the loss curves and a JSON file.

The packages `rich` and `matplotlib` are optional, so they are imported where they are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muon_fsdp.training.results import RunResult

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # colour-blind readers can tell these apart too


def summarize(result: RunResult, baseline: RunResult) -> dict[str, float | int | None]:
    """Return the figures of one run; `steps_to_baseline` is when it reached the baseline's final validation loss."""
    reached = result.first_reaching(baseline.final_validation_loss)
    return {
        "final_train_loss": result.final_train_loss,
        "final_validation_loss": result.final_validation_loss,
        "best_validation_loss": result.best_validation_loss,
        "steps_to_baseline": None if reached is None else reached.step,
        "seconds_to_baseline": None if reached is None else result.training_seconds(reached.step),
        "milliseconds_per_step": result.milliseconds_per_step,
        "optimizer_share": result.optimizer_share,
    }


def largest_distance(one: RunResult, other: RunResult) -> float:
    """Return the largest difference between the training losses of two runs at the same step."""
    return max(abs(a - b) for a, b in zip(one.train_losses, other.train_losses, strict=True))


def print_table(results: Sequence[RunResult], baseline: RunResult) -> None:
    """Print a table with one row per run, and below it how each run compares with the baseline."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("optimizer", no_wrap=True)
    # Line breaks by hand, so that the table fits into 80 columns, the width of a pipe.
    table.add_column("final\ntrain\nloss", justify="right")
    table.add_column("final\nval.\nloss", justify="right")
    table.add_column("best\nval.\nloss", justify="right")
    table.add_column(f"steps to\n{baseline.name}'s final\nval. loss", justify="right")
    table.add_column("ms per\nstep", justify="right")
    table.add_column("optimizer\nshare of\nthe step", justify="right")
    for result in results:
        reached = result.first_reaching(baseline.final_validation_loss)
        table.add_row(
            result.name,
            f"{result.final_train_loss:.3f}",
            f"{result.final_validation_loss:.3f}",
            f"{result.best_validation_loss:.3f}",
            "never" if reached is None else str(reached.step),
            f"{result.milliseconds_per_step:.0f}",
            f"{result.optimizer_share:.0%}",
        )
    Console().print(table)
    for result in results:
        if result is not baseline:
            print(_comparison(result, baseline))


def _comparison(result: RunResult, baseline: RunResult) -> str:
    reached, goal = result.first_reaching(baseline.final_validation_loss), baseline.evaluations[-1]
    if reached is None:
        return f"{result.name} did not reach {baseline.name}'s final validation loss of {goal.loss:.3f}."
    seconds, baseline_seconds = result.training_seconds(reached.step), baseline.training_seconds(goal.step)
    return (
        f"{result.name} reached {baseline.name}'s final validation loss of {goal.loss:.3f} after {reached.step} of "
        f"{goal.step} steps, in {seconds:.1f} s of training instead of {baseline_seconds:.1f} s."
    )


def write_metrics(path: Path, settings: Mapping[str, Any], results: Sequence[RunResult], baseline: RunResult) -> None:
    """Write the figures of the table and the complete loss curves as JSON."""
    runs = {
        result.name: summarize(result, baseline)
        | {
            "groups": [asdict(group) for group in result.groups],
            "train_losses": result.train_losses,
            "step_seconds": result.step_seconds,
            "evaluations": [asdict(evaluation) for evaluation in result.evaluations],
        }
        for result in results
    }
    document = {"settings": dict(settings), "baseline": baseline.name, "runs": runs}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_plot(path: Path, title: str, results: Sequence[RunResult], baseline: RunResult) -> None:
    """Plot the validation loss over steps and over seconds of training, as a PNG."""
    from matplotlib.figure import Figure  # not pyplot, which needs a window system and has global state

    figure = Figure(figsize=(11, 4.8), dpi=120, layout="constrained")
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    for index, (result, color) in enumerate(zip(results, _COLORS, strict=False)):
        trained = result.evaluations[1:]  # the loss before training would squeeze all others into the lower third
        steps = [evaluation.step for evaluation in trained]
        losses = [evaluation.loss for evaluation in trained]
        label = f"{result.name}: {result.final_validation_loss:.3f}"
        # Each curve is thinner than the one before it, so that curves on top of each other are all visible.
        width = max(1.0, 4.5 - 1.4 * index)
        style = {"color": color, "marker": "o", "markersize": width + 1.5, "linewidth": width}
        by_steps.plot(steps, losses, label=label, **style)
        by_seconds.plot([result.training_seconds(step) for step in steps], losses, label=label, **style)
    for axes, quantity in ((by_steps, "step"), (by_seconds, "seconds of training, at the median time per step")):
        axes.axhline(baseline.final_validation_loss, color="grey", linestyle="--", linewidth=1, zorder=0)
        axes.set_xlabel(quantity)
        axes.grid(alpha=0.3)
        axes.legend(title="final validation loss")
    by_steps.set_ylabel("validation loss (nats per byte)")
    by_steps.set_title("by steps")
    by_seconds.set_title("by time")
    figure.suptitle(title)
    figure.savefig(path)
