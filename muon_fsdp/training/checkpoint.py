"""Lock the folder of a run, and save and load its checkpoints, on any number of ranks.

A checkpoint is written under another name and renamed when it is complete, so that a kill never leaves half of one.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from muon_fsdp.rules import RULES
from muon_fsdp.text import format_bytes
from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.parallel import World
from muon_fsdp.training.unpickling import Planner, Reader

_NAME = re.compile(r"step-(\d{8})")
_MANIFEST = "manifest.json"  # configuration and step of the run, and size and checksum of every other file


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the newest one that can be used."""


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: dict[str, Any],
    world: World,
    keep: int,
) -> None:
    """Write the checkpoint `folder/step-N`, and delete all but the last `keep`; all ranks call it.

    Args:
        folder: the folder of all checkpoints of the run.
        step: the number of steps that the model has been trained for.
        model: the model, on its device or sharded over the ranks.
        optimizer: its optimizer.
        run: "config" and "model" of the manifest, which `read_manifest` returns.
        world: the ranks of the run.
        keep: how many checkpoints to keep.

    Raises:
        CheckpointError: it could not be written; the checkpoints before it are unchanged.
    """
    final = folder / f"step-{step:08d}"
    aside = folder / f"{final.name}.partial"
    world.note(f"saving step {step}")

    def make_folder() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.partial"):  # of a killed run
            shutil.rmtree(leftover)

    def write() -> None:
        state_dict_saver.save(_state(model, optimizer), checkpoint_id=aside, no_dist=world.size == 1)

    def publish() -> None:
        files = {file.name: _fingerprint(file) for file in sorted(aside.iterdir())}
        text = json.dumps({"step": step, **run, "world_size": world.size, "files": files}, indent=1)
        (aside / _MANIFEST).write_text(text, encoding="utf-8")
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)

    # After each part ranks compare: one that failed alone would leave the others waiting in collectives of the next.
    failure = _attempt(make_folder, world, world.is_main)
    failure = failure or _attempt(write, world)
    failure = failure or _attempt(publish, world, world.is_main)
    if failure:
        if world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        good, free = checkpoints(folder), shutil.disk_usage(folder.parent).free
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: {failure} "
            f"({format_bytes(free)} are free there); "
            + (f"the newest complete checkpoint is {good[-1].name}" if good else "there is no earlier checkpoint")
        )


def read_manifest(path: Path, world: World) -> dict[str, Any]:
    """Return the manifest that `save` wrote, after checking every file against its checksum; all ranks call it.

    Raises:
        CheckpointError: a file is damaged. Nothing has been loaded yet.
    """
    failure, manifest = "", {}
    world.note(f"checking {path.name}")
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        step, *_ = (manifest[key] for key in ("step", "config", "model"))
        if path.name != f"step-{step:08d}":
            failure = f"{_MANIFEST} belongs to step {step}"
        for index, (name, fingerprint) in enumerate(manifest["files"].items()):
            if index % world.size == world.rank and _fingerprint(path / name) != fingerprint:
                failure = f"{name} has changed since it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        failure = f"{_MANIFEST}: {_cause(error)}"
    if failure := first_failure(failure, world):
        earlier = [other.name for other in checkpoints(path.parent) if other.name < path.name]
        advice = f"delete it to resume from {earlier[-1]}" if earlier else "there is no earlier checkpoint: start again"
        raise CheckpointError(f"{path} is damaged ({failure}); {advice}")
    return manifest


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Load a checkpoint into a model and its optimizer, on any number of ranks; all ranks call it.

    The optimizer keeps the options of this run instead of those in the checkpoint.
    """
    world.note(f"loading {path.name}")
    given = [{name: group[name] for name in RULES[group["rule"]].all_options} for group in optimizer.param_groups]

    def read() -> None:
        state = _state(model, optimizer)
        state_dict_loader.load(state, storage_reader=Reader(path), planner=Planner(), no_dist=world.size == 1)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    if failure := _attempt(read, world):
        raise CheckpointError(f"{path} could not be loaded: {failure}")
    for group, options in zip(optimizer.param_groups, given, strict=True):
        group.update(options)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _fingerprint(file: Path) -> list[int]:
    """Return size and CRC-32 checksum of a file."""
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return [file.stat().st_size, checksum]


def first_failure(failure: str, world: World) -> str:
    """Return the failure of the first rank that has one, "" for none, so that either all ranks raise or none does."""
    found = [failure] * world.size
    if world.size > 1:
        dist.all_gather_object(found, failure)
    return next(filter(None, found), "")


def _attempt(action: Callable[[], None], world: World, here: bool = True) -> str:
    """Do something, if it is to be done `here`, and return why the first rank failed, or "" if none did.

    Warnings are hidden: in them torch comments on its own calls, and a user can do nothing about that.
    """
    failure = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if here:
                action()
    except (Exception, CheckpointException) as error:
        failure = _cause(error)
    return first_failure(failure, world)


def _cause(error: BaseException) -> str:
    """Return the first line of the original error, which torch wraps in others."""
    failures = getattr(error, "failures", None)  # a CheckpointException has one error per rank, each with its traceback
    if failures:
        error = next(iter(failures.values()))[0]
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    lines = str(error).strip().splitlines()
    if lines and "inline_container" in lines[0]:  # torch reports a line of its C++ code, not the cause
        return "a file could not be written completely; the disk may be full"
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@contextmanager
def lock_folder(folder: Path, world: World) -> Iterator[None]:
    """Create `folder` and hold its lock while the context is entered; all ranks call it.

    Two runs in one folder would mix their metrics and delete each other's checkpoints.

    Raises:
        ConfigError: another run holds the lock, or the folder cannot be written to.
    """
    failure, lock = "", None
    if world.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("w")
            _lock(lock.fileno(), folder)
        except BlockingIOError:
            failure = f"another run is writing to {folder}: wait until it ends, or pass another --output"
        except OSError as error:
            reason = "it is a file" if folder.is_file() else error.strerror or error
            failure = f"cannot write to --output {folder}: {reason}"
    try:
        if failure := first_failure(failure, world):
            raise ConfigError(failure)
        yield
    finally:
        if lock is not None:
            lock.close()


def _lock(file: int, folder: Path) -> None:
    """Lock an open file until the process ends, even by a kill; print a note where the file system has no locks."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        print(f"note: {folder} cannot be locked here; do not start a second run in it", flush=True)
