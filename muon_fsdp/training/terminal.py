"""Print for people: colours, errors, tables, and a first line before PyTorch is imported.

Nothing slow is imported here. The package `rich` is optional, so it is imported where it is used.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

from muon_fsdp.text import table_lines

Color = Literal["red", "yellow", "green"]
_CODES: dict[Color, str] = {"red": "31", "yellow": "33", "green": "32"}


def colored(text: str, color: Color, stream: TextIO) -> str:
    """Return a text in a colour, or unchanged where `stream` shows no colours.

    Files and pipes show none, nor do terminals that call themselves "dumb". A user turns colours off with NO_COLOR.
    """
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[1;{_CODES[color]}m{text}\x1b[0m"


def print_error(message: str) -> None:
    """Print an error in one line on stderr."""
    _erase_announcement()
    print(f"{colored('error:', 'red', sys.stderr)} {message}", file=sys.stderr, flush=True)


_announcement: list[str] = []  # the line about PyTorch that a terminal shows now


def _erase_announcement() -> None:
    while _announcement:
        print(f"\r{' ' * len(_announcement.pop())}\r", end="", file=sys.stderr, flush=True)


def announce_torch(prog: str) -> None:
    """Announce on a terminal that PyTorch is being imported, before the arguments of a command are parsed.

    Elsewhere `import_torch` says so after they have been parsed: there nobody waits, the line cannot be erased, and a
    mistake in the arguments stays the only line.
    """
    if "torch" not in sys.modules and sys.stderr.isatty() and not _announcement:
        _announcement.append(f"{prog}: importing PyTorch ...")
        print(_announcement[0], end="", file=sys.stderr, flush=True)


def import_torch(prog: str) -> None:
    """Import PyTorch, which takes seconds, and say so first in a line that names the command `prog`."""
    if "torch" in sys.modules:
        return
    announce_torch(prog)
    if not sys.stderr.isatty():
        print(f"{prog}: importing PyTorch ...", file=sys.stderr, flush=True)
    try:
        import torch  # noqa: F401
    finally:
        _erase_announcement()


def print_paragraph(text: str) -> None:
    """Print a text in lines that are not longer than the terminal is wide, and never longer than 80 columns."""
    width = min(80, shutil.get_terminal_size().columns)
    print(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False))


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    marked: Mapping[int, Color] | None = None,
) -> None:
    """Print a table, drawn by Rich on a terminal that is wide enough for it, and in plain text elsewhere.

    Args:
        title: the line above the table.
        header: the names of the columns.
        rows: the cells, row by row.
        left: how many of the first columns hold words. The other columns hold numbers and are aligned to the right.
        marked: the colours of rows that a reader should see first, by the number of the row.
    """
    marked = marked or {}
    if sys.stdout.isatty() and _draw_table(title, header, rows, left, marked):
        return
    print(title)
    width = shutil.get_terminal_size().columns  # 80 for files and pipes, unless COLUMNS says another
    for number, lines in enumerate(table_lines(header, rows, left=left, width=width), start=-1):
        for line in lines:
            print(colored(line, marked[number], sys.stdout) if number in marked else line)
    print()


def _draw_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int, marked: Mapping[int, Color]
) -> bool:
    """Draw a table with Rich, unless Rich is not installed or would have to cut words; return whether it was drawn."""
    if importlib.util.find_spec("rich") is None:
        return False
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number < left else "right")
    for number, row in enumerate(rows):
        table.add_row(*row, style=f"bold {marked[number]}" if number in marked else None)
    console = Console(markup=False, highlight=False)
    fits = console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width
    if fits:
        console.print(table)
    return fits
