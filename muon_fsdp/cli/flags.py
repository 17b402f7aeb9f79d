"""Define the flags of `muon-fsdp plan` as a dataclass, and make commands of functions that take such a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from muon_fsdp.plan.speeds import BYTES_PER_SECOND, DEVICE_MEMORY, FLOPS_PER_SECOND, MEMORY_BYTES_PER_SECOND

DTYPES = ("float32", "bfloat16", "float16", "float64")

Flags = TypeVar("Flags")


def option(default: Any, metavar: str | None, text: str, *, name: str | None = None, **settings: Any) -> Any:
    """Return a field of a dataclass that `command_with` makes an option.

    Args:
        default: its value if the user does not give it.
        metavar: what the help shows for its value; None for a switch.
        text: its help.
        name: its name, such as "--list". Default: the name of the field with dashes.
        settings: further arguments of `typer.Option`.
    """
    return field(default=default, metadata={"name": name, "settings": {"metavar": metavar, "help": text, **settings}})


def command_with(flags: Callable[..., Flags]) -> Callable[[Callable[[Flags], None]], Callable[..., None]]:
    """Return a decorator that turns a function of one dataclass into a command for Typer.

    Typer reads the signature of a command. The decorated function gets one keyword argument per field of `flags`, with
    its default, builds an instance from the arguments and passes it on.

    Args:
        flags: a dataclass whose fields are made by `option`, or annotated for Typer.
    """
    hints = get_type_hints(flags, include_extras=True)
    for each in fields(flags):  # type: ignore[arg-type]
        if each.metadata:
            # A switch that gives its name has no opposite, such as --no-json.
            name = each.metadata["name"] or f"--{each.name.replace('_', '-')}"
            hints[each.name] = Annotated[hints[each.name], typer.Option(name, **each.metadata["settings"])]
    of_fields = inspect.signature(flags).parameters
    parameters = [of_fields[name].replace(annotation=hint) for name, hint in hints.items()]

    def decorate(function: Callable[[Flags], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            function(flags(**values))

        command.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        return command

    return decorate


@dataclass(frozen=True)
class PlanFlags:
    """The flags of `muon-fsdp plan`, as the user gave them."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A name (--list shows all), a Hugging Face config.json or its folder, or package.module:callable that "
            "returns a torch.nn.Module.",
        ),
    ] = None
    list_models: bool = option(False, None, "List the models that have a name.", name="--list")
    world_size: int | None = option(None, "N", "Number of ranks. Default: the number of ranks in --mesh.", min=1)
    mesh: str | None = option(
        None, "MESH", "SHARDS, or REPLICAS,SHARDS for HSDP; REPLICAS,1 for DDP. Default: one shard per rank."
    )
    strategy: str = option("auto", "NAME", "Which ranks orthogonalize a matrix: auto, owner or replicate.")
    attention: str = option("split", "NAME", "How fused weights of attention are read: split, whole or per_head.")
    rule: str | None = option(
        None, "NAME", "Rule for the matrices, by name (a wrong name lists all). Default: the same as in MuonOptimizer."
    )
    plugin: list[str] | None = option(  # noqa: RUF009 (it returns a field)
        None, "FILE", "Python file, or package.module, that registers your own rules; may be repeated."
    )
    dtype: str | None = option(
        None,
        "NAME",
        f"Precision of the weights: {', '.join(DTYPES)}. Default: float32, or as a callable builds it.",
    )
    comm_dtype: str | None = option(
        None, "NAME", "Precision of updates that are sent between ranks. Default: bfloat16, as on GPUs."
    )
    max_stage_bytes: str | None = option(
        None,
        "BYTES",
        "Bytes of updates that a rank holds or computes in a stage, at most, as a number or a size such as 64MiB. "
        "Default: chosen by the planner.",
    )
    device_memory: str = option(
        f"{DEVICE_MEMORY // 2**30}GiB",
        "BYTES",
        "Total memory of the smallest device, as a number or a size. The planner chooses stages so that scratch takes "
        "at most 5% of it.",
    )
    shard_state: bool = option(False, None, "DDP with shard_state=True; needs --mesh REPLICAS,1.")
    offload_state: bool = option(False, None, "Keep moments in the memory of the host, as offload_state=True does.")
    state_dtype: str | None = option(None, "NAME", "How moments are stored: float32, bfloat16 or int8.")
    rounding: str | None = option(
        None, "NAME", "How half-precision weights are rounded: nearest, stochastic or remainder."
    )
    tflops: float = option(
        FLOPS_PER_SECOND / 1e12, "X", "Assumed speed of matrix products on a rank, in TFLOP/s (see below)."
    )
    bandwidth: float = option(
        BYTES_PER_SECOND / 1e9,
        "X",
        "Assumed GB/s that a rank sends, and also receives: one 400 Gb/s network card per rank.",
    )
    memory_bandwidth: float = option(
        MEMORY_BYTES_PER_SECOND / 1e12, "X", "Assumed TB/s of a rank's device memory: that of a copy on an H200."
    )
    routing: bool = option(False, None, "Show every parameter with its rule and the reason.")
    json: bool = option(False, None, "Print JSON and nothing else.")
