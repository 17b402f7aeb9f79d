"""Print the output of commands: JSON, and a line while a command works."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext


def print_json(content: object) -> None:
    """Print an object as JSON, with null for numbers that are not finite, such as the loss of a run that diverged."""
    print(json.dumps(_finite(content), indent=1, allow_nan=False))


def _finite(content: object) -> object:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def status(message: str) -> AbstractContextManager[object]:
    """Return a context that shows a message on stderr, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(message)


def examples(*lines: str) -> str:
    """Return the end of a help text: commands that a reader can copy, one per line."""
    return "\n".join(("Examples:", *(f"$ {line}" for line in lines)))
