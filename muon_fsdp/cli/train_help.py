"""Print `muon-fsdp train --help` in the style of the other commands, whose help Typer prints."""

from __future__ import annotations

import argparse
import re

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from muon_fsdp.cli.output import examples
from muon_fsdp.training.config import make_parser

PROG = "muon-fsdp train"
_DEFAULT = re.compile(r"\s*\((default: [^()]*)\)")
_WIDEST_VALUE = 22  # columns for what a flag takes; longer lists of choices are broken


def print_help() -> None:
    """Print every flag, and examples."""
    parser = make_parser(PROG)
    console = Console(highlight=False)
    console.print(Text.assemble("\n ", ("Usage: ", "yellow"), (PROG, "bold"), " [OPTIONS]\n"))
    console.print(Padding(f"{parser.description}\n", (0, 1)))
    for group in parser._action_groups:
        if group._group_actions:
            console.print(_panel(group, parser))
    lines = examples(
        f"{PROG} --model small --steps 100",
        f"{PROG} --model small --steps 150 --resume --processes 2 --fsdp",
        f"{PROG} --model demo --optimizer sso --lambda-mode projection --output runs/sso",
        "torchrun --nproc_per_node=8 -m muon_fsdp.training --model gpt2 --data shards --epochs 3 --fsdp",
    )
    console.print(Padding(Text(lines), 1))


def _panel(group: argparse._ArgumentGroup, parser: argparse.ArgumentParser) -> Panel:
    """Return a box with the flags of a group: their names, the values that they take, and what they do."""
    table = Table(box=None, show_header=False, expand=True, pad_edge=False)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(style="bold yellow", max_width=_WIDEST_VALUE, overflow="fold")
    table.add_column(ratio=1)
    formatter = argparse.HelpFormatter(PROG)
    for action in group._group_actions:
        text = formatter._expand_help(action)
        between = "\n" if isinstance(action, argparse.BooleanOptionalAction) else ", "
        table.add_row(between.join(action.option_strings), _value(action), _sentence(text))
    title = (group.title or "options").capitalize()
    return Panel(table, border_style="dim", title=title, title_align="left")


def _value(action: argparse.Action) -> str:
    """Return what a flag takes, such as N or one of several names; "" for a switch."""
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "|".join(map(str, action.choices))
    return str(action.metavar or action.dest.upper())


def _sentence(text: str) -> Text:
    """Return a help text as a sentence, with its default in brackets at the end, as Typer writes it."""
    defaults = _DEFAULT.findall(text)
    text = _DEFAULT.sub("", text).strip()
    end = "" if text.endswith(".") else "."
    sentence = Text(f"{text[:1].upper()}{text[1:]}{end}")
    for default in defaults:
        sentence.append(f" [{default}]", "dim")
    return sentence
