"""Ranks of `muon-fsdp bench --multi-gpu` as threads of one process, and functions that they run in their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from muon_fsdp.benchmarks.multi_gpu import CPU_WORKLOADS, measure
from muon_fsdp.benchmarks.ranks import Ranks, RanksError, on_this_machine


def on_ranks(size: int, work: Callable[[Ranks], Any], limit: float = 120.0) -> list[Any]:
    """Call `work` with the `Ranks` of each rank; return the results by rank, or what was raised."""

    def one(ranks: Ranks) -> Any:
        try:
            return work(ranks)
        except RanksError as error:
            return error

    return on_this_machine(size, one, limit)


def total(value: int) -> int:
    """Sum a value over the ranks."""
    found = torch.tensor(value, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(found)
    return int(found)


def raise_on_last() -> None:
    """Raise on the last rank, while the others wait for it in a collective."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("the last rank\nhas a problem")
    total(1)


def die_on_first() -> None:
    """End the process of the first rank without a word, while the others wait for it."""
    if dist.get_rank() == 0:
        os._exit(7)
    total(1)


def print_as_gloo() -> int:
    """Print to stdout below Python, as gloo of torch 2.10 does, and return a result."""
    return os.write(1, b"[Gloo] Rank 0 is connected to 0 peer ranks.\n")


def hang() -> None:
    """Sleep for longer than any test."""
    time.sleep(600)


def measured(names: list[str], repeats: int) -> dict[str, Any]:
    """Measure contestants on the tiny model, in the process of this rank."""
    return {name: measure(CPU_WORKLOADS["tiny"], name, repeats) for name in names}
