"""Writes a generated page, or checks that the committed page is what would be written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def write_or_check(path: Path, text: str, argv: Sequence[str] | None) -> int:
    """Write a page, or with `--check` compare the file with it.

    Args:
        path: the file of the page.
        text: the page.
        argv: the arguments of the program that generates it; None for those of the command line.

    Returns:
        The exit status: 1 if the page is stale.
    """
    parser = argparse.ArgumentParser(description=f"Write docs/{path.name}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is stale")
    if not parser.parse_args(argv).check:
        path.write_text(text)
    elif not path.exists() or path.read_text() != text:
        print(f"{path.name} is stale: run python docs/generate_{path.stem}.py", file=sys.stderr)
        return 1
    return 0
