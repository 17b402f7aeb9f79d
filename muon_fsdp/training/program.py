"""Run the training program: from a configuration to a trained model, its checkpoints and its metrics."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from muon_fsdp.rules.recipes import recipes
from muon_fsdp.training import checkpoint, resuming
from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.config import TrainConfig, parse
from muon_fsdp.training.data import DataError, OneRankError
from muon_fsdp.training.ending import Stop, discard_stdout, stop_on_signals
from muon_fsdp.training.inputs import Inputs, open_inputs, rows_per_rank
from muon_fsdp.training.launcher import is_launched, launch, launcher_is_gone
from muon_fsdp.training.logits import LogitClip
from muon_fsdp.training.loop import Training, make_schedule, train
from muon_fsdp.training.model import GPT
from muon_fsdp.training.optimizers import make_optimizer
from muon_fsdp.training.parallel import connect, place
from muon_fsdp.training.report import LOSS_PLOT, history
from muon_fsdp.training.results import RunResult, describe_groups
from muon_fsdp.training.run_log import log_run, print_start
from muon_fsdp.training.terminal import print_error

_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer")  # how gloo's errors put it


def run(config: TrainConfig) -> RunResult:
    """Train as `config` describes on all ranks of this job; the result is the same on each."""
    with connect(config) as world, stop_on_signals() as stop:
        if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
            install = 'pip install "muon_fsdp[integrations]"'
            raise ConfigError(f"--tensorboard needs the package tensorboard; install it with: {install}")
        world.note("reading the data")
        inputs = open_inputs(config, world)  # first, so that a mistake is reported before a folder is created
        saved = resuming.find_checkpoint(config, world)
        with checkpoint.lock_folder(config.folder, world):
            return _run(inputs, stop, saved)


def _run(inputs: Inputs, stop: Stop, saved: Path | None) -> RunResult:
    """Build model and optimizer, load the checkpoint `saved` if there is one, and train."""
    manifest: dict[str, Any] = {}
    if saved is not None:
        manifest = checkpoint.read_manifest(saved, inputs.world)
        inputs = resuming.check_inputs(inputs, manifest)
    config, world, pace = inputs.config, inputs.world, inputs.pace
    torch.manual_seed(config.seed)
    world.note("building the model")
    model = place(GPT(inputs.model_config), config, world)
    world.note("building the optimizer")
    optimizer = make_optimizer(model, config)
    result = RunResult(config.label, groups=describe_groups(optimizer))
    if saved is not None:
        checkpoint.load(saved, model, optimizer, world)
        earlier = resuming.earlier_result(config, manifest, world)
        result = replace(earlier, name=result.name, groups=result.groups, num_steps_before=manifest["step"])
        if world.is_main:
            resuming.print_changes(manifest, config)
    if world.is_main:
        print_start(inputs, result)

    def save(step: int) -> None:
        facts = {"config": config.as_json(), "model": asdict(inputs.model_config)}
        checkpoint.save(config.folder / "checkpoints", step, model, optimizer, facts, world, config.keep)

    fractions = (config.warmup_fraction, config.decay_fraction, config.final_lr_fraction)
    schedule = make_schedule(config.schedule, pace.steps, *fractions)
    hooks: dict[str, Any] = {}
    if config.recipe is not None:
        recipe, decays = recipes[config.recipe], [group["weight_decay"] for group in optimizer.param_groups]
        schedule = partial(recipe.lr_factor, total_steps=pace.steps)
        hooks["set_options"] = partial(recipe.set_options, optimizer.param_groups, decays, total_steps=pace.steps)
    if config.qk_clip is not None:
        hooks["clip_logits"] = LogitClip(model, inputs.model_config.num_heads, config.qk_clip, world)
    log: AbstractContextManager[Callable[[RunResult], None]] = nullcontext(lambda result: None)
    if world.is_main:
        log = log_run(inputs, optimizer, result, manifest.get("step"), stop)
    with log as write:
        training = Training(
            model=model,
            optimizer=optimizer,
            base_lrs=[group.lr for group in result.groups],
            clip=lambda norm: optimizer.clip_grad_norm_(norm)["all"],
            schedule=schedule,
            train_batches=inputs.training_rows(result.num_steps),
            validation=inputs.validation_windows(),
            pace=pace,
            world=world,
            on_log=write,
            on_save=save,
            stop_wanted=lambda: stop.wanted or launcher_is_gone(),
            **hooks,
        )
        return train(training, result)


def main(argv: Sequence[str] | None = None, prog: str = "python -m muon_fsdp.training") -> int:
    """Run the program with these command-line arguments.

    Returns:
        The exit code: 0 after the last step, 1 if training failed, 2 for a mistake in the arguments or the data, 130
        after Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal can't show must not end a run
    arguments = list(sys.argv[1:] if argv is None else argv)
    config, processes = parse(arguments, prog)
    try:
        if processes is not None and not is_launched():
            if "RANK" in os.environ:
                raise ConfigError("--processes starts its own processes: leave it out under torchrun")
            rows_per_rank(config, max(1, processes // config.tensor_parallel))  # before the ranks take seconds to start
            return launch(arguments, processes)
        result = run(config)
    except (Exception, KeyboardInterrupt) as error:
        return _report_failure(error, config)
    if _is_main():
        _print_end(config, result)
    return 130 if result.stopped else 0


def _print_end(config: TrainConfig, result: RunResult) -> None:
    """Print the history of losses, and where everything is."""
    last = checkpoint.checkpoints(config.folder / "checkpoints")[-1]
    print(f"\n{history(result)}\n")
    if result.stopped:
        print(f"stopped after step {result.num_steps} and saved {last}; pass --resume to continue from there")
    else:
        print(f"validation loss {result.final_validation_loss:.4f}; metrics and checkpoint are in {config.folder}")
    if importlib.util.find_spec("matplotlib") is None:
        print('note: there is no plot of the losses; install matplotlib with: pip install "muon_fsdp[cli]"')
    else:
        print(f"wrote {config.folder / LOSS_PLOT}")


def _report_failure(error: BaseException, config: TrainConfig) -> int:
    """Print an error that a user can act on in one line, and return the exit code; raise any other one again."""
    if isinstance(error, ConfigError | DataError):
        return _fail(str(error), 2, on_one_rank=isinstance(error, OneRankError))
    if isinstance(error, FloatingPointError | checkpoint.CheckpointError):
        return _fail(str(error), 1)
    if isinstance(error, BrokenPipeError):  # before the first step; later ones stop the run cleanly
        discard_stdout()
        return 1
    if isinstance(error, OSError):
        where = "" if error.filename else f" ({config.folder})"
        return _fail(f"{error}{where}", 1, on_one_rank=True)
    if isinstance(error, KeyboardInterrupt):
        return _fail("stopped at once; the last checkpoint is unchanged", 130)
    reason = str(error).partition("\n")[0] if isinstance(error, RuntimeError) else ""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in reason:
        return _fail(f"out of memory: {reason} Lower --micro-batch-size, or pass --fsdp", 1, on_one_rank=True)
    if any(sign in reason for sign in _PEER_IS_GONE):
        return _fail("another rank has ended; the last checkpoint is unchanged", 1)
    raise error


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _fail(message: str, code: int, on_one_rank: bool = False) -> int:
    """Print an error on rank 0, or on any rank if it may be the only one that has it; return `code`."""
    if _is_main():
        print_error(message)
    elif on_one_rank:
        print_error(f"rank {os.environ['RANK']}: {message}")
    return code
