"""Find the total memory of a rank's device, which does not change during a run."""

from __future__ import annotations

import os

import torch

from muon_fsdp.comm.process_groups import num_ranks
from muon_fsdp.plan.speeds import DEVICE_MEMORY


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory that this rank's part of a device has.

    Returns:
        For a GPU, its total memory. For a CPU, and for a device that reports none, the memory of the host divided by
        the ranks on it: `LOCAL_WORLD_SIZE`, which torchrun sets, or else all ranks of the job. For the meta device, and
        for a host that reports none, what the planner assumes.
    """
    if device.type == "meta":
        return DEVICE_MEMORY
    if device.type != "cpu":
        properties = getattr(torch.get_device_module(device), "get_device_properties", None)
        total = getattr(properties(device), "total_memory", None) if properties is not None else None
        if total is not None:
            return int(total)
    if not hasattr(os, "sysconf"):
        return DEVICE_MEMORY
    ranks_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks()))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_of_host
