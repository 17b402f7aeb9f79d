"""`muon-fsdp bench`: speed of orthogonalization, of whole steps and of the element-wise pair on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from muon_fsdp.cli.output import fail, print_json

TABLES = "orthogonalization,step,pair"


def bench(
    tables: Annotated[str, typer.Option(help="What to measure, separated by commas.")] = TABLES,
    shapes: Annotated[
        str | None,
        typer.Option(help="Batches to orthogonalize instead of the usual ones, as 48x768x768,8x2048x2048."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(help="Only steps of these: gpt2-124m, 1.3b, llama-8b; on a CPU gpt2-124m."),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Timings of each; medians are shown. Default: 10 on a GPU, 3 on a CPU."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads, where there is no GPU. Default: OMP_NUM_THREADS, or 2."),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Write the figures to this file; '-' prints them, and nothing else."),
    ] = None,
) -> None:
    """Measure orthogonalizations and steps on this machine.

    PyTorch's optimizers are timed beside ours, and dion and gram_newton_schulz where they are installed. Progress goes
    to stderr.
    """
    import torch

    from muon_fsdp.benchmarks import run as benchmarks
    from muon_fsdp.benchmarks.orthogonalization import parse_shape
    from muon_fsdp.benchmarks.steps import models_on

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = _split(tables) or fail(f"--tables: name some of {TABLES}")
    _refuse_unknown("--tables", wanted, benchmarks.TABLES)
    _refuse_unknown("--models", _split(models), [name.split(",")[0] for name in models_on(device)])
    try:
        batches = [parse_shape(shape) for shape in _split(shapes)]
    except ValueError as error:
        fail(f"--shapes: {error}")
    if json not in (None, "-") and not Path(json).absolute().parent.is_dir():
        fail(f"--json: the folder of {json} does not exist; make it first")
    figures, text = benchmarks.run(
        device,
        tables=wanted,
        shapes=batches or None,
        models=_split(models) or None,
        repeats=repeats or (10 if device == "cuda" else 3),
        threads=threads or (torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else 2),
    )
    if json == "-":
        print_json(figures)
        return
    print(text)
    if json is not None:
        from json import dumps

        Path(json).write_text(dumps(figures, indent=1) + "\n")


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def _refuse_unknown(option: str, names: list[str], valid: list[str] | tuple[str, ...]) -> None:
    for name in names:
        if name not in valid:
            fail(f"{option}: {name!r} is not one of {', '.join(valid)}")
