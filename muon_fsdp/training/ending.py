"""End a process that had process groups. Nothing slow is imported here."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Exit with `code` as `sys.exit` does, up to where Python would take the interpreter down.

    DTensor's caches keep every mesh, so gloo's threads are still there at the end, also after
    `destroy_process_group()`. One that frees a tensor just then waits for the GIL, and up to Python 3.13 the
    interpreter unwinds it through a destructor: SIGABRT, "terminate called without an active exception".
    """
    atexit.register(_leave, code)
    raise SystemExit(code)


def _leave(code: int) -> None:
    """Run the other exit handlers, which come after this one, and end."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by its reader, or by the program
            stream.flush()
    os._exit(code)
