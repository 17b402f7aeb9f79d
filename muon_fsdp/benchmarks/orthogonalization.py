"""Measure five-step orthogonalizations of batches of matrices, in bfloat16 on a GPU and in float32 on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from muon_fsdp.benchmarks.machine import Ceilings, progress
from muon_fsdp.benchmarks.peers import orthogonalizers
from muon_fsdp.linalg.newton_schulz import orthogonalize
from muon_fsdp.text import plain_table
from muon_fsdp.timing import milliseconds

GPU_SHAPES = [
    (48, 768, 768),
    (12, 768, 3072),
    (96, 1024, 1024),
    (8, 2048, 2048),
    (8, 2048, 8192),
    (1, 4096, 4096),
    (4, 4096, 4096),
    (4, 4096, 14336),
    (128, 128, 4096),
]
CAPTURED = "muon_fsdp, captured"
OURS = ("muon_fsdp", CAPTURED)
CPU_SHAPES = [(4, 128, 128), (4, 128, 512), (2, 384, 384), (1, 768, 768), (1, 768, 3072)]


def least_flops(rows: int, cols: int, steps: int = 5) -> float:
    """Return the fewest floating-point operations of an orthogonalization with `steps` iterations.

    Symmetric products count half. The result is that of the cheaper form: the standard one or the Gram one.
    """
    small, aspect = min(rows, cols), max(rows, cols) / min(rows, cols)
    return 2.0 * small**3 * min(steps * (1.5 * aspect + 0.5), 3 * aspect + 1.4 * steps)


def parse_shape(text: str) -> tuple[int, int, int]:
    """Parse a batch such as "48x768x768".

    Returns:
        The number of matrices, and their rows and columns.
    """
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"shape {text!r} is not BATCHxROWSxCOLUMNS, for example 48x768x768")
    count, rows, cols = map(int, sizes)
    return count, rows, cols


def measure(
    device: str, ceilings: Ceilings, repeats: int, shapes: Sequence[tuple[int, int, int]] | None = None
) -> list[dict[str, Any]]:
    """Measure our orthogonalization and those of other libraries on batches of these shapes, or on the default ones.

    Returns:
        One entry per batch: its shape, the milliseconds of each implementation, the floor, our best time and TFLOP/s.
    """
    contestants = {"muon_fsdp": orthogonalize, **orthogonalizers(device)}
    results = []
    for count, rows, cols in shapes or (GPU_SHAPES if device == "cuda" else CPU_SHAPES):
        shape = f"{count} x {rows} x {cols}"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        matrices = torch.randn(count, rows, cols, device=device, dtype=dtype)
        entry: dict[str, Any] = {"shape": shape, "milliseconds": {}}
        for name, function in contestants.items():
            entry["milliseconds"][name] = milliseconds(partial(function, matrices), device, repeats)
            if device == "cuda" and function is orthogonalize:
                entry["milliseconds"][CAPTURED] = milliseconds(_captured(matrices), device, repeats)
        flops = count * least_flops(rows, cols)
        traffic = 2 * matrices.nbytes
        entry["floor_milliseconds"] = 1e3 * (flops / ceilings.flops + traffic / ceilings.bytes)
        entry["best"] = min(entry["milliseconds"][name] for name in OURS if name in entry["milliseconds"])
        entry["tflops"] = flops / entry["best"] / 1e9
        results.append(entry)
        progress(f"{shape}: {entry['best']:.3f} ms")
    return results


def _captured(matrices: torch.Tensor) -> Callable[[], object]:
    """Capture an orthogonalization in a CUDA graph, to time the device without the host.

    Returns:
        A function that replays the graph.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = orthogonalize(matrices)

    def replay() -> torch.Tensor:
        graph.replay()
        return result  # keeps the output alive, whose memory the graph writes

    return replay


def show(results: list[dict[str, Any]]) -> str:
    """Return the results as a text table."""
    names = list(results[0]["milliseconds"])
    header = ["batch x m x n", *(f"{name}, ms" for name in names), "TFLOP/s", "% of floor"]
    rows = [
        [
            entry["shape"],
            *(f"{entry['milliseconds'][name]:.3f}" for name in names),
            f"{entry['tflops']:.3g}",
            f"{100 * entry['floor_milliseconds'] / entry['best']:.0f}",
        ]
        for entry in results
    ]
    return plain_table(header, rows)
