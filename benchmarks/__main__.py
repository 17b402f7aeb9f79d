"""Time of one optimizer step on the matrices of GPT-2 small, ours beside PyTorch's Muon and AdamW."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from muon_fsdp import MuonOptimizer

GPT2_LAYER = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "muon_fsdp": lambda params: MuonOptimizer(params, nesterov=True),
    "torch.optim.Muon": lambda params: torch.optim.Muon(params, lr=0.02, weight_decay=0.0),
    "torch.optim.AdamW(fused)": lambda params: torch.optim.AdamW(params, fused=True),
}


def parameters(layers: int, device: str) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    result = []
    for _ in range(layers):
        for shape in GPT2_LAYER:
            p = nn.Parameter(torch.randn(shape, device=device, generator=generator) * 0.02)
            p.grad = torch.randn(shape, device=device, generator=generator)
            result.append(p)
    return result


def seconds_per_step(optimizer: torch.optim.Optimizer, device: str, repeats: int) -> tuple[float, float]:
    """(first step, median of the following ones)."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[1:])


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--layers", type=int, default=12, help="layers of GPT-2 small (default 12: 124M with embeddings)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed steps; the median is reported")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, {args.threads} threads"
    print(f"torch {torch.__version__}, {name}, {args.layers} layers, median of {args.repeats} steps")

    results = {}
    for label, make in OPTIMIZERS.items():
        print(f"timing {label} ...", flush=True)
        optimizer = make(parameters(args.layers, device))
        first, median = seconds_per_step(optimizer, device, args.repeats)
        results[label] = {"first_step_ms": first * 1e3, "step_ms": median * 1e3}
    ours = results["muon_fsdp"]["step_ms"]
    print(f"\n{'optimizer':26} {'step ms':>10} {'first ms':>10} {'ours/this':>10}")
    for label, result in results.items():
        ratio = ours / result["step_ms"]
        print(f"{label:26} {result['step_ms']:10.1f} {result['first_step_ms']:10.1f} {ratio:10.2f}")
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "device": name, "results": results}, indent=2))


if __name__ == "__main__":
    main()
