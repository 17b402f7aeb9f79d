"""Run the training loop: gradient accumulation, clipping, timed steps, validation, logging, saving and stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from muon_fsdp.training.data import Batch
from muon_fsdp.training.parallel import World, synchronize_gradients
from muon_fsdp.training.results import Evaluation, RunResult, Step


@dataclass(frozen=True)
class Pace:
    """The number of steps of a run, and the number of steps between validations, log lines and checkpoints."""

    steps: int
    eval_every: int
    log_every: int = 1
    save_every: int | None = None
    num_micro_batches: int = 1
    clip_norm: float = 1.0


@dataclass(frozen=True)
class Training:
    """Everything that the loop needs: what is trained, on which data, with which schedule, and whom it reports to."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    base_lrs: Sequence[float]  # learning rate of every param group, before the schedule
    clip: Callable[[float], Tensor]  # clips the gradient to a norm, and returns the norm before
    schedule: Callable[[int], float]  # factor on every learning rate, by the step counted from 0
    train_batches: Iterator[Batch]  # this rank's rows
    validation: Sequence[Batch]  # all rows
    pace: Pace
    world: World
    on_log: Callable[[RunResult], None]
    on_save: Callable[[int], None]  # the number of steps done
    stop_wanted: Callable[[], bool]
    clip_logits: Callable[[torch.optim.Optimizer], None] | None = None  # called after every step
    set_options: Callable[[int], None] = lambda step: None  # sets options besides lr, by the step counted from 0


class Clock:
    """Measures the seconds of each step and of its `optimizer.step()`.

    On a GPU it uses CUDA events, so that timing does not make the host wait; on a CPU it uses the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []  # torch.cuda.Event, or seconds

    def mark(self) -> None:
        """Record the time now; call it four times a step: at its start, before and after the update, at its end."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._marks[-1].record()

    def read(self) -> list[tuple[float, float]]:
        """Return and forget the seconds of every step since the last call, each with the seconds of its update."""
        if self._on_gpu:
            torch.cuda.synchronize()
        steps = zip(*(self._marks[index::4] for index in range(4)), strict=True)
        times = [(self._seconds(start, end), self._seconds(before, after)) for start, before, after, end in steps]
        self._marks.clear()
        return times

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self._on_gpu else float(end - start)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch], world: World) -> float:
    """Return the mean loss per token over `batches`, each of which is split evenly over the data-parallel ranks."""
    losses, num_tokens = [], 0
    for batch in batches:
        world.note()
        rows = (part.tensor_split(world.data_size)[world.data_rank].to(world.device) for part in batch)
        with world.autocast():
            _, loss = model(*rows)
        losses.append(loss.float() * batch[0].numel())
        num_tokens += batch[0].numel()
    return world.mean(torch.stack(losses).sum()[None])[0] / num_tokens


def train(training: Training, result: RunResult) -> RunResult:
    """Train from the step that `result` has reached to the last one, or until a stop is wanted.

    Returns:
        `result`, to which every step and validation has been added.
    """
    pace, world = training.pace, training.world
    world.note("the first step")
    clock = Clock(world.device)
    if not result.evaluations:
        _validate(training, result, result.num_steps)
    unread: list[Tensor] = []
    for step in range(result.num_steps, pace.steps):
        unread.append(_take_step(training, step, clock))
        done, is_last = step + 1, step + 1 == pace.steps
        evaluates = is_last or done % pace.eval_every == 0
        saves = is_last or (pace.save_every is not None and done % pace.save_every == 0)
        if not (evaluates or saves or done % pace.log_every == 0):
            continue  # without waiting for the device
        stop = _read_steps(training, result, unread, clock)
        if evaluates:
            _validate(training, result, done)
            _require_finite("validation loss", result.final_validation_loss, result.name, done)
        training.on_log(result)
        unread.clear()
        if saves or stop:
            training.on_save(done)
        if stop and not is_last:
            result.stopped = True
            break
    return result


def _validate(training: Training, result: RunResult, step: int) -> None:
    loss = evaluate(training.model, training.validation, training.world)
    result.evaluations.append(Evaluation(step, loss))


def _take_step(training: Training, step: int, clock: Clock) -> Tensor:
    """Take a step without waiting for the device, unless it clips logits; return loss and gradient norm (2,)."""
    optimizer, pace, world = training.optimizer, training.pace, training.world
    world.note(f"step {step + 1}")
    clock.mark()
    for group, lr in zip(optimizer.param_groups, training.base_lrs, strict=True):
        group["lr"] = lr * training.schedule(step)
    training.set_options(step)
    loss = _accumulate(training.model, next(training.train_batches), pace.num_micro_batches, world)
    norm = training.clip(pace.clip_norm)
    clock.mark()
    optimizer.step()
    if training.clip_logits is not None:
        training.clip_logits(optimizer)
    clock.mark()
    optimizer.zero_grad()
    clock.mark()
    return torch.stack((loss, norm.to(loss.dtype)))


def _read_steps(training: Training, result: RunResult, unread: Sequence[Tensor], clock: Clock) -> bool:
    """Average losses and norms of the unread steps over the ranks, add them to `result`, and check them.

    Returns:
        Whether any rank wants to stop. This travels in the same all-reduce, so that all ranks stop at the same step.
    """
    stop_wanted = unread[0].new_tensor([float(training.stop_wanted())])
    *values, stop = training.world.mean(torch.cat((*unread, stop_wanted)))
    for loss, norm, (seconds, update_seconds) in zip(values[0::2], values[1::2], clock.read(), strict=True):
        step = result.num_steps + 1
        lr = training.base_lrs[0] * training.schedule(step - 1)
        result.steps.append(Step(step, loss, lr, norm, seconds, update_seconds))
    for taken in result.steps[-len(unread) :]:
        _require_finite("loss", taken.loss, result.name, taken.step)
        _require_finite("gradient norm", taken.gradient_norm, result.name, taken.step)
    return stop > 0


def _require_finite(what: str, value: float, name: str, step: int) -> None:
    """Raise FloatingPointError for a NaN or infinity, before a checkpoint of useless weights replaces a good one."""
    if not math.isfinite(value):
        raise FloatingPointError(f"the {what} of {name} is {value} at step {step}; lower the learning rate")


def _accumulate(model: nn.Module, batch: Batch, num_micro_batches: int, world: World) -> Tensor:
    """Run forward and backward over this rank's rows in equal micro-batches, and return the mean loss of the rows."""
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


def make_schedule(
    name: Literal["cosine", "trapezoid"], steps: int, warmup: float = 0.1, decay: float = 0.4, final: float = 0.05
) -> Callable[[int], float]:
    """Make a schedule that starts with a linear warmup.

    Args:
        name: "cosine" falls along half a cosine after the warmup; "trapezoid" stays at 1 and then falls along a line.
        steps: the number of steps of the run.
        warmup: the fraction of the steps for the warmup.
        decay: the fraction of the steps for the line of "trapezoid".
        final: the factor after the last step.

    Returns:
        A function from a step, counted from 0, to the factor.
    """
    warmup_steps = max(1, round(warmup * steps))
    first_down = warmup_steps if name == "cosine" else max(warmup_steps, steps - round(decay * steps))

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, max(0, step - first_down) / max(1, steps - first_down))
        left = 0.5 * (1 + math.cos(math.pi * progress)) if name == "cosine" else 1 - progress
        return final + (1 - final) * left

    return factor
