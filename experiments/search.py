"""Search the hyperparameters of AdamW, Muon and NorMuon, and compare the best settings over several seeds.

python -m experiments.search --model small --steps 600 --folder runs/search --name search_small -- --batch-size 32
python -m experiments.search --plan rules --model small --steps 600 --folder runs/rules --name rules_small -- FLAGS
python -m experiments.search --plan chains --model small --steps 600 --folder runs/chains --name chains_small -- FLAGS
python -m experiments.search --plan storage --model small --steps 600 --folder runs/s --name storage_small -- FLAGS
python -m experiments.search --model gpt2 --steps 300 --folder runs/gpt2 --name search_gpt2 --seconds 280 -- --data DATA

`experiments/search_plan.py` has the plans: `--plan rules` compares all rules of matrices, `--plan chains` the chains of
Newton-Schulz steps, and `--plan storage` ways to store state and to round weights. Flags after `--` go to the training
program in every run.

FOLDER/search.json keeps every finished run, none of which is run again. With `--seconds`, runs that are under way when
the time is over save a checkpoint and stop. The same command continues, also after a crash. FOLDER has NAME.csv (every
run), NAME_curves.csv (mean, lowest and highest loss over seeds) or, for chains, NAME_means.csv (mean and standard
error), NAME.md (tables) and a plot.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from experiments.search_plan import (
    PLANS,
    SEARCH_SEED,
    STARTS,
    Losses,
    Outlook,
    Setting,
    plan_named,
)
from experiments.search_report import Finished, write_reports, write_runs
from muon_fsdp.training.arguments import OneLineParser, fail
from muon_fsdp.training.results import read_result, read_start

TRAINER = [sys.executable, "-m", "muon_fsdp.training"]
STOPPING_SECONDS = 25.0  # left at the end of --seconds: checkpoints are written, and then the report
USEFUL_SECONDS = 60.0  # a run is worth starting with so much time left, because it can be resumed
STOPPED = 130  # the exit code of a run that saved a checkpoint after a signal


@dataclass(frozen=True)
class Job:
    """One run: a setting with a seed."""

    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        """Return the name of its files."""
        return f"{self.setting.slug}-seed{self.seed}"


@dataclass
class Running:
    """A run that is under way."""

    job: Job
    process: subprocess.Popen[bytes]
    started: float


class Store:
    """The folder of a search: `search.json` has every finished run, `runs` has the folders of unfinished ones."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        """Open the folder.

        Raises:
            ValueError: the folder belongs to a search of another model, length or data.
        """
        self.folder = folder
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        self._file = folder / "search.json"
        document = json.loads(self._file.read_text()) if self._file.exists() else {"search": facts, "runs": []}
        saved = document["search"]
        if saved != facts:
            names = ", ".join(f"{name} is {saved.get(name)!r} there and {facts[name]!r} here" for name in facts
                              if saved.get(name) != facts[name])  # fmt: skip
            raise ValueError(f"{folder} has the runs of another search: {names}; pass another --folder")
        self._facts, self._runs = facts, document["runs"]
        self._save()

    def _save(self) -> None:
        """Write the file, a line for each run, so that an interruption leaves the old file or the new one."""
        aside = self._file.with_suffix(".partial")
        runs = ",\n".join(json.dumps(run) for run in self._runs)
        aside.write_text(f'{{"search": {json.dumps(self._facts)},\n"runs": [\n{runs}\n]}}\n')
        os.replace(aside, self._file)

    def output(self, job: Job) -> Path:
        """Return the folder of a run that is not finished."""
        return self.folder / "runs" / job.name

    def errors(self, job: Job) -> Path:
        """Return the file for what a run prints to stderr."""
        return self.folder / "runs" / f"{job.name}.log"

    def finished(self) -> list[Finished]:
        """Return all finished runs."""
        return [Finished.from_json(run) for run in self._runs]

    def keep(self, job: Job, facts: dict[str, Any]) -> Finished:
        """Write the result of a run, and delete its folder, because checkpoints are large."""
        self._runs.append({"setting": asdict(job.setting), "seed": job.seed, **facts})
        self._save()
        shutil.rmtree(self.output(job), ignore_errors=True)
        self.errors(job).unlink(missing_ok=True)
        return Finished.from_json(self._runs[-1])


def result_facts(output: Path, seconds: float, parallel: int) -> dict[str, Any]:
    """Read the metrics of a run that has ended.

    Args:
        output: the folder of the run.
        seconds: how long its last process ran.
        parallel: how many runs shared the device.
    """
    result, start = read_result(output), read_start(output)
    is_timed = bool(result.timed)
    return {
        "evaluations": [[each.step, each.loss] for each in result.evaluations],
        "train_loss": result.final_train_loss if result.steps else None,
        "milliseconds_per_step": result.milliseconds_per_step if is_timed else None,
        "optimizer_share": result.optimizer_share if is_timed else None,
        "parallel": parallel,
        "seconds": seconds,
        "steps": start["steps"],
        "tokens_per_step": start["config"]["batch_size"] * start["model"]["sequence_length"],
        "training_tokens": start["training_tokens"],
        "num_parameters": start["num_parameters"],
        "device": start["device"],
    }


class Search:
    """Runs what the plan asks for, several runs at once, until nothing is left or the time is over."""

    def __init__(
        self, store: Store, plan: Callable[[Losses], Outlook], args: argparse.Namespace, shared: Sequence[str]
    ) -> None:
        self._store, self._plan, self._args, self._shared = store, plan, args, list(shared)
        self._running: list[Running] = []
        self.done = store.finished()
        limit = math.inf if args.seconds is None else args.seconds - STOPPING_SECONDS
        self._deadline = time.monotonic() + limit

    def outlook(self) -> Outlook:
        """Return what the finished runs say."""
        losses = {each.setting: each.final_loss for each in self.done if each.seed == SEARCH_SEED}
        return self._plan(losses)

    def wanted(self) -> list[Job]:
        """Return the jobs that can run now and are neither finished nor under way, the search first."""
        outlook = self.outlook()
        jobs = [Job(setting, SEARCH_SEED) for setting in outlook.pending]
        names = [name for name in self._args.compare if name in outlook.chosen]
        # Seed by seed, so that an interrupted search has the same number of seeds of every optimizer, or one less.
        jobs += [Job(outlook.chosen[name], seed) for seed in self._seeds() for name in names]
        known = {Job(each.setting, each.seed) for each in self.done} | {each.job for each in self._running}
        return [job for job in dict.fromkeys(jobs) if job not in known]

    def _seeds(self) -> range:
        return range(SEARCH_SEED + 1, SEARCH_SEED + 1 + self._args.seeds)

    def run(self) -> bool:
        """Run until nothing is left to do or the time is over.

        Returns:
            Whether everything is finished.
        """
        handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # else its runs would go on without it
        try:
            while time.monotonic() < self._deadline:
                waiting = self.wanted()
                while waiting and len(self._running) < self._args.parallel and self._is_time_to_start():
                    self._launch(waiting.pop(0))
                if not self._running:
                    break  # nothing is left, or too little time for what is left
                time.sleep(0.05)
                self._collect()
        except KeyboardInterrupt:
            print("stopping", flush=True)
        finally:
            self._stop()
            signal.signal(signal.SIGTERM, handler)
        return not self.wanted()

    def _is_time_to_start(self) -> bool:
        left = self._deadline - time.monotonic()
        durations = [each.seconds for each in self.done]
        return left > min([USEFUL_SECONDS, *([median(durations)] if durations else [])])

    def _launch(self, job: Job) -> None:
        """Start a run, from its checkpoint if it was interrupted after it had saved one."""
        output = self._store.output(job)
        resumes = any((output / "checkpoints").glob("step-*[0-9]"))
        if not resumes:
            shutil.rmtree(output, ignore_errors=True)
        command = [*TRAINER, "--model", self._args.model, "--steps", str(self._args.steps), *self._shared]
        command += [*job.setting.flags(), "--seed", str(job.seed), "--name", job.name, "--output", str(output)]
        threads = max(1, (os.cpu_count() or 1) // self._args.parallel)
        with self._store.errors(job).open("w") as errors:
            process = subprocess.Popen(
                [*command, *(["--resume"] if resumes else [])],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},  # else every run would use all cores
                start_new_session=True,  # Ctrl-C is for the search, which stops its runs once: twice would be at once
            )
        self._running.append(Running(job, process, time.monotonic()))

    def _collect(self) -> None:
        """Keep the results of the runs that have ended."""
        for each in [each for each in self._running if each.process.poll() is not None]:
            self._running.remove(each)
            self._finish(each)

    def _finish(self, ended: Running) -> None:
        """Keep the result of a run that has ended; a run that was stopped stays unfinished.

        Raises:
            RuntimeError: the run failed, and not because its loss diverged.
        """
        errors = self._store.errors(ended.job).read_text().strip()
        code, output = ended.process.returncode, self._store.output(ended.job)
        if code in (STOPPED, -signal.SIGTERM, -signal.SIGKILL):
            return
        diverged = code == 1 and "lower the learning rate" in errors
        if code != 0 and not diverged:
            last = errors.splitlines()[-1] if errors else "nothing was printed"
            raise RuntimeError(f"run {ended.job.name} ended with exit code {code}: {last}")
        facts = result_facts(output, time.monotonic() - ended.started, self._args.parallel)
        kept = self._store.keep(ended.job, facts | {"diverged": diverged})
        self.done.append(kept)
        write_runs(self._store.folder / f"{self._args.name}.csv", self.done)
        loss = "diverged" if diverged else f"validation loss {kept.final_loss:.4f}"
        print(f"{len(self.done):3}  {ended.job.name}: {loss}, {kept.seconds:.0f} s", flush=True)

    def _stop(self) -> None:
        """Stop the runs under way; each saves a checkpoint, unless it does not end in time."""
        for each in self._running:
            each.process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + STOPPING_SECONDS
        while any(each.process.poll() is None for each in self._running) and time.monotonic() < limit:
            time.sleep(0.05)
        for each in self._running:
            each.process.kill()  # does nothing to a process that has ended
            each.process.wait()
        self._collect()


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line.

    Returns:
        The arguments of the search, and the flags for the training program.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", choices=list(STARTS), help="preset of the training program")
    parser.add_argument(
        "--plan",
        default="optimizers",
        choices=PLANS,
        help="tune AdamW, then Muon and NorMuon; or three learning rates of every rule of matrices, or of every chain; "
        "or Muon with every way to store state and to round weights",
    )
    parser.add_argument("--steps", type=int, required=True, help="training steps of each run")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the results, old and new")
    parser.add_argument("--name", required=True, help="name of the reports, without suffix")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="stop after this time; the same command continues later")
    parser.add_argument(
        "--seeds",
        type=int,
        help="seeds of the chosen settings (default: 5, or 3 from 124M on, for rules and for storage)",
    )
    parser.add_argument(
        "--compare",
        type=lambda text: text.split(","),
        help="chosen settings to run with several seeds (default: all)",
    )
    args = parser.parse_args(arguments[:at])
    for name in ("steps", "parallel", "seeds"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    plan = plan_named(args.plan, args.model)
    args.seeds = args.seeds or plan.num_seeds
    unknown = [name for name in args.compare or () if name not in plan.names]
    if unknown:
        parser.error(f"--compare: unknown {', '.join(unknown)}; valid names are {', '.join(plan.names)}")
    args.compare = args.compare or plan.names
    return args, arguments[at + 1 :]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a search, from where it stopped, and write what it has found.

    Returns:
        The exit code: 0 if everything is finished, 3 if runs are left, 1 if a run failed.
    """
    args, shared = parse(argv)
    facts = {"model": args.model, "steps": args.steps, "flags": shared}
    facts |= {"plan": args.plan} if args.plan != "optimizers" else {}
    try:
        store = Store(args.folder, facts)
    except ValueError as error:
        fail(str(error))
    search = Search(store, plan_named(args.plan, args.model).look, args, shared)
    print(f"{len(search.done)} runs are finished already", flush=True)
    try:
        is_finished = search.run()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_reports(args.folder / args.name, search.outlook(), search.done, facts)
    if not is_finished:
        print("runs are left: the same command continues")
    return 0 if is_finished else 3


if __name__ == "__main__":
    raise SystemExit(main())
