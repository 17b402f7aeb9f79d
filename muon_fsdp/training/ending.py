"""Stop a run cleanly, and end a process that had process groups. Nothing slow is imported here."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn


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

    with handling_signals(handle):
        yield stop


@contextmanager
def handling_signals(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handle` at each Ctrl-C and SIGTERM while the context is entered."""
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def discard_stdout() -> None:
    """Send standard output to /dev/null after its reader has left, as `head` does.

    Otherwise Python would raise BrokenPipeError once more when it flushes what is still buffered.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print("note: standard output was closed; stopping", file=sys.stderr, flush=True)


def end_process(code: int) -> NoReturn:
    """Exit with `code` as `sys.exit` does, but skip the shutdown of the Python interpreter.

    DTensor's caches keep every mesh alive, so gloo's threads still run at the end, even after
    `destroy_process_group()`. A thread that frees a tensor during the shutdown waits for the GIL, and Python up to 3.13
    unwinds it through a destructor: the process aborts with "terminate called without an active exception".
    """
    atexit.register(_leave, code)
    raise SystemExit(code)


def _leave(code: int) -> None:
    """Run the remaining exit handlers, flush the output and end the process."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader or the program has closed it
            stream.flush()
    os._exit(code)
