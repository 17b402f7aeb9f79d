"""`muon-fsdp train`: run the training program, which parses its own flags."""

from __future__ import annotations

from typing import Any

import typer

from muon_fsdp.training.terminal import import_torch

# --help is passed on as well, because the flags are those of the training program.
OPTIONS: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}


def train(context: typer.Context) -> None:
    """Train a GPT with any registered rule on one device, or with DDP, FSDP2, HSDP and tensor parallelism."""
    import_torch("muon-fsdp train")
    if {"-h", "--help"}.intersection(context.args):
        from muon_fsdp.cli.train_help import print_help

        print_help()
        return
    from muon_fsdp.training.program import main

    raise typer.Exit(main(context.args, prog="muon-fsdp train"))
