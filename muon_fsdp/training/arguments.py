"""Report mistakes in command-line arguments in one line.

Nothing slow is imported here, so that a program can report a mistake at once.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from muon_fsdp.training.terminal import print_error


class ConfigError(ValueError):
    """The arguments of a program cannot be used; the message says what to change."""


def fail(message: str) -> NoReturn:
    """Print an error in one line and exit with code 2."""
    print_error(" ".join(message.split()))
    raise SystemExit(2)


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that reports a mistake in one line and leaves the usage to --help."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and where to find help, and exit with code 2."""
        fail(f"{message} (see {self.prog} --help)")
