"""Print the output of commands: one-line errors, JSON, and tables for a terminal or a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from muon_fsdp.text import plain_table


def fail(message: str) -> NoReturn:
    """Print a one-line error about the arguments to stderr and exit with status 2."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


def print_json(content: object) -> None:
    """Print an object as JSON, refusing NaN and infinity, which are not valid JSON."""
    print(json.dumps(content, indent=1, allow_nan=False))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print a table, drawn by Rich on a terminal and in plain text elsewhere.

    Args:
        title: the line above the table.
        header: the names of the columns.
        rows: the cells, row by row.
        left: how many of the first columns hold words. The other columns hold numbers and are aligned to the right.
    """
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


@contextmanager
def status(message: str) -> Iterator[Any]:
    """Show a message on stderr while the body runs, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield None
