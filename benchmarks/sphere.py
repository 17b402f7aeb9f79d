"""Time of one step on spectral spheres beside one of Muon: `python -m benchmarks.sphere`."""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable

import torch
from torch import nn

from muon_fsdp import MuonOptimizer, SpectralSphereOptimizer
from muon_fsdp.benchmarks.steps import CPU_MODELS, MODELS
from muon_fsdp.benchmarks.timing import describe_machine, milliseconds, synchronize, table

LR = 0.02
WARM_UP = 6  # steps: two in which first vectors are looked for, one before a graph is captured, and that


class Gradients:
    """Of rank 32 and the same at every step, plus noise: the top directions of the weights change from step to step."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self._low = [
            (torch.randn(len(p), 32, device=p.device), torch.randn(32, p[0].numel(), device=p.device)) for p in params
        ]
        self._params = params
        for p in params:
            p.grad = torch.empty_like(p)

    def renew(self) -> None:
        for p, (a, b) in zip(self._params, self._low, strict=True):
            assert p.grad is not None
            p.grad.normal_().addmm_(a, b, alpha=0.3)


def measure(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], params: list[nn.Parameter], repeats: int
) -> float:
    """Median milliseconds of a step, of the device where there is one."""
    optimizer, gradients = make(params), Gradients(params)
    for _ in range(WARM_UP):
        gradients.renew()
        optimizer.step()
    times = []
    for _ in range(repeats):
        gradients.renew()
        if params[0].is_cuda:
            synchronize("cuda")
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            optimizer.step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            times.append(milliseconds(optimizer.step, "cpu", 1))
    return statistics.median(times)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = MODELS if device == "cuda" else CPU_MODELS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(models), default="1.3b" if device == "cuda" else next(iter(models)))
    parser.add_argument("--modes", nargs="+", default=["zero", "projection", "bracketed"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    graph = device == "cuda"
    makes: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "Muon": lambda params: MuonOptimizer(params, lr=LR, cuda_graph=graph)
    }
    for mode in args.modes:
        makes[f"SSO, {mode}"] = lambda params, mode=mode: SpectralSphereOptimizer(
            params, lr=LR, lambda_mode=mode, cuda_graph=graph
        )
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in models[args.model]]
    times = {}
    for name, make in makes.items():
        times[name] = measure(make, params, args.repeats)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    print(describe_machine(device, torch.get_num_threads()), args.model)
    rows = [[name, f"{time:.1f}", f"{time / times['Muon']:.2f}"] for name, time in times.items()]
    print(table(["optimizer", "ms", "over Muon"], rows))


if __name__ == "__main__":
    main()
