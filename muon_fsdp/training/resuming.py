"""Resume a run: find its checkpoint, check that it belongs to this run, report what changed, and read its metrics."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from muon_fsdp.rules import RULES
from muon_fsdp.training import checkpoint
from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.config import TrainConfig, default_options, json_value
from muon_fsdp.training.inputs import Inputs
from muon_fsdp.training.parallel import World
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
    """Check that a checkpoint fits the run.

    Returns:
        The inputs, with the checkpoint's number of steps if neither `--steps` nor `--epochs` was passed.

    Raises:
        ConfigError: the checkpoint is of another model or optimizer, or has more steps than the run.
    """
    config, saved, rule = inputs.config, manifest["config"], manifest["config"]["optimizer"]
    if rule not in RULES:
        flags = " ".join(f"--plugin {file}" for file in saved.get("plugin") or ["FILE"])
        raise ConfigError(
            f"the checkpoint was trained with rule {rule!r}, which is not registered: pass {flags} --optimizer {rule}"
        )
    if saved["model"] != config.model:
        name = saved["model"]
        raise ConfigError(f"the checkpoint is of --model {name}, not of {config.model}: pass --model {name}")
    before, now = manifest["model"] | {"optimizer": rule}, asdict(inputs.model_config) | {"optimizer": config.optimizer}
    differences = [
        f"{name} is {before.get(name)!r} in the checkpoint and {now[name]!r} here"
        for name in now
        if before.get(name) != now[name]
    ]
    decays = saved.get("rest_weight_decay") or 0.0, config.rest_weight_decay or 0.0
    if bool(decays[0]) != bool(decays[1]):  # it needs a param group of its own, which a checkpoint has or has not
        differences.append(f"rest_weight_decay is {decays[0]:g} in the checkpoint and {decays[1]:g} here")
    if differences:
        raise ConfigError(
            f"the checkpoint is of another model or optimizer: {'; '.join(differences)}; pass the checkpoint's "
            "values, or another --output"
        )
    if config.steps is None and config.epochs is None:
        config = replace(config, steps=saved.get("steps"), epochs=saved.get("epochs"))
        inputs = replace(inputs, config=config)
    if inputs.pace.steps < manifest["step"]:
        raise ConfigError(
            f"the checkpoint is already at step {manifest['step']}, but the run has only {inputs.pace.steps} steps: "
            "pass more --steps, or another --output"
        )
    return inputs


def print_changes(manifest: dict[str, Any], config: TrainConfig) -> None:
    """Print which settings differ from those of the checkpoint and affect the result."""
    saved, given = manifest["config"], config.as_json()
    matters = (
        "steps", "epochs", "batch_size", "seed", "data", "lr", "rest_lr", "weight_decay", "rest_weight_decay",
        "rest_betas", "schedule", "warmup_fraction", "decay_fraction", "final_lr_fraction", "clip_norm", "qk_clip",
        "precision", "recipe", "weights", "rounding", "state_dtype",
    )  # fmt: skip
    changes = [f"{name} {saved.get(name)} -> {given[name]}" for name in matters if saved.get(name) != given[name]]
    defaults = json_value(default_options(config.rule))
    before, now = {**defaults, **saved.get("options", {})}, {**defaults, **given["options"]}
    names = [name for name in before | now if before.get(name) != now.get(name)]  # views have no default
    changes += [f"{name} {before.get(name)} -> {now.get(name)}" for name in names]
    if changes:
        print(f"note: settings that differ from the checkpoint's: {', '.join(changes)}", flush=True)


def earlier_result(config: TrainConfig, manifest: dict[str, Any], world: World) -> RunResult:
    """Return the result of the steps before the checkpoint, read from `metrics.jsonl`.

    A file that cannot be used is renamed, with a warning: bad metrics do not prevent resuming from a good checkpoint.
    """
    result = lost = RunResult(config.label, num_steps_before=manifest["step"])
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
        text = f"warning: {problem}; metrics start again after step {manifest['step']}{where}"
        print(text, file=sys.stderr, flush=True)
    return lost
