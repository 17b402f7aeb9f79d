"""The command `muon-fsdp`. Typer and Rich come with the extra `cli`; without them the command says so."""

from __future__ import annotations

import importlib.util
import sys
from typing import NoReturn

from muon_fsdp.training.ending import end_process


def main() -> int:
    """The entry point; a mistake in what was asked exits with 2."""
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
    """The script `muon-fsdp`."""
    end_process(main())
