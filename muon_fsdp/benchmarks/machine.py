"""Describe the machine of a benchmark, and measure the ceilings that results are compared with."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

from muon_fsdp import __version__
from muon_fsdp.benchmarks.live import LiveLine
from muon_fsdp.timing import milliseconds, seconds, sustained_seconds, synchronize

OTHER_PACKAGES = ("triton", "dion", "gram_newton_schulz")


def free_memory(device: str) -> None:
    """Release the memory of deleted tensors, so that the next contestant starts with an empty device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def cool_down(device: str, pause: float = 1.0) -> None:
    """Wait while a GPU idles, so that the next contestant does not start at the temperature of the last one."""
    if device == "cuda":
        synchronize(device)
        time.sleep(pause)


@dataclass(frozen=True)
class Ceilings:
    """The most that a device can do per second, in float16 on a GPU and in float32 on a CPU."""

    burst_flops: float  # of a few large matrix products after a pause
    sustained_flops: float  # of the same products after a second of them
    bytes: float  # read and written by a large copy

    @classmethod
    def measure(cls, device: str, pause: float = 1.0, load: float = 2.0) -> Ceilings:
        """Time large matrix products and a large copy on the device.

        Args:
            device: "cuda" or "cpu".
            pause: seconds for which the device is idle before the burst.
            load: seconds of products for the sustained rate, of which the second half counts.
        """
        size, numel = (8192, 2**28) if device == "cuda" else (1024, 2**24)
        dtype = torch.float16 if device == "cuda" else torch.float32
        x = torch.randn(size, size, device=device, dtype=dtype)
        product = torch.empty_like(x)

        def multiply() -> None:
            torch.mm(x, x, out=product)

        seconds(multiply, device)  # loads the library
        time.sleep(pause)
        burst = min(seconds(multiply, device) for _ in range(5))
        sustained = sustained_seconds(multiply, device, load)
        source = torch.randn(numel, device=device)
        target = torch.empty_like(source)
        copy = 1e-3 * milliseconds(lambda: torch.neg(source, out=target), device, 5)
        flops = 2 * float(size) ** 3
        return cls(flops / burst, flops / sustained, 2 * source.nbytes / copy)

    def show(self) -> str:
        """Return the ceilings as one line of text."""
        return (
            f"{self.sustained_flops / 1e12:.4g} TFLOP/s sustained, {self.burst_flops / 1e12:.4g} TFLOP/s in "
            f"a burst, {self.bytes / 1e12:.3g} TB/s"
        )


@dataclass(frozen=True)
class Setup:
    """The settings that all tables of one run share."""

    device: str  # "cuda" or "cpu"
    ceilings: Ceilings
    repeats: int  # how many times each figure is measured
    live: LiveLine


def describe_machine(device: str, threads: int) -> dict[str, Any]:
    """Return the date, the name of the device and the versions of all packages that take part."""
    cpu = f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"
    versions = {"muon_fsdp": __version__, "torch": torch.__version__}
    versions.update({package: _version(package) for package in OTHER_PACKAGES if importlib.util.find_spec(package)})
    name = torch.cuda.get_device_name() if device == "cuda" else cpu
    return {"date": date.today().isoformat(), "device": name, "versions": versions}


def show_machine(machine: Mapping[str, Any]) -> str:
    """Return what `describe_machine` found as one line of text."""
    versions = [f"{package} {version}" for package, version in machine["versions"].items()]
    return ", ".join([machine["date"], machine["device"], *versions])


def _version(package: str) -> str:
    """Return the version of a package, or "unknown" if it can be imported but was not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
