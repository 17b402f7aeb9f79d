"""Time calls on the host and on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: str) -> None:
    """Wait until all work submitted to a CUDA device has finished; do nothing on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


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
