"""Report a run on rank 0: its first lines, its progress, and the lines of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from muon_fsdp.training.inputs import Inputs
from muon_fsdp.training.progress import show_progress
from muon_fsdp.training.results import Journal, RunResult, start_line, train_line
from muon_fsdp.training.stopping import Stop, discard_stdout

_DATA_SIZES = {"training_tokens": "train", "validation_tokens": "validation"}


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


class RunLog:
    """Writes `metrics.jsonl` and the progress line while a run trains."""

    def __init__(self, journal: Journal, show: Callable[[RunResult], None], num_evaluations: int, stop: Stop) -> None:
        self._journal, self._show, self._stop = journal, show, stop
        self._num_written = num_evaluations  # a resumed run has written its earlier evaluations before

    def write(self, result: RunResult, factors: Sequence[float]) -> None:
        """Write the last `len(factors)` steps, whose learning rates had these factors, and any new validation."""
        lr = result.groups[0].lr
        for index, factor in enumerate(factors, start=len(result.train_losses) - len(factors)):
            self._journal.write("train", train_line(result, index, lr * factor))
        for evaluation in result.evaluations[self._num_written :]:
            self._journal.write("validation", asdict(evaluation))
        self._num_written = len(result.evaluations)
        self._journal.flush()
        try:
            self._show(result)
        except BrokenPipeError:
            self._stop.wanted = True
            discard_stdout()

    def write_end(self, result: RunResult, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Write the last line of a run: its final loss, its speed and its memory."""
        facts: dict[str, Any] = {"stopped": result.stopped, "validation_loss": result.final_validation_loss}
        if result.times()[0]:
            seconds = result.milliseconds_per_step / 1e3
            facts |= {"optimizer_share": result.optimizer_share, "seconds_per_step": seconds}
        facts["optimizer_state_bytes_per_rank"] = state_bytes(optimizer)
        if device.type == "cuda":
            facts["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        self._journal.write("end", facts)


@contextmanager
def open_log(inputs: Inputs, result: RunResult, resumed_from: int | None, stop: Stop) -> Iterator[RunLog | None]:
    """Open `metrics.jsonl`, write its start line and show progress; yield None on ranks other than rank 0."""
    config, world, pace = inputs.config, inputs.world, inputs.pace
    if not world.is_main:
        yield None
        return
    journal = Journal(config.folder, resumed_from, config.tensorboard)
    try:
        facts = {"config": config.as_json(), "model": asdict(inputs.model_config), "world_size": world.size}
        facts |= {"num_parameters": result.num_parameters, "device": str(world.device), "steps": pace.steps}
        facts |= {name: getattr(inputs.corpus, part).numel() for name, part in _DATA_SIZES.items()}
        journal.write("start", start_line(result, facts | {"resumed_from": resumed_from}))
        with show_progress(result.name, pace.steps, inputs.tokens_per_step, pace.eval_every) as show:
            yield RunLog(journal, show, len(result.evaluations), stop)
    finally:
        journal.close()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return how many bytes of optimizer state this rank holds."""
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                local = value.to_local() if hasattr(value, "to_local") else value
                total += local.numel() * local.element_size()
    return total
