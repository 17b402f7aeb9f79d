"""Provide the command `muon-fsdp`, which needs Typer and Rich from the extra `cli`."""

from __future__ import annotations

import importlib.util
import sys
from typing import NoReturn

from muon_fsdp.training.ending import end_process
from muon_fsdp.training.terminal import announce_torch, print_error

WITH_TORCH = ("train", "plan", "bench", "doctor")  # commands that import PyTorch


def main() -> int:
    """Run the command with the arguments of this process.

    Returns:
        The exit status: 2 after a mistake in the arguments, or if Typer or Rich is missing.
    """
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print_error(f'muon-fsdp needs {" and ".join(missing)}; install with: pip install "muon_fsdp[cli]"')
        return 2
    arguments = sys.argv[1:]
    if arguments and arguments[0] in WITH_TORCH and not {"-h", "--help"}.intersection(arguments):
        announce_torch(f"muon-fsdp {arguments[0]}")  # first, because the import of Typer takes a moment too
    from muon_fsdp.cli.app import call

    return call(arguments)


def command() -> NoReturn:
    """Run the script `muon-fsdp` and end the process."""
    end_process(main())
