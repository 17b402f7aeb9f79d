"""Measuring: milliseconds of the device and of the host, and the two ceilings that everything is compared with."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

import torch


def progress(line: str) -> None:
    """What was measured just now; not on stdout, which belongs to the results."""
    print(f"  {line}", file=sys.stderr, flush=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], object], device: str, repeats: int, at_least: float = 0.02) -> float:
    """Median time of a call, device work included; short calls are repeated back to back."""
    run()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    calls = max(1, int(at_least / max(1e-6, time.perf_counter() - start)))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start) / calls)
    return statistics.median(times)


@dataclass(frozen=True)
class Ceilings:
    """What the device can do: floating-point operations in half precision, and bytes copied, per second."""

    flops: float
    bytes: float

    @classmethod
    def measure(cls, device: str) -> Ceilings:
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
    cpu = f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"
    name = torch.cuda.get_device_name() if device == "cuda" else cpu
    return {"date": date.today().isoformat(), "device": name, "torch": torch.__version__}


def table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *rows)
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
