"""Prints memory and time of a step for ways to store state and weights: `python -m tests.gpu.storage_table` on a GPU.

Every mode takes steps on the parameters of a model, Llama-3 8B by default, with gradients that stay as they are. Steps
are eager. Memory is what `torch.cuda.max_memory_allocated` counts beyond weights and gradients, beside the plan's
prediction. `--model` takes another name of `muon-fsdp plan --list`, or 1.3b. The last column is the time of copying as
much as the state on the host from and to the device, both at once.
"""

from __future__ import annotations

import argparse
import gc
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.benchmarks.public_models import PUBLIC_MODELS, GPT2Model

# State, how weights in bfloat16 are rounded, and whether state is on the host.
MODES = (
    ("float32", "nearest", False),
    ("bfloat16", "nearest", False),
    ("int8", "nearest", False),
    ("float32", "stochastic", False),
    ("int8", "stochastic", False),
    ("int8", "remainder", False),
    ("int8", "stochastic", True),
    ("float32", "nearest", True),
)
WARMUP_STEPS, TIMED_STEPS = 2, 3
TABLE_MODELS = {**PUBLIC_MODELS, "1.3b": partial(GPT2Model, hidden=2048, layers=24)}


class Measured(NamedTuple):
    """What one mode takes: bytes, and milliseconds of a step. Peaks are those beyond weights and gradients."""

    fixed: int  # weights and gradients
    state: int
    peak: int
    predicted_state: int
    predicted_peak: int
    milliseconds: float


def make_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give a model on the meta device weights and gradients on the GPU."""
    model.to(dtype).to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
            parameter.grad = torch.randn_like(parameter)
    return model


def measure(model: nn.Module, timed: int = TIMED_STEPS, **options: Any) -> Measured:
    """Take steps with a new optimizer, from the one that creates state on, and forget it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer = MuonOptimizer(model, lr=0.02, adamw_lr=1e-4, cuda_graph=False, **options)
    for _ in range(WARMUP_STEPS):
        optimizer.step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(timed):
        optimizer.step()
    end.record()
    torch.cuda.synchronize()
    report = optimizer.plan_report()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return Measured(
        fixed=sum(2 * p.numel() * p.itemsize for p in model.parameters()),
        state=sum(value.numel() * value.itemsize for value in tensors),
        peak=torch.cuda.max_memory_allocated() - before,
        predicted_state=report.state_bytes,
        predicted_peak=report.device_state_bytes + report.scratch_bytes,
        milliseconds=start.elapsed_time(end) / max(1, timed),
    )


def milliseconds_of_copies(num_bytes: int, repeats: int = 3) -> float:
    """Return the milliseconds in which as many bytes travel from the host and as many to it, at the same time."""
    piece = min(num_bytes, 2**28)
    inward, outward = torch.cuda.Stream(), torch.cuda.Stream()
    hosts = [torch.empty(piece, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(piece, dtype=torch.uint8, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats * max(1, num_bytes // piece)):
        with torch.cuda.stream(inward):
            devices[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(outward):
            hosts[1].copy_(devices[1], non_blocking=True)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / repeats


def main() -> None:
    names = ["-".join((state, rounding, *(["host"] if host else []))) for state, rounding, host in MODES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=list(TABLE_MODELS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="that of the weights")
    parser.add_argument("--modes", nargs="*", choices=names, default=names)
    given = parser.parse_args()
    name = given.model
    with torch.device("meta"):
        model = TABLE_MODELS[name]()
    model = make_model(model, getattr(torch, given.dtype))
    numel = sum(p.numel() for p in model.parameters())
    print(f"{name}, {numel:,} parameters, {torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| state | rounding | bytes per parameter: state | peak beyond weights and gradients | "
          "predicted peak | all device memory, per parameter | step | copies alone |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for mode, (state_dtype, rounding, on_host) in zip(names, MODES, strict=True):
        if mode not in given.modes:
            continue
        found = measure(model, state_dtype=state_dtype, rounding=rounding, offload_state=on_host)
        copies = f"{milliseconds_of_copies(found.state):.0f} ms" if on_host else ""
        print(
            f"| {state_dtype}{' on the host' if on_host else ''} | {rounding} | {found.state / numel:.2f} "
            f"| {found.peak / 1e9:.2f} GB | {found.predicted_peak / 1e9:.2f} GB "
            f"| {(found.fixed + found.peak) / numel:.2f} | {found.milliseconds:.0f} ms | {copies} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
