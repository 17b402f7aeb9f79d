"""End a process that had process groups. Nothing slow is imported here, so that every program can use it."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


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
