"""How products are cut into tiles, and what a device has to compute them with."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class KernelError(RuntimeError):
    """A kernel could not be compiled or launched, and another one will do."""


class TileConfig(NamedTuple):
    """How a product is cut: a program computes `rows` x `cols` of the result in steps of `inner`."""

    rows: int
    cols: int
    inner: int
    num_warps: int
    num_stages: int
    persistent: bool = False  # one program per multiprocessor, each with many tiles
    group: int = 8  # rows of tiles that are computed side by side, so that operands are found in the cache


@lru_cache(maxsize=64)
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
