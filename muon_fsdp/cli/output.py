"""What commands print: errors of one line, JSON and nothing else, tables for a terminal or for a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer


def fail(message: str) -> NoReturn:
    """Say in one line what was wrong with what was asked, and exit with 2."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


def print_json(content: object) -> None:
    print(json.dumps(content, indent=1, allow_nan=False))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """A table whose first `left` columns are words and the others numbers."""
    if not sys.stdout.isatty():
        print(f"{title}\n{plain_table(header, rows, left=left)}\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
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


@contextmanager
def status(message: str) -> Iterator[Any]:
    """A line on stderr while something takes long, if somebody is there to see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield None
