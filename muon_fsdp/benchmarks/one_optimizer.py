"""Measure the time and memory of the steps of one optimizer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import nn

from muon_fsdp.benchmarks.machine import free_memory
from muon_fsdp.benchmarks.peers import MakeOptimizer
from muon_fsdp.timing import device_milliseconds, host_seconds, seconds, synchronize

Shapes = Sequence[tuple[int, ...]]

# Steps before the first that is timed. On a GPU they compile kernels and capture a CUDA graph, also where the optimizer
# captures itself after a few steps. The first two steps of a spectral sphere compute the initial singular vectors.
WARM_UP = {"cuda": 6, "cpu": 2}
GRADIENT_RANK = 32


class Gradients:
    """Random gradients with a fixed part of low rank.

    The top singular vectors of the weights then change from step to step as in training, which some rules depend on.
    """

    def __init__(self, params: Sequence[nn.Parameter], generator: torch.Generator) -> None:
        self._generator = generator
        self._parts = [
            (p, self._normal(len(p), GRADIENT_RANK), self._normal(GRADIENT_RANK, p[0].numel())) for p in params
        ]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._generator.device, generator=self._generator)

    def renew(self) -> None:
        """Give every parameter a new gradient tensor, as `zero_grad` followed by another backward would.

        The order changes with every call, so that the caching allocator gives most gradients another address without
        reserving more memory.
        """
        for p, _, _ in self._parts:
            p.grad = None
        self._parts.reverse()
        for p, left, right in self._parts:
            p.grad = self._normal(*p.shape).addmm_(left, right, alpha=0.3)


class PeakMemory:
    """The largest CUDA memory of watched calls beyond that at the start: allocated by tensors, and reserved for them.

    Memory that a captured graph keeps for itself is reserved all the time, and allocated only during the capture.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def watch(self, run: Callable[[], float]) -> float:
        """Make a call and update the peaks. Allocations between watched calls, such as of gradients, do not count.

        Returns:
            The result of the call.
        """
        torch.cuda.reset_peak_memory_stats()
        result = run()
        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated() - self._before[0])
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved() - self._before[1])
        return result


def random_parameters(shapes: Shapes, device: str) -> tuple[list[nn.Parameter], Gradients]:
    """Make parameters of these shapes with gradients, and what renews the gradients."""
    generator = torch.Generator(device).manual_seed(0)
    params = [nn.Parameter(torch.randn(s, device=device, generator=generator).mul_(0.02)) for s in shapes]
    gradients = Gradients(params, generator)
    gradients.renew()
    return params, gradients


def measure_one(make: MakeOptimizer, shapes: Shapes, device: str, repeats: int) -> dict[str, float]:
    """Measure the steps of one optimizer on parameters of these shapes.

    Returns:
        The median time of a step until the device has finished and of `step()` on the host, and the time of the first
        step; on a GPU also the time of a step in a queue of them, and the memory beyond weights and gradients.
    """
    free_memory(device)  # else the optimizer would use memory that the last one reserved
    params, gradients = random_parameters(shapes, device)
    synchronize(device)
    memory = PeakMemory() if device == "cuda" else None

    def timed(clock: Callable[[], float]) -> float:
        return memory.watch(clock) if memory else clock()

    optimizer = make(params)
    first = timed(lambda: seconds(optimizer.step, device))
    for _ in range(WARM_UP[device] - 1):
        gradients.renew()
        timed(lambda: seconds(optimizer.step, device))
    total, host = [], []
    for _ in range(repeats):
        gradients.renew()
        total.append(timed(lambda: seconds(optimizer.step, device)))
    for _ in range(repeats):  # without waiting: in training too, the device is still busy when the host calls step()
        gradients.renew()
        host.append(timed(lambda: host_seconds(optimizer.step)))
    result = {
        "milliseconds": 1e3 * statistics.median(total),
        "host_milliseconds": 1e3 * statistics.median(host),
        "first_step_seconds": first,
    }
    if memory is not None:
        result["device_milliseconds"] = device_milliseconds(optimizer.step, repeats, calls=4)
        result["extra_allocated_gigabytes"] = memory.allocated / 1e9
        result["extra_reserved_gigabytes"] = memory.reserved / 1e9
    return result
