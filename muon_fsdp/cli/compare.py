"""`muon-fsdp compare`: show the losses and times of several runs as a table and as a plot."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from muon_fsdp.cli.output import print_json
from muon_fsdp.training.arguments import ConfigError, fail
from muon_fsdp.training.report import print_comparison, summarize, write_plot
from muon_fsdp.training.results import METRICS_FILE, RunResult, read_result, read_start

# Settings that change what a loss means, by their place in the first line of metrics.jsonl, with their flags.
_SAME = {
    ("config", "data"): "--data",
    ("config", "eval_windows"): "--eval-windows",
    ("model", "sequence_length"): "--sequence-length",
    ("model", "vocab_size"): "--vocab-size",
}


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs; the first is the baseline.")
    ],
    plot: Annotated[Path, typer.Option(metavar="PATH", help="PNG file for the loss curves.")] = Path("compare.png"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else; write no plot.")] = False,
) -> None:
    """Compare the losses and times of runs of `muon-fsdp train`.

    The table shows after how many steps each run reached the final validation loss of the first run. A run may still
    be training: its figures are then those of its last validation.
    """
    if len(runs) < 2:
        fail("pass the folders of at least two runs; the first is the baseline")
    if not json and not plot.absolute().parent.is_dir():
        fail(f"--plot: no such folder: {plot.absolute().parent}; create it first")
    results = [_read(folder) for folder in runs]
    counts = Counter(result.name for result in results)
    results = [
        result if counts[result.name] == 1 else replace(result, name=str(folder))
        for result, folder in zip(results, runs, strict=True)
    ]
    baseline = results[0]
    if json:
        figures = []
        for result, folder in zip(results, runs, strict=True):
            own = {"name": result.name, "folder": str(folder), "steps": result.num_steps}
            validations = [asdict(evaluation) for evaluation in result.evaluations]
            figures.append(own | summarize(result, baseline) | {"evaluations": validations})
        print_json(figures)
        return
    print_comparison(results, baseline)
    starts = [read_start(folder) for folder in runs]
    for (part, name), flag in _SAME.items():
        values = [start.get(part, {}).get(name) for start in starts]
        if any(value != values[0] for value in values):
            print(f"note: the runs differ in {flag}, so their losses may not be comparable")
    if importlib.util.find_spec("matplotlib") is None:
        print('note: the plot needs matplotlib; install it with: pip install "muon_fsdp[cli]"')
        return
    write_plot(plot, "", results, baseline)
    print(f"wrote {plot}")


def _read(folder: Path) -> RunResult:
    """Read the result of a run that has been validated after at least one step."""
    if not folder.is_dir():
        fail(f"no such folder: {folder}; pass the folders of runs, which `muon-fsdp train` calls --output")
    if not (folder / METRICS_FILE).exists():
        fail(f"no such file: {folder / METRICS_FILE}; pass the folders of runs, not the one above them")
    try:
        result = read_result(folder)
    except (ConfigError, OSError) as error:
        fail(str(error))
    if not result.train_losses or not result.evaluations:
        fail(f"{folder} has no step yet, or no validation: wait until the run has some")
    return result
