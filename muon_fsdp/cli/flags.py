"""Define the flags of `muon-fsdp plan` as a dataclass, and make commands of functions that take such a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from muon_fsdp.plan.speeds import BYTES_PER_SECOND, DEVICE_MEMORY, FLOPS_PER_SECOND, MEMORY_BYTES_PER_SECOND

DTYPES = ("float32", "bfloat16", "float16", "float64")

Flags = TypeVar("Flags")


def command_with(flags: Callable[..., Flags]) -> Callable[[Callable[[Flags], None]], Callable[..., None]]:
    """Return a decorator that turns a function of one dataclass into a command for Typer.

    Typer reads the signature of a command. The decorated function gets one keyword argument per field of `flags`, with
    its annotation and default, builds an instance from the arguments and passes it on.

    Args:
        flags: a dataclass whose fields are annotated with `typer.Argument` or `typer.Option`.
    """
    hints = get_type_hints(flags, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(flags).parameters.values()
    ]

    def decorate(function: Callable[[Flags], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            function(flags(**values))

        command.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        command.__annotations__ = hints
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
    list_models: Annotated[bool, typer.Option("--list", help="List the models that have a name.")] = False
    world_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of ranks. Default: the number of ranks in --mesh.")
    ] = None
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="MESH",
            help="SHARDS, or REPLICAS,SHARDS for HSDP; REPLICAS,1 for DDP. Default: one shard per rank.",
        ),
    ] = None
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="Which ranks orthogonalize a matrix: auto, owner or replicate.")
    ] = "auto"
    rule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Rule for the matrices, by name (a wrong name lists all). Default: the same as in MuonOptimizer.",
        ),
    ] = None
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Python file, or package.module, that registers your own rules; may be repeated."
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Precision of the weights: {', '.join(DTYPES)}. Default: float32, or as a callable builds it.",
        ),
    ] = None
    comm_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Precision of updates that are sent between ranks. Default: bfloat16, as on GPUs."
        ),
    ] = None
    max_stage_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Bytes of updates that a rank holds or computes in a stage, at most, as a number or a size such as "
            "64MiB. Default: chosen by the planner.",
        ),
    ] = None
    device_memory: Annotated[
        str,
        typer.Option(
            metavar="BYTES",
            help="Total memory of the smallest device, as a number or a size. The planner chooses stages so that "
            "scratch takes at most 5% of it.",
        ),
    ] = f"{DEVICE_MEMORY // 2**30}GiB"
    shard_state: Annotated[
        bool,
        typer.Option("--shard-state", help="DDP with shard_state=True; needs --mesh REPLICAS,1."),
    ] = False
    tflops: Annotated[
        float,
        typer.Option(metavar="X", help="Assumed speed of matrix products on a rank, in TFLOP/s (see below)."),
    ] = FLOPS_PER_SECOND / 1e12
    bandwidth: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="Assumed GB/s that a rank sends, and also receives: one 400 Gb/s network card per rank.",
        ),
    ] = BYTES_PER_SECOND / 1e9
    memory_bandwidth: Annotated[
        float,
        typer.Option(metavar="X", help="Assumed TB/s of a rank's device memory: that of a copy on an H200."),
    ] = MEMORY_BYTES_PER_SECOND / 1e12
    routing: Annotated[bool, typer.Option("--routing", help="Show every parameter with its rule and the reason.")] = (
        False
    )
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False
