"""Ranks of `muon-fsdp bench --multi-gpu` as threads of one process, and functions that they run in their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from muon_fsdp.benchmarks.isolated import Place, Ranks
from muon_fsdp.benchmarks.sharded_training import CPU_WORKLOADS, measure


def on_ranks(size: int, work: Callable[[Ranks], Any], limit: float = 120.0) -> list[Any]:
    """Call `work` with the `Ranks` of each rank; return the results by rank, or what was raised."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def one(rank: int) -> Any:
        place = Place(rank, size, rank, size, "127.0.0.1", store.port)
        client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        try:
            return work(Ranks(place, limit, client))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


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


def hang() -> None:
    """Sleep for longer than any test."""
    time.sleep(600)


def measured(names: list[str], repeats: int) -> dict[str, Any]:
    """Measure contestants on the tiny model, in the process of this rank."""
    return {name: measure(CPU_WORKLOADS["tiny"], name, repeats) for name in names}
