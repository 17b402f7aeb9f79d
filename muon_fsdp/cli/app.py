"""Assemble the commands of `muon-fsdp`; each has a module of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import muon_fsdp
from muon_fsdp.cli.bench import bench
from muon_fsdp.cli.compare import compare
from muon_fsdp.cli.doctor import doctor
from muon_fsdp.cli.output import examples
from muon_fsdp.cli.plan import ABOUT_TIME, hint_at_flag, plan
from muon_fsdp.cli.train import OPTIONS, train
from muon_fsdp.training.terminal import print_error


class _WithoutTypesOfFlags:
    """Hides the type of flags in a help text: they take no value."""

    def get_params(self, context: Any) -> list[Any]:
        """Return the options of a command, with --help."""
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_WithoutTypesOfFlags, TyperCommand):
    pass


class _Group(_WithoutTypesOfFlags, TyperGroup):
    pass


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    pretty_exceptions_enable=False,  # a plain traceback can be pasted into a bug report
)


def _print_version(wanted: bool) -> None:
    """Print the version and exit, if --version was given."""
    if wanted:
        print(f"muon_fsdp {muon_fsdp.__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "muon-fsdp doctor",
        "muon-fsdp train --model small --steps 100",
        "muon-fsdp compare runs/small-adamw runs/small-muon",
        "muon-fsdp plan llama-3-70b --mesh 8,64",
        "muon-fsdp bench --tables step",
    )
)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train with Muon on one device or FSDP2, compare runs, plan and measure steps, and check this machine."""


def _add(command: Callable[..., None], *lines: str, before: str = "") -> None:
    """Add a command with its examples; its docstring is its help, whose lines a terminal breaks as it likes."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(cls=_Command, help=text, epilog=before + examples(*lines))(command)


app.command(**OPTIONS)(train)
_add(
    compare,
    "muon-fsdp compare runs/small-adamw runs/small-muon",
    "muon-fsdp compare runs/* --plot losses.png",
    "muon-fsdp compare runs/one runs/two --json > figures.json",
)
_add(
    plan,
    "muon-fsdp plan --list",
    "muon-fsdp plan llama-3-70b --mesh 8,64",
    "muon-fsdp plan path/to/config.json --world-size 16 --routing",
    "muon-fsdp plan my_package.models:build --world-size 8 --rule normuon --json",
    before=ABOUT_TIME,
)
_add(
    bench,
    "muon-fsdp bench",
    "muon-fsdp bench --tables step --models gpt2-124m --rules normuon",
    "muon-fsdp bench --tables orthogonalization --shapes 48x768x768,8x2048x2048 --json figures.json",
    "torchrun --standalone --nproc-per-node 8 -m muon_fsdp.cli bench --multi-gpu --json multi_gpu.json",
)
_add(doctor, "muon-fsdp doctor", "muon-fsdp doctor --quick", "muon-fsdp doctor --json > doctor.json")

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
        is_unknown = hasattr(error, "possibilities")  # names of other flags that look alike
        hint = hint_at_flag(error.option_name) if is_unknown and where.endswith(" plan") else ""
        if hint:
            error.possibilities = None
        message = " ".join(error.format_message().split()).rstrip(".") + hint
        print_error(f"{message} (see {where} --help)")
        return 2
    except typer.Abort:
        return 130
    except SystemExit as end:  # of `fail` and of argparse, which parses the flags of `muon-fsdp train`
        if not isinstance(end.code, int):  # imported code ends the program, perhaps with a text for stderr
            raise
        return end.code
