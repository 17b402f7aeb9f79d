"""Format numbers and plain text tables for reports and programs, and warn users at their own line."""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Sequence
from itertools import count, zip_longest

__all__ = ["format_bytes", "format_count", "format_seconds", "format_shape", "plain_table", "warn_user"]


def format_bytes(number: float, digits: int = 4) -> str:
    """Return a number of bytes with a decimal unit, such as "1.5 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.{digits}g} {unit}"
    return f"{number:.0f} B"


def format_count(number: int, digits: int = 4) -> str:
    """Return a large count in short form, such as "70.55B" for 70.55 billion."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.{digits}g}{unit}"
    return str(number)


def format_seconds(seconds: float) -> str:
    """Return a duration in seconds, or in milliseconds if it is shorter than one second."""
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.3g} ms" if seconds else "0"


def format_shape(shape: Sequence[int]) -> str:
    """Return a tensor shape such as "4096x14336", or "scalar" for a tensor without dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def plain_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, width: int | None = None
) -> str:
    """Return a table in plain text: a header, a line of dashes, and one line per row.

    Args:
        header: the names of the columns.
        rows: the cells, row by row.
        left: how many of the first columns hold words and are aligned to the left. The other columns hold numbers and
            are aligned to the right.
        width: if the table is wider than this, names of columns and cells of words are broken at spaces. A word or a
            number is never cut, so the table may stay wider.
    """
    return "\n".join(line for lines in table_lines(header, rows, left=left, width=width) for line in lines)


def table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, width: int | None = None
) -> list[list[str]]:
    """Return the lines of a plain table: first those of the header, then those of every row."""
    widths = _widths(header, rows, left, width)
    cells = [[*_broken(header, widths, len(header), is_header=True), ["-" * each for each in widths]]]
    cells += [_broken(row, widths, left, is_header=False) for row in rows]
    return [
        [
            "  ".join(
                cell.ljust(each) if column < left else cell.rjust(each)
                for column, (cell, each) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        for lines in cells
    ]


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]], left: int, width: int | None) -> list[int]:
    """Return the widths of the columns: those of the widest columns are reduced until the table fits, if it can."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = []
    for number, (name, *cells) in enumerate(columns):
        length = _longest_word if number < left else len
        least.append(max([_longest_word(name), *map(length, cells)]))
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        column = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        if widths[column] == least[column]:
            break
        widths[column] -= 1
    return widths


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _broken(cells: Sequence[str], widths: Sequence[int], breakable: int, *, is_header: bool) -> list[list[str]]:
    """Return the cells of a row line by line, after breaking the first `breakable` ones at spaces.

    Names of columns end at the bottom, above their cells; cells begin at the top.
    """
    wrapped = [
        textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
        if column < breakable and len(cell) > width
        else [cell]
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    if is_header:
        return [list(line) for line in zip_longest(*map(reversed, wrapped), fillvalue="")][::-1]
    return [list(line) for line in zip_longest(*wrapped, fillvalue="")]


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
