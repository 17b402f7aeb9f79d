"""Describe how a kernel cuts a product into tiles, and the device that it runs on."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class KernelError(RuntimeError):
    """Raised when a kernel could not be compiled or launched; the caller then uses another kernel."""


class TileConfig(NamedTuple):
    """The tiles of a product: a tile is `rows` x `cols` of the result, computed in steps of `inner`."""

    rows: int
    cols: int
    inner: int
    num_warps: int
    num_stages: int
    persistent: bool = False  # one program per multiprocessor that computes many tiles, not one program per tile
    group: int = 8  # rows of tiles that are computed together, so that their operands stay in the L2 cache


@lru_cache(maxsize=64)
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
