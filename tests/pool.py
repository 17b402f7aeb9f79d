"""A pool of processes that stay alive for the whole test session and run functions as ranks of a process group."""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


def fork_context() -> Any:
    """Return a context of multiprocessing whose processes have imported torch already.

    They are forked from one that has imported what all of them need and has done nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch._dynamo", "tests.distributed_cases"])
    return context


class RankError(AssertionError):
    """Something failed on a rank; the message holds every rank's traceback."""


class RankPool:
    """Starts ranks as they are needed: importing torch takes seconds, a new process group milliseconds.

    CUDA does not survive a fork, so ranks of NCCL begin anew.
    """

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._context = multiprocessing.get_context("spawn") if backend == "nccl" else fork_context()
        self._workers: list[tuple[Any, Connection]] = []
        atexit.register(self.close)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """Run `function(*args)` on `world_size` ranks of a fresh process group; return the results by rank.

        Raises:
            RankError: `function` raised on some rank, or a rank died or did not answer in `timeout` seconds.
        """
        self._start(world_size)
        with tempfile.TemporaryDirectory() as folder:
            task = (function.__module__, function.__qualname__, args, world_size, os.path.join(folder, "store"))
            for rank in range(world_size):
                self._workers[rank][1].send((rank, *task))
            replies = []
            for rank in range(world_size):
                connection = self._workers[rank][1]
                if not connection.poll(timeout):
                    self.close()
                    raise RankError(f"rank {rank} did not answer within {timeout} s; answers so far: {replies}")
                try:
                    replies.append(connection.recv())
                except EOFError:
                    self.close()
                    raise RankError(f"rank {rank} died; answers so far: {replies}") from None
        failures = [f"--- rank {rank}\n{text}" for rank, (failed, text) in enumerate(replies) if failed]
        if failures:
            raise RankError("\n".join(failures))
        return [result for _, result in replies]

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()

    def _start(self, count: int) -> None:
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._backend), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _serve(connection: Connection, backend: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # loopback only
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    known = 0
    while True:
        if known != (known := len(sys.modules)):
            gc.freeze()  # what was imported need not be searched for garbage after every run: Transformers takes 0.1 s
        try:
            rank, module, name, args, world_size, store = connection.recv()
        except EOFError:
            return
        try:
            if backend == "nccl":
                # NCCL refuses two ranks on one GPU of a host, so every rank says it is a host of its own.
                os.environ["NCCL_HOSTID"] = f"rank{rank}"
                os.environ["NCCL_SOCKET_IFNAME"] = "lo"
                torch.cuda.set_device(0)
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
            torch.manual_seed(0)
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            reply = (False, function(*args))
        except BaseException:
            reply = (True, traceback.format_exc())
        finally:
            if dist.is_initialized():
                _leave_together()
                dist.destroy_process_group()
        connection.send(reply)
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear DTensor's caches, which keep the meshes of earlier runs.

    A mesh keeps its process groups, each with threads that wake a hundred times a second. And an equal mesh of a later
    run would find the old one there, whose groups have other names.
    """
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # not in all versions of torch
    for function in vars(_redistribute).values():
        getattr(function, "cache_clear", lambda: None)()
    gc.collect()


def _leave_together() -> None:
    """Wait until all ranks are done: one that closes its connections early fails those that still make theirs."""
    import torch.distributed as dist

    if dist.get_backend() == "fake":
        return
    store = dist.distributed_c10d._get_default_store()
    if store.add("left", 1) == dist.get_world_size():
        store.set("all left", "")
    with suppress(RuntimeError):  # a rank that hangs has been noticed by the test itself
        store.wait(["all left"], timedelta(seconds=20))
