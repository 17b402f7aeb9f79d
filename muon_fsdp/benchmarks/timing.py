"""Time calls on the host and on the device, and measure the two ceilings that results are compared with."""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

import torch


def progress(line: str) -> None:
    """Print what was just measured to stderr, because stdout holds only the results."""
    print(f"  {line}", file=sys.stderr, flush=True)


def synchronize(device: str) -> None:
    """Wait until all work submitted to a CUDA device has finished; do nothing on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Release the memory of deleted tensors, so that the next contestant starts with an empty device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def host_seconds(run: Callable[[], object]) -> float:
    """Return how long a call keeps the host busy. Work that it submits to a GPU may still be running."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def seconds(run: Callable[[], object], device: str) -> float:
    """Return how long a call takes, from an idle device until the device has finished its work."""

    def run_to_the_end() -> None:
        run()
        synchronize(device)

    synchronize(device)
    return host_seconds(run_to_the_end)


def milliseconds(run: Callable[[], object], device: str, repeats: int, at_least: float = 0.02) -> float:
    """Return the median time of a call, including its work on the device.

    Short calls are repeated back to back until at least `at_least` seconds have passed, because the clock and the
    synchronization would dominate a single one.
    """
    run()
    calls = max(1, int(at_least / max(1e-6, seconds(run, device))))

    def run_all() -> None:
        for _ in range(calls):
            run()

    return statistics.median(1e3 * seconds(run_all, device) / calls for _ in range(repeats))


def device_milliseconds(run: Callable[[], object], repeats: int, calls: int = 1) -> float:
    """Return the median time of a call between two CUDA events.

    Args:
        run: the call to time.
        repeats: how many times are measured.
        calls: calls between the two events. With several, the device works through a queue of them, so that the result
            is the time of the device alone wherever the host is faster.
    """
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / calls)
    return statistics.median(times)


@dataclass(frozen=True)
class Ceilings:
    """The most that a device can do per second: floating-point operations in half precision, and bytes copied."""

    flops: float
    bytes: float

    @classmethod
    def measure(cls, device: str) -> Ceilings:
        """Time one large matrix product and one large copy on the device."""
        size, numel = (8192, 2**28) if device == "cuda" else (1024, 2**24)
        dtype = torch.float16 if device == "cuda" else torch.float32
        x = torch.randn(size, size, device=device, dtype=dtype)
        product = torch.empty_like(x)
        flops = 2 * size**3 / milliseconds(lambda: torch.mm(x, x, out=product), device, 5)
        source = torch.randn(numel, device=device)
        target = torch.empty_like(source)
        copied = 2 * source.nbytes / milliseconds(lambda: torch.neg(source, out=target), device, 5)
        return cls(1e3 * flops, 1e3 * copied)


def describe_machine(device: str, threads: int) -> dict[str, str]:
    """Return the date, the name of the device and the version of PyTorch, for the head of a report."""
    cpu = f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"
    name = torch.cuda.get_device_name() if device == "cuda" else cpu
    return {"date": date.today().isoformat(), "device": name, "torch": torch.__version__}
