"""Run a function on several ranks of this machine, each in a process of its own."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def run_on_ranks(world_size: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """Call `function(*args)` on every rank of a new process group.

    Args:
        world_size: how many processes to start. Each computes with one thread.
        function: a function that can be imported by name.
        args: its arguments, which must be picklable.
        backend: "gloo" for CPUs, or "nccl" for ranks that share the first GPU.

    Returns:
        The results by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; the message holds its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, (world_size, backend, folder, function, args), nprocs=world_size)  # type: ignore[no-untyped-call]
        return [pickle.loads((Path(folder) / f"rank{rank}").read_bytes()) for rank in range(world_size)]


def _run_rank(
    rank: int, world_size: int, backend: str, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Join the process group as one rank, call the function, and leave its result in `folder`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend == "nccl":
        # NCCL refuses two ranks on one GPU of one host, so every rank claims to be a host of its own.
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        torch.manual_seed(0)
        (Path(folder) / f"rank{rank}").write_bytes(pickle.dumps(function(*args)))
        # A rank that closes its connections early would break those that other ranks still use.
        dist.barrier()
    finally:
        dist.destroy_process_group()
