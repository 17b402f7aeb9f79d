"""Run the tables of `muon-fsdp bench`: figures for JSON, and texts as they are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from muon_fsdp.benchmarks import orthogonalization, steps, throttling
from muon_fsdp.benchmarks.contestants import DEFAULT_RULES
from muon_fsdp.benchmarks.live import LiveLine
from muon_fsdp.benchmarks.machine import Ceilings, Setup, describe_run, show_run
from muon_fsdp.benchmarks.throttling import Sample, Watch

TABLES = ("orthogonalization", "step", "pair")

Save = Callable[[Mapping[str, Any]], None]
Show = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The choice of tables, shapes, models and rules that a run measures."""

    tables: Sequence[str] = TABLES  # which of `TABLES` to measure
    shapes: Sequence[tuple[int, int, int]] | None = None  # batches to orthogonalize, instead of the default ones
    models: Sequence[str] | None = None  # models whose steps are measured; None stands for all
    rules: Sequence[str] = DEFAULT_RULES  # further rules in the table of steps, as `contestants.parse_rule` reads them
    repeats: int = 3  # how many times each figure is measured; the result is the median
    threads: int = 2  # threads that PyTorch uses on a CPU
    first_step: bool = False  # whether to measure the first step of new processes; only on a GPU


class Report:
    """The results of a run, as figures for JSON and as text; on a GPU with its clocks during each part.

    Args:
        watch: samples the clocks of a GPU; None on a CPU.
        save: called with all figures so far whenever there are new ones, so that a run that is stopped loses little.
        show: called with the text of each part once it has been measured.
    """

    def __init__(self, watch: Watch | None, save: Save, show: Show) -> None:
        self.figures: dict[str, Any] = {}
        self._watch, self._save, self._show = watch, save, show

    @contextmanager
    def part(self, name: str) -> Iterator[list[str]]:
        """Record what the GPU does while the body measures a part and adds its text to the list that is yielded."""
        lines: list[str] = []
        watching: AbstractContextManager[list[Sample]] = self._watch.samples() if self._watch else nullcontext([])
        with watching as samples:
            yield lines
        if self._watch:
            summary = self._watch.summarize(samples)
            self.figures.setdefault("gpu", {})[name] = summary
            lines.append(throttling.show(summary))
        self._save(self.figures)
        self._show("\n".join(lines))

    def add(self, name: str, title: str, entries: Iterator[Any], text: Callable[[Any], str]) -> None:
        """Measure one table and add it to the report.

        Args:
            name: the key of the table among the figures.
            title: the line above it.
            entries: measures one part of the table after the other.
            text: returns all parts as text.
        """
        with self.part(name) as lines:
            found = self.figures[name] = []
            for entry in entries:
                found.append(entry)
                self._save(self.figures)
            lines += [title, text(found).rstrip()]


def run(device: str, request: Request, save: Save, show: Show) -> dict[str, Any]:
    """Measure the requested tables on a device.

    Args:
        device: "cuda" or "cpu".
        request: what to measure.
        save: called with the figures so far whenever there are new ones.
        show: called with a text whenever a part has been measured.

    Returns:
        The figures, ready for JSON.
    """
    if device == "cpu":
        torch.set_num_threads(request.threads)
    live = LiveLine()

    def show_part(text: str) -> None:
        live.clear()
        show(f"{text}\n")

    report = Report(Watch.of_gpu() if device == "cuda" else None, save, show_part)
    machine = describe_run(device, request.threads)
    report.figures.update(machine, repeats=request.repeats)
    show_part(show_run(machine))
    live.show("ceilings ...")
    with report.part("ceilings") as lines:
        ceilings = Ceilings.measure(device)
        report.figures["ceilings"] = asdict(ceilings)
        lines.append(f"ceilings: {ceilings.show()}")
    setup = Setup(device, ceilings, request.repeats, live)
    models = steps.models_on(device, request.models)
    if "orthogonalization" in request.tables:
        title = "Orthogonalization, five steps; the floor is at the sustained rate"
        report.add("orthogonalization", title, orthogonalization.measure(setup, request.shapes), orthogonalization.show)
    if "step" in request.tables:
        title = "One step; the floor is at the sustained rate"
        report.add("step", title, steps.measure(setup, models, request.rules), steps.show)
    if "pair" in request.tables:
        report.add("pair", "The element-wise pair", steps.measure_pair(setup), steps.show_pair)
    if request.first_step and device == "cuda":
        title = "The first step of a new process"
        report.add("first_step", title, steps.measure_first(setup, models), steps.show_first)
    elif request.first_step:
        show_part("The first step of a new process: not measured, because no kernels are compiled on a CPU")
    return report.figures
