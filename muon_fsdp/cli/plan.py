"""`muon-fsdp plan`: preview the optimizer step of a model on ranks that need not exist."""

from __future__ import annotations

import math
import re

from muon_fsdp.cli.flags import DTYPES, PlanFlags, command_with
from muon_fsdp.cli.output import print_json, status
from muon_fsdp.text import format_count
from muon_fsdp.training.arguments import ConfigError, fail
from muon_fsdp.training.terminal import import_torch, print_table

MOST_RANKS = 1 << 16  # that are planned in reasonable time
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

# Flags of `muon-fsdp train` that have another name here.
MEANT = {
    "--model": "pass MODEL without a flag",
    "--optimizer": "pass --rule",
    "--processes": "pass --world-size",
    "--replicas": "pass --mesh REPLICAS,SHARDS",
    "--fsdp": "leave it out: FSDP2 is the default",
    "--ddp": "pass --mesh REPLICAS,1",
    "--tp": "tensor parallelism is not planned",
    "--weights": "pass --dtype",
    "--precision": "pass --dtype",
}

ABOUT_TIME = (
    "The time is an estimate: FLOPs of the busiest rank / --tflops, its bytes / --bandwidth, bytes of device memory / "
    "--memory-bandwidth, and 0.1 ms for every transfer. FLOPs count symmetric products in full, although only half of "
    "each is computed. Counted this way, one H200 reached 1,000 to 1,030 TFLOP/s on matrices of 4096 rows, 850 to 880 "
    "on 2048 rows, and 580 to 660 on 768 rows (docs/performance.md).\n\n"
)


@command_with(PlanFlags)
def plan(flags: PlanFlags) -> None:
    """Preview an optimizer step on any number of GPUs, without GPUs.

    Shows which parameters are orthogonalized under FSDP2 or DDP, which ranks compute their updates, what is sent, the
    memory per rank, and an estimate of the time. Needs no GPU, no processes and no memory for weights.
    """
    if flags.list_models:
        _list_models(as_json=flags.json)
        return
    if flags.model is None:
        fail("pass a model, such as gpt2-124m; muon-fsdp plan --list shows all that have a name")
    mesh = _mesh(flags.mesh, flags.world_size)
    if flags.shard_state and (len(mesh) != 2 or mesh[1] != 1):
        fail("--shard-state is for DDP: pass --mesh REPLICAS,1, for example --mesh 8,1; FSDP2 shards state without it")
    stage_bytes = None if flags.max_stage_bytes is None else _size("--max-stage-bytes", flags.max_stage_bytes)
    device_memory = _size("--device-memory", flags.device_memory)
    if device_memory < 2**20:
        fail(f"--device-memory {flags.device_memory} is less than 1 MiB; pass for example 80GiB")
    for option in ("tflops", "bandwidth", "memory_bandwidth"):
        if not 1e-6 <= getattr(flags, option) < math.inf:
            fail(f"--{option.replace('_', '-')} {getattr(flags, option):g} is no speed; pass at least 1e-6")
    for option in ("dtype", "comm_dtype"):
        if getattr(flags, option) not in (None, *DTYPES):
            fail(f"--{option.replace('_', '-')} {getattr(flags, option)} is not one of {', '.join(DTYPES)}")
    import_torch("muon-fsdp plan")
    from muon_fsdp.cli.planned import StepPreview
    from muon_fsdp.declarations.encoding import STORAGE_OPTIONS
    from muon_fsdp.declarations.settings import SETTINGS
    from muon_fsdp.rules import DEFAULT_RULE
    from muon_fsdp.training.plugins import find_rule, load_plugins

    for declared in (*SETTINGS, *STORAGE_OPTIONS):
        value = getattr(flags, declared.name, None)
        if declared.choices and value not in (None, *declared.choices):
            fail(f"--{declared.name.replace('_', '-')} {value} is not one of {', '.join(declared.choices)}")
    with status(f"planning {flags.model} ..."):
        try:
            load_plugins(flags.plugin or [])  # first, because they register rules
            rule = find_rule(DEFAULT_RULE if flags.rule is None else flags.rule)
            preview = StepPreview(flags, mesh, rule.name, stage_bytes, device_memory)
        except ConfigError as error:
            fail(str(error))
        except (TypeError, ValueError) as error:  # the optimizer refuses an option, or a model without parameters
            fail(f"{flags.model}: {error}")
    if flags.json:
        print_json(preview.as_json(routing=flags.routing))
    else:
        preview.show(routing=flags.routing)


def hint_at_flag(flag: str) -> str:
    """Return what to pass instead of a flag of `muon-fsdp train`, or of an argument of the optimizer; else nothing."""
    if flag in MEANT:
        return f"; {MEANT[flag]}"
    from muon_fsdp.declarations.settings import SETTINGS
    from muon_fsdp.rules import RULES
    from muon_fsdp.training.config import make_parser

    options = {option.name for rule in RULES.values() for option in rule.all_options.values()}
    name = flag.removeprefix("--").replace("-", "_")
    if name in options.union(setting.name for setting in SETTINGS) or flag in make_parser("")._option_string_actions:
        return "; to plan other options, call plan_report() of your own MuonOptimizer"
    return ""


def _list_models(*, as_json: bool) -> None:
    """Print the models that have a name, with their numbers of parameters."""
    import_torch("muon-fsdp plan")
    from muon_fsdp.cli.loading import load_model, named_models

    with status("counting parameters ..."):
        counts = {name: sum(p.numel() for p in load_model(name, None).parameters()) for name in named_models()}
    if as_json:
        print_json(counts)
    else:
        print_table("Models", ("name", "parameters"), [(name, format_count(count)) for name, count in counts.items()])


def _mesh(mesh: str | None, world_size: int | None) -> tuple[int, ...]:
    """Return the shape of the mesh, (shards,) or (replicas, shards), from --mesh and --world-size."""
    shape: tuple[int, ...]
    if mesh is not None:
        sizes = [part.strip() for part in mesh.split(",")]
        if len(sizes) > 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            fail(f"--mesh {mesh} is not SHARDS or REPLICAS,SHARDS; pass for example --mesh 8,64")
        shape = tuple(map(int, sizes))
    elif world_size is not None:
        shape = (world_size,)
    else:
        fail("pass the number of ranks: --world-size 512, or --mesh REPLICAS,SHARDS such as --mesh 8,64")
    number = math.prod(shape)
    if number > MOST_RANKS:
        fail(f"{number} ranks are more than the {MOST_RANKS} that can be planned; pass fewer")
    if world_size not in (None, number):
        fail(f"--mesh {mesh} has {number} ranks and --world-size is {world_size}: make them equal")
    return shape


def _size(option: str, text: str) -> int:
    """Parse a number of bytes such as "268435456", "256MiB" or "1.5kB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in SIZES or float(match[1]) * SIZES[match[2]] < 1:
        fail(f"{option} {text} is not a number of bytes; pass for example 268435456 or 256MiB")
    return int(float(match[1]) * SIZES[match[2]])
