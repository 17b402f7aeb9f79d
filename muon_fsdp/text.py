"""Format numbers and plain text tables for reports and programs, and warn users at their own line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from itertools import count

__all__ = ["format_bytes", "format_count", "format_seconds", "format_shape", "plain_table", "warn_user"]


def format_bytes(number: float) -> str:
    """Return a number of bytes with a decimal unit, such as "1.5 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.0f} B"


def format_count(number: int, digits: int = 4) -> str:
    """Return a large count in short form, such as "70.55B" for 70.55 billion."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.{digits}g}{unit}"
    return str(number)


def format_seconds(seconds: float) -> str:
    """Return a duration in seconds, or in milliseconds if it is shorter than one second."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms" if seconds else "0"


def format_shape(shape: Sequence[int]) -> str:
    """Return a tensor shape such as "4096x14336", or "scalar" for a tensor without dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a table in plain text: a header, a line of dashes, and one line per row.

    Args:
        header: the names of the columns.
        rows: the cells, row by row.
        left: how many of the first columns are aligned to the left. The other columns hold numbers and are aligned to
            the right.
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def first_names(names: Sequence[str]) -> str:
    """Return the first four names as text for a message, followed by "..." if there are more."""
    return ", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else "")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside this package and torch that called into it, however deep the call is."""
    for level in count(1):
        try:
            module = sys._getframe(level).f_globals.get("__name__", "")
        except ValueError:  # every frame is ours, as in `python -m muon_fsdp.cli`
            warnings.warn(message, category, stacklevel=2)
            return
        if module.partition(".")[0] not in ("muon_fsdp", "torch"):
            warnings.warn(message, category, stacklevel=level + 1)
            return
