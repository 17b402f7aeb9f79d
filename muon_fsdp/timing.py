"""Time calls on the host and on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

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
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def repeated(run: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a call that makes `times` calls back to back."""

    def run_all() -> None:
        for _ in range(times):
            run()

    return run_all


class Series:
    """A call that is timed as a series: repeated back to back for at least 20 ms.

    The clock and the synchronization would dominate a single short call. The constructor makes the call twice, so that
    kernels are compiled before the first time is taken.
    """

    def __init__(self, run: Callable[[], object], device: str) -> None:
        run()
        self._calls = max(1, int(0.02 / max(1e-6, seconds(run, device))))
        self._run_all, self._device = repeated(run, self._calls), device

    def milliseconds(self) -> float:
        """Return the time of one call in a series, including its work on the device."""
        return 1e3 * seconds(self._run_all, self._device) / self._calls


def milliseconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median time of a call over several series, including its work on the device."""
    series = Series(run, device)
    return statistics.median(series.milliseconds() for _ in range(repeats))


def medians_in_turn(all_series: Mapping[str, Series], repeats: int, running: Callable[[str], None]) -> dict[str, float]:
    """Return the median milliseconds of several calls by name, measured in turn.

    Every round times each call once, and every second round does so in the opposite order. So all of them meet a device
    that the others have heated alike. One more round comes first and does not count, because preparing one call may
    have released memory that another one uses.

    Args:
        all_series: the calls to time, by name.
        repeats: how many rounds are measured.
        running: called with the name of the call that is timed next.
    """
    times: dict[str, list[float]] = {name: [] for name in all_series}
    for number in range(1 + repeats):
        for name in reversed(times) if number % 2 else times:
            running(name)
            times[name].append(all_series[name].milliseconds())
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def sustained_seconds(run: Callable[[], object], device: str, load: float) -> float:
    """Return the time of a call once the device has been busy with such calls for half of `load` seconds.

    Calls run back to back for about `load` seconds. Only the second half counts, when the device has reached the clock
    that its power limit allows.
    """
    calls = max(1, round(load / 2 / max(1e-6, seconds(run, device))))
    run_half = repeated(run, calls)
    seconds(run_half, device)
    return seconds(run_half, device) / calls


def device_milliseconds(run: Callable[[], object], repeats: int, calls: int = 1) -> float:
    """Return the median time of a call between two CUDA events.

    Args:
        run: the call to time.
        repeats: how many times are measured.
        calls: calls between the two events. With several, the device works through a queue of them, so that the result
            is the time of the device alone wherever the host is faster.
    """
    run_all = repeated(run, calls)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run_all()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / calls)
    return statistics.median(times)
