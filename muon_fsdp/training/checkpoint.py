"""Checkpoints that are whole or not there: written aside, checked, renamed, and loadable on other ranks."""

from __future__ import annotations

import json
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
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

from muon_fsdp.text import format_bytes
from muon_fsdp.training.parallel import World
from muon_fsdp.training.unpickling import Planner, Reader

_NAME = re.compile(r"step-(\d{8})")
_MANIFEST = "manifest.json"  # what the run was, and size and checksum of every other file


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which one is still good."""


def checkpoints(folder: Path) -> list[Path]:
    """The complete ones, oldest first."""
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
) -> Path:
    """Write `folder/step-N`; all ranks call it. Until the last moment it has another name, so a kill leaves no half."""
    final = folder / f"step-{step:08d}"
    aside = folder / f"{final.name}.partial"
    failure = ""
    world.note(f"saving step {step}")
    if world.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob("*.partial"):
                shutil.rmtree(leftover)
        except OSError as error:
            failure = _cause(error)
    failures = everyone(failure, world)
    if not any(failures):  # on any rank: the others would wait for it in the collectives of the save
        try:
            with _quiet():
                state = _state(model, optimizer)
                state_dict_saver.save(state, checkpoint_id=aside, no_dist=world.size == 1)
        except (Exception, CheckpointException) as error:
            failure = _cause(error)
        failures = everyone(failure, world)
    if world.is_main and not any(failures):
        try:
            files = {file.name: _fingerprint(file) for file in sorted(aside.iterdir())}
            manifest = {"step": step, **run, "world_size": world.size, "files": files}
            (aside / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            if final.exists():
                shutil.rmtree(final)
            aside.rename(final)
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(old)
        except OSError as error:
            failure = _cause(error)
    failures = everyone(failure, world)
    if any(failures):
        if world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        good, free = checkpoints(folder), shutil.disk_usage(folder.parent).free
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: {next(filter(None, failures))} "
            f"({format_bytes(free)} free there); "
            + (f"the newest good one is {good[-1].name}" if good else "there is no earlier one")
        )
    return final


def read_manifest(path: Path, world: World) -> dict[str, Any]:
    """What `save` was told, after a look at every file: a damaged one is named before anything is loaded."""
    failure, manifest = "", {}
    world.note(f"checking {path.name}")
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        step, *_ = (manifest[key] for key in ("step", "config", "model"))
        if path.name != f"step-{step:08d}":
            failure = f"{_MANIFEST} is of step {step}"
        for index, (name, fingerprint) in enumerate(manifest["files"].items()):
            if index % world.size == world.rank and _fingerprint(path / name) != fingerprint:
                failure = f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        failure = f"{_MANIFEST}: {_cause(error)}"
    failure = next(filter(None, everyone(failure, world)), "")
    if failure:
        earlier = [other.name for other in checkpoints(path.parent) if other.name < path.name]
        advice = f"delete it to go on from {earlier[-1]}" if earlier else "there is no earlier one: start anew"
        raise CheckpointError(f"{path} is damaged ({failure}); {advice}")
    return manifest


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Into a model and an optimizer on any number of ranks."""
    failure = ""
    world.note(f"loading {path.name}")
    try:
        with _quiet():
            state = _state(model, optimizer)
            state_dict_loader.load(state, storage_reader=Reader(path), planner=Planner(), no_dist=world.size == 1)
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
    except (Exception, CheckpointException) as error:
        failure = _cause(error)
    failures = everyone(failure, world)
    if any(failures):
        raise CheckpointError(f"{path} could not be loaded: {next(filter(None, failures))}")


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _fingerprint(file: Path) -> list[int]:
    """Size and CRC-32."""
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return [file.stat().st_size, checksum]


def everyone(failure: str, world: World) -> list[str]:
    """Every rank's failure, so that all raise or none does."""
    if world.size == 1:
        return [failure]
    found: list[str] = [""] * world.size
    dist.all_gather_object(found, failure)
    return found


def _cause(error: BaseException) -> str:
    """The first thing that went wrong, in a line; torch wraps what the file system said."""
    failures = getattr(error, "failures", None)  # of a CheckpointException: by rank, with its traceback
    if failures:
        error = next(iter(failures.values()))[0]
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    lines = str(error).strip().splitlines()
    if lines and "inline_container" in lines[0]:  # torch's writer of files tells where it stood, not what happened
        return "a file could not be written whole, as on a full disk"
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks about its own calls, which a user can do nothing about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
