"""Resume a run: find its checkpoint, check that it belongs to this run, report what changed, and read its metrics."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from muon_fsdp.rules import RULES
from muon_fsdp.training import checkpoint
from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.config import TrainConfig, default_options, json_value
from muon_fsdp.training.inputs import Inputs
from muon_fsdp.training.model import GPTConfig
from muon_fsdp.training.parallel import World
from muon_fsdp.training.plugins import find_rule
from muon_fsdp.training.results import RunResult, read_result_until, set_metrics_aside


def find_checkpoint(config: TrainConfig, world: World) -> Path | None:
    """Return the newest checkpoint of the run, or None if a new run starts.

    Raises:
        ConfigError: `--resume` was passed and there is no checkpoint, or was not passed and there is one.
    """
    found = checkpoint.checkpoints(config.folder / "checkpoints")
    world.barrier()  # a rank that looks later would find what rank 0 has written in the meantime
    if not found and config.resume:
        raise ConfigError(f"{config.folder} has no checkpoint to resume from; leave out --resume to start a new run")
    if found and not config.resume:
        raise ConfigError(
            f"{config.folder} already has a checkpoint, {found[-1].name}: pass --resume to continue that run, or "
            "another --output to start a new one"
        )
    return found[-1] if found else None


def check_inputs(inputs: Inputs, manifest: dict[str, Any]) -> Inputs:
    """Check that a checkpoint fits the run; an empty manifest stands for a new run.

    Returns:
        The inputs, with the checkpoint's number of steps if neither `--steps` nor `--epochs` was passed.

    Raises:
        ConfigError: the checkpoint is of another model or optimizer, or has more steps than the run.
    """
    if not manifest:
        return inputs
    _check_same_run(manifest, inputs.config, inputs.model_config)
    inputs = inputs.with_config(_with_saved_length(inputs.config, manifest))
    if inputs.pace.steps < manifest["step"]:
        raise ConfigError(
            f"the checkpoint is already at step {manifest['step']}, but the run has only {inputs.pace.steps} steps: "
            "pass more --steps, or another --output"
        )
    return inputs


def _with_saved_length(config: TrainConfig, manifest: dict[str, Any]) -> TrainConfig:
    if config.steps is not None or config.epochs is not None:
        return config
    return replace(config, steps=manifest["config"].get("steps"), epochs=manifest["config"].get("epochs"))


def _check_same_run(manifest: dict[str, Any], config: TrainConfig, model_config: GPTConfig) -> None:
    given, saved = asdict(model_config), manifest["model"]
    preset = manifest["config"].get("model")
    if preset != config.model:
        raise ConfigError(f"the checkpoint is of --model {preset}, not of {config.model}: pass --model {preset}")
    differences = [
        f"{name} is {saved.get(name)!r} in the checkpoint and {given[name]!r} here"
        for name in given
        if saved.get(name) != given[name]
    ]
    trained_with = _rule_of(manifest)
    if trained_with != config.optimizer:
        differences.append(f"optimizer is {trained_with!r} in the checkpoint and {config.optimizer!r} here")
    decays = manifest["config"].get("rest_weight_decay") or 0.0, config.rest_weight_decay or 0.0
    if bool(decays[0]) != bool(decays[1]):  # it needs a param group of its own, which a checkpoint has or has not
        differences.append(f"rest_weight_decay is {decays[0]:g} in the checkpoint and {decays[1]:g} here")
    if differences:
        raise ConfigError(
            f"the checkpoint is of another model or optimizer: {'; '.join(differences)}; pass the checkpoint's "
            "values, or another --output"
        )


def _rule_of(manifest: dict[str, Any]) -> str:
    """Return the name of the rule that a checkpoint was trained with, which may be saved by an alias."""
    saved = manifest["config"]["optimizer"]
    try:
        return find_rule(saved).name
    except ConfigError:
        files = manifest["config"].get("plugin") or ["FILE"]
        flags = " ".join(f"--plugin {file}" for file in files)
        raise ConfigError(
            f"the checkpoint was trained with rule {saved!r}, which is not registered: pass {flags} --optimizer {saved}"
        ) from None


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Load weights and optimizer state, but keep the options of this run instead of those in the checkpoint."""
    groups = optimizer.param_groups
    given = [{name: group[name] for name in RULES[group["rule"]].all_options} for group in groups]
    checkpoint.load(path, model, optimizer, world)
    for group, options in zip(optimizer.param_groups, given, strict=True):
        group.update(options)


def print_changes(manifest: dict[str, Any], config: TrainConfig) -> None:
    """Print which settings differ from those of the checkpoint and affect the result; an empty manifest has none."""
    if not manifest:
        return
    saved, given = manifest["config"], config.as_json()
    matters = (
        "steps", "epochs", "batch_size", "seed", "data", "lr", "rest_lr", "weight_decay", "rest_weight_decay",
        "rest_betas", "schedule", "warmup_fraction", "decay_fraction", "final_lr_fraction", "clip_norm", "precision",
    )  # fmt: skip
    changes = [f"{name} {saved.get(name)} -> {given[name]}" for name in matters if saved.get(name) != given[name]]
    defaults = json_value(default_options(config.rule))
    before = {**defaults, **saved, **saved.get("options", {})}  # older runs saved options beside the other settings
    now = {**defaults, **given["options"]}
    changes += [
        f"{name} {before[name]} -> {now[name]}" for name in now if name not in given and before[name] != now[name]
    ]
    if changes:
        print(f"note: settings that differ from the checkpoint's: {', '.join(changes)}", flush=True)


def earlier_result(config: TrainConfig, manifest: dict[str, Any], world: World) -> RunResult:
    """Return the result of the steps before the checkpoint, read from `metrics.jsonl`.

    A file that cannot be used is renamed, with a warning: bad metrics do not prevent resuming from a good checkpoint.
    """
    result = lost = RunResult(config.label, num_steps_lost=manifest["step"])
    problem = ""
    try:
        result = read_result_until(config.folder, manifest)
    except ConfigError as error:
        problem = str(error)
    # The exchange also makes every rank read the file before rank 0 renames it.
    problem = checkpoint.first_failure(problem, world)
    if not problem:
        return result
    if world.is_main:
        kept = set_metrics_aside(config.folder)
        where = "" if kept is None else f", and the old file is kept as {kept.name}"
        print(
            f"warning: {problem}; metrics start again after step {manifest['step']}{where}",
            file=sys.stderr,
            flush=True,
        )
    return lost
