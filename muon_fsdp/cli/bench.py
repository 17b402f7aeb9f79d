"""`muon-fsdp bench`: measure orthogonalization, whole steps and the element-wise pair, or training on several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from muon_fsdp.cli.flags import command_with, option
from muon_fsdp.cli.output import print_json
from muon_fsdp.training.arguments import fail
from muon_fsdp.training.terminal import import_torch

if TYPE_CHECKING:
    from muon_fsdp.benchmarks.run import Save, Show

TABLES = ("orthogonalization", "step", "pair")
ALSO_ON_RANKS = ("multi_gpu", "models", "repeats", "json")  # flags that --multi-gpu uses


@dataclass(frozen=True)
class BenchFlags:
    """The flags of `muon-fsdp bench`, as the user gave them."""

    multi_gpu: bool = option(
        False, None, "Compare training with several optimizers on a model that FSDP2 shards over the ranks of torchrun."
    )
    tables: str = option(
        ",".join(TABLES),
        "NAMES",
        f"Tables to measure, separated by commas. Default: {', '.join(TABLES)}.",
        show_default=False,
    )
    shapes: str | None = option(
        None, "SHAPES", "Batches to orthogonalize instead of the default ones, such as 48x768x768,8x2048x2048."
    )
    models: str | None = option(
        None,
        "NAMES",
        "Measure these models only: gpt2-124m, 1.3b, llama-8b; on a CPU gpt2-124m, or tiny with --multi-gpu.",
    )
    rules: str | None = option(
        None,
        "RULES",
        "Further rules in the table of steps, with options if needed: RULE or RULE:OPTION=VALUE, separated by commas; "
        "'' for none. Default: normuon, and spectral_sphere with lambda_mode=projection.",
    )
    first_step: bool = option(
        False,
        None,
        "Also measure the first step of new processes, with an empty and with a full cache of kernels. Only on a GPU.",
    )
    repeats: int | None = option(
        None,
        "N",
        "How often each figure is measured; the median is shown. Default: 10 on a GPU, 3 on a CPU.",
        min=1,
    )
    threads: int | None = option(
        None, "N", "CPU threads, on a machine without a GPU. Default: OMP_NUM_THREADS, or 2.", min=1
    )
    json: str | None = option(
        None,
        "PATH",
        "Write the figures to this file as JSON, after each of them; '-' prints the JSON and nothing else.",
    )


@command_with(BenchFlags)
def bench(flags: BenchFlags) -> None:
    """Measure orthogonalizations and steps on this machine.

    PyTorch's optimizers are timed beside ours, as are dion and gram_newton_schulz if they are installed. A line on
    stderr shows what is being measured.
    """
    import_torch("muon-fsdp bench")
    from muon_fsdp.benchmarks.machine import best_device

    device = best_device().type
    only_json = flags.json == "-"
    if flags.json is not None and not only_json and not Path(flags.json).absolute().parent.is_dir():
        fail(f"--json: the folder of {flags.json} does not exist; create it first")
    run = _run_on_ranks if flags.multi_gpu else _run_tables
    repeats = flags.repeats or (10 if device == "cuda" else 3)
    save = partial(_save, path=None if only_json else flags.json)
    show: Show = (lambda text: None) if only_json else partial(print, flush=True)
    run(flags, device, repeats, save, show)


def _run_tables(flags: BenchFlags, device: str, repeats: int, save: Save, show: Show) -> None:
    """Check the flags of the tables and measure them."""
    import torch

    from muon_fsdp.benchmarks import contestants, orthogonalization, steps
    from muon_fsdp.benchmarks.live import LiveLine
    from muon_fsdp.benchmarks.machine import Ceilings, Setup, describe_run
    from muon_fsdp.benchmarks.run import Report
    from muon_fsdp.benchmarks.throttling import Watch

    tables = _names("--tables", flags.tables, TABLES) or fail(f"--tables: pass some of {','.join(TABLES)}")
    models = steps.models_on(device, _names("--models", flags.models, steps.models_on(device)))
    rules = contestants.DEFAULT_RULES if flags.rules is None else _split(flags.rules)
    try:
        shapes = [orthogonalization.parse_shape(shape) for shape in _split(flags.shapes)]
    except ValueError as error:
        fail(f"--shapes: {error}")
    try:
        for rule in rules:
            contestants.parse_rule(rule)
    except ValueError as error:
        fail(f"--rules: {error}")
    threads = flags.threads or (torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else 2)
    if device == "cpu":
        torch.set_num_threads(threads)
    live = LiveLine()

    def show_part(text: str) -> None:
        live.clear()
        show(f"{text}\n")

    report = Report(Watch.of_gpu() if device == "cuda" else None, save, show_part)
    report.figures.update(describe_run(device, threads), repeats=repeats)
    versions = [f"{package} {version}" for package, version in report.figures["versions"].items()]
    show_part(", ".join([report.figures["date"], report.figures["device"], *versions]))
    live.show("ceilings ...")
    with report.part("ceilings") as lines:
        ceilings = Ceilings.measure(device)
        report.figures["ceilings"] = asdict(ceilings)
        lines.append(f"ceilings: {ceilings.show()}")
    setup = Setup(device, ceilings, repeats, live)
    if "orthogonalization" in tables:
        title = "Orthogonalization, five steps; the floor is at the sustained rate"
        report.add("orthogonalization", title, orthogonalization.measure(setup, shapes), orthogonalization.show)
    if "step" in tables:
        title = "One step; the floor is at the sustained rate"
        report.add("step", title, steps.measure(setup, models, rules), steps.show)
    if "pair" in tables:
        report.add("pair", "The element-wise pair", steps.measure_pair(setup), steps.show_pair)
    if flags.first_step and device == "cuda":
        report.add(
            "first_step", "The first step of a new process", steps.measure_first(setup, models), steps.show_first
        )
    elif flags.first_step:
        show_part("The first step of a new process: not measured, because no kernels are compiled on a CPU")
    if flags.json == "-":
        print_json(report.figures)


def _run_on_ranks(flags: BenchFlags, device: str, repeats: int, save: Save, show: Show) -> None:
    """Check the flags of `--multi-gpu` and run it; the first rank prints the tables and saves the figures."""
    import torch

    from muon_fsdp.benchmarks import multi_gpu
    from muon_fsdp.benchmarks.ranks import Place, Ranks

    for field in fields(flags):
        if field.name not in ALSO_ON_RANKS and getattr(flags, field.name) != field.default:
            fail(f"--{field.name.replace('_', '-')} does not work with --multi-gpu; leave one of them out")
    models = _names("--models", flags.models, multi_gpu.workloads_on(device))
    place = Place.of_torchrun()
    if place is None:
        count = torch.cuda.device_count() or 2
        fail(
            "--multi-gpu measures the ranks of a job, and no launcher has started one. Run: torchrun --standalone "
            f"--nproc-per-node {count} -m muon_fsdp.cli bench --multi-gpu --json multi_gpu.json"
        )
    figures = multi_gpu.run(Ranks(place, multi_gpu.TIME_LIMIT), device, models, repeats, save, show)
    if place.rank == 0 and flags.json == "-":
        print_json(figures)
    elif place.rank == 0:
        print(multi_gpu.closing_line(flags.json))
    if multi_gpu.ours_failed(figures):
        raise typer.Exit(1)


def _save(figures: Mapping[str, Any], path: str | None) -> None:
    """Write figures to a file as JSON, if the user named one. A reader never sees a part of them."""
    if path is not None:
        partial_file = Path(f"{path}.partial")
        partial_file.write_text(dumps(figures, indent=1) + "\n")
        partial_file.replace(path)


def _split(text: str | None) -> list[str]:
    """Split a list that is separated by commas, and drop empty parts."""
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def _names(flag: str, text: str | None, valid: Iterable[str]) -> list[str]:
    """Return the names that were passed to a flag; fail if one is not valid, up to the comma of a longer title."""
    short = [name.split(",")[0] for name in valid]
    names = _split(text)
    for name in names:
        if name not in short:
            fail(f"{flag}: {name!r} is not one of {', '.join(short)}")
    return names
