"""Keep the metrics of a run while it trains, and read them back from `metrics.jsonl`."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import mean, median
from typing import IO, TYPE_CHECKING, Any

from muon_fsdp.training.arguments import ConfigError

if TYPE_CHECKING:
    import torch

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Step:
    """One step in `metrics.jsonl`; `step` counts from 1, and `lr` is that of the first parameter group."""

    step: int
    loss: float
    lr: float
    gradient_norm: float
    seconds: float
    optimizer_seconds: float


@dataclass(frozen=True)
class Evaluation:
    """The validation loss after `step` steps."""

    step: int
    loss: float


@dataclass(frozen=True)
class OptimizerGroup:
    """Rule and options of one param group, before any schedule; `num_parameters` counts elements, not tensors."""

    rule: str
    num_tensors: int
    num_parameters: int
    lr: float
    weight_decay: float

    def __str__(self) -> str:
        return (
            f"{self.rule} on {self.num_tensors} tensors, {self.num_parameters:,} parameters, lr {self.lr:g}, "
            f"weight decay {self.weight_decay:g}"
        )


@dataclass
class RunResult:
    """The steps and validations of one run; they grow while it trains.

    The first steps are missing if the run has been resumed after their metrics were lost.
    """

    name: str
    groups: list[OptimizerGroup] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    num_steps_before: int = 0  # steps before the run was last resumed: other ranks may have taken and timed them
    stopped: bool = False  # whether a signal ended the run before its last step

    @property
    def num_steps(self) -> int:
        """Return how many steps the run has taken, those before a resume included."""
        return self.steps[-1].step if self.steps else self.num_steps_before

    @property
    def train_losses(self) -> list[float]:
        """Return the training loss of every step."""
        return [step.loss for step in self.steps]

    @property
    def final_train_loss(self) -> float:
        """Return the mean loss over the last twentieth of the steps, because the loss of one batch is noisy."""
        return mean(self.train_losses[-max(1, len(self.steps) // 20) :])

    @property
    def final_validation_loss(self) -> float:
        """Return the loss of the last validation."""
        return self.evaluations[-1].loss

    @property
    def best_validation_loss(self) -> float:
        """Return the lowest loss of any validation."""
        return min(evaluation.loss for evaluation in self.evaluations)

    @property
    def milliseconds_per_step(self) -> float:
        """Return the median, like every time here: other programs on the machine make some steps many times slower."""
        return 1e3 * self.training_seconds(1)

    @property
    def num_parameters(self) -> int:
        """Return how many numbers are trained, counted once over all ranks."""
        return sum(group.num_parameters for group in self.groups)

    @property
    def timed(self) -> list[Step]:
        """Return the steps since the run was last started, whose times are comparable."""
        return self.steps[len(self.steps) - (self.num_steps - self.num_steps_before) :]

    @property
    def optimizer_share(self) -> float:
        """Return the share of a step's time that `optimizer.step()` takes, between 0 and 1."""
        return median(step.optimizer_seconds for step in self.timed) / self.training_seconds(1)

    def training_seconds(self, num_steps: int) -> float:
        """Return the seconds that `num_steps` steps take at the median time per step, without validation."""
        return num_steps * median(step.seconds for step in self.timed)

    def first_reaching(self, loss: float) -> Evaluation | None:
        """Return the first evaluation whose validation loss is at most `loss`, or None if there is none."""
        return next((evaluation for evaluation in self.evaluations if evaluation.loss <= loss), None)


def describe_groups(optimizer: torch.optim.Optimizer) -> list[OptimizerGroup]:
    """Describe the param groups of any optimizer; one that does not name its rules is described by its class."""
    return [
        OptimizerGroup(
            rule=group.get("rule", type(optimizer).__name__.lower()),
            num_tensors=len(group["params"]),
            num_parameters=sum(parameter.numel() for parameter in group["params"]),
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
        )
        for group in optimizer.param_groups
    ]


def start_metrics(folder: Path, resumed_from: int | None) -> IO[str]:
    """Open `metrics.jsonl` to append to it, after removing all lines but those before the step of a resumed run."""
    path = folder / METRICS_FILE
    lines = [] if resumed_from is None else _lines_until(path, resumed_from)
    aside = path.with_suffix(".partial")
    aside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(aside, path)
    return path.open("a", encoding="utf-8")


def set_metrics_aside(folder: Path) -> Path | None:
    """Rename `metrics.jsonl`, if there is one, to `metrics.jsonl.bad`, or to `.bad2`, `.bad3` ... if that is taken."""
    path = folder / METRICS_FILE
    names = (path.with_name(f"{METRICS_FILE}.bad{number}") for number in itertools.chain([""], itertools.count(2)))
    return path.rename(next(name for name in names if not name.exists())) if path.exists() else None


def _lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the lines up to `step`, or up to the first line that is not valid, such as one that a kill cut short."""
    found = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict) or not isinstance(line.get("step", 0), int):
            break
        if line.get("kind") == "start" or line.get("step", step + 1) <= step:
            found.append(line)
    return found


def read_result(folder: Path) -> RunResult:
    """Return the result that `metrics.jsonl` records."""
    path = folder / METRICS_FILE
    return _result_of(_lines_until(path, 2**63), path)


def read_start(folder: Path) -> dict[str, Any]:
    """Return the last "start" line of `metrics.jsonl`: configuration, model, ranks and groups of the run."""
    starts = [line for line in _lines_until(folder / METRICS_FILE, 0) if line.get("kind") == "start"]
    return starts[-1] if starts else {}


def read_result_until(folder: Path, manifest: Mapping[str, Any]) -> RunResult:
    """Return the result that `metrics.jsonl` records up to a checkpoint.

    Raises:
        ConfigError: the file is missing, cannot be read, or does not belong to the checkpoint's run.
    """
    path, step = folder / METRICS_FILE, manifest["step"]
    try:
        if not path.exists():
            raise ConfigError(f"{path} is missing")
        lines = _lines_until(path, step)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    result = _result_of(lines, path)
    if result.num_steps != step:
        raise ConfigError(f"{path} records {result.num_steps} steps, but the checkpoint is of step {step}")
    last = max((index for index, line in enumerate(lines) if line["kind"] == "train"), default=0)
    before = [line for line in lines[:last] if line["kind"] == "start"]
    if before and any(before[-1].get(name) != manifest[name] for name in ("config", "model")):
        raise ConfigError(f"{path} belongs to another run than the checkpoint")
    return result


def _result_of(lines: Sequence[Mapping[str, Any]], path: Path) -> RunResult:
    try:
        starts = [line for line in lines if line["kind"] == "start"]
        result = RunResult(starts[-1]["name"], groups=[OptimizerGroup(**group) for group in starts[-1]["groups"]])
        for line in lines:
            if line["kind"] == "start":
                result.num_steps_before = line["resumed_from"] or 0
            elif line["kind"] == "train":
                if line["step"] != result.num_steps + 1:
                    raise ValueError("a step is missing")
                values = {each.name: float(line[each.name]) for each in fields(Step) if each.name != "step"}
                result.steps.append(Step(line["step"], **values))
            elif line["kind"] == "validation":
                result.evaluations.append(Evaluation(line["step"], float(line["loss"])))
    except (LookupError, TypeError, ValueError):
        raise ConfigError(f"{path} is not the record of a run") from None
    return result
