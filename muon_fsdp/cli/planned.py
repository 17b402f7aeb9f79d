"""Show a planned optimizer step as text tables or as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from muon_fsdp.cli.estimate import Memory, Time, routing_summary
from muon_fsdp.cli.flags import PlanFlags
from muon_fsdp.parameters.routing_report import RoutingReport
from muon_fsdp.plan.report import PlanReport, PlanRow
from muon_fsdp.plan.speeds import FIXED_SECONDS
from muon_fsdp.plan.staging import SCRATCH_SHARE, scratch_limit
from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES
from muon_fsdp.text import format_bytes, format_count, format_seconds, format_shape
from muon_fsdp.training.terminal import print_paragraph, print_table

# What follows the number of stages, by the number of stages in flight.
_OVERLAP = {
    3: "; gathers and scatters overlap with computation",
    2: "; gathers overlap with computation; scatters do not, to save memory",
    1: ", one after the other, to save memory",
}


@dataclass(frozen=True)
class PlanOutput:
    """The optimizer step of a model on a mesh of ranks: its plan, and what it costs in memory and time."""

    flags: PlanFlags
    mesh: tuple[int, ...]  # (shards,) or (replicas, shards)
    rule: str
    max_stage_bytes: int | None  # None: chosen by the planner
    device_memory: int  # total bytes of a device
    model: nn.Module  # on the meta device
    report: PlanReport
    routes: RoutingReport
    memory: Memory
    time: Time

    @property
    def num_elements(self) -> int:
        """Return the number of elements in all parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def dtypes(self) -> list[str]:
        """Return the names of all dtypes that parameters have."""
        return sorted({str(parameter.dtype).removeprefix("torch.") for parameter in self.model.parameters()})

    @property
    def transformers_class(self) -> str | None:
        """Return the name of the class that Transformers built, or None for other models."""
        cls = type(self.model)
        return cls.__name__ if cls.__module__.startswith("transformers.") else None

    @property
    def assumed(self) -> dict[str, float]:
        """Return the speeds that the estimate of the time assumes, and the memory that stages are chosen for."""
        return {
            "tflops": self.flags.tflops,
            "bandwidth_gb_s": self.flags.bandwidth,
            "memory_bandwidth_tb_s": self.flags.memory_bandwidth,
            "device_memory": self.device_memory,
        }

    def as_json(self, *, routing: bool) -> dict[str, Any]:
        """Return everything that the tables show, unrounded; with `routing` also the route of every parameter."""
        report = self.report
        content = {
            "model": self.flags.model,
            "class": self.transformers_class,
            "elements": self.num_elements,
            "world_size": math.prod(self.mesh),
            "mesh": self.mesh,
            "dtypes": self.dtypes,
            "comm_dtype": self.flags.comm_dtype or "default",
            "rule": self.rule,
            "strategy": self.flags.strategy,
            "max_stage_bytes": self.max_stage_bytes,
            "shard_state": self.flags.shard_state,
            "assumed": self.assumed,
            "routing": [asdict(routed) for routed in routing_summary(self.routes.rows)],
            "warnings": self.routes.warnings,
            "memory": {**asdict(self.memory), "total": self.memory.total, "adamw_total": self.memory.adamw_total},
            "time": asdict(self.time),
            "shapes": [asdict(row) for row in report.rows],
            "num_stages": report.num_stages,
            "balance": report.balance,
            "flops": {"busiest_rank": report.max_flops, "mean": report.mean_flops},
            "bytes_per_rank": {
                "gather_mean": report.gather_bytes / report.num_ranks if report.num_ranks else 0.0,
                "gather_busiest": report.traffic.busiest_gather,
                "scatter_mean": report.scatter_bytes / report.num_ranks if report.num_ranks else 0.0,
                "scatter_busiest": report.traffic.busiest_scatter,
                "weights": report.traffic.weights,
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
        for warning in () if routing else self.routes.warnings:
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
                routed.rule,
                routed.reason,
                str(routed.parameters),
                format_count(routed.elements),
                f"{100 * routed.elements / self.num_elements:.1f}%",
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
                format_shape(row.shape),
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
        print_paragraph(f"{self._stages()} {self._busiest()}")
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

    def _busiest(self) -> str:
        """Return which rank computes most, and how its work compares with that of the best possible assignment."""
        report = self.report
        most = [rank for rank, flops in report.flops_by_rank.items() if flops == report.max_flops]
        others = f" and {_numbered(len(most) - 1, 'other')}" if len(most) > 1 else ""
        return f"Most work: rank {most[0]}{others}, {report.balance:.3f} times the least possible."

    def _show_memory(self) -> None:
        """Print the memory of the fullest rank, with a note if some ranks hold much less."""
        memory = self.memory
        rows = [
            ("weights", format_bytes(memory.weights), format_bytes(memory.weights)),
            ("gradients", format_bytes(memory.gradients), format_bytes(memory.gradients)),
            ("optimizer state", format_bytes(memory.state), format_bytes(memory.adamw_state)),
            ("scratch, at most", format_bytes(memory.scratch), "0 B"),
            ("sum", format_bytes(memory.total), format_bytes(memory.adamw_total)),
        ]
        everywhere = f"{RULES[DEFAULT_OTHER_RULE].display_name} for all"
        print_table("Memory of the fullest rank", ("", "as planned", everywhere), rows)
        notes = []
        if memory.total > memory.adamw_total:
            notes.append(f"the sum is {format_bytes(memory.total - memory.adamw_total)} more than with AdamW.")
            if self.max_stage_bytes is None:
                notes[0] += " Steps that need less scratch take longer: pass --max-stage-bytes to see one."
        limit = scratch_limit(self.device_memory)
        if self.max_stage_bytes is None and memory.scratch > limit:
            notes.append(
                f"scratch exceeds its limit of {format_bytes(limit)}, {SCRATCH_SHARE:.0%} of --device-memory: a "
                f"parameter of shape {format_shape(self.report.neediest)} alone needs "
                f"{format_bytes(memory.least_scratch)}."
            )
        if memory.weights > 1.2 * memory.mean_weights:
            notes.append(
                f"the first rank holds {memory.weights / memory.mean_weights:.1f} times the mean of weights, as some "
                "parameters have fewer rows (or experts) than there are shards. Fewer shards are more even: --mesh "
                "REPLICAS,SHARDS."
            )
        for note in notes:
            print_paragraph(f"note: {note}")
            print()

    def _show_time(self) -> None:
        """Print the estimated time of each part of a step, and the speeds that were assumed."""
        rows = [
            ("orthogonalize", format_seconds(self.time.orthogonalize)),
            ("element-wise", format_seconds(self.time.elementwise)),
            ("gather", format_seconds(self.time.gather)),
            ("scatter", format_seconds(self.time.scatter)),
        ]
        if self.time.weights:
            rows.append(("all-gather of weights", format_seconds(self.time.weights)))
        rows.append(("waiting", format_seconds(self.time.waiting)))
        if self.time.overlapped:
            rows.append(("transfers during computation", format_seconds(-self.time.overlapped)))
        rows.append(("step", format_seconds(self.time.step)))
        print_table("Time of the busiest rank, estimated", ("", "per step"), rows)
        assumed = self.assumed
        print_paragraph(
            f"Assumed: {assumed['tflops']:g} TFLOP/s (--tflops), {assumed['bandwidth_gb_s']:g} GB/s sent and received "
            f"by a rank (--bandwidth), {assumed['memory_bandwidth_tb_s']:g} TB/s of device memory "
            f"(--memory-bandwidth), {1e3 * FIXED_SECONDS:g} ms more for every transfer; devices of "
            f"{self.flags.device_memory} (--device-memory), of which scratch may take {SCRATCH_SHARE:.0%}."
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
