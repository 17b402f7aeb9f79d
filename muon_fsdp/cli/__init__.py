"""Provide the command `muon-fsdp`, which needs Typer and Rich from the extra `cli`."""

from __future__ import annotations

import importlib.util
import sys
from typing import NoReturn

from muon_fsdp.training.ending import end_process


def main() -> int:
    """Run the command with the arguments of this process.

    Returns:
        The exit status: 2 after a mistake in the arguments, or if Typer or Rich is missing.
    """
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f'error: muon-fsdp needs {" and ".join(missing)}; install with: pip install -e ".[cli]"',
            file=sys.stderr,
        )
        return 2
    from muon_fsdp.cli.app import call

    return call(sys.argv[1:])


def command() -> NoReturn:
    """Run the script `muon-fsdp` and end the process."""
    end_process(main())
