"""Collect facts about this machine for `muon-fsdp doctor`: versions, devices, environment and kernels."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muon_fsdp import __version__
from muon_fsdp.kernels.select import KERNELS_VARIABLE, Product, select

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
# Variables that change results or speed. The values of all others are private and stay out of bug reports.
VARIABLES = (KERNELS_VARIABLE, ISA_VARIABLE, "TRITON_INTERPRET", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING")
PACKAGES = ("triton", "numpy", "typer", "rich", "matplotlib", "transformers", "accelerate", "lightning")


def versions() -> dict[str, str]:
    """Return the versions of this package, PyTorch, the system and related packages."""
    return {
        "muon_fsdp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "NCCL": _nccl_version(),
        "system": f"{platform.system()} {_digits(platform.release())} {platform.machine()}",
        **{package: _version(package) for package in PACKAGES},
    }


def _digits(release: str) -> str:
    """Return the leading version number of a kernel release, because the text after it may name a machine."""
    match = re.match(r"[\d.]+", release)
    return match[0] if match else ""


def _version(package: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


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


def environment() -> dict[str, str]:
    """Return the environment variables among `VARIABLES` that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def best_device() -> torch.device:
    """Return the first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernel_choices(device: torch.device) -> list[dict[str, str]]:
    """Return which kernel computes matrix products of typical sizes, and why."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    products = [
        Product("symmetric", 12, 768, 768, 3072, dtype),
        Product("multiply_add", 12, 768, 3072, 768, dtype),
        Product("symmetric", 1, 4096, 4096, 4096, dtype),
        Product("multiply_add", 1, 4096, 14336, 4096, dtype),
        Product("symmetric", 128, 64, 64, 128, torch.float32),
    ]
    found = []
    for product in products:
        choice = select(product, device)
        found.append(
            {
                "product": f"{product.operation} {product.num_matrices} x ({product.rows} x {product.inner} x "
                f"{product.cols})",
                "dtype": str(product.dtype).removeprefix("torch."),
                "kernel": choice.path or "chosen by timing at the first use",
                "why": choice.reason,
            }
        )
    return found


def without_home(content: Any) -> Any:
    """Replace the path of the user's home folder in all texts of a nested structure."""
    home = str(Path.home())
    if isinstance(content, str):
        return content.replace(home, "~") if len(home) > 1 else content
    if isinstance(content, Mapping):
        return {key: without_home(value) for key, value in content.items()}
    return [without_home(value) for value in content] if isinstance(content, (list, tuple)) else content
