"""`muon-fsdp bench`: measure orthogonalization, whole steps and the element-wise pair on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from muon_fsdp.cli.output import fail, print_json

TABLES = "orthogonalization,step,pair"


def bench(
    tables: Annotated[str, typer.Option(help="Tables to measure, separated by commas.")] = TABLES,
    shapes: Annotated[
        str | None,
        typer.Option(help="Batches to orthogonalize instead of the default ones, such as 48x768x768,8x2048x2048."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(help="Measure steps of these models only: gpt2-124m, 1.3b, llama-8b; on a CPU gpt2-124m."),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="How often each figure is measured; the median is shown. Default: 10 on a GPU, 3 on a CPU."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads, on a machine without a GPU. Default: OMP_NUM_THREADS, or 2."),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Write the figures to this file as JSON; '-' prints the JSON and nothing else."
        ),
    ] = None,
) -> None:
    """Measure orthogonalizations and steps on this machine.

    PyTorch's optimizers are timed beside ours, as are dion and gram_newton_schulz if they are installed. Progress is
    printed to stderr.
    """
    import torch

    from muon_fsdp.benchmarks import run as benchmarks
    from muon_fsdp.benchmarks.orthogonalization import parse_shape
    from muon_fsdp.benchmarks.steps import models_on

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = _split(tables) or fail(f"--tables: pass some of {TABLES}")
    _check_names("--tables", wanted, benchmarks.TABLES)
    _check_names("--models", _split(models), [name.split(",")[0] for name in models_on(device)])
    try:
        batches = [parse_shape(shape) for shape in _split(shapes)]
    except ValueError as error:
        fail(f"--shapes: {error}")
    if json not in (None, "-") and not Path(json).absolute().parent.is_dir():
        fail(f"--json: the folder of {json} does not exist; create it first")
    figures, text = benchmarks.run(
        device,
        tables=wanted,
        shapes=batches or None,
        models=_split(models) or None,
        repeats=repeats or (10 if device == "cuda" else 3),
        threads=threads or (torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else 2),
    )
    _write(figures, text, json)


def _write(figures: dict[str, Any], text: str, json: str | None) -> None:
    """Print the tables and write the figures to the file of --json, or print only the figures if it is "-"."""
    if json == "-":
        print_json(figures)
        return
    print(text)
    if json is not None:
        from json import dumps

        Path(json).write_text(dumps(figures, indent=1) + "\n")


def _split(text: str | None) -> list[str]:
    """Split a list that is separated by commas, and drop empty parts."""
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def _check_names(option: str, names: list[str], valid: list[str] | tuple[str, ...]) -> None:
    """Fail if a name that was passed to an option is not valid."""
    for name in names:
        if name not in valid:
            fail(f"{option}: {name!r} is not one of {', '.join(valid)}")
