"""Plan the optimizer step of a model, count its memory, estimate its time, and show all this as tables or as JSON."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from muon_fsdp.cli.flags import PlanFlags
from muon_fsdp.cli.loading import load_model
from muon_fsdp.optimizers.muon import MuonOptimizer
from muon_fsdp.parameters.records import held_elements, state_bytes
from muon_fsdp.parameters.routing_report import RoutingRow
from muon_fsdp.plan.costs import NUM_SLOTS, run_timeline
from muon_fsdp.plan.layout import Layout, fsdp_layout, state_layout
from muon_fsdp.plan.report import PlanReport, PlanRow
from muon_fsdp.plan.speeds import FIXED_SECONDS, HOST_BYTES_PER_SECOND, Speeds
from muon_fsdp.plan.stage_limits import SCRATCH_SHARE, scratch_limit
from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES
from muon_fsdp.text import format_bytes, format_count, format_seconds, format_shape
from muon_fsdp.training.terminal import print_paragraph, print_table

# What follows the number of stages, by the number of stages in flight.
_OVERLAP = {
    3: "; gathers and scatters overlap with computation",
    2: "; gathers overlap with computation; scatters do not, to save memory",
    1: ", one after the other, to save memory",
}


def count_memory(model: nn.Module, optimizer: MuonOptimizer, report: PlanReport, layout: Layout) -> dict[str, float]:
    """Count the memory of the first rank, which has the largest shard of every parameter.

    Args:
        model: on the meta device.
        optimizer: has the rule of every parameter.
        report: its plan.
        layout: the layout of all parameters.

    Returns:
        Bytes for JSON, beside those with AdamW for all parameters.
    """
    weights = gradients = adamw_state = adamw_in_8_bits = everywhere = 0
    adamw = RULES[DEFAULT_OTHER_RULE].all_state
    for parameter in model.parameters():
        bytes_held = held_elements(parameter, layout) * parameter.element_size()
        weights += bytes_held
        gradients += bytes_held if parameter.requires_grad else 0
        everywhere += parameter.numel() * parameter.element_size() * layout.num_replicas
    for record in optimizer._records():
        adamw_state += state_bytes(adamw, record.tensor, None, layout)
        adamw_in_8_bits += state_bytes(adamw, record.tensor, None, layout, "int8")
    return {
        "weights": weights,
        "gradients": gradients,
        "state": report.device_state_bytes,
        "host_state": report.host_bytes,
        "scratch": report.scratch_bytes,  # an upper bound
        "least_scratch": report.least_scratch_bytes,  # of the parameter that needs the most, in a stage of its own
        # Of the copy that state_dict() makes.
        "state_dict": report.state_dict_bytes if report.state_dict_bytes != report.state_bytes else 0,
        "adamw_state": adamw_state,
        "adamw_8bit_state": adamw_in_8_bits,
        "mean_weights": everywhere / len(layout.ranks),  # over all ranks
        "total": weights + gradients + report.device_state_bytes + report.scratch_bytes,
        "adamw_total": weights + gradients + adamw_state,
        "adamw_8bit_total": weights + gradients + adamw_in_8_bits,
    }


def estimate_time(optimizer: MuonOptimizer, report: PlanReport, of_state: Layout, speeds: Speeds) -> dict[str, float]:
    """Estimate the time of a step on the busiest rank.

    `of_state` is the layout of state and of what a rank updates.

    Returns:
        Seconds for JSON of each part of a step, and of the whole: the sum of its parts, less what overlaps.
    """
    moved = 0
    for record in optimizer._records():
        parameter = record.tensor
        # A step reads the gradient and the weight and writes the weight; it reads and writes the moments. The update of
        # a matrix is also written to a buffer and read from it.
        staged = 4 if record.rule.needs_matrices else 0
        moved += (3 * parameter.element_size() + staged) * held_elements(parameter, of_state)
        moments = [spec for spec in record.all_state if spec.is_sharded]
        state_dtype = record.group.get("state_dtype", "float32")
        moved += 2 * state_bytes(moments, parameter, record.view, of_state, state_dtype)
        if report.traffic.weights:  # rows of all ranks are copied from a buffer into the weight
            moved += 2 * parameter.element_size() * parameter.numel()
    elementwise = moved / speeds.memory_bytes
    gather = speeds.send(report.traffic.busiest_gather)
    scatter = speeds.send(report.traffic.busiest_scatter)
    weights = speeds.send(report.traffic.weights)
    orthogonalize = speeds.compute(report.max_flops)
    timeline = run_timeline(report.stages, speeds)
    busiest = max(report.flops_by_rank, key=report.flops_by_rank.__getitem__, default=0)
    overlapped = timeline.overlap(report.stages, speeds, busiest)
    step = elementwise + timeline.seconds + weights
    waiting = timeline.seconds + overlapped - orthogonalize - gather - scatter
    host = max(0.0, report.host_bytes / HOST_BYTES_PER_SECOND - step)  # state is copied while everything else runs
    return {
        "orthogonalize": orthogonalize,
        "elementwise": elementwise,  # momentum, AdamW and weights, limited by device memory
        "gather": gather,
        "scatter": scatter,
        "weights": weights,  # all-gather of the weights that other ranks have updated
        # For other ranks that compute, send or receive more, and for transfers to start.
        "waiting": waiting if abs(waiting) > 1e-9 else 0.0,
        "host": host,
        "overlapped": overlapped,  # the time of transfers in which the rank computes
        "step": step + host,
        "num_stages": report.num_stages,
    }


def routing_summary(rows: Sequence[RoutingRow]) -> list[dict[str, Any]]:
    """Return how many parameters and elements have each rule for each reason, those with the most elements first."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in rows:
        found[(row.rule, row.reason)].append(math.prod(row.shape))
    summary = [
        {"rule": rule, "reason": reason, "parameters": len(sizes), "elements": sum(sizes)}
        for (rule, reason), sizes in found.items()
    ]
    return sorted(summary, key=lambda routed: -routed["elements"])


class StepPreview:
    """The optimizer step of a model on a mesh of ranks: its plan, and what it costs in memory and time.

    Args:
        flags: all flags; those that are texts have been parsed, and follow.
        mesh: (shards,) or (replicas, shards).
        rule: the name of the rule for matrices.
        max_stage_bytes: None means that the planner chooses.
        device_memory: the total bytes of a device.

    Raises:
        ConfigError: the model can't be built.
        ValueError, TypeError: the optimizer refuses an option, or a model without parameters.
    """

    def __init__(
        self, flags: PlanFlags, mesh: tuple[int, ...], rule: str, max_stage_bytes: int | None, device_memory: int
    ) -> None:
        self.flags, self.mesh, self.rule = flags, mesh, rule
        self.max_stage_bytes, self.device_memory = max_stage_bytes, device_memory
        model = load_model(flags.model or "", getattr(torch, flags.dtype) if flags.dtype else None)
        parameters = list(model.parameters())
        self.num_elements = sum(parameter.numel() for parameter in parameters)
        self.dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
        cls = type(model)
        self.transformers_class = cls.__name__ if cls.__module__.startswith("transformers.") else None
        if flags.rounding in ("stochastic", "remainder") and "float32" in self.dtypes:
            raise ValueError(f"--rounding {flags.rounding} is not for float32 weights: pass --dtype bfloat16 too")
        storage: dict[str, Any] = {"state_dtype": flags.state_dtype, "rounding": flags.rounding}
        optimizer = MuonOptimizer(
            model,
            rule=rule,
            strategy=flags.strategy,  # type: ignore[arg-type]  # checked by the optimizer
            attention=flags.attention,  # type: ignore[arg-type]  # checked by the optimizer
            max_stage_bytes=max_stage_bytes,
            comm_dtype=getattr(torch, flags.comm_dtype) if flags.comm_dtype else None,
            shard_state=flags.shard_state,
            offload_state=flags.offload_state,
            **{name: value for name, value in storage.items() if value is not None},
        )
        self.report = optimizer.plan_report(world_size=math.prod(mesh), mesh=mesh, device_memory=device_memory)
        self.routes = optimizer.routing_report(full=True)
        layout = fsdp_layout(math.prod(mesh), mesh)
        of_state = state_layout(layout, shard_state=flags.shard_state)
        speeds = Speeds(flags.tflops * 1e12, flags.bandwidth * 1e9, flags.memory_bandwidth * 1e12)
        self.memory = count_memory(model, optimizer, self.report, layout)
        self.time = estimate_time(optimizer, self.report, of_state, speeds)

    def as_json(self, *, routing: bool) -> dict[str, Any]:
        """Return everything that the tables show, unrounded; with `routing` also the route of every parameter."""
        report, flags = self.report, self.flags
        content = {
            "model": flags.model,
            "class": self.transformers_class,
            "elements": self.num_elements,
            "world_size": math.prod(self.mesh),
            "mesh": self.mesh,
            "dtypes": self.dtypes,
            "comm_dtype": flags.comm_dtype or "default",
            "rule": self.rule,
            "strategy": flags.strategy,
            "attention": flags.attention,
            "max_stage_bytes": self.max_stage_bytes,
            "shard_state": flags.shard_state,
            "offload_state": flags.offload_state,
            "state_dtype": flags.state_dtype,
            "rounding": flags.rounding,
            "assumed": {
                "tflops": flags.tflops,
                "bandwidth_gb_s": flags.bandwidth,
                "memory_bandwidth_tb_s": flags.memory_bandwidth,
                "device_memory": self.device_memory,
            },
            "routing": routing_summary(self.routes.rows),
            "warnings": [*self.routes.warnings, *filter(None, [report.large_state_warning])],
            "memory": self.memory,
            "time": self.time,
            "shapes": [asdict(row) for row in report.rows],
            "num_stages": report.num_stages,
            "balance": report.balance,
            "flops": {"busiest_rank": report.max_flops, "mean": report.mean_flops},
            "bytes_per_rank": {
                "gather_mean": report.gather_bytes / max(1, report.num_ranks),
                "gather_busiest": report.traffic.busiest_gather,
                "scatter_mean": report.scatter_bytes / max(1, report.num_ranks),
                "scatter_busiest": report.traffic.busiest_scatter,
                "weights": report.traffic.weights,
                "settled": report.settled_bytes,
            },
        }
        if routing:
            content["parameters"] = [
                {"name": row.name, "shape": row.shape, "rule": row.rule, "scale": row.scale, "reason": row.reason}
                for row in self.routes.rows
            ]
        return content

    def show(self, *, routing: bool) -> None:
        """Print the tables; with `routing` print the route of every parameter first."""
        if routing:
            print(f"{self.routes}\n")
        count, dtypes = format_count(self.num_elements), ", ".join(self.dtypes)
        print_paragraph(f"{self.flags.model}: {count} parameters in {dtypes}, {self._layout()}")
        if self.transformers_class:
            print_paragraph(f"built by Transformers as {self.transformers_class}")
        print()
        self._show_routing()
        self._show_matrices()
        self._show_memory()
        self._show_time()
        warnings = [*(() if routing else self.routes.warnings), self.report.large_state_warning]
        for warning in filter(None, warnings):
            print_paragraph(f"warning: {warning}")

    def _layout(self) -> str:
        """Return what distributes the parameters, and over how many replicas and shards."""
        replicas, shards = self.mesh if len(self.mesh) == 2 else (1, self.mesh[0])
        if replicas > 1 == shards:
            return f"DDP, {replicas} replicas{', sharded state' if self.flags.shard_state else ''}"
        how = f"{_numbered(replicas, 'replica')} x " if len(self.mesh) == 2 else ""
        return f"FSDP2, {how}{_numbered(shards, 'shard')}"

    def _show_routing(self) -> None:
        """Print how many parameters take which rule, and why."""
        rows = [
            (
                routed["rule"],
                routed["reason"],
                str(routed["parameters"]),
                format_count(routed["elements"]),
                f"{100 * routed['elements'] / self.num_elements:.1f}%",
            )
            for routed in routing_summary(self.routes.rows)
        ]
        print_table("Routing", ("rule", "why", "tensors", "elements", "share"), rows, left=2)

    def _show_matrices(self) -> None:
        """Print which ranks compute the matrices of each shape, and what is sent."""
        report, num_ranks = self.report, self.report.num_ranks
        if not report.rows:
            print("No parameter is orthogonalized: nothing travels in a step.\n")
            return
        rows = [
            (
                row.matrices.rpartition(" of ")[2] if "," not in row.matrices else format_shape(row.shape),
                str(row.num_matrices),
                _computed_by(row),
                *_work(row.gather_bytes / num_ranks, row.scatter_bytes / num_ranks, row.flops / num_ranks),
            )
            for row in report.rows
        ]
        mean = _work(report.gather_bytes / num_ranks, report.scatter_bytes / num_ranks, report.mean_flops)
        busiest = _work(report.traffic.busiest_gather, report.traffic.busiest_scatter, report.max_flops)
        rows.append(("all", str(report.num_matrices), "", *mean))
        rows.append(("busiest rank", "", "", *busiest))
        header = ("shape", "number", "strategy", "gather", "scatter", "TFLOP")
        print_table("Matrices, means per rank and step", header, rows, marked={len(rows) - 1: "yellow"})
        most = [rank for rank, flops in report.flops_by_rank.items() if flops == report.max_flops]
        others = f" and {_numbered(len(most) - 1, 'other')}" if len(most) > 1 else ""
        print_paragraph(
            f"{self._stages()} Most work: rank {most[0]}{others}, {report.balance:.3f} times the least possible."
        )
        print()

    def _stages(self) -> str:
        """Return the number of stages, how far they overlap, and why every rank may compute everything."""
        report = self.report
        in_flight = {stage.in_flight for stage in report.stages if stage.traffic.sends}
        overlap = _OVERLAP[min(in_flight)] if in_flight else ", one after the other, as nothing is sent"
        text = f"{_numbered(report.num_stages, 'stage')}{overlap if report.num_stages > 1 else ''}."
        if self.flags.strategy == "auto" and any(row.strategy == "replicate" for row in report.rows):
            text += " Every rank computes what is marked replicate, because sending results would take longer."
        return text

    def _show_memory(self) -> None:
        """Print the memory of the fullest rank, with a note if some ranks hold much less."""
        memory = self.memory
        parts = [
            ("weights", "weights", "weights", "weights"),
            ("gradients", "gradients", "gradients", "gradients"),
            ("optimizer state", "state", "adamw_state", "adamw_8bit_state"),
            ("scratch, at most", "scratch", None, None),
            ("sum", "total", "adamw_total", "adamw_8bit_total"),
        ]
        rows = [(name, *(format_bytes(memory[key] if key else 0) for key in keys)) for name, *keys in parts]
        everywhere = RULES[DEFAULT_OTHER_RULE].display_name
        print_table("Memory of the fullest rank", ("", "as planned", everywhere, f"{everywhere}, 8 bits"), rows)
        notes = []
        if memory["host_state"]:
            notes.append(
                f"the memory of the host holds {format_bytes(memory['host_state'])} of state for every rank, and the "
                f"device that of up to {NUM_SLOTS} stages at a time. Copies are estimated at "
                f"{HOST_BYTES_PER_SECOND / 1e9:g} GB/s each way."
            )
        if memory["state_dict"]:
            notes.append(f"state_dict() makes a copy of the state in float32, {format_bytes(memory['state_dict'])}.")
        if memory["total"] > memory["adamw_total"]:
            notes.append(f"the sum is {format_bytes(memory['total'] - memory['adamw_total'])} more than with AdamW.")
            if self.max_stage_bytes is None:
                notes[-1] += " Steps that need less scratch take longer: pass --max-stage-bytes to see one."
        limit = scratch_limit(self.device_memory)
        if self.max_stage_bytes is None and memory["scratch"] > limit:
            notes.append(
                f"scratch exceeds its limit of {format_bytes(limit)}, {SCRATCH_SHARE:.0%} of --device-memory: a "
                f"parameter of shape {format_shape(self.report.neediest)} alone needs "
                f"{format_bytes(memory['least_scratch'])}."
            )
        weights, mean = memory["weights"], memory["mean_weights"]
        if weights > 1.2 * mean:
            notes.append(
                f"the first rank holds {weights / mean:.1f} times the mean of weights, as some parameters have fewer "
                "rows (or experts) than there are shards. Fewer shards are more even: --mesh REPLICAS,SHARDS."
            )
        for note in notes:
            print_paragraph(f"note: {note}")
            print()

    def _show_time(self) -> None:
        """Print the estimated time of each part of a step, and the speeds that were assumed."""
        time = self.time
        parts = {
            "orthogonalize": time["orthogonalize"],
            "element-wise": time["elementwise"],
            "gather": time["gather"],
            "scatter": time["scatter"],
            "all-gather of weights": time["weights"] or None,
            "waiting": time["waiting"],
            "waiting for the host": time["host"] or None,
            "transfers during computation": -time["overlapped"] or None,
            "step": time["step"],
        }
        rows = [(name, format_seconds(seconds)) for name, seconds in parts.items() if seconds is not None]
        print_table("Time of the busiest rank, estimated", ("", "per step"), rows)
        flags = self.flags
        print_paragraph(
            f"Assumed: {flags.tflops:g} TFLOP/s (--tflops), {flags.bandwidth:g} GB/s sent and received by a rank "
            f"(--bandwidth), {flags.memory_bandwidth:g} TB/s of device memory (--memory-bandwidth), "
            f"{1e3 * FIXED_SECONDS:g} ms more for every transfer; devices of {flags.device_memory} (--device-memory), "
            f"of which scratch may take {SCRATCH_SHARE:.0%}."
        )


def _computed_by(row: PlanRow) -> str:
    """Return the strategy of a shape, with the number of ranks that compute its matrices where not all do."""
    if row.strategy == "replicate":
        return row.strategy
    return f"{row.num_owners} {row.strategy}" if row.strategy == "local" else _numbered(row.num_owners, row.strategy)


def _work(gathered: float, scattered: float, flops: float) -> tuple[str, str, str]:
    """Return bytes gathered, bytes scattered and TFLOP as the text of three cells."""
    tflop = f"{flops / 1e12:.3g}" if flops >= 1e10 else f"{flops / 1e12:.1g}"  # at most six characters
    return format_bytes(gathered, 3), format_bytes(scattered, 3), tflop


def _numbered(number: int, what: str) -> str:
    """Return a number with a noun in the singular or the plural."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
