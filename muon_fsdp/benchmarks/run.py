"""One run of the benchmarks: the tables that were asked for, as figures and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muon_fsdp.benchmarks import orthogonalization, pair, steps
from muon_fsdp.benchmarks.timing import Ceilings, describe_machine

TABLES = ("orthogonalization", "step", "pair")


def run(
    device: str,
    *,
    tables: Sequence[str] = TABLES,
    shapes: Sequence[tuple[int, int, int]] | None = None,
    models: Sequence[str] | None = None,
    repeats: int = 3,
    threads: int = 2,
) -> tuple[dict[str, Any], str]:
    """The figures of a run, and the same as tables; `shapes` and `models` take the place of the usual ones."""
    if device == "cpu":
        torch.set_num_threads(threads)
    machine = describe_machine(device, threads)
    ceilings = Ceilings.measure(device)
    report: dict[str, Any] = {**machine, "ceilings": {"flops": ceilings.flops, "bytes": ceilings.bytes}}
    texts = [
        ", ".join(machine.values())
        + f"\nceilings: {ceilings.flops / 1e12:.2f} TFLOP/s, {ceilings.bytes / 1e12:.3f} TB/s"
    ]
    if "orthogonalization" in tables:
        report["orthogonalization"] = orthogonalization.measure(device, ceilings, repeats, shapes)
        texts.append("Orthogonalization, five steps\n" + orthogonalization.show(report["orthogonalization"]))
    if "step" in tables:
        report["step"] = steps.measure(device, ceilings, repeats, models)
        texts.append("One step\n" + steps.show(report["step"]).rstrip())
    if "pair" in tables:
        report["pair"] = pair.measure(device, ceilings, repeats)
        texts.append("The element-wise pair\n" + pair.show(report["pair"]).rstrip())
    return report, "\n\n".join(texts)
