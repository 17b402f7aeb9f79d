"""Train a small GPT with Muon on one process and on two, and with AdamW; write a table, a plot and the metrics."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from muon_fsdp.training.arguments import OneLineParser
from muon_fsdp.training.config import parse
from muon_fsdp.training.data import DataError, open_corpus
from muon_fsdp.training.program import main as train_main
from muon_fsdp.training.report import print_comparison, summarize, write_plot
from muon_fsdp.training.results import RunResult, read_result
from muon_fsdp.training.terminal import print_error

PROG = "python -m experiments.demo"
DEFAULT_STEPS = 200
BATCH_SIZE = 16
EVALUATIONS_PER_RUN = 20

# The runs differ only in the hidden matrices: AdamW updates embedding, head and vectors with the same lr in all.
# Validation loss after 300 steps (seed 0, Python 3.11), for the learning rates that were tried, when the model had five
# heads of attention instead of four:
#   Muon   lr 0.02: 1.522   0.04: 1.477   0.08: 1.501                  with a rest lr of 0.016: 0.04: 1.497
#   AdamW  lr 1e-3: 1.756   2e-3: 1.689   4e-3: 1.637   8e-3: 1.665    with a rest lr of 0.016: 4e-3: 1.657
# AdamW with lr 1e-3 was also tried with weight decay 0.1 on embedding and head. With seed 1 the chosen learning rates
# give 1.492 and 1.660. One learning rate for all parameters is much worse for AdamW, 1.869 at best (8e-3; we tried 1e-3
# to 16e-3 with weight decay 0.1 on all matrices), so the baseline has two of them, as Muon does.
REST_LR = "0.032"
MUON = ("--optimizer", "muon", "--lr", "0.04", "--weight-decay", "0.01")
ADAMW = ("--optimizer", "adamw", "--lr", "0.004", "--weight-decay", "0.1")  # lr * weight_decay is the same as Muon's
BASELINE, ALONE, TOGETHER = "AdamW", "Muon", "Muon, 2 ranks"
RUNS: dict[str, tuple[str, ...]] = {
    TOGETHER: (*MUON, "--processes", "2", "--fsdp"),
    ALONE: MUON,
    BASELINE: ADAMW,
}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--model", default="demo", help="model size (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)")
    parser.add_argument(
        "--data", type=Path, help="text file or folder of text files (default: Python's standard library)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder for the results (default: %(default)s)"
    )
    return parser.parse_args(argv)


def _flags(name: str, arguments: argparse.Namespace) -> list[str]:
    """Return the flags of a run of the training program; all runs have the same initial weights and batches."""
    flags = ["--model", arguments.model, "--steps", str(arguments.steps), "--seed", str(arguments.seed)]
    flags += ["--batch-size", str(BATCH_SIZE), "--rest-lr", REST_LR, "--device", "cpu", "--precision", "float32"]
    flags += ["--eval-every", str(max(1, arguments.steps // EVALUATIONS_PER_RUN)), "--name", name]
    flags += ["--output", str(_folder(arguments, name)), *RUNS[name]]
    return flags if arguments.data is None else [*flags, "--data", str(arguments.data)]


def _folder(arguments: argparse.Namespace, name: str) -> Path:
    output: Path = arguments.output
    return output / name.lower().replace(", ", "-").replace(" ", "-")


def _report(arguments: argparse.Namespace) -> None:
    results = {name: read_result(_folder(arguments, name)) for name in (ALONE, TOGETHER, BASELINE)}
    baseline, runs = results[BASELINE], list(results.values())
    print()
    print_comparison(runs, baseline)
    distance = largest_distance(results[ALONE], results[TOGETHER])
    print(f"The training losses of Muon on one process and on two differ by at most {distance:.1g}.")
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    }
    settings = {"model": arguments.model, "seed": arguments.seed, "largest_distance": distance}
    write_metrics(arguments.output / "metrics.json", settings | {"environment": environment}, runs, baseline)
    source = "Python's standard library" if arguments.data is None else str(arguments.data)
    write_plot(arguments.output / "loss.png", f"GPT ({arguments.model}) on {source}", runs, baseline)
    for file in ("loss.png", "metrics.json"):
        print(f"wrote {arguments.output / file}")


def largest_distance(one: RunResult, other: RunResult) -> float:
    """Return the largest difference between the training losses of two runs at the same step."""
    return max(abs(a - b) for a, b in zip(one.train_losses, other.train_losses, strict=True))


def write_metrics(path: Path, settings: Mapping[str, Any], results: Sequence[RunResult], baseline: RunResult) -> None:
    """Write the figures of the table and the complete loss curves as JSON."""
    runs = {
        result.name: summarize(result, baseline)
        | {
            "groups": [asdict(group) for group in result.groups],
            "train_losses": result.train_losses,
            "step_seconds": [step.seconds for step in result.steps],
            "evaluations": [asdict(evaluation) for evaluation in result.evaluations],
        }
        for result in results
    }
    document = {"settings": dict(settings), "baseline": baseline.name, "runs": runs}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        The exit code: 0 on success, 1 if training failed, 2 for a mistake in the arguments, 130 after Ctrl-C.
    """
    arguments = _parse(argv)
    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print_error(f'the demo needs {" and ".join(missing)}; install with: pip install "muon_fsdp[cli]"')
        return 2
    config, _ = parse(_flags(ALONE, arguments), PROG)  # before training, so that a mistake costs no time
    try:
        open_corpus(arguments.data, config.model_config(None).sequence_length)
        arguments.output.mkdir(parents=True, exist_ok=True)
    except (DataError, OSError) as error:
        print_error(str(error))
        return 2
    for name in RUNS:
        flags = _flags(name, arguments)
        shutil.rmtree(_folder(arguments, name), ignore_errors=True)  # a checkpoint of an earlier demo would stop it
        print(f"\n$ muon-fsdp train {shlex.join(flags)}", flush=True)
        if code := train_main(flags):
            return code
    _report(arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
