"""Measure the element-wise pair, TritonMuon and TritonMuonW, beside torch.optim.Adam.

The result is compared with a copy of the 28 bytes per float32 parameter that a step has to move.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from muon_fsdp.benchmarks.machine import Setup, cool_down
from muon_fsdp.benchmarks.one_optimizer import measure_one
from muon_fsdp.benchmarks.peers import MakeOptimizer
from muon_fsdp.optimizers.elementwise import TritonMuon, TritonMuonW
from muon_fsdp.text import plain_table

BYTES_PER_PARAMETER = 28  # a step reads gradient, weight and two moments, and writes the last three
GPU_SIZES = {
    "1.2e9 in 96 tensors": 96 * [(12_500_000 // 5000, 5000)],
    "85M in 48 tensors": 48 * [(1_770_000 // 1000, 1000)],
}
CPU_SIZES = {"1M in 8 tensors": 8 * [(250, 500)]}

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "TritonMuon": lambda params: TritonMuon(params, weight_decay=0.01),
    "TritonMuonW": TritonMuonW,
    "TritonMuon(layerwise_norm)": lambda params: TritonMuon(params, layerwise_norm=True),
    "torch.optim.Adam": torch.optim.Adam,
    "torch.optim.Adam(fused)": lambda params: torch.optim.Adam(params, fused=True),
}


def measure(setup: Setup) -> Iterator[dict[str, Any]]:
    """Measure every optimizer on every set of tensors.

    Yields:
        One entry per set of tensors: its name and size, and the figures of each optimizer.
    """
    sizes = GPU_SIZES if setup.device == "cuda" else CPU_SIZES
    for number, (name, shapes) in enumerate(sizes.items(), start=1):
        setup.live.begin("pair", number, len(sizes), name)
        parameters = sum(rows * cols for rows, cols in shapes)
        entry: dict[str, Any] = {"size": name, "parameters": parameters, "optimizers": {}}
        for label, make in OPTIMIZERS.items():
            setup.live.running(label)
            one = measure_one(make, shapes, setup.device, setup.repeats)
            milliseconds = one.get("device_milliseconds", one["milliseconds"])
            one["of_copy"] = BYTES_PER_PARAMETER * parameters / (1e-3 * milliseconds) / setup.ceilings.bytes
            entry["optimizers"][label] = one
            cool_down(setup.device)
        yield entry


def show(results: list[dict[str, Any]]) -> str:
    """Return the results as one text table per set of tensors."""
    header = ["optimizer", "device ms", "host ms", "% of a copy", "Adam / this"]
    parts = []
    for entry in results:
        times = {name: one.get("device_milliseconds", one["milliseconds"]) for name, one in entry["optimizers"].items()}
        rows = [
            [
                name,
                f"{times[name]:.3f}",
                f"{one['host_milliseconds']:.2f}",
                f"{100 * one['of_copy']:.0f}",
                f"{times['torch.optim.Adam'] / times[name]:.2f}",
            ]
            for name, one in entry["optimizers"].items()
        ]
        parts.append(f"{entry['size']}\n{plain_table(header, rows)}\n")
    return "\n".join(parts)
