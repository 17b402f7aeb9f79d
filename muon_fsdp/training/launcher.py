"""Start several processes of the training program on this machine, as `torchrun --standalone` would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from muon_fsdp.training.terminal import print_error

_LAUNCHER = "MUON_FSDP_LAUNCHER_PID"
_GRACE_SECONDS = 15.0  # that ranks have to end by themselves after another rank has failed


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run the training program with `arguments` on `processes` ranks.

    Each rank gets a process session of its own: a Ctrl-C would otherwise reach it twice, from the terminal and from us.

    Returns:
        The first exit code that is not 0, or 0; 1 if a signal ended a rank.
    """
    command = [sys.executable, "-m", "muon_fsdp.training", *_without_processes(arguments)]
    store = _open_store()
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), _LAUNCHER: str(os.getpid())}
    job["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 must not open a store of its own
    job |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    job.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // processes))))
    ranks = [
        subprocess.Popen(command, env=os.environ | job | {"RANK": str(i), "LOCAL_RANK": str(i)}, start_new_session=True)
        for i in range(processes)
    ]

    def forward(number: int, frame: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(ranks)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


def _open_store() -> TCPStore:
    """Open the job's store on a free port of this machine, and hold the port so that no other program takes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    deadline = None
    while any(rank.poll() is None for rank in ranks):
        if deadline is None and any(rank.poll() for rank in ranks):
            deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.05)
    codes = [rank.poll() for rank in ranks]
    for i, code in enumerate(codes):
        if code is None:
            print_error(f"rank {i} did not end after another rank had failed, and was killed")
    died = [(i, code) for i, code in enumerate(codes) if code is not None and code < 0]
    for i, code in died:
        print_error(f"rank {i} was ended by {signal.Signals(-code).name}")
    if died:
        return 1
    return next((code for code in codes if code), 0)


def launcher_is_gone() -> bool:
    """Return whether `launch` started this rank and has ended since, so that nobody waits for the rank."""
    pid = os.environ.get(_LAUNCHER)
    return pid is not None and os.getppid() != int(pid)


def _without_processes(arguments: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--processes":
            skip = True
        elif not argument.startswith("--processes="):
            kept.append(argument)
    return kept


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
