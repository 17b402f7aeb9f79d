"""Measure five-step orthogonalizations of batches of matrices, in bfloat16 on a GPU and in float32 on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from muon_fsdp.benchmarks.accuracy import LARGE, Accuracy, Probe, make_probe, measure_accuracy, show_accuracy
from muon_fsdp.benchmarks.contestants import FAST, OURS, Orthogonalizer, orthogonalizers
from muon_fsdp.benchmarks.machine import Setup, free_memory
from muon_fsdp.comm.recorder import CudaSegments, GraphRecorder, Recorder
from muon_fsdp.linalg.newton_schulz import orthogonalization_flops, orthogonalize
from muon_fsdp.text import plain_table
from muon_fsdp.timing import Series, medians_in_turn

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
CPU_SHAPES = [(4, 128, 128), (4, 128, 512), (2, 384, 384), (1, 768, 768), (1, 768, 3072)]

Mode = Callable[[Orthogonalizer, Tensor], Callable[[], object]]


def parse_shape(text: str) -> tuple[int, int, int]:
    """Return the number of matrices, the rows and the columns of a batch such as "48x768x768"."""
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"shape {text!r} is not BATCHxROWSxCOLUMNS, for example 48x768x768")
    count, rows, cols = map(int, sizes)
    return count, rows, cols


def least_flops(rows: int, cols: int) -> float:
    """Return the floating-point operations of our orthogonalization with five iterations.

    Symmetric products count half, because the kernels compute one triangle. All tables get their operations from here.
    """
    return orthogonalization_flops(rows, cols, 5, symmetric=0.5)


def captured(function: Orthogonalizer, matrices: Tensor) -> Callable[[], object]:
    """Capture an orthogonalization in a CUDA graph, to time the device without the host; return what replays it."""
    function(matrices)  # compiles and tunes kernels, which a capture can't
    recorder = GraphRecorder(CudaSegments(matrices.device))

    def work(_: Recorder) -> None:
        function(matrices)

    recorder.record(work)
    return recorder.replay


def modes_on(device: str) -> dict[str, Mode]:
    """Return the ways in which every contestant is measured, by what the table adds to its name."""
    return {"": partial, ", captured": captured} if device == "cuda" else {"": partial}


def measure(setup: Setup, shapes: Sequence[tuple[int, int, int]] | None = None) -> Iterator[dict[str, Any]]:
    """Measure our orthogonalization and those of other libraries on batches of these shapes, or on the default ones.

    Yields:
        One entry per batch: its shape, the milliseconds of each implementation and what it makes of singular values
        (None if it does not run), why some do not run, the floor, the best time of our default and its TFLOP/s.
    """
    device = setup.device
    ours: dict[str, Orthogonalizer] = {OURS: orthogonalize, FAST: partial(orthogonalize, method="fast")}
    contestants = {**ours, **orthogonalizers(device)}
    modes = modes_on(device)
    columns = [name + mode for name in contestants for mode in modes]
    shapes = shapes or (GPU_SHAPES if device == "cuda" else CPU_SHAPES)
    failed_captures: dict[str, str] = {}  # not tried again: each may keep memory until the end of the process
    named = [(" x ".join(map(str, shape)), shape) for shape in shapes]
    for name, (count, rows, cols) in setup.live.each("orthogonalization", named):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        matrices = torch.randn(count, rows, cols, device=device, dtype=dtype)
        all_series, notes = _prepare(contestants, modes, matrices, setup, failed_captures)
        probe = make_probe(rows, cols, device, dtype)
        times = medians_in_turn(all_series, setup.repeats, setup.live.running)
        flops = count * least_flops(rows, cols)
        best = min(times[OURS + mode] for mode in modes)
        floor = setup.ceilings.floor_milliseconds(flops, 2 * matrices.nbytes)
        del all_series, matrices
        free_memory(device)
        yield {
            "shape": name,
            "milliseconds": {column: times.get(column) for column in columns},
            "accuracy": {
                name: None if name in notes else _accuracy(name, function, probe)
                for name, function in contestants.items()
            },
            "notes": notes,
            "floor_milliseconds": floor,
            "best": best,
            "tflops": flops / best / 1e9,
        }


def _accuracy(name: str, function: Orthogonalizer, probe: Probe) -> Accuracy | None:
    """Return what a contestant makes of the singular values of a probe; None if it does not support its shape."""
    try:
        return measure_accuracy(function, probe)
    except Exception:  # another library
        if name in (OURS, FAST):
            raise
        return None


def _prepare(
    contestants: dict[str, Orthogonalizer],
    modes: dict[str, Mode],
    matrices: Tensor,
    setup: Setup,
    failed_captures: dict[str, str],
) -> tuple[dict[str, Series], dict[str, str]]:
    """Prepare every contestant on these matrices: its kernels are compiled and its graph is captured.

    Captures that fail are added to `failed_captures`, with the reason by column; those in it are not tried.

    Returns:
        What is timed, and why the others do not run, both by column.
    """
    found: dict[str, Series] = {}
    notes: dict[str, str] = {}
    for mode, make in modes.items():
        for name, function in contestants.items():
            column = name + mode
            if name in notes or column in failed_captures:
                continue
            setup.live.running(column)
            try:
                found[column] = Series(make(function, matrices), setup.device)
            except Exception as error:  # another library may not support this machine or a capture
                if name in (OURS, FAST):
                    raise
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                (failed_captures if mode else notes)[column] = reason
                setup.live.note(column, reason)
    return found, {**notes, **failed_captures}


def show(results: list[dict[str, Any]]) -> str:
    """Return the times and the singular values as text tables, with a line for each contestant that did not run."""
    names = list(results[0]["milliseconds"])
    header = ["batch x m x n", *(f"{name}, ms" for name in names), "TFLOP/s", "% of floor"]
    rows = [
        [
            entry["shape"],
            *("-" if time is None else f"{time:.3f}" for time in entry["milliseconds"].values()),
            f"{entry['tflops']:.3g}",
            f"{100 * entry['floor_milliseconds'] / entry['best']:.0f}",
        ]
        for entry in results
    ]
    notes = {name: note for entry in results for name, note in entry["notes"].items()}
    accuracy = plain_table(
        ["batch x m x n", *results[0]["accuracy"]],
        [[entry["shape"], *map(show_accuracy, entry["accuracy"].values())] for entry in results],
    )
    lines = [plain_table(header, rows), *(f"{name}: {note}" for name, note in notes.items())]
    return "\n".join(
        [*lines, "", f"Where singular values from {LARGE:g} of the norm on end, and the slope at zero", accuracy]
    )
