"""Run the tables of `muon-fsdp bench` and return them as figures and as text."""

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
    """The results of a run so far, as figures for JSON and as text; on a GPU with its clocks during each part.

    Args:
        watch: samples the clocks of a GPU; None on a CPU.
        save: called with all figures so far whenever there are new ones, so that a run that is stopped loses little.
    """

    def __init__(self, watch: Watch | None, save: Save) -> None:
        self.figures: dict[str, Any] = {}
        self._texts: list[str] = []
        self._watch, self._save = watch, save

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record what the GPU does while the body measures a part and adds its text, then add that, and save."""
        watching: AbstractContextManager[list[Sample]] = self._watch.samples() if self._watch else nullcontext([])
        with watching as samples:
            yield
        if self._watch:
            summary = self._watch.summarize(samples)
            self.figures.setdefault("gpu", {})[name] = summary
            self._texts[-1] += f"\n{throttling.show(summary)}"
        self._save(self.figures)

    def add(self, name: str, title: str, entries: Iterator[Any], show: Callable[[Any], str]) -> None:
        """Measure one table and add it to the report.

        Args:
            name: the key of the table among the figures.
            title: the text before it.
            entries: measures one part of the table after the other.
            show: returns all parts as text.
        """
        with self.part(name):
            found = self.figures[name] = []
            for entry in entries:
                found.append(entry)
                self._save(self.figures)
            self.note(title + show(found).rstrip())

    def note(self, text: str) -> None:
        """Add a text."""
        self._texts.append(text)

    def text(self) -> str:
        """Return everything that was added, as text."""
        return "\n\n".join(self._texts)


def run(device: str, request: Request, save: Save) -> tuple[dict[str, Any], str]:
    """Measure the requested tables on a device, "cuda" or "cpu".

    Args:
        device: "cuda" or "cpu".
        request: what to measure.
        save: called with the figures so far whenever there are new ones.

    Returns:
        The figures, ready for JSON, and the same figures as text tables.
    """
    if device == "cpu":
        torch.set_num_threads(request.threads)
    live, report = LiveLine(), Report(Watch.of_gpu() if device == "cuda" else None, save)
    machine = describe_run(device, request.threads)
    report.figures.update(machine, repeats=request.repeats)
    report.note(show_run(machine))
    live.show("ceilings ...")
    with report.part("ceilings"):
        ceilings = Ceilings.measure(device)
        report.figures["ceilings"] = asdict(ceilings)
        report.note(f"ceilings: {ceilings.show()}")
    setup = Setup(device, ceilings, request.repeats, live)
    models = steps.models_on(device, request.models)
    if "orthogonalization" in request.tables:
        title = "Orthogonalization, five steps; the floor is at the sustained rate\n"
        report.add("orthogonalization", title, orthogonalization.measure(setup, request.shapes), orthogonalization.show)
    if "step" in request.tables:
        title = "One step; the floor is at the sustained rate\n"
        report.add("step", title, steps.measure(setup, models, request.rules), steps.show)
    if "pair" in request.tables:
        report.add("pair", "The element-wise pair\n", steps.measure_pair(setup), steps.show_pair)
    if request.first_step and device == "cuda":
        title = "The first step of a new process\n"
        report.add("first_step", title, steps.measure_first(setup, models), steps.show_first)
    elif request.first_step:
        report.note("The first step of a new process: not measured, because no kernels are compiled on a CPU")
    live.clear()
    return report.figures, report.text()
