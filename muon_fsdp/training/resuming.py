"""Going on with a run: which checkpoint, whether it is of this run, what changed, and the metrics until there."""

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
from muon_fsdp.training.config import TrainConfig, as_json, json_value
from muon_fsdp.training.model import GPTConfig
from muon_fsdp.training.parallel import World
from muon_fsdp.training.plugins import find_rule
from muon_fsdp.training.results import RunResult, read_result_until, set_metrics_aside
from muon_fsdp.training.rule_flags import default_options


def find_checkpoint(config: TrainConfig, world: World) -> Path | None:
    found = checkpoint.checkpoints(config.folder / "checkpoints")
    world.barrier()  # all look before one writes
    if not found and config.resume:
        raise ConfigError(f"{config.folder} holds no checkpoint to go on from yet; leave out --resume to start anew")
    if found and not config.resume:
        raise ConfigError(
            f"{config.folder} holds a run with a checkpoint of {found[-1].name}: say --resume to go on with it, "
            "or give another --output"
        )
    return found[-1] if found else None


def as_long_as_before(config: TrainConfig, manifest: dict[str, Any]) -> TrainConfig:
    """A run that is resumed without a length keeps the one that it had."""
    if not manifest or config.steps is not None or config.epochs is not None:
        return config
    return replace(config, steps=manifest["config"].get("steps"), epochs=manifest["config"].get("epochs"))


def check_same_run(manifest: dict[str, Any], config: TrainConfig, model_config: GPTConfig) -> None:
    if not manifest:
        return
    given, saved = asdict(model_config), manifest["model"]
    preset = manifest["config"].get("model")
    if preset != config.model:
        raise ConfigError(f"the checkpoint is of --model {preset}, not {config.model}: say --model {preset}")
    differences = [
        f"{name} {saved.get(name)!r} there, {given[name]!r} here" for name in given if saved.get(name) != given[name]
    ]
    trained_with = _rule_of(manifest)
    if trained_with != config.optimizer:
        differences.append(f"optimizer {trained_with!r} there, {config.optimizer!r} here")
    if differences:
        raise ConfigError(f"the checkpoint is of another model or optimizer: {'; '.join(differences)}")


def _rule_of(manifest: dict[str, Any]) -> str:
    """Return the name of the rule that a checkpoint was trained with, which may be saved by an alias."""
    saved = manifest["config"]["optimizer"]
    try:
        return find_rule(saved).name
    except ConfigError:
        files = manifest["config"].get("plugin") or ["FILE"]
        flags = " ".join(f"--plugin {file}" for file in files)
        raise ConfigError(
            f"the checkpoint is of rule {saved!r}, which is not registered: pass {flags} --optimizer {saved}"
        ) from None


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Load weights and state; options stay what this run was told, not what the run before was."""
    groups = optimizer.param_groups
    told = [{name: group[name] for name in RULES[group["rule"]].all_options} for group in groups]
    checkpoint.load(path, model, optimizer, world)
    for group, options in zip(optimizer.param_groups, told, strict=True):
        group.update(options)


def print_changes(saved: dict[str, Any], config: TrainConfig) -> None:
    """Tell what a resumed run does otherwise than before; where it runs does not matter."""
    given = as_json(config)
    matters = (
        "steps", "epochs", "batch_size", "seed", "data", "lr", "rest_lr", "weight_decay", "schedule",
        "warmup_fraction", "decay_fraction", "final_lr_fraction", "clip_norm", "precision",
    )  # fmt: skip
    changes = [f"{name} {saved.get(name)} -> {given[name]}" for name in matters if saved.get(name) != given[name]]
    defaults = json_value(default_options(config.rule))
    before = {**defaults, **saved, **saved.get("options", {})}  # which older runs saved beside the others
    now = {**defaults, **given["options"]}
    changes += [
        f"{name} {before[name]} -> {now[name]}" for name in now if name not in given and before[name] != now[name]
    ]
    if changes:
        print(f"note: this run goes on with other settings: {', '.join(changes)}", flush=True)


def earlier_result(config: TrainConfig, manifest: dict[str, Any], world: World) -> RunResult:
    """Return what the metrics tell of the steps before the checkpoint. Bad ones do not stop a good checkpoint."""
    result = lost = RunResult(config.label, num_steps_lost=manifest["step"])
    problem = ""
    try:
        result = read_result_until(config.folder, manifest)
    except ConfigError as error:
        problem = str(error)
    problem = next(filter(None, checkpoint.everyone(problem, world)), "")  # all have read before one writes
    if not problem:
        return result
    if world.is_main:
        kept = set_metrics_aside(config.folder)
        where = "" if kept is None else f", and the file is kept as {kept.name}"
        print(
            f"warning: {problem}; metrics begin anew after step {manifest['step']}{where}", file=sys.stderr, flush=True
        )
    return lost
