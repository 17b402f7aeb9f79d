"""Find AdamW's best learning rate on the demo preset, and the ratio of AdamW's learning rate to that of matrices.

python -m experiments.default_lr                            # the whole search: 70 runs, about 20 minutes on one core
python -m experiments.default_lr --only torch.optim.AdamW   # a part of it
python -m experiments.default_lr --report                   # print the table of the finished runs

A contestant is the line of code that a user writes. Every run warms up over a tenth of its steps and then follows a
cosine, all groups alike, without clipping. The file gets a row for each run, and runs that it has are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import mean

import torch
from torch import nn

import muon_fsdp
from muon_fsdp.text import plain_table
from muon_fsdp.training.data import open_corpus, training_batches, validation_batches
from muon_fsdp.training.loop import evaluate, make_schedule
from muon_fsdp.training.model import GPT, preset
from muon_fsdp.training.parallel import World

FILE = Path("docs/experiments/default_lr.csv")
ADAMW_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
RATIOS = (0.015, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # the first is 3e-4 at lr=0.02
FEW_RATIOS = (0.05, 0.15, 0.5)


@dataclass(frozen=True)
class Model:
    """A preset, with its own or tied embeddings, and the length of a run."""

    preset: str
    tied: bool
    steps: int
    batch_size: int

    @property
    def name(self) -> str:
        """Return how tables name it."""
        return f"{self.preset}, tied" if self.tied else self.preset


MODELS = [
    Model("demo", tied=False, steps=100, batch_size=8),
    Model("demo", tied=True, steps=100, batch_size=8),
]


@dataclass(frozen=True)
class Run:
    """One run: a model, the line that makes its optimizer, and a seed."""

    model: str
    line: str
    seed: int
    loss: float = math.nan  # of validation, at the end; infinite if it diverged

    @property
    def key(self) -> tuple[str, str, int]:
        """Return what tells it from other runs."""
        return self.model, self.line, self.seed


def lines() -> list[str]:
    """Return the lines of code that are compared."""
    found = [f"torch.optim.AdamW(model.parameters(), lr={lr:g})" for lr in ADAMW_RATES]
    for name in ("FSDPMuonOptimizer", "MuonOptimizer"):
        found += [f"{name}(model, lr=0.02, adamw_lr={0.02 * ratio:g})" for ratio in RATIOS]
    sphere = "SpectralSphereOptimizer(model, lr=0.02, lambda_mode='projection'"
    for ratio in FEW_RATIOS:
        found += [f"MuonOptimizer(model, lr={lr}, adamw_lr={lr * ratio:g})" for lr in (0.01, 0.04)]
        found.append(f"MuonOptimizer(model, lr=0.02, scale='spectral', adamw_lr={0.02 * ratio:g})")
        found.append(f"{sphere}, adamw_lr={0.02 * ratio:g})")
    scale = "scale='match_rms_adamw'"
    found += [f"MuonOptimizer(model, lr=0.003, {scale}, adamw_lr={0.003 * ratio:g})" for ratio in (0.3, 1, 3)]
    return found


def make_optimizer(line: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of a line such as `MuonOptimizer(model, lr=0.02)`."""
    names = {name: getattr(muon_fsdp, name) for name in muon_fsdp.__all__}
    optimizer: torch.optim.Optimizer = eval(line, {"torch": torch, "model": model, **names})
    return optimizer


def train(model: Model, line: str, seed: int) -> float:
    """Train a preset on the CPU with an optimizer, and return its last validation loss; infinity if it diverged."""
    torch.manual_seed(seed)
    config = replace(preset(model.preset), tie_embeddings=model.tied)
    network = GPT(config)
    corpus = open_corpus(None, config.sequence_length, byte_budget=8_000_000)
    generator = torch.Generator().manual_seed(seed)
    batches = training_batches(corpus.train, model.batch_size, config.sequence_length, generator)
    optimizer = make_optimizer(line, network)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, make_schedule("cosine", model.steps))
    for _, (inputs, targets) in zip(range(model.steps), batches, strict=False):
        _, loss = network(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    held_out = validation_batches(corpus.validation, 32, config.sequence_length, 64)
    result = evaluate(network, held_out, World(torch.device("cpu"), torch.float32))
    return result if math.isfinite(result) else math.inf


def _train_in_process(task: tuple[Model, str, int]) -> Run:
    torch.set_num_threads(1)  # the same result however many cores there are
    model, line, seed = task
    return Run(model.name, line, seed, train(model, line, seed))


def read_runs(file: Path) -> list[Run]:
    """Return the runs of a file, or none if it does not exist."""
    if not file.exists():
        return []
    with file.open(newline="") as opened:
        return [Run(row["model"], row["line"], int(row["seed"]), float(row["loss"])) for row in csv.DictReader(opened)]


def write_runs(file: Path, runs: Iterable[Run]) -> None:
    """Write the runs in a fixed order."""
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, [field.name for field in fields(Run)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(run) | {"loss": f"{run.loss:.4f}"} for run in sorted(runs, key=lambda run: run.key))


def report(runs: Sequence[Run]) -> str:
    """Return a table with the mean loss of each line on each model, over the seeds."""
    losses: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        losses[run.line, run.model].append(run.loss)
    models = [model.name for model in MODELS]
    order = dict.fromkeys([*lines(), *(run.line for run in runs)])

    def cell(line: str, model: str) -> str:
        found = losses[line, model]
        return f"{mean(found):.3f} ({len(found)})" if found else ""

    shown = [line for line in order if any(losses[line, model] for model in models)]
    header = ("line (mean loss, number of seeds)", *models)
    return plain_table(header, [(line, *(cell(line, model) for model in models)) for line in shown])


def _tasks(arguments: argparse.Namespace, known: Iterable[Run]) -> Iterator[tuple[Model, str, int]]:
    done = {run.key for run in known}
    for seed in range(arguments.seeds):
        for model in MODELS:
            for line in arguments.line or lines():
                if arguments.only in line and (model.name, line, seed) not in done:
                    yield model, line, seed


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only lines that contain this text")
    parser.add_argument("--line", action="append", help="run this line of code instead of the search's; repeatable")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of each run (default: %(default)s)")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time (default: %(default)s)")
    parser.add_argument("--file", type=Path, default=FILE, help="where the results are (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="print the table, and run nothing")
    arguments = parser.parse_args(argv)
    runs = read_runs(arguments.file)
    tasks = [] if arguments.report else list(_tasks(arguments, runs))
    if tasks:
        with multiprocessing.get_context("spawn").Pool(arguments.parallel) as pool:
            for number, run in enumerate(pool.imap_unordered(_train_in_process, tasks), start=1):
                runs.append(run)
                write_runs(arguments.file, runs)
                print(f"{number}/{len(tasks)}  {run.model}, seed {run.seed}, {run.line}: {run.loss:.3f}", flush=True)
    print(report(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
