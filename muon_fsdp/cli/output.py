"""Print the output of commands: JSON, and a line while a command works."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext


def print_json(content: object) -> None:
    """Print an object as JSON, refusing NaN and infinity, which are not valid JSON."""
    print(json.dumps(content, indent=1, allow_nan=False))


def status(message: str) -> AbstractContextManager[object]:
    """Return a context that shows a message on stderr, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(message)


def examples(*lines: str) -> str:
    """Return the end of a help text: commands that a reader can copy, one per line."""
    return "\n".join(("Examples:", *(f"$ {line}" for line in lines)))
