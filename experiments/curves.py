"""Curves of the training program, a command for each question; CSV and a picture of the answer.

python -m experiments.curves optimizers --model small --steps 300 --name curves_small
python -m experiments.curves ranks --model small --steps 60 --name curves_ranks -- --device cpu
python -m experiments.curves memory --model gpt2 --name memory_gpt2

What follows `--` goes to the training program, for every run.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from muon_fsdp.training.plugins import find_rule, load_plugins, plugins_in
from muon_fsdp.training.report import largest_distance
from muon_fsdp.training.results import METRICS_FILE, RunResult, read_result
from muon_fsdp.training.rule_flags import default_options

RATES = {"muon": ("0.01", "0.02", "0.04"), "adamw": ("0.001", "0.002", "0.004"), "sso": ("0.01", "0.02")}
RATES["normuon"] = RATES["muon"]


@dataclass(frozen=True)
class Finished:
    """A run of the program, and the last line of its journal."""

    label: str
    optimizer: str
    result: RunResult
    end: dict[str, float]


def run(label: str, optimizer: str, flags: Sequence[str], folder: Path) -> Finished | None:
    """The training program in a process of its own; None if it failed, which a rate that is too large may."""
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


def best_of(runs: Sequence[Finished]) -> list[Finished]:
    """The best run of each optimizer."""
    optimizers = dict.fromkeys(finished.optimizer for finished in runs)
    return [
        min((r for r in runs if r.optimizer == name), key=lambda r: r.result.final_validation_loss)
        for name in optimizers
    ]


def write_csv(path: Path, runs: Sequence[Finished]) -> None:
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


def write_plot(path: Path, title: str, runs: Sequence[Finished]) -> None:
    """By steps, and by time where optimizers are compared: ranks that share cores say nothing about it."""
    from matplotlib.figure import Figure

    is_timed = len({finished.optimizer for finished in runs}) > 1
    figure = Figure(figsize=(11 if is_timed else 7, 4.8), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2 if is_timed else 1, sharey=True, squeeze=False)[0]
    for index, finished in enumerate(runs):
        points = finished.result.evaluations[1:]
        label = f"{finished.label}: {finished.result.final_validation_loss:.3f}"
        width = max(1.0, 4.0 - 1.2 * index)
        losses = [point.loss for point in points]
        steps = [point.step for point in points]
        places = (steps, [finished.result.training_seconds(step) for step in steps])
        for axes, at in zip(panels, places, strict=False):
            axes.plot(at, losses, label=label, linewidth=width)
    names = ("step", "seconds of training, at the median time of a step")
    for axes, name in zip(panels, names, strict=False):
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[0].legend(title="final validation loss")
    figure.suptitle(title)
    figure.savefig(path)


def compare_optimizers(args: argparse.Namespace, shared: list[str], folder: Path) -> Iterator[Finished]:
    """Every optimizer at several rates; the best of each is what is shown."""
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
    first = None
    for ranks in (1, 2, 4):
        more = [] if ranks == 1 else ["--processes", str(ranks), "--fsdp"]
        found = run(f"Muon {ranks} rank(s)", "muon", [*shared, *more], folder)
        if not found:
            continue
        first = first or found
        distance = largest_distance(found.result, first.result)
        print(f"{found.label}: training losses differ from the first's by at most {distance:.2g}", flush=True)
        yield found


def compare_memory(args: argparse.Namespace, shared: list[str], folder: Path) -> Iterator[Finished]:
    for name in ("adamw", "muon", "sso"):
        if found := run(find_rule(name).display_name, name, shared, folder):
            peak = found.end.get("peak_memory_bytes")
            state = found.end["optimizer_state_bytes_per_rank"] / 1e6
            print(
                f"{found.label:8} state {state:.1f} MB{'' if peak is None else f', peak {peak / 1e6:.1f} MB'}",
                flush=True,
            )
            yield found


QUESTIONS = {"optimizers": compare_optimizers, "ranks": compare_ranks, "memory": compare_memory}


def _rates(text: str) -> dict[str, tuple[str, ...]]:
    """Of the hidden matrices, or of these and of the rest: muon=0.01,0.02:adamw=0.001/0.002"""
    return {name: tuple(rates.split(",")) for name, rates in (part.split("=") for part in text.split(":"))}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=list(QUESTIONS))
    parser.add_argument("--model", default="small")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--optimizers", default="adamw,muon")
    parser.add_argument(
        "--rates", type=_rates, default={}, help="such as muon=0.01,0.02:adamw=0.001/0.002, lr or lr/rest lr"
    )
    parser.add_argument("--name", required=True, help="of the files")
    parser.add_argument("--output", type=Path, default=Path("docs/experiments"))
    arguments = list(sys.argv[1:] if argv is None else argv)
    more = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    args = parser.parse_args(arguments[: len(arguments) - len(more) - 1] if "--" in arguments else arguments)
    load_plugins(plugins_in(more, "muon-fsdp train"))
    shared = ["--model", args.model, "--steps", str(args.steps), *more]
    args.output.mkdir(parents=True, exist_ok=True)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for finished in QUESTIONS[args.question](args, shared, Path(folder)):
            runs.append(finished)  # written after each run: what was measured stays if a later one is interrupted
            if args.question == "memory":
                facts = {finished.label: finished.end for finished in runs}
                (args.output / f"{args.name}.json").write_text(json.dumps(facts, indent=1) + "\n")
                continue
            write_csv(args.output / f"{args.name}.csv", runs)
            shown = best_of(runs) if args.question == "optimizers" else runs
            write_plot(args.output / f"{args.name}.png", f"{args.model}, {args.steps} steps", shown)
    return 0 if runs else 1


if __name__ == "__main__":
    raise SystemExit(main())
