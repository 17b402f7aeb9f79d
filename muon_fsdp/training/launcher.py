"""Start several processes of the training program on this machine, as `torchrun --standalone` would.

torch's elastic launcher sends SIGTERM to all other ranks as soon as one has failed, before they report why they end,
and after Ctrl-C it ends with an exception instead of the status 130 of its ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from muon_fsdp.training.ending import handling_signals
from muon_fsdp.training.terminal import print_error

_LAUNCHER = "MUON_FSDP_LAUNCHER_PID"
_GRACE_SECONDS = 15.0  # that ranks have to end by themselves after another rank has failed


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run the training program with `arguments` on `processes` ranks.

    Each rank gets a process session of its own: a Ctrl-C would otherwise reach it twice, from the terminal and from us.

    Returns:
        The first exit code that is not 0, or 0; 1 if a signal ended a rank.
    """
    store = open_store()
    threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // processes))}  # unless the user has set it
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), _LAUNCHER: str(os.getpid())}
    job["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 must not open a store of its own
    job |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "muon_fsdp.training", *arguments],
            env=threads | os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(processes)
    ]

    def forward(number: int, frame: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    try:
        with handling_signals(forward):
            return _wait(ranks)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


def open_store() -> TCPStore:
    """Open the job's store on a free port of this machine, and hold the port so that no other program takes it.

    It listens to this machine alone; TCPStore would listen to the network.
    """
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
    for rank, code in enumerate(codes):
        if code is None:
            print_error(f"rank {rank} did not end after another rank had failed, and was killed")
        elif code < 0:
            print_error(f"rank {rank} was ended by {signal.Signals(-code).name}")
    if any(code is not None and code < 0 for code in codes):
        return 1
    return next((code for code in codes if code), 0)


def is_launched() -> bool:
    """Return whether `launch` started this process."""
    return _LAUNCHER in os.environ


def launcher_is_gone() -> bool:
    """Return whether `launch` started this rank and has ended since, so that nobody waits for the rank."""
    return is_launched() and os.getppid() != int(os.environ[_LAUNCHER])
