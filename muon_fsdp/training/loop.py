"""One training run: schedule, gradient clipping, timed steps, and validation at a fixed interval."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from muon_fsdp.training.model import GPT

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LoopConfig:
    """What all compared runs share."""

    steps: int
    warmup_fraction: float = 0.1
    final_lr_fraction: float = 0.05
    clip_norm: float = 1.0
    eval_every: int = 20

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"LoopConfig.steps must be at least 1, got {self.steps}")
        if self.eval_every < 1:
            raise ValueError(f"LoopConfig.eval_every must be at least 1, got {self.eval_every}")
        for name in ("warmup_fraction", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"LoopConfig.{name} must be between 0 and 1, got {getattr(self, name)}")
        if not self.clip_norm > 0:
            raise ValueError(f"LoopConfig.clip_norm must be positive, got {self.clip_norm}")


@dataclass(frozen=True)
class Evaluation:
    """A validation loss after so many steps."""

    step: int
    loss: float


@dataclass(frozen=True)
class OptimizerGroup:
    """What one param group does, before any schedule; `num_parameters` counts numbers, not tensors."""

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
    """What one optimizer did; grows while it trains."""

    name: str
    groups: list[OptimizerGroup] = field(default_factory=list)
    train_losses: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)

    @property
    def final_train_loss(self) -> float:
        """Mean over the last twentieth of the steps: the loss of one batch is noise."""
        last = self.train_losses[-max(1, len(self.train_losses) // 20) :]
        return sum(last) / len(last)

    @property
    def final_validation_loss(self) -> float:
        return self.evaluations[-1].loss

    @property
    def best_validation_loss(self) -> float:
        return min(evaluation.loss for evaluation in self.evaluations)

    @property
    def milliseconds_per_step(self) -> float:
        """Median, as every time here: another program on the same cores makes some steps many times slower."""
        return 1e3 * median(self.step_seconds)

    @property
    def optimizer_share(self) -> float:
        """The part of a step that is `optimizer.step()`, between 0 and 1."""
        return median(self.optimizer_seconds) / median(self.step_seconds)

    def training_seconds(self, num_steps: int) -> float:
        """How long so many steps take, evaluation left out."""
        return num_steps * median(self.step_seconds)

    def first_reaching(self, loss: float) -> Evaluation | None:
        """The first evaluation whose validation loss is at most `loss`; None if there is none."""
        return next((evaluation for evaluation in self.evaluations if evaluation.loss <= loss), None)


def warmup_cosine(config: LoopConfig) -> Callable[[int], float]:
    """The factor on every group's lr: linear warmup, then a half cosine down to `final_lr_fraction`."""
    warmup_steps = max(1, round(config.warmup_fraction * config.steps))

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, config.steps - warmup_steps))
        return config.final_lr_fraction + (1 - config.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def describe_groups(optimizer: torch.optim.Optimizer) -> list[OptimizerGroup]:
    """The param groups of any optimizer; the library's own name their rule, others are known by their class."""
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


@torch.inference_mode()
def evaluate(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Mean loss per token over `batches`."""
    total, num_tokens = 0.0, 0
    for inputs, targets in batches:
        _, loss = model(inputs, targets)
        total += loss.item() * targets.numel()
        num_tokens += targets.numel()
    return total / num_tokens


def train(
    name: str,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    train_batches: Iterator[Batch],
    validation: Sequence[Batch],
    config: LoopConfig,
    on_step: Callable[[RunResult], None],
) -> RunResult:
    """Train `model` for `config.steps` steps; `on_step` sees the result so far after each."""
    result = RunResult(name, groups=describe_groups(optimizer))  # before the scheduler scales the lr down to its start
    scheduler = LambdaLR(optimizer, warmup_cosine(config))
    result.evaluations.append(Evaluation(0, evaluate(model, validation)))
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        _, loss = model(*next(train_batches))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        before_update = time.perf_counter()
        optimizer.step()
        result.optimizer_seconds.append(time.perf_counter() - before_update)
        optimizer.zero_grad()
        scheduler.step()
        result.train_losses.append(loss.item())
        if not math.isfinite(result.train_losses[-1]):
            raise FloatingPointError(f"the loss of {name} is {loss.item()} at step {step}; lower its learning rate")
        result.step_seconds.append(time.perf_counter() - started)
        if step % config.eval_every == 0 or step == config.steps:
            result.evaluations.append(Evaluation(step, evaluate(model, validation)))
        on_step(result)
    return result
