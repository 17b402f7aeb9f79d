"""Describe this machine for reports, and measure the ceilings that results are compared with."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muon_fsdp import __version__
from muon_fsdp.benchmarks.live import LiveLine
from muon_fsdp.kernels.select import KERNELS_VARIABLE
from muon_fsdp.timing import milliseconds, seconds, sustained_seconds, synchronize

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
# Variables that change results or speed, and have no addresses in them. The values of all others are private and stay
# out of reports.
VARIABLES = (
    KERNELS_VARIABLE,
    ISA_VARIABLE,
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_SOCKET_NTHREADS",
)
PACKAGES = ("triton", "numpy", "typer", "rich", "matplotlib", "transformers", "accelerate", "lightning")
MEASURED_PACKAGES = ("triton", "dion", "gram_newton_schulz")


def best_device() -> torch.device:
    """Return the first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe_run(device: str, threads: int) -> dict[str, Any]:
    """Return the date, the name of the device and the versions of all packages that take part in a benchmark."""
    cpu = f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"
    versions = {"muon_fsdp": __version__, "torch": torch.__version__}
    versions.update({package: _version(package) for package in MEASURED_PACKAGES if importlib.util.find_spec(package)})
    name = torch.cuda.get_device_name() if device == "cuda" else cpu
    return {"date": date.today().isoformat(), "device": name, "versions": versions}


def describe() -> dict[str, Any]:
    """Return what a bug report needs: versions, devices, backends of torch.distributed, and variables that matter."""
    release = re.split(r"[^\d.]", platform.release())[0]  # the text after the number may name a machine
    versions = {
        "muon_fsdp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "NCCL": _nccl_version(),
        "system": f"{platform.system()} {release} {platform.machine()}",
        **{package: _version(package) for package in PACKAGES},
    }
    return {
        "versions": versions,
        "devices": devices(),
        "backends": backends(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(package: str) -> str:
    """Return the version of a package, or "unknown" if it can be imported but was not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown" if importlib.util.find_spec(package) else "not installed"


def _nccl_version() -> str:
    """Return the version of NCCL, or "none" without a GPU."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "none"
    nccl: Any = importlib.import_module("torch.cuda.nccl")
    return ".".join(map(str, nccl.version()))


def devices() -> list[str]:
    """Describe the CPU and every visible GPU, one line each."""
    found = [f"cpu: {_cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in torch"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            f"cuda:{index}: {properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return found


def _cpu_name() -> str:
    """Return the model name of the CPU, or its architecture where the name is unknown."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def backends() -> dict[str, bool]:
    """Return which backends of torch.distributed this build of PyTorch has."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def topology() -> list[str]:
    """Return the lines of `nvidia-smi topo -m`, which show NVLink and PCIe connections; none without the command."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        done = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def without_home(content: Any) -> Any:
    """Replace the path of the user's home folder in all texts of a nested structure."""
    home = str(Path.home())
    if isinstance(content, str):
        return content.replace(home, "~") if len(home) > 1 else content
    if isinstance(content, Mapping):
        return {key: without_home(value) for key, value in content.items()}
    return [without_home(value) for value in content] if isinstance(content, (list, tuple)) else content


def free_memory(device: str) -> None:
    """Release the memory of deleted tensors, so that the next contestant starts with an empty device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def cool_down(device: str) -> None:
    """Wait for a second while a GPU idles, so that the next contestant does not start as hot as the last one ended."""
    if device == "cuda":
        synchronize(device)
        time.sleep(1.0)


@dataclass(frozen=True)
class Ceilings:
    """The most that a device can do per second, in float16 on a GPU and in float32 on a CPU."""

    burst_flops: float  # of a few large matrix products after a pause
    sustained_flops: float  # of the same products after a second of them
    bytes: float  # read and written by a large copy

    @classmethod
    def measure(cls, device: str, pause: float = 1.0, load: float = 2.0) -> Ceilings:
        """Time large matrix products and a large copy on the device.

        The device is idle for `pause` seconds before the burst, and then busy for `load` seconds, of which the second
        half counts as sustained.
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

    def floor_milliseconds(self, flops: float, num_bytes: float) -> float:
        """Return the time of this work at the sustained rate of products and the speed of a copy: its floor."""
        return 1e3 * (flops / self.sustained_flops + num_bytes / self.bytes)

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
