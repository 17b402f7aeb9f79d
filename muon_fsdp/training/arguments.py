"""Flags of programs; nothing slow is imported here, so that a mistake is told at once."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class ConfigError(ValueError):
    """What was asked for cannot be done; the message says what to change."""


def fail(message: str) -> NoReturn:
    """Say in one line what was wrong with what was asked, and exit with 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


class OneLineParser(argparse.ArgumentParser):
    """Tells a mistake in one line; usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")
