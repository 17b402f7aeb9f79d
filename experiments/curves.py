"""Run the training program several times to compare optimizers, numbers of ranks, or memory.

python -m experiments.curves optimizers --model small --steps 300 --name curves_small
python -m experiments.curves ranks --model small --steps 60 --name curves_ranks -- --device cpu
python -m experiments.curves memory --model gpt2 --name memory_gpt2

The loss curves are written as CSV and as SVG for light and dark pages, the memory as JSON. Flags after `--` are passed
to the training program in every run.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.demo import largest_distance
from experiments.plots import Curve, draw_curves
from muon_fsdp.text import format_bytes
from muon_fsdp.training.config import default_options, parse
from muon_fsdp.training.plugins import find_rule
from muon_fsdp.training.results import METRICS_FILE, RunResult, read_result

RATES = {"muon": ("0.01", "0.02", "0.04"), "adamw": ("0.001", "0.002", "0.004"), "sso": ("0.01", "0.02")}
RATES["normuon"] = RATES["muon"]


@dataclass(frozen=True)
class Finished:
    """A finished run of the training program, with the last line of its metrics file."""

    label: str
    optimizer: str
    result: RunResult
    end: dict[str, float]


def run(label: str, optimizer: str, flags: Sequence[str], folder: Path) -> Finished | None:
    """Run the training program in a new process.

    Returns:
        The finished run, or None if it failed, for example because the learning rate was too large.
    """
    output = folder / label.replace(" ", "-").replace(",", "").replace("/", "-")
    command = [sys.executable, "-m", "muon_fsdp.training", "--output", str(output), "--optimizer", optimizer]
    command += ["--name", label, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{label}: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return None
    result = read_result(output)
    end = json.loads((output / METRICS_FILE).read_text().splitlines()[-1])
    print(
        f"{label:24} validation loss {result.final_validation_loss:.4f}  "
        f"{result.milliseconds_per_step:7.1f} ms a step  optimizer {result.optimizer_share:6.1%}",
        flush=True,
    )
    return Finished(label, optimizer, result, end)


def write_csv(path: Path, runs: Sequence[Finished]) -> None:
    """Write the training loss of every tenth step and all validation losses."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["run", "step", "train_loss", "validation_loss"])
        for finished in runs:
            validation = {evaluation.step: evaluation.loss for evaluation in finished.result.evaluations}
            losses = [None, *finished.result.train_losses]
            for step, loss in enumerate(losses):
                if step in validation or step % 10 == 0:
                    shown = "" if loss is None else f"{loss:.6f}"
                    held_out = f"{validation[step]:.6f}" if step in validation else ""
                    writer.writerow([finished.label, step, shown, held_out])


def read_curves(path: Path) -> dict[str, Curve]:
    """Read the validation losses that `write_csv` wrote, without those before the first step.

    Returns:
        The curve of each run. Runs have one seed.
    """
    points: dict[str, tuple[list[float], list[float]]] = {}
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
            if row["validation_loss"] and row["step"] != "0":
                steps, losses = points.setdefault(row["run"], ([], []))
                steps.append(int(row["step"]))
                losses.append(float(row["validation_loss"]))
    return {label: (label.split(" ")[0], steps, losses, losses, losses) for label, (steps, losses) in points.items()}


def best_of(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the run of each optimizer with the lowest final validation loss."""
    best: dict[str, str] = {}
    for label, (optimizer, _, losses, *_) in curves.items():
        if optimizer not in best or losses[-1] < curves[best[optimizer]][2][-1]:
            best[optimizer] = label
    return {label: curves[label] for label in best.values()}


def write_plot(path: Path, title: str, is_best: bool) -> None:
    """Plot the validation losses of a CSV file of `write_csv`.

    Args:
        path: the CSV file. The plot gets the same name.
        title: the title of the plot.
        is_best: whether to show only the best run of each optimizer, and mark AdamW's final loss.
    """
    curves = read_curves(path)
    shown = best_of(curves) if is_best else curves
    adamw = [curve[2][-1] for curve in shown.values() if curve[0] == "AdamW"]
    target = adamw[0] if is_best and len(shown) > 1 and adamw else None
    labelled = {f"{label}: {curve[2][-1]:.3f}": curve for label, curve in shown.items()}
    marked = next((label for label, curve in labelled.items() if curve[0] == "Muon"), None)
    draw_curves(
        path.with_suffix(""), labelled, title=title, target=target, target_label="AdamW's final loss", marked=marked
    )


def compare_optimizers(args: argparse.Namespace, shared: list[str], folder: Path) -> Iterator[Finished]:
    """Train with every optimizer at several learning rates."""
    for optimizer in args.optimizers.split(","):
        rule = find_rule(optimizer)
        usual = RATES.get(optimizer, (str(default_options(rule)["lr"]),))
        for rate in args.rates.get(optimizer, usual):
            lr, _, rest_lr = rate.partition("/")
            flags = ["--lr", lr, *(["--rest-lr", rest_lr] if rest_lr else [])]
            found = run(f"{rule.display_name} lr {rate}", optimizer, [*shared, *flags], folder)
            if found:
                yield found


def compare_ranks(args: argparse.Namespace, shared: list[str], folder: Path) -> Iterator[Finished]:
    """Train on one, two and four ranks, and print how far the losses differ."""
    first = None
    for ranks in (1, 2, 4):
        more = [] if ranks == 1 else ["--processes", str(ranks), "--fsdp"]
        found = run(f"Muon {ranks} rank(s)", "muon", [*shared, *more], folder)
        if not found:
            continue
        first = first or found
        distance = largest_distance(found.result, first.result)
        print(
            f"{found.label}: training losses differ from those of the first run by at most {distance:.2g}", flush=True
        )
        yield found


def compare_memory(args: argparse.Namespace, shared: list[str], folder: Path) -> Iterator[Finished]:
    """Train with each optimizer, and print the bytes of its state and the peak memory."""
    for name in ("adamw", "muon", "sso"):
        if found := run(find_rule(name).display_name, name, shared, folder):
            peak = found.end.get("peak_memory_bytes")
            state = format_bytes(found.end["optimizer_state_bytes_per_rank"])
            print(f"{found.label:8} state {state}{'' if peak is None else f', peak {format_bytes(peak)}'}", flush=True)
            yield found


QUESTIONS = {"optimizers": compare_optimizers, "ranks": compare_ranks, "memory": compare_memory}


def _rates(text: str) -> dict[str, tuple[str, ...]]:
    """Parse learning rates such as "muon=0.01,0.02:adamw=0.001/0.002".

    Returns:
        For each optimizer its learning rates: for matrices, or for matrices and, after "/", for all other parameters.
    """
    return {name: tuple(rates.split(",")) for name, rates in (part.split("=") for part in text.split(":"))}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what a question needs and write the results after each run.

    Returns:
        The exit status: 1 if every run failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=list(QUESTIONS), help="what to compare")
    parser.add_argument("--model", default="small", help="preset of the training program")
    parser.add_argument("--steps", type=int, default=100, help="training steps of each run")
    parser.add_argument("--optimizers", default="adamw,muon", help="optimizers to compare, separated by commas")
    parser.add_argument(
        "--rates",
        type=_rates,
        default={},
        help="learning rates to try, such as muon=0.01,0.02:adamw=0.001/0.002; the number after / is for parameters "
        "that are not matrices",
    )
    parser.add_argument("--name", required=True, help="name of the output files, without suffix")
    parser.add_argument("--output", type=Path, default=Path("docs/experiments"), help="folder of the output files")
    arguments = list(sys.argv[1:] if argv is None else argv)
    more = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    args = parser.parse_args(arguments[: len(arguments) - len(more) - 1] if "--" in arguments else arguments)
    parse(more, "muon-fsdp train")  # imports the plugins, and reports a mistake before the first run
    shared = ["--model", args.model, "--steps", str(args.steps), *more]
    args.output.mkdir(parents=True, exist_ok=True)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for finished in QUESTIONS[args.question](args, shared, Path(folder)):
            runs.append(finished)  # results are written after each run, so that they survive an interruption
            if args.question == "memory":
                facts = {finished.label: finished.end for finished in runs}
                (args.output / f"{args.name}.json").write_text(json.dumps(facts, indent=1) + "\n")
                continue
            write_csv(args.output / f"{args.name}.csv", runs)
            title = f"{args.model}, {args.steps} steps"
            write_plot(args.output / f"{args.name}.csv", title, is_best=args.question == "optimizers")
    return 0 if runs else 1


if __name__ == "__main__":
    raise SystemExit(main())
