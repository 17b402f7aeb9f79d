"""The loop: accumulation, clipping, timed steps, validation, and when to look, to save and to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from muon_fsdp.training.data import DataError
from muon_fsdp.training.parallel import World, clip_gradient, synchronize_gradients
from muon_fsdp.training.results import Evaluation, RunResult

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Pace:
    """How long a run is and how often it does what."""

    steps: int
    eval_every: int
    log_every: int = 1
    save_every: int | None = None
    num_micro_batches: int = 1
    clip_norm: float = 1.0


class Clock:
    """Seconds of each step and of its update: by events on a GPU, so that nothing waits, else by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[list[float | torch.cuda.Event]] = []

    def mark(self) -> None:
        """Four times a step: at its start, before and after the update, at its end."""
        if not self._marks or len(self._marks[-1]) == 4:
            self._marks.append([])
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks[-1].append(event)
        else:
            self._marks[-1].append(time.perf_counter())

    def read(self) -> list[tuple[float, float]]:
        """(step, update) of the steps since the last look."""
        if self._on_gpu:
            torch.cuda.synchronize()
        times = [(_seconds(start, end), _seconds(before, after)) for start, before, after, end in self._marks]
        self._marks.clear()
        return times


def _seconds(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start


def check_tokens(inputs: Tensor, targets: Tensor, vocab_size: int) -> None:
    largest = int(max(inputs.max(), targets.max()))
    if largest >= vocab_size:
        raise DataError(
            f"the data holds token {largest}, but the model's vocabulary has {vocab_size}: give a larger --vocab-size, "
            "or data that was tokenized for this model"
        )


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch], world: World | None = None) -> float:
    """Mean loss per token over `batches`, each of which is split evenly over the data-parallel ranks."""
    losses, num_tokens = [], 0
    for inputs, targets in batches:
        if world is None:
            _, loss = model(inputs, targets)
        else:
            world.note()
            with world.autocast():
                _, loss = model(_mine(inputs, world), _mine(targets, world))
        losses.append(loss.float() * targets.numel())
        num_tokens += targets.numel()
    total = torch.stack(losses).sum()
    return (total.item() if world is None else world.mean(total[None])[0]) / num_tokens


def _mine(rows: Tensor, world: World) -> Tensor:
    return rows.tensor_split(world.data_size)[world.data_rank].to(world.device)


def train(
    result: RunResult,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train_batches: Iterator[Batch],
    validation: Sequence[Batch],
    pace: Pace,
    schedule: Callable[[int], float],
    world: World,
    *,
    base_lrs: Sequence[float],
    on_log: Callable[[RunResult, Sequence[float]], None],
    on_save: Callable[[int], None],
    stop_wanted: Callable[[], bool],
) -> RunResult:
    """From where `result` stands to the last step.

    `train_batches` yields this rank's rows. `on_log` sees the result after each look at the device, with the factors
    of the schedule for the steps since the last; `on_save` is told the step.
    """
    world.note("the first step")
    clock = Clock(world.device)
    if not result.evaluations:
        result.evaluations.append(Evaluation(result.num_steps, evaluate(model, validation, world)))
    waiting: list[Tensor] = []  # (loss, norm of the gradient) of steps that were not looked at
    for step in range(result.num_steps, pace.steps):
        world.note(f"step {step + 1}")
        clock.mark()
        for group, lr in zip(optimizer.param_groups, base_lrs, strict=True):
            group["lr"] = lr * schedule(step)
        loss = _accumulate(model, next(train_batches), pace.num_micro_batches, world)
        norm = clip_gradient(model, pace.clip_norm)
        clock.mark()
        optimizer.step()
        clock.mark()
        optimizer.zero_grad()
        clock.mark()
        waiting.append(torch.stack((loss, norm.to(loss.dtype))))
        done = step + 1
        evaluates = done % pace.eval_every == 0 or done == pace.steps
        saves = done == pace.steps or (pace.save_every is not None and done % pace.save_every == 0)
        if not (evaluates or saves or done % pace.log_every == 0):
            continue
        *values, stop = world.mean(torch.cat((*waiting, loss.new_tensor([float(stop_wanted())]))))
        result.train_losses += values[0::2]
        result.gradient_norms += values[1::2]
        for seconds, update_seconds in clock.read():
            result.step_seconds.append(seconds)
            result.optimizer_seconds.append(update_seconds)
        first = done - len(waiting) + 1
        for behind, (loss_there, norm_there) in enumerate(zip(values[0::2], values[1::2], strict=True), start=first):
            _refuse_not_finite("loss", loss_there, result.name, behind)
            _refuse_not_finite("norm of the gradient", norm_there, result.name, behind)
        if evaluates:
            result.evaluations.append(Evaluation(done, evaluate(model, validation, world)))
            _refuse_not_finite("validation loss", result.final_validation_loss, result.name, done)
        on_log(result, [schedule(index) for index in range(done - len(waiting), done)])
        waiting.clear()
        if saves or stop:
            on_save(done)
        if stop and done < pace.steps:
            result.stopped = True
            break
    return result


def _refuse_not_finite(what: str, value: float, name: str, step: int) -> None:
    """Before a checkpoint is written: what follows from such a step is of no use, and would push out a good one."""
    if not math.isfinite(value):
        raise FloatingPointError(f"the {what} of {name} is {value} at step {step}; lower its learning rate")


def _accumulate(model: nn.Module, batch: Batch, num_micro_batches: int, world: World) -> Tensor:
    """Backward through the rank's rows in equal pieces; the mean loss."""
    total = torch.zeros((), device=world.device)
    pieces = [rows.to(world.device, non_blocking=True).chunk(num_micro_batches) for rows in batch]
    for index, (inputs, targets) in enumerate(zip(*pieces, strict=True)):
        world.note()
        with synchronize_gradients(model, wanted=index == num_micro_batches - 1):
            with world.autocast():
                _, loss = model(inputs, targets)
            (loss / num_micro_batches).backward()
        total += loss.detach().float() / num_micro_batches
    return total
