"""The training program: from a configuration to a trained model, its checkpoints and its metrics."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from muon_fsdp.training import checkpoint, resuming
from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.checkpoint import CheckpointError
from muon_fsdp.training.config import TrainConfig, as_json, parse
from muon_fsdp.training.data import Corpus, DataError, open_corpus, training_batches, validation_batches
from muon_fsdp.training.launcher import launch, launcher_is_gone
from muon_fsdp.training.loop import Batch, Pace, check_tokens, train
from muon_fsdp.training.model import GPT, GPTConfig
from muon_fsdp.training.optimizers import make_optimizer
from muon_fsdp.training.parallel import World, connect, place
from muon_fsdp.training.progress import show_progress
from muon_fsdp.training.results import (
    Journal,
    RunResult,
    check_tensorboard,
    describe_groups,
    start_line,
    train_line,
)
from muon_fsdp.training.schedule import make_schedule

DEFAULT_STEPS = 100
EVALUATIONS_PER_RUN = 20
_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer")  # in gloo's words


class OneRankError(DataError):
    """Of what this rank alone has read."""


def run(config: TrainConfig) -> RunResult:
    """Train as `config` says, on this process and the others of its job; the result is the same on all."""
    with connect(config) as world, _stop_signals() as stop:
        if config.tensorboard:
            check_tensorboard()
        world.note("reading the data")
        model_config, corpus = _open_data(config)
        _pace(config, model_config, corpus, world)  # a mistake is told before a folder is made
        saved = resuming.find_checkpoint(config, world)
        with _own_folder(config.folder, world):
            return _run(config, world, stop, model_config, corpus, saved)


def _run(
    config: TrainConfig,
    world: World,
    stop: Stop,
    model_config: GPTConfig,
    corpus: Corpus,
    saved: Path | None,
) -> RunResult:
    manifest = {} if saved is None else checkpoint.read_manifest(saved, world)
    resuming.check_same_run(manifest, config, model_config)
    config = resuming.as_long_as_before(config, manifest)
    pace = _pace(config, model_config, corpus, world)
    if manifest and pace.steps < manifest["step"]:
        raise ConfigError(
            f"{pace.steps} steps are fewer than the {manifest['step']} of the checkpoint: give more --steps, or "
            "another --output"
        )

    torch.manual_seed(config.seed)
    world.note("building the model")
    gpt = GPT(model_config)
    model = place(gpt, config, world)
    world.note("building the optimizer")
    optimizer = make_optimizer(model, config)
    base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
    result = RunResult(config.label, groups=describe_groups(optimizer))
    if saved is not None:
        resuming.load(saved, model, optimizer, world)
        earlier = resuming.earlier_result(config, manifest, world)
        result = replace(earlier, name=result.name, groups=result.groups, num_steps_before=manifest["step"])
        if world.is_main:
            resuming.print_changes(manifest["config"], config)
    if world.is_main:
        _print_start(config, world, gpt, corpus, pace, result)

    schedule = make_schedule(
        config.schedule, pace.steps, config.warmup_fraction, config.decay_fraction, config.final_lr_fraction
    )
    journal = Journal(config.folder, manifest.get("step"), config.tensorboard) if world.is_main else None
    tokens_per_step = config.batch_size * model_config.sequence_length
    if journal is not None:
        facts = {"config": as_json(config), "model": asdict(model_config), "world_size": world.size}
        facts |= {"num_parameters": gpt.num_parameters(), "device": str(world.device), "steps": pace.steps}
        journal.write("start", start_line(result, facts | {"resumed_from": manifest.get("step")}))

    def save(step: int) -> None:
        facts = {"config": as_json(config), "model": asdict(model_config)}
        checkpoint.save(config.folder / "checkpoints", step, model, optimizer, facts, world, config.keep)

    try:
        with _logger(journal, pace, tokens_per_step, result, base_lrs[0], stop) as on_log:
            train(
                result,
                model,
                optimizer,
                _checked(_training_rows(config, corpus, model_config, world, result.num_steps), model_config),
                _validation(config, corpus, model_config, world, pace),
                pace,
                schedule,
                world,
                base_lrs=base_lrs,
                on_log=on_log,
                on_save=save,
                stop_wanted=lambda: stop.wanted or launcher_is_gone(),
            )
        if journal is not None:
            journal.write("end", _end_facts(result, optimizer, world))
    finally:
        if journal is not None:
            journal.close()
    return result


# --- what the configuration leaves open ---


def _open_data(config: TrainConfig) -> tuple[GPTConfig, Corpus]:
    length = config.model_config(None).sequence_length
    corpus = open_corpus(config.data, length)
    return config.model_config(corpus.vocab_size), corpus


def _pace(config: TrainConfig, model_config: GPTConfig, corpus: Corpus, world: World) -> Pace:
    rows = _rows_of_a_rank(config, world.data_size)
    steps = config.steps or DEFAULT_STEPS
    if config.epochs is not None:
        tokens_per_step = config.batch_size * model_config.sequence_length
        steps = max(1, round(config.epochs * corpus.train.numel() / tokens_per_step))
    return Pace(
        steps=steps,
        eval_every=config.eval_every or max(5, steps // EVALUATIONS_PER_RUN),
        log_every=config.log_every or (1 if world.device.type == "cpu" else 10),
        save_every=config.save_every,
        num_micro_batches=rows // (config.micro_batch_size or rows),
        clip_norm=config.clip_norm,
    )


def _rows_of_a_rank(config: TrainConfig, data_size: int) -> int:
    rows = config.batch_size // data_size
    micro = config.micro_batch_size or rows
    if rows == 0 or config.batch_size % data_size or rows % micro:
        raise ConfigError(
            f"--batch-size {config.batch_size} must be a multiple of {data_size} data-parallel rank(s)"
            + (f" x --micro-batch-size {micro}" if config.micro_batch_size else "")
        )
    return rows


def _training_rows(
    config: TrainConfig, corpus: Corpus, model_config: GPTConfig, world: World, first: int
) -> Iterator[Batch]:
    """This rank's rows of batches that are the same on any number of ranks."""
    rows = config.batch_size // world.data_size
    mine = slice(world.data_rank * rows, (world.data_rank + 1) * rows)
    generator = torch.Generator().manual_seed(config.seed)
    return training_batches(corpus.train, config.batch_size, model_config.sequence_length, generator, first, mine)


def _checked(batches: Iterator[Batch], model_config: GPTConfig) -> Iterator[Batch]:
    for inputs, targets in batches:
        try:
            check_tokens(inputs, targets, model_config.vocab_size)
        except DataError as error:
            raise OneRankError(str(error)) from None
        yield inputs, targets


def _validation(config: TrainConfig, corpus: Corpus, model_config: GPTConfig, world: World, pace: Pace) -> list[Batch]:
    """Windows in batches that every rank can take an equal part of."""
    length = model_config.sequence_length
    available = (corpus.validation.numel() - 1) // length
    windows = min(config.eval_windows, available) // world.data_size * world.data_size
    if windows == 0:
        raise ConfigError(f"{available} validation window(s) for {world.data_size} ranks: give --data a longer text")
    batch_size = config.batch_size // pace.num_micro_batches
    batches = validation_batches(corpus.validation, batch_size, length, windows)
    for inputs, targets in batches:
        check_tokens(inputs, targets, model_config.vocab_size)
    return batches


@contextmanager
def _own_folder(folder: Path, world: World) -> Iterator[None]:
    """The folder, made and locked: two runs in one would mix their metrics and delete each other's checkpoints."""
    failure, lock = "", None
    if world.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("w")
            _lock(lock.fileno(), folder)
        except BlockingIOError:
            failure = f"another run writes to {folder}: wait until it ends, or give another --output"
        except OSError as error:
            reason = "it is a file" if folder.is_file() else error.strerror or error
            failure = f"--output {folder} can't be written: {reason}"
    failure = checkpoint.everyone(failure, world)[0]
    try:
        if failure:
            raise ConfigError(failure)
        yield
    finally:
        if lock is not None:
            lock.close()


def _lock(file: int, folder: Path) -> None:
    """Until the process ends, also by a kill. A file system may have no locks."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        print(f"note: {folder} can't be locked; start no second run in it", flush=True)


# --- what is shown and written ---


def _print_start(config: TrainConfig, world: World, gpt: GPT, corpus: Corpus, pace: Pace, result: RunResult) -> None:
    if config.parallel == "none":
        layout = "one process"
    else:
        layout = f"{'DDP' if config.parallel == 'ddp' else 'FSDP2'} on {world.size} rank(s)"
    if world.mesh is not None and world.mesh.size() != world.mesh.size(1):
        replicas, shards, tensor = world.mesh.shape
        layout += f" ({replicas} replicas x {shards} shards x {tensor} tensor-parallel)"
    print(
        f"{config.label}: {config.model}, {gpt.num_parameters():,} parameters, {layout}, {world.device.type}, "
        f"{str(world.precision).removeprefix('torch.')}\n"
        f"  {corpus.train.numel():,} training tokens of {corpus.source}; {pace.steps} steps of "
        f"{config.batch_size} x {gpt.config.sequence_length} tokens, "
        f"{pace.num_micro_batches} micro-batch(es) a step",
        *(str(group) for group in result.groups),
        *([f"going on from step {result.num_steps}"] if result.num_steps else []),
        *(["that was its last: nothing is left to do"] if result.num_steps == pace.steps else []),
        sep="\n  ",
        flush=True,
    )


@contextmanager
def _logger(
    journal: Journal | None, pace: Pace, tokens_per_step: int, result: RunResult, lr: float, stop: Stop
) -> Iterator[Callable[[RunResult, Sequence[float]], None]]:
    """What the loop calls after each look: the journal and the progress line, on rank 0 alone."""
    if journal is None:
        yield lambda result, factors: None
        return
    written = len(result.evaluations)
    with show_progress(result.name, pace.steps, tokens_per_step, pace.eval_every) as show:

        def log(result: RunResult, factors: Sequence[float]) -> None:
            nonlocal written
            for index, factor in enumerate(factors, start=len(result.train_losses) - len(factors)):
                journal.write("train", train_line(result, index, lr * factor))
            for evaluation in result.evaluations[written:]:
                journal.write("validation", asdict(evaluation))
            written = len(result.evaluations)
            journal.flush()
            try:
                show(result)
            except BrokenPipeError:
                stop.wanted = True
                _stdout_is_closed()

        yield log


def _end_facts(result: RunResult, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    facts: dict[str, Any] = {"stopped": result.stopped, "validation_loss": result.final_validation_loss}
    if result.times()[0]:
        facts |= {"optimizer_share": result.optimizer_share, "seconds_per_step": result.milliseconds_per_step / 1e3}
    facts["optimizer_state_bytes_per_rank"] = state_bytes(optimizer)
    if world.device.type == "cuda":
        facts["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    return facts


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer keeps on this rank."""
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                local = value.to_local() if hasattr(value, "to_local") else value
                total += local.numel() * local.element_size()
    return total


@dataclass
class Stop:
    """Whether a checkpoint and a clean end are wanted before the last step."""

    wanted: bool = False


@contextmanager
def _stop_signals() -> Iterator[Stop]:
    """The first Ctrl-C (or SIGTERM) asks for a checkpoint and a clean end; the second ends at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, frame: object) -> None:
        if stop.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.wanted = True

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None, prog: str = "python -m muon_fsdp.training") -> int:
    """0 after the last step, 1 when training failed, 2 for a mistake in what was asked, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal can't show must not end a run
    arguments = list(sys.argv[1:] if argv is None else argv)
    config, processes = parse(arguments, prog)
    if processes is not None:
        if "RANK" in os.environ:
            return _fail("--processes starts processes itself: leave it out under torchrun", 2)
        try:
            _rows_of_a_rank(config, max(1, processes // config.tensor_parallel))
        except ConfigError as error:
            return _fail(str(error), 2)
        return launch(arguments, processes)
    try:
        result = run(config)
    except OneRankError as error:
        return _fail(str(error), 2, of_one_rank=True)
    except (ConfigError, DataError) as error:
        return _fail(str(error), 2)
    except (FloatingPointError, CheckpointError) as error:
        return _fail(str(error), 1)
    except BrokenPipeError:  # before the first step
        _stdout_is_closed()
        return 1
    except OSError as error:
        where = "" if error.filename else f" ({config.folder})"
        return _fail(f"{error}{where}", 1, of_one_rank=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in reason:
            message = f"out of memory: {reason} Lower --micro-batch-size or use --fsdp"
            return _fail(message, 1, of_one_rank=True)
        if any(sign in reason for sign in _PEER_IS_GONE):
            return _fail("another rank has ended; the last checkpoint is as it was", 1)
        raise
    except KeyboardInterrupt:
        return _fail("stopped at once; the last checkpoint is as it was", 130)
    if _is_main():
        last = checkpoint.checkpoints(config.folder / "checkpoints")[-1]
        if result.stopped:
            print(f"stopped after step {result.num_steps}, saved as {last}; --resume goes on from there")
        else:
            print(f"validation loss {result.final_validation_loss:.4f}; metrics and checkpoint in {config.folder}")
    return 130 if result.stopped else 0


def _stdout_is_closed() -> None:
    """As after `| head`: the rest is printed nowhere, and what is still buffered must not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print("note: standard output was closed; stopping", file=sys.stderr, flush=True)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _fail(message: str, code: int, of_one_rank: bool = False) -> int:
    if _is_main():
        print(f"error: {message}", file=sys.stderr, flush=True)
    elif of_one_rank:
        print(f"error: rank {os.environ['RANK']}: {message}", file=sys.stderr, flush=True)
    return code
