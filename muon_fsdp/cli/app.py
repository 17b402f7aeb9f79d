"""Assemble the commands of `muon-fsdp`; each has a module of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import muon_fsdp
from muon_fsdp.cli.bench import bench
from muon_fsdp.cli.doctor import doctor
from muon_fsdp.cli.plan import EPILOG, plan
from muon_fsdp.cli.train import OPTIONS, train

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,  # a plain traceback can be pasted into a bug report
)


def _print_version(wanted: bool) -> None:
    """Print the version and exit, if --version was given."""
    if wanted:
        print(f"muon_fsdp {muon_fsdp.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train with Muon on one device or FSDP2, measure and plan its steps, and check this machine."""


app.command(**OPTIONS)(train)
app.command()(bench)
app.command(epilog=EPILOG)(plan)
app.command()(doctor)

# Typer exports BadParameter but not its base class, which is click's in some versions of Typer and its own in others.
UsageError: Any = typer.BadParameter.__mro__[1]


def call(arguments: Sequence[str]) -> int:
    """Run a command, and print a mistake in its arguments as one line, like the errors of the commands themselves.

    Returns:
        The exit status.
    """
    try:
        return app(list(arguments) or ["--help"], prog_name="muon-fsdp", standalone_mode=False) or 0
    except UsageError as error:
        where = error.ctx.command_path if error.ctx else "muon-fsdp"
        message = " ".join(error.format_message().split()).rstrip(".")
        print(f"error: {message} (see {where} --help)", file=sys.stderr)
        return 2
    except typer.Abort:
        return 130
