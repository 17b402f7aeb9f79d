"""Time of the element-wise pair beside torch's Adam: 28 bytes a float32 parameter, at how much of a copy's rate."""

from __future__ import annotations

import gc
from typing import Any

import torch

from muon_fsdp.benchmarks.peers import MakeOptimizer
from muon_fsdp.benchmarks.steps import measure_one
from muon_fsdp.benchmarks.timing import Ceilings, progress, table
from muon_fsdp.optimizers.elementwise import TritonMuon, TritonMuonW

BYTES_PER_PARAMETER = 28  # gradient, weight and two moments read, the last three written
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


def measure(device: str, ceilings: Ceilings, repeats: int) -> list[dict[str, Any]]:
    results = []
    for name, shapes in (GPU_SIZES if device == "cuda" else CPU_SIZES).items():
        parameters = sum(rows * cols for rows, cols in shapes)
        entry: dict[str, Any] = {"size": name, "parameters": parameters, "optimizers": {}}
        for label, make in OPTIMIZERS.items():
            one = measure_one(make, shapes, device, repeats)
            milliseconds = one.get("device_milliseconds", one["milliseconds"])
            one["of_copy"] = BYTES_PER_PARAMETER * parameters / (1e-3 * milliseconds) / ceilings.bytes
            entry["optimizers"][label] = one
            progress(f"{name}, {label}: {milliseconds:.3f} ms")
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        results.append(entry)
    return results


def show(results: list[dict[str, Any]]) -> str:
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
        parts.append(f"{entry['size']}\n{table(header, rows)}\n")
    return "\n".join(parts)
