"""Prints memory and time of a step for ways to store state and weights: `python -m tests.gpu.storage_table` on a GPU.

Every mode takes steps on the parameters of a model, Llama-3 8B by default, with gradients that stay as they are. Steps
are eager. Memory is what `torch.cuda.max_memory_allocated` counts beyond weights and gradients, beside the plan's
prediction. `--model` takes another name of `muon-fsdp plan --list`.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any, NamedTuple

import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.benchmarks.public_models import PUBLIC_MODELS

# State, and how weights in bfloat16 are rounded.
MODES = (
    ("float32", "nearest"),
    ("bfloat16", "nearest"),
    ("int8", "nearest"),
    ("float32", "stochastic"),
    ("int8", "stochastic"),
    ("int8", "remainder"),
)
WARMUP_STEPS, TIMED_STEPS = 2, 3


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
    optimizer = MuonOptimizer(model, lr=1e-3, adamw_lr=1e-4, cuda_graph=False, **options)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=list(PUBLIC_MODELS))
    name = parser.parse_args().model
    with torch.device("meta"):
        model = PUBLIC_MODELS[name]()
    model = make_model(model, torch.bfloat16)
    numel = sum(p.numel() for p in model.parameters())
    print(f"{name}, {numel:,} parameters, {torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| state | rounding of bf16 weights | bytes per parameter: state | peak beyond weights and gradients | "
          "predicted peak | all memory, per parameter | step |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for state_dtype, rounding in MODES:
        found = measure(model, state_dtype=state_dtype, rounding=rounding)
        print(
            f"| {state_dtype} | {rounding} | {found.state / numel:.2f} | {found.peak / 1e9:.2f} GB "
            f"| {found.predicted_peak / 1e9:.2f} GB | {(found.fixed + found.peak) / numel:.2f} "
            f"| {found.milliseconds:.0f} ms |",
            flush=True,
        )


if __name__ == "__main__":
    main()
