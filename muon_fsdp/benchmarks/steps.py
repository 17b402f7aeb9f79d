"""Time and memory of one optimizer step on the matrices of a model, ours beside others."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.benchmarks.orthogonalization import least_flops
from muon_fsdp.benchmarks.peers import MakeOptimizer, optimizers
from muon_fsdp.benchmarks.timing import Ceilings, progress, synchronize, table

MODELS: dict[str, list[tuple[int, int]]] = {
    "gpt2-124m": 12 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)],
    "1.3b": 24 * [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192)],
    "llama-8b, 8 of 32 layers": 8 * [*2 * [(4096, 4096)], *2 * [(1024, 4096)], *2 * [(14336, 4096)], (4096, 14336)],
}
CPU_MODELS = {"gpt2-124m, 1 layer": MODELS["gpt2-124m"][:4]}
# Bytes that a step moves at least for every float32 element: gradient, momentum twice, staging twice, weight twice, and
# the result.
BYTES_PER_ELEMENT = 24


def ours(device: str) -> dict[str, MakeOptimizer]:
    found: dict[str, MakeOptimizer] = {"muon_fsdp": lambda params: MuonOptimizer(params, nesterov=True)}
    if device == "cuda":
        found["muon_fsdp, cuda_graph"] = lambda params: MuonOptimizer(params, nesterov=True, cuda_graph=True)
    return found


def new_gradients(params: list[nn.Parameter], generator: torch.Generator) -> None:
    """Fresh numbers at other addresses, as after `zero_grad` and another backward."""
    for p in params:
        p.grad = torch.randn(p.shape, device=p.device, generator=generator)


def measure_one(make: MakeOptimizer, shapes: list[tuple[int, int]], device: str, repeats: int) -> dict[str, float]:
    generator = torch.Generator(device).manual_seed(0)
    params = [nn.Parameter(torch.randn(s, device=device, generator=generator) * 0.02) for s in shapes]
    new_gradients(params, generator)
    synchronize(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    optimizer = make(params)
    start = time.perf_counter()
    optimizer.step()
    synchronize(device)
    first = time.perf_counter() - start
    extra = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    for _ in range(2 if device == "cuda" else 0):  # a graph is captured at the second step
        optimizer.step()
    if device == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
    total, host = [], []
    for _ in range(repeats):
        new_gradients(params, generator)
        synchronize(device)
        start = time.perf_counter()
        optimizer.step()
        synchronize(device)
        total.append(time.perf_counter() - start)
    for _ in range(repeats):  # as in training: the device is still busy when the host comes to the step
        new_gradients(params, generator)
        start = time.perf_counter()
        optimizer.step()
        host.append(time.perf_counter() - start)
    if device == "cuda":
        extra = max(extra, torch.cuda.max_memory_allocated() - before)
    result = {
        "milliseconds": 1e3 * statistics.median(total),
        "host_milliseconds": 1e3 * statistics.median(host),
        "first_step_seconds": first,
        "extra_gigabytes": extra / 1e9,
    }
    if device == "cuda":
        result["device_milliseconds"] = _back_to_back(optimizer, repeats)
    return result


def _back_to_back(optimizer: torch.optim.Optimizer, repeats: int) -> float:
    """Time of a step in a queue of them: of the device alone where the host is faster."""
    calls = 4
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            optimizer.step()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / calls)
    return statistics.median(times)


def models_on(device: str) -> dict[str, list[tuple[int, int]]]:
    """What is measured by default, by the name that `--models` takes and what more there is to say of it."""
    return MODELS if device == "cuda" else CPU_MODELS


def measure(device: str, ceilings: Ceilings, repeats: int, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
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
            except Exception as error:  # a peer that does not run here is part of the result
                if name.startswith("muon_fsdp"):
                    raise
                progress(f"{model}, {name}: {type(error).__name__}: {error}")
                continue
            finally:
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
            one["tflops"] = flops / one["milliseconds"] / 1e9
            entry["optimizers"][name] = one
            progress(f"{model}, {name}: {one['milliseconds']:.2f} ms")
        results.append(entry)
    return results


def show(results: list[dict[str, Any]]) -> str:
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
        parts.append(table(header, rows) + "\n")
    return "\n".join(parts)
