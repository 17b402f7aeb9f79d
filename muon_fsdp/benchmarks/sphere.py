"""Measure a step of SpectralSphereOptimizer beside a step of Muon: `python -m muon_fsdp.benchmarks.sphere`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from muon_fsdp import MuonOptimizer, SpectralSphereOptimizer
from muon_fsdp.benchmarks.machine import describe_machine, free_memory
from muon_fsdp.benchmarks.peers import MakeOptimizer
from muon_fsdp.benchmarks.steps import models_on
from muon_fsdp.text import plain_table
from muon_fsdp.timing import device_milliseconds, milliseconds, synchronize

LR = 0.02
# Untimed steps: the first two compute the initial singular vectors, and a later one captures the CUDA graph.
WARM_UP = 6


class Gradients:
    """Random gradients with a fixed part of rank 32, so that the top singular vectors of the weights keep changing."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._low = [
            (torch.randn(len(p), 32, device=p.device), torch.randn(32, p[0].numel(), device=p.device)) for p in params
        ]
        self._params = params
        for p in params:
            p.grad = torch.empty_like(p)

    def renew(self) -> None:
        """Fill every gradient with new noise plus its fixed part, in place."""
        for p, (a, b) in zip(self._params, self._low, strict=True):
            assert p.grad is not None
            p.grad.normal_().addmm_(a, b, alpha=0.3)


def measure(make: MakeOptimizer, params: list[nn.Parameter], repeats: int) -> float:
    """Return the median milliseconds of a step: of the device on a GPU, and of the whole call on a CPU."""
    optimizer, gradients = make(params), Gradients(params)
    for _ in range(WARM_UP):
        gradients.renew()
        optimizer.step()
    times = []
    for _ in range(repeats):
        gradients.renew()
        if params[0].is_cuda:
            synchronize("cuda")
            times.append(device_milliseconds(optimizer.step, repeats=1))
        else:
            times.append(milliseconds(optimizer.step, "cpu", repeats=1))
    return statistics.median(times)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags, measure Muon and every mode, and print the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = models_on(device)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        choices=list(models),
        default="1.3b" if device == "cuda" else next(iter(models)),
        help="model whose matrices are updated",
    )
    parser.add_argument(
        "--modes", nargs="+", default=["zero", "projection", "bracketed"], help="values of lambda_mode to measure"
    )
    parser.add_argument("--repeats", type=int, default=7, help="steps to time; the table shows the median")
    args = parser.parse_args(argv)
    graph = device == "cuda"
    makes: dict[str, MakeOptimizer] = {"Muon": partial(MuonOptimizer, lr=LR, cuda_graph=graph)}
    for mode in args.modes:
        makes[f"SSO, {mode}"] = partial(SpectralSphereOptimizer, lr=LR, lambda_mode=mode, cuda_graph=graph)
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in models[args.model]]
    times = {}
    for name, make in makes.items():
        times[name] = measure(make, params, args.repeats)
        free_memory(device)
    print(describe_machine(device, torch.get_num_threads()), args.model)
    rows = [[name, f"{time:.1f}", f"{time / times['Muon']:.2f}"] for name, time in times.items()]
    print(plain_table(["optimizer", "ms", "over Muon"], rows))


if __name__ == "__main__":
    main()
