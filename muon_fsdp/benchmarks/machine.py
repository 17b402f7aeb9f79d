"""Describe the machine of a benchmark, and measure the two ceilings that results are compared with."""

from __future__ import annotations

import gc
import platform
import sys
from dataclasses import dataclass
from datetime import date

import torch

from muon_fsdp.timing import milliseconds


def progress(line: str) -> None:
    """Print what was just measured to stderr, because stdout holds only the results."""
    print(f"  {line}", file=sys.stderr, flush=True)


def free_memory(device: str) -> None:
    """Release the memory of deleted tensors, so that the next contestant starts with an empty device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


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
