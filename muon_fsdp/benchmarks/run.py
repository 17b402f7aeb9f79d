"""Run the tables of `muon-fsdp bench`: figures for JSON, and texts as they are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch

from muon_fsdp.benchmarks import orthogonalization, steps, throttling
from muon_fsdp.benchmarks.live import LiveLine
from muon_fsdp.benchmarks.machine import Ceilings, Setup, describe_run
from muon_fsdp.benchmarks.throttling import Sample, Watch

Save = Callable[[Mapping[str, Any]], None]
Show = Callable[[str], None]


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


def run(
    device: str,
    *,
    tables: Sequence[str],
    shapes: Sequence[tuple[int, int, int]],
    models: Sequence[str],
    rules: Sequence[str],
    repeats: int,
    threads: int,
    first_step: bool,
    save: Save,
    show: Show,
) -> dict[str, Any]:
    """Measure tables on a device.

    Args:
        device: "cuda" or "cpu".
        tables: those to measure: "orthogonalization", "step" and "pair".
        shapes: batches to orthogonalize; none stands for the default ones.
        models: short names of the models whose steps are measured; none stands for all.
        rules: further rules in the table of steps, as `contestants.parse_rule` reads them.
        repeats: how many times each figure is measured; the result is the median.
        threads: threads that PyTorch uses on a CPU.
        first_step: whether to measure the first step of new processes; only on a GPU.
        save: called with the figures so far whenever there are new ones.
        show: called with a text whenever a part has been measured.

    Returns:
        The figures, ready for JSON.
    """
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
    shapes_by_model = steps.models_on(device, models)
    if "orthogonalization" in tables:
        title = "Orthogonalization, five steps; the floor is at the sustained rate"
        report.add("orthogonalization", title, orthogonalization.measure(setup, shapes), orthogonalization.show)
    if "step" in tables:
        title = "One step; the floor is at the sustained rate"
        report.add("step", title, steps.measure(setup, shapes_by_model, rules), steps.show)
    if "pair" in tables:
        report.add("pair", "The element-wise pair", steps.measure_pair(setup), steps.show_pair)
    if first_step and device == "cuda":
        title = "The first step of a new process"
        report.add("first_step", title, steps.measure_first(setup, shapes_by_model), steps.show_first)
    elif first_step:
        show_part("The first step of a new process: not measured, because no kernels are compiled on a CPU")
    return report.figures
