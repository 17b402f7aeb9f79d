"""Run functions on ranks, each in a new process, so that one that fails or hangs stops no other.

The processes that torchrun started form no process group. They only start a process each, wait for it, and exchange
results through the store of the job. A process that hangs in a collective can be killed from outside, and nothing else
ends a collective of NCCL. `on_this_machine` does the same without torchrun, with threads in the place of its processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from muon_fsdp.training.launcher import open_store

Result = TypeVar("Result")

_GRACE_SECONDS = 1.0  # before a rank reports an error, which may follow from the death of a process of another rank
_PATIENCE_SECONDS = 60.0  # that ranks wait for each other beyond the time limit


class RanksError(Exception):
    """A function failed on some rank, or took too long; the message names the rank and the reason."""


@dataclass(frozen=True)
class Place:
    """The place of this process in a job, as torchrun writes it into the environment."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int

    @classmethod
    def of_torchrun(cls) -> Place | None:
        """Return the place of this process; None if no launcher has set the variables of torchrun."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if any(name not in os.environ for name in names):
            return None
        rank, size, host, port = (os.environ[name] for name in names)
        local_rank, local_size = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", size)
        return cls(int(rank), int(size), int(local_rank), int(local_size), host, int(port))

    @property
    def shares_gpu(self) -> bool:
        """Return whether ranks of this machine share a GPU."""
        return 0 < torch.cuda.device_count() < self.local_size


class Ranks:
    """All ranks of a job, as one of them sees them. All ranks must call the same methods in the same order.

    Args:
        place: the place of this process in the job.
        limit: seconds that a function may take.
        store: the store of the job; None connects to it.
        backend: that of the process groups; None means NCCL if the machine has a GPU, else gloo.
    """

    def __init__(self, place: Place, limit: float, store: Store | None = None, backend: str | None = None) -> None:
        self.place = place
        self._limit = limit
        self._backend = backend
        # A new process then starts by a fork of a process that has imported PyTorch and has not used CUDA.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["muon_fsdp.benchmarks.multi_gpu"])
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun opens the store itself
        if store is None:
            is_master = place.rank == 0 and not is_hosted
            store = TCPStore(place.host, place.port, is_master=is_master, wait_for_workers=False)
        self._store = PrefixStore("muon_fsdp bench", store)
        self._calls = 0

    def from_first(self, value: Any) -> Any:
        """Return on all ranks what the first rank passes, which must be valid JSON."""
        self._calls += 1
        key = f"{self._calls}/value"
        if self.place.rank == 0:
            self._store.set(key, json.dumps(value))
        self._store.wait([key], timedelta(seconds=_PATIENCE_SECONDS))
        return json.loads(self._store.get(key))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` on all ranks, in new processes that form a process group.

        Args:
            function: a function that can be imported by name. Its result must be valid JSON.
            args: its arguments, which must be picklable.

        Returns:
            The results by rank.

        Raises:
            RanksError: a rank raised an error, died or exceeded the time limit. Every rank raises it.
        """
        self._calls += 1
        failed = f"{self._calls}/error"
        ours, theirs = self._context.Pipe()
        join = (self.place, f"muon_fsdp bench/{self._calls}", self._limit, self._backend)
        process = self._context.Process(target=_serve, args=(theirs, join, function, args), daemon=True)
        process.start()
        theirs.close()
        try:
            result, error = self._wait(ours, failed)
            if error is not None:  # the first error counts: later ones are consequences, such as closed connections
                self._store.compare_set(failed, "", f"rank {self.place.rank}: {error}")
        finally:  # after the error is known to all, because a process that holds a GPU can take long to end
            process.kill()
            process.join()
        self._store.set(f"{self._calls}/result/{self.place.rank}", json.dumps(result))
        keys = [f"{self._calls}/result/{rank}" for rank in range(self.place.size)]
        self._store.wait(keys, timedelta(seconds=self._limit + _PATIENCE_SECONDS))
        if self._store.check([failed]):
            raise RanksError(self._store.get(failed).decode())
        return [json.loads(self._store.get(key)) for key in keys]

    def _wait(self, ours: Connection, failed: str) -> tuple[Any, str | None]:
        """Wait for the reply of a process until the time limit, or until the store has `failed`.

        Returns:
            The result, and the error if there is one.
        """
        deadline = time.monotonic() + self._limit
        while not ours.poll(0.1):
            if time.monotonic() > deadline:
                return None, f"it took longer than {self._limit:g} s and was stopped"
            if self._store.check([failed]):
                return None, None
        try:
            result, error = ours.recv()
        except EOFError:
            return None, "its process died without a message"
        if error is not None:
            time.sleep(_GRACE_SECONDS)
        return result, error


def on_this_machine(
    size: int, work: Callable[[Ranks], Result], limit: float = 600.0, backend: str | None = None
) -> list[Result]:
    """Call `work` with the `Ranks` of each of `size` new ranks, which meet over the loopback device.

    Every rank has a thread; `limit` and `backend` are those of `Ranks`.

    Returns:
        The results by rank.
    """
    store = open_store()

    def one(rank: int) -> Result:
        client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        return work(Ranks(Place(rank, size, rank, size, "127.0.0.1", store.port), limit, client, backend))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def _serve(
    connection: Connection,
    join: tuple[Place, str, float, str | None],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Join a process group as one rank, call the function, send its result or its error, and end this process."""
    os.dup2(2, 1)  # gloo of torch 2.10 prints to stdout, which holds only the results of the command
    reply: tuple[Any, str | None]
    try:
        _join(*join)
        reply = function(*args), None
        dist.barrier()  # a rank that leaves early would close connections that others still use
    except BaseException as error:
        reply = None, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    connection.send(reply)
    # The caller kills this process. If it ended by itself after an error, others would report closed connections.
    time.sleep(_PATIENCE_SECONDS)
    os._exit(1)


def _join(place: Place, prefix: str, limit: float, backend: str | None) -> None:
    """Join the process group of a function, over the loopback device if all ranks are on this machine."""
    store = PrefixStore(prefix, TCPStore(place.host, place.port, is_master=False, wait_for_workers=False))
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if place.local_size == place.size and platform.system() == "Linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend == "gloo":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        if place.shares_gpu:
            # NCCL refuses two ranks on one GPU of one host, so every rank claims to be a host of its own.
            os.environ["NCCL_HOSTID"] = f"rank{place.rank}"
            if place.local_size == place.size:
                os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=limit)
    )
