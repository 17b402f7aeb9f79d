"""Report a run while it trains, on rank 0: its first lines, its progress, and the lines of `metrics.jsonl`.

The package `rich` is optional, so it is imported where it is used.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from statistics import mean, median
from typing import Any

import torch

from muon_fsdp.comm.dtensors import local
from muon_fsdp.text import format_count
from muon_fsdp.training.ending import Stop, discard_stdout
from muon_fsdp.training.inputs import Inputs
from muon_fsdp.training.report import write_loss_plot
from muon_fsdp.training.results import RunResult, start_metrics

_RECENT_STEPS = 10  # loss and speed are averaged over these, because those of single steps vary
_SHORTEST_BAR, _LONGEST_BAR = 6, 30


def print_start(inputs: Inputs, result: RunResult) -> None:
    """Print the model, the layout, the data, the number of steps and what each param group does."""
    config, world, pace = inputs.config, inputs.world, inputs.pace
    print(
        f"{config.label}: {config.model}, {result.num_parameters:,} parameters, {_describe_layout(inputs)}, "
        f"{world.device.type}, {str(world.precision).removeprefix('torch.')}\n"
        f"  {inputs.corpus.train.numel():,} training tokens from {inputs.corpus.source}; {pace.steps} steps of "
        f"{config.batch_size} x {inputs.model_config.sequence_length} tokens, "
        f"{pace.num_micro_batches} micro-batch(es) per step",
        *(str(group) for group in result.groups),
        *([f"resuming from step {result.num_steps}"] if result.num_steps else []),
        *(["that was the last step: nothing is left to do"] if result.num_steps == pace.steps else []),
        sep="\n  ",
        flush=True,
    )


def _describe_layout(inputs: Inputs) -> str:
    config, world = inputs.config, inputs.world
    if config.parallel == "none":
        return "one process"
    layout = f"{'DDP' if config.parallel == 'ddp' else 'FSDP2'} on {world.size} rank(s)"
    if world.mesh is not None and world.mesh.size() != world.mesh.size(1):
        replicas, shards, tensor = world.mesh.shape
        layout += f" ({replicas} replicas x {shards} shards x {tensor} tensor-parallel)"
    return layout


# ----------------------------------------------------------------------------------------------------------- metrics


@contextmanager
def log_run(
    inputs: Inputs, optimizer: torch.optim.Optimizer, result: RunResult, resumed_from: int | None, stop: Stop
) -> Iterator[Callable[[RunResult], None]]:
    """Write `metrics.jsonl` and the plot of a run, and show its progress.

    The file has a line for the start of a run, every step, every validation and the end; with `--tensorboard` the same
    numbers become events. A resumed run continues the file.

    Yields:
        A function that writes the steps and validations since its last call, and shows the progress.
    """
    config, world, corpus = inputs.config, inputs.world, inputs.corpus
    num_steps, num_evaluations = len(result.steps), len(result.evaluations)  # written before a resume
    with ExitStack() as opened:
        stream = opened.enter_context(start_metrics(config.folder, resumed_from))
        events: Any = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purged = None if resumed_from is None else resumed_from + 1
            events = opened.enter_context(SummaryWriter(str(config.folder / "tensorboard"), purge_step=purged))

        def write_line(kind: str, **values: Any) -> None:
            stream.write(json.dumps({"kind": kind, **values}) + "\n")
            if events is not None and "step" in values:
                for name, value in values.items():
                    if name != "step" and isinstance(value, int | float):
                        events.add_scalar(f"{kind}/{name}", value, values["step"])

        def write(result: RunResult) -> None:
            nonlocal num_steps, num_evaluations
            for step in result.steps[num_steps:]:
                write_line("train", **asdict(step))
            for evaluation in result.evaluations[num_evaluations:]:
                write_line("validation", **asdict(evaluation))
            num_steps, num_evaluations = len(result.steps), len(result.evaluations)
            stream.flush()
            try:
                show(result)
            except BrokenPipeError:
                stop.wanted = True
                discard_stdout()

        write_line(
            "start",
            name=result.name,
            groups=[asdict(group) for group in result.groups],
            config=config.as_json(),
            model=asdict(inputs.model_config),
            world_size=world.size,
            num_parameters=result.num_parameters,
            device=str(world.device),
            steps=inputs.pace.steps,
            training_tokens=corpus.train.numel(),
            validation_tokens=corpus.validation.numel(),
            resumed_from=resumed_from,
        )
        pace = inputs.pace
        show = opened.enter_context(show_progress(result.name, pace.steps, inputs.tokens_per_step, pace.eval_every))
        try:
            yield write
        except FloatingPointError:
            write_loss_plot(config.folder, result)  # the curve shows how the loss got there
            raise
        facts: dict[str, Any] = {"stopped": result.stopped, "validation_loss": result.final_validation_loss}
        if result.timed:
            seconds = result.milliseconds_per_step / 1e3
            facts |= {"optimizer_share": result.optimizer_share, "seconds_per_step": seconds}
        values = (value for state in optimizer.state.values() for value in state.values())
        held = sum(local(value).nbytes for value in values if isinstance(value, torch.Tensor))
        facts["optimizer_state_bytes_per_rank"] = held
        if world.device.type == "cuda":
            facts["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        write_line("end", **facts)
        write_loss_plot(config.folder, result)


# ---------------------------------------------------------------------------------------------------------- progress


@contextmanager
def show_progress(
    name: str, steps: int, tokens_per_step: float, plain_every: int
) -> Iterator[Callable[[RunResult], None]]:
    """Yield a function that shows the result so far, in a live line on a terminal and in plain lines elsewhere."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        shown = 0

        def print_line(result: RunResult) -> None:
            nonlocal shown
            if result.num_steps // plain_every != shown // plain_every or result.num_steps == steps:
                shown = result.num_steps
                # Flushed, else a pipe would buffer the lines until the end.
                print(f"{result.name:<6} {_figures(result, steps, tokens_per_step)[0]}", flush=True)

        yield print_line
        return
    from rich.live import Live
    from rich.text import Text

    with Live(Text(f"{name}  waiting for the first step", no_wrap=True, overflow="ellipsis")) as live:
        ascii_only = live.console.options.ascii_only
        full, empty = ("=", "-") if ascii_only else ("━", "─")  # a reader without colours sees a bar too

        def update_line(result: RunResult) -> None:
            shown_name, length, figures = fit(result, steps, tokens_per_step, live.console.width)
            done = round(length * result.num_steps / steps)
            bar = Text.assemble((full * done, "green"), (empty * (length - done), "dim"))
            parts = [part for part in (Text(shown_name, "bold"), bar, Text(figures)) if part]
            live.update(Text("  ", no_wrap=True, overflow="crop").join(parts))

        yield update_line


def fit(result: RunResult, steps: int, tokens_per_step: float, width: int) -> tuple[str, int, str]:
    """Choose what a line of `width` columns shows. The figures come first, then a bar, then the name of the run.

    Returns:
        The name or "", the length of the bar or 0, and the figures. Two spaces separate the three.
    """
    long, medium, short = _figures(result, steps, tokens_per_step)
    for name, figures in ((result.name, long), (result.name, medium), (result.name, short), ("", short)):
        room = width - len(figures) - 2 - (len(name) + 2 if name else 0)
        if room >= _SHORTEST_BAR:
            return name, min(room, _LONGEST_BAR), figures
    return "", 0, short[:width]


def _figures(result: RunResult, steps: int, tokens_per_step: float) -> tuple[str, str, str]:
    """Return how far a run is, and how fast it was in its last steps, in long, medium and short form."""
    recent = result.timed[-_RECENT_STEPS:]
    seconds = median(step.seconds for step in recent)
    share = f"{median(step.optimizer_seconds for step in recent) / seconds:.0%}"
    loss = mean(step.loss for step in result.steps[-_RECENT_STEPS:])
    at, speed = f"{result.num_steps:>{len(str(steps))}}/{steps}  loss {loss:.3f}", tokens_per_step / seconds
    left = _time_left((steps - result.num_steps) * seconds)
    validation = f"val {result.final_validation_loss:.3f}"  # it changes rarely, so only the long form has it
    return (
        f"step {at}  {validation}  {speed:,.0f} tokens/s  optimizer {share}  {left}",
        f"{at}  {speed:,.0f} tok/s  optimizer {share}  {left}",
        f"{at}  {format_count(round(speed), 3)} tok/s  opt {share}  {left}",
    )


def _time_left(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit} left"
    return f"{seconds:.0f} s left"
