"""Stop a run cleanly after Ctrl-C, SIGTERM, or when nobody reads its standard output any more."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Stop:
    """Records whether the run should save a checkpoint and end before its last step."""

    wanted: bool = False


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Set `Stop.wanted` at the first Ctrl-C or SIGTERM, and raise KeyboardInterrupt at a second Ctrl-C."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # Python allows signal handlers only there
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        if stop.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.wanted = True

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def discard_stdout() -> None:
    """Send standard output to /dev/null after its reader has left, as `head` does.

    Otherwise Python would raise BrokenPipeError once more when it flushes what is still buffered.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print("note: standard output was closed; stopping", file=sys.stderr, flush=True)
