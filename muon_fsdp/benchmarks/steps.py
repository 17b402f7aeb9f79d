"""Measure the time and memory of one optimizer step on the matrices of a model, for our optimizer and others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.benchmarks.machine import Ceilings, free_memory, progress
from muon_fsdp.benchmarks.orthogonalization import least_flops
from muon_fsdp.benchmarks.peers import MakeOptimizer, optimizers
from muon_fsdp.benchmarks.public_models import DECODERS, PUBLIC_MODELS, DecoderModel, GPT2Model, matrix_shapes
from muon_fsdp.text import plain_table
from muon_fsdp.timing import device_milliseconds, host_seconds, seconds, synchronize

Shapes = Sequence[tuple[int, ...]]

# Shapes of the matrices that are updated. The name before the comma is what `--models` accepts.
MODELS: dict[str, Shapes] = {
    "gpt2-124m": matrix_shapes(PUBLIC_MODELS["gpt2-124m"]),
    "1.3b": matrix_shapes(partial(GPT2Model, hidden=2048, layers=24)),
    "llama-8b, 8 of 32 layers": matrix_shapes(partial(DecoderModel, replace(DECODERS["llama-3-8b"], layers=8))),
}
CPU_MODELS = {"gpt2-124m, 1 layer": MODELS["gpt2-124m"][:4]}
# The fewest bytes that a step moves per float32 element: it reads the gradient, reads and writes the momentum, the
# staging buffer and the weight, and writes the result.
BYTES_PER_ELEMENT = 24


def ours(device: str) -> dict[str, MakeOptimizer]:
    """Return what makes each of our optimizers, by the name that the table shows."""
    found: dict[str, MakeOptimizer] = {"muon_fsdp": lambda params: MuonOptimizer(params, nesterov=True)}
    if device == "cuda":
        found["muon_fsdp, cuda_graph"] = lambda params: MuonOptimizer(params, nesterov=True, cuda_graph=True)
    return found


def new_gradients(params: list[nn.Parameter], generator: torch.Generator) -> None:
    """Give every parameter a new gradient tensor, as `zero_grad` followed by another backward would."""
    for p in params:
        p.grad = torch.randn(p.shape, device=p.device, generator=generator)


def measure_one(make: MakeOptimizer, shapes: Shapes, device: str, repeats: int) -> dict[str, float]:
    """Measure the steps of one optimizer on parameters of these shapes.

    Returns:
        The median time of a step until the device has finished and of `step()` on the host, the time of the first step,
        and the memory used beyond weights and gradients; on a GPU also the time of a step in a queue of them.
    """
    generator = torch.Generator(device).manual_seed(0)
    params = [nn.Parameter(torch.randn(s, device=device, generator=generator) * 0.02) for s in shapes]
    new_gradients(params, generator)
    synchronize(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    optimizer = make(params)
    first = seconds(optimizer.step, device)
    extra = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    for _ in range(2 if device == "cuda" else 0):  # the second step captures a CUDA graph, which must not be timed
        optimizer.step()
    if device == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
    total, host = [], []
    for _ in range(repeats):
        new_gradients(params, generator)
        total.append(seconds(optimizer.step, device))
    for _ in range(repeats):  # without waiting: in training too, the device is still busy when the host calls step()
        new_gradients(params, generator)
        host.append(host_seconds(optimizer.step))
    if device == "cuda":
        extra = max(extra, torch.cuda.max_memory_allocated() - before)
    result = {
        "milliseconds": 1e3 * statistics.median(total),
        "host_milliseconds": 1e3 * statistics.median(host),
        "first_step_seconds": first,
        "extra_gigabytes": extra / 1e9,
    }
    if device == "cuda":
        result["device_milliseconds"] = device_milliseconds(optimizer.step, repeats, calls=4)
    return result


def models_on(device: str) -> dict[str, Shapes]:
    """Return the shapes of the models that are measured on a device, by the name that the table shows."""
    return MODELS if device == "cuda" else CPU_MODELS


def measure(device: str, ceilings: Ceilings, repeats: int, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure every optimizer on every model, or on the models named in `only`.

    Returns:
        One entry per model: its name, size and floor, and the figures of each optimizer.
    """
    results = []
    for model, shapes in models_on(device).items():
        if only and model.split(",")[0] not in only:
            continue
        elements, flops = sum(r * c for r, c in shapes), sum(least_flops(r, c) for r, c in shapes)
        floor = 1e3 * (flops / ceilings.flops + BYTES_PER_ELEMENT * elements / ceilings.bytes)
        entry: dict[str, Any] = {"model": model, "parameters": elements, "floor_milliseconds": floor, "optimizers": {}}
        for name, make in {**ours(device), **optimizers(device)}.items():
            try:
                one = measure_one(make, shapes, device, repeats)
            except Exception as error:  # another library may not support this machine; the others are still measured
                if name.startswith("muon_fsdp"):
                    raise
                progress(f"{model}, {name}: {type(error).__name__}: {error}")
                continue
            finally:
                free_memory(device)
            one["tflops"] = flops / one["milliseconds"] / 1e9
            entry["optimizers"][name] = one
            progress(f"{model}, {name}: {one['milliseconds']:.2f} ms")
        results.append(entry)
    return results


def show(results: list[dict[str, Any]]) -> str:
    """Return the results as one text table per model."""
    parts = []
    for entry in results:
        header = ["optimizer", "step ms", "device ms", "host ms", "first s", "extra GB", "TFLOP/s", "% of floor"]
        rows = [
            [
                name,
                f"{one['milliseconds']:.2f}",
                f"{one.get('device_milliseconds', one['milliseconds']):.2f}",
                f"{one['host_milliseconds']:.2f}",
                f"{one['first_step_seconds']:.2f}",
                f"{one['extra_gigabytes']:.2f}",
                f"{one['tflops']:.3g}" if "Adam" not in name else "-",
                f"{100 * entry['floor_milliseconds'] / one['milliseconds']:.0f}" if "Adam" not in name else "-",
            ]
            for name, one in entry["optimizers"].items()
        ]
        millions, floor = entry["parameters"] / 1e6, entry["floor_milliseconds"]
        parts.append(f"{entry['model']}: {millions:.0f}M parameters in matrices, floor {floor:.2f} ms")
        parts.append(plain_table(header, rows) + "\n")
    return "\n".join(parts)
