"""Run the tables of `muon-fsdp bench` and return them as figures and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from muon_fsdp.benchmarks import first_step, orthogonalization, pair, steps, throttling
from muon_fsdp.benchmarks.contestants import DEFAULT_RULES
from muon_fsdp.benchmarks.live import LiveLine
from muon_fsdp.benchmarks.machine import Ceilings, Setup, describe_machine, show_machine
from muon_fsdp.benchmarks.throttling import Sample, Watch

TABLES = ("orthogonalization", "step", "pair")


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
    """The results of a run so far, as figures for JSON and as text; on a GPU with its clocks during each part."""

    def __init__(self, watch: Watch | None) -> None:
        self.figures: dict[str, Any] = {}
        self._texts: list[str] = []
        self._watch = watch

    def add(self, name: str, title: str, measure: Callable[[], Any], show: Callable[[Any], str]) -> None:
        """Measure one part and add it to the report.

        Args:
            name: the key of the part among the figures.
            title: the text before it.
            measure: returns the figures.
            show: returns the figures as text.
        """
        watching: AbstractContextManager[list[Sample]] = self._watch.samples() if self._watch else nullcontext([])
        with watching as samples:
            self.figures[name] = measure()
        text = title + show(self.figures[name]).rstrip()
        if self._watch:
            summary = self._watch.summarize(samples)
            self.figures.setdefault("gpu", {})[name] = summary
            text += f"\n{throttling.show(summary)}"
        self._texts.append(text)

    def note(self, text: str) -> None:
        """Add a line that has no figures."""
        self._texts.append(text)

    def text(self) -> str:
        """Return everything that was added, as text."""
        return "\n\n".join(self._texts)


def run(device: str, request: Request) -> tuple[dict[str, Any], str]:
    """Measure the requested tables on a device, "cuda" or "cpu".

    Returns:
        The figures, ready for JSON, and the same figures as text tables.
    """
    if device == "cpu":
        torch.set_num_threads(request.threads)
    live, report = LiveLine(), Report(Watch.of_gpu() if device == "cuda" else None)
    machine = describe_machine(device, request.threads)
    report.figures.update(machine, repeats=request.repeats)
    report.note(show_machine(machine))
    live.show("ceilings ...")
    report.add("ceilings", "ceilings: ", lambda: asdict(Ceilings.measure(device)), lambda it: Ceilings(**it).show())
    setup = Setup(device, Ceilings(**report.figures["ceilings"]), request.repeats, live)
    models = steps.models_on(device, request.models)
    if "orthogonalization" in request.tables:
        title = "Orthogonalization, five steps; the floor is at the sustained rate\n"
        measure = partial(orthogonalization.measure, setup, request.shapes)
        report.add("orthogonalization", title, measure, orthogonalization.show)
    if "step" in request.tables:
        report.add(
            "step",
            "One step; the floor is at the sustained rate\n",
            partial(steps.measure, setup, models, request.rules),
            steps.show,
        )
    if "pair" in request.tables:
        report.add("pair", "The element-wise pair\n", partial(pair.measure, setup), pair.show)
    if request.first_step and device == "cuda":
        title = "The first step of a new process\n"
        report.add("first_step", title, partial(first_step.measure, setup, models), first_step.show)
    elif request.first_step:
        report.note("The first step of a new process: not measured, because no kernels are compiled on a CPU")
    live.clear()
    return report.figures, report.text()
