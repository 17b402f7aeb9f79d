"""Run the tables of `muon-fsdp bench` and return them as figures and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muon_fsdp.benchmarks import orthogonalization, pair, steps
from muon_fsdp.benchmarks.machine import Ceilings, describe_machine

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
    """Measure some tables on a device.

    Args:
        device: "cuda" or "cpu".
        tables: which of `TABLES` to measure.
        shapes: batches to orthogonalize, instead of the default ones for the device.
        models: names of the models whose steps are measured. Default: all models for the device.
        repeats: how many times each figure is measured; the result is the median.
        threads: threads that PyTorch uses on a CPU.

    Returns:
        The figures, ready for JSON, and the same figures as text tables.
    """
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
