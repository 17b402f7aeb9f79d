"""Print the output of commands: JSON, and a line while a command works."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def print_json(content: object) -> None:
    """Print an object as JSON, refusing NaN and infinity, which are not valid JSON."""
    print(json.dumps(content, indent=1, allow_nan=False))


@contextmanager
def status(message: str) -> Iterator[Any]:
    """Show a message on stderr while the body runs, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield None


def examples(*lines: str) -> str:
    """Return the end of a help text: commands that a reader can copy, one per line."""
    return "\n".join(("Examples:", *(f"$ {line}" for line in lines)))
