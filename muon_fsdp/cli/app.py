"""The commands, each in a module of its own."""

from __future__ import annotations

import typer

from muon_fsdp.cli.bench import bench
from muon_fsdp.cli.doctor import doctor
from muon_fsdp.cli.plan import EPILOG, plan
from muon_fsdp.cli.train import OPTIONS, train

app = typer.Typer(
    help="Muon on one device and on FSDP2: train, measure, plan and check.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback that can be pasted into a bug report
)

app.command(**OPTIONS)(train)
app.command()(bench)
app.command(epilog=EPILOG)(plan)
app.command()(doctor)
