"""`muon-fsdp plan`: what an optimizer step of a model would be on ranks that are not there."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muon_fsdp.cli.output import fail, print_json, print_table, status

if TYPE_CHECKING:
    from muon_fsdp.cli.estimate import Memory, RoutedTo, Time
    from muon_fsdp.parameters.routing import RoutingReport
    from muon_fsdp.plan.report import PlanReport

DTYPES = ("float32", "bfloat16", "float16", "float64")
MOST_RANKS = 1 << 16
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}

EPILOG = (
    "Time is estimated: FLOPs of the busiest rank / --tflops, its bytes / --bandwidth, bytes of device memory / "
    "--memory-bandwidth; latencies are left out. FLOPs count symmetric products in full, though half is computed: by "
    "this count one H200 reached 830 to 880 TFLOP/s on the matrices of a 1.3B model and of Llama-3 8B, and 560 on "
    "GPT-2's (docs/performance.md)."
)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A name (llama-3-70b, deepseek-v3, ...; a wrong one lists them), a Hugging Face config.json or its "
            "folder, or package.module:callable that returns a torch.nn.Module."
        ),
    ],
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks of the job. Default: those of --mesh.")] = None,
    mesh: Annotated[
        str | None, typer.Option(help="SHARDS, or REPLICAS,SHARDS for HSDP. Default: one shard per rank.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="Who orthogonalizes a matrix: auto, owner or replicate.")] = "auto",
    rule: Annotated[
        str | None,
        typer.Option(help="Rule of the matrices, by name (a wrong one lists them). Default: as of MuonOptimizer."),
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Python file, or package.module, that registers rules of your own; may be repeated."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Precision of the sharded weights: {', '.join(DTYPES)}. Default: float32, or as built."),
    ] = None,
    comm_dtype: Annotated[
        str | None, typer.Option(help="Precision of updates that travel. Default: bfloat16, as on GPUs.")
    ] = None,
    max_stage_bytes: Annotated[
        str, typer.Option(help="Updates that are worked on at a time, in bytes or as 64MiB.")
    ] = "256MiB",
    tflops: Annotated[
        float, typer.Option(min=1e-3, help="Assumed rate of a rank's matrix products, in TFLOP/s (see below).")
    ] = 800.0,
    bandwidth: Annotated[
        float, typer.Option(min=1e-3, help="Assumed GB/s that a rank sends, and receives: one 400 Gb/s card each.")
    ] = 50.0,
    memory_bandwidth: Annotated[
        float, typer.Option(min=1e-6, help="Assumed TB/s of a rank's device memory: a copy on an H200.")
    ] = 4.2,
    routing: Annotated[bool, typer.Option("--routing", help="Show every parameter with its rule and why.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Plan the optimizer step of a model on ranks that need not exist.

    Which parameters the rule of matrices takes under FSDP2, who computes their updates, what travels, memory per rank,
    and an estimate of the time. It needs no GPU, no processes and no memory for weights.
    """
    shape = _mesh(mesh, world_size)
    stage_bytes = _size("--max-stage-bytes", max_stage_bytes)
    with status(f"planning {model} ..."):
        name = _rule(rule, plugin or [])
        figures, report, routes = _figures(
            model, shape, strategy, name, dtype, comm_dtype, stage_bytes, tflops, bandwidth, memory_bandwidth
        )
    if json:
        content = _as_json(figures, report)
        if routing:
            content["parameters"] = [
                {"name": row.name, "shape": row.shape, "rule": row.rule, "scale": row.scale, "reason": row.reason}
                for row in routes.rows
            ]
        print_json(content)
        return
    if routing:
        print(f"{routes}\n")
    _show(figures, report, warnings=() if routing else routes.warnings)


def _mesh(mesh: str | None, world_size: int | None) -> tuple[int, ...]:
    import math

    if mesh is None:
        if world_size is None:
            fail("say how many ranks: --world-size 512, or --mesh REPLICAS,SHARDS as --mesh 8,64")
        _refuse_too_many((world_size,))
        return (world_size,)
    sizes = [part.strip() for part in mesh.split(",")]
    if len(sizes) > 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        fail(f"--mesh {mesh} is not SHARDS or REPLICAS,SHARDS, as --mesh 8,64")
    shape = tuple(map(int, sizes))
    _refuse_too_many(shape)
    if world_size is not None and math.prod(shape) != world_size:
        fail(f"--mesh {mesh} has {math.prod(shape)} ranks and --world-size is {world_size}: make them equal")
    return shape


def _rule(name: str | None, plugins: list[str]) -> str:
    """Return the name of the rule that was asked for, by name or alias, after plugins have registered theirs."""
    from muon_fsdp.rules import DEFAULT_RULE
    from muon_fsdp.training.arguments import ConfigError
    from muon_fsdp.training.plugins import find_rule, load_plugins

    try:
        load_plugins(plugins)
        return find_rule(DEFAULT_RULE if name is None else name).name
    except ConfigError as error:
        fail(str(error))


def _refuse_too_many(shape: tuple[int, ...]) -> None:
    import math

    if math.prod(shape) > MOST_RANKS:
        fail(f"{math.prod(shape)} ranks are more than the {MOST_RANKS} that can be planned")


def _size(option: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if match is None or match[2] not in SIZES or float(match[1]) * SIZES[match[2]] < 1:
        fail(f"{option} {text} is not a number of bytes, as 268435456 or 256MiB")
    return int(float(match[1]) * SIZES[match[2]])


def _figures(
    name: str,
    mesh: tuple[int, ...],
    strategy: str,
    rule: str,
    dtype: str | None,
    comm_dtype: str | None,
    max_stage_bytes: int,
    tflops: float,
    bandwidth: float,
    memory_bandwidth: float,
) -> tuple[dict[str, Any], PlanReport, RoutingReport]:
    import math

    import torch

    from muon_fsdp.cli import estimate
    from muon_fsdp.cli.loading import LoadingError, load_model
    from muon_fsdp.optimizers.muon import MuonOptimizer
    from muon_fsdp.plan.report import fsdp_layouts

    def precision(option: str, text: str | None) -> torch.dtype | None:
        if text is not None and text not in DTYPES:
            fail(f"{option} {text} is not one of {', '.join(DTYPES)}")
        found = None if text is None else getattr(torch, text)
        assert found is None or isinstance(found, torch.dtype)
        return found

    try:
        model = load_model(name, precision("--dtype", dtype))
        options: dict[str, Any] = {"strategy": strategy, "max_stage_bytes": max_stage_bytes, "rule": rule}
        optimizer = MuonOptimizer(model, comm_dtype=precision("--comm-dtype", comm_dtype), **options)
    except LoadingError as error:
        fail(str(error))
    except (TypeError, ValueError) as error:  # of an option, or a model without parameters
        fail(f"{name}: {error}")
    world_size = math.prod(mesh)
    report = optimizer.plan_report(world_size=world_size, mesh=mesh)
    routes = optimizer.routing_report()
    parameters = list(model.parameters())
    layout = fsdp_layouts(parameters[:1], world_size, mesh)[0]
    rates = estimate.Rates(tflops * 1e12, bandwidth * 1e9, memory_bandwidth * 1e12)
    figures: dict[str, Any] = {
        "model": name,
        "class": type(model).__name__ if type(model).__module__.startswith("transformers.") else None,
        "elements": sum(parameter.numel() for parameter in parameters),
        "world_size": world_size,
        "mesh": mesh,
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
        "comm_dtype": comm_dtype or "default",
        "rule": rule,
        "strategy": strategy,
        "max_stage_bytes": max_stage_bytes,
        "assumed": {"tflops": tflops, "bandwidth_gb_s": bandwidth, "memory_bandwidth_tb_s": memory_bandwidth},
        "routing": estimate.routing_summary(routes.rows),
        "warnings": routes.warnings,
        "memory": estimate.memory(model, optimizer, report, layout),
        "time": estimate.time(optimizer, report, layout, rates),
    }
    return figures, report, routes


def _as_json(figures: dict[str, Any], report: PlanReport) -> dict[str, Any]:
    from dataclasses import asdict

    memory: Memory = figures["memory"]
    time: Time = figures["time"]
    return {
        **figures,
        "routing": [asdict(routed) for routed in figures["routing"]],
        "shapes": [asdict(row) for row in report.rows],
        "num_stages": report.num_stages,
        "balance": report.balance,
        "flops": {"busiest_rank": report.max_flops, "mean": report.mean_flops},
        "bytes_per_rank": {
            "gather_mean": report.gather_bytes / report.num_ranks if report.num_ranks else 0.0,
            "gather_busiest": report.traffic.busiest_gather,
            "scatter_mean": report.scatter_bytes / report.num_ranks if report.num_ranks else 0.0,
            "scatter_busiest": report.traffic.busiest_scatter,
        },
        "memory": {**asdict(memory), "total": memory.total, "adamw_total": memory.adamw_total},
        "time": asdict(time),
    }


def _show(figures: dict[str, Any], report: PlanReport, warnings: tuple[str, ...]) -> None:
    mesh, dtypes = figures["mesh"], ", ".join(figures["dtypes"])
    shards = _numbered(mesh[-1], "shard")
    how = f"{_numbered(mesh[0], 'replica')} x {shards}" if len(mesh) == 2 else shards
    print(f"{figures['model']}: {_count(figures['elements'])} parameters in {dtypes}, FSDP2, {how}")
    print(f"built by Transformers as {figures['class']}\n" if figures["class"] else "")
    _show_routing(figures["routing"], figures["elements"])
    _show_matrices(report)
    memory: Memory = figures["memory"]
    _show_memory(memory)
    if memory.weights > 1.2 * memory.mean_weights:
        print(
            f"note: the first rank holds {memory.weights / memory.mean_weights:.1f} times the mean of weights, as some "
            "parameters\nhave fewer rows (or experts) than there are shards. Fewer shards are more\neven: --mesh "
            "REPLICAS,SHARDS.\n"
        )
    _show_time(figures["time"], figures["assumed"])
    for warning in warnings:
        print(textwrap.fill(f"warning: {warning}", 80, break_long_words=False, break_on_hyphens=False))


def _show_routing(summary: list[RoutedTo], total: int) -> None:
    rows = [
        (each.rule, each.reason, str(each.parameters), _count(each.elements), f"{100 * each.elements / total:.1f}%")
        for each in summary
    ]
    print_table("Routing", ("rule", "why", "tensors", "elements", "share"), rows, left=2)


def _show_matrices(report: PlanReport) -> None:
    if not report.rows:
        print("No parameter is orthogonalized: nothing travels in a step.\n")
        return
    rows = [
        (
            "x".join(map(str, row.shape)),
            str(row.num_matrices),
            row.strategy,
            str(row.num_owners),
            _bytes(row.gather_bytes / report.num_ranks),
            _bytes(row.scatter_bytes / report.num_ranks),
            f"{row.flops / report.num_ranks / 1e12:.3g}",
        )
        for row in report.rows
    ]
    rows.append(
        (
            "all",
            str(report.num_matrices),
            "",
            "",
            _bytes(report.gather_bytes / report.num_ranks),
            _bytes(report.scatter_bytes / report.num_ranks),
            f"{report.mean_flops / 1e12:.3g}",
        )
    )
    traffic = report.traffic
    rows.append(
        (
            "busiest rank",
            "",
            "",
            "",
            _bytes(traffic.busiest_gather),
            _bytes(traffic.busiest_scatter),
            f"{report.max_flops / 1e12:.3g}",
        )
    )
    header = ("shape", "matrices", "strategy", "owners", "gather", "scatter", "TFLOP")
    print_table("Matrices, means per rank and step", header, rows)
    print(f"{report.num_stages} stage(s); the busiest rank computes {report.balance:.3f} times the least possible.\n")


def _show_memory(memory: Memory) -> None:
    rows = [
        ("weights", _bytes(memory.weights), _bytes(memory.weights)),
        ("gradients", _bytes(memory.gradients), _bytes(memory.gradients)),
        ("optimizer state", _bytes(memory.state), _bytes(memory.adamw_state)),
        ("scratch, at most", _bytes(memory.scratch), "0 B"),
        ("sum", _bytes(memory.total), _bytes(memory.adamw_total)),
    ]
    from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES

    everywhere = f"{RULES[DEFAULT_OTHER_RULE].display_name} for all"
    print_table("Memory of the fullest rank", ("", "as planned", everywhere), rows)


def _show_time(time: Time, assumed: dict[str, float]) -> None:
    rows = [
        ("orthogonalize", _seconds(time.orthogonalize)),
        ("element-wise", _seconds(time.elementwise)),
        ("gather", _seconds(time.gather)),
        ("scatter", _seconds(time.scatter)),
        ("step, as these overlap", _seconds(time.step)),
    ]
    print_table("Time of the busiest rank, estimated", ("", "per step"), rows)
    print(
        f"Assumed: {assumed['tflops']:g} TFLOP/s (--tflops), {assumed['bandwidth_gb_s']:g} GB/s sent and received by a "
        f"rank\n(--bandwidth), {assumed['memory_bandwidth_tb_s']:g} TB/s of device memory (--memory-bandwidth); no "
        "latencies."
    )


def _numbered(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _count(number: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.0f} B"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms" if seconds else "0"
