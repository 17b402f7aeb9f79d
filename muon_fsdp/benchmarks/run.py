"""Collect the results of a run of `muon-fsdp bench`: figures for JSON, and texts as they are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from muon_fsdp.benchmarks import throttling
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
            entries: measures one part of the table after the other; a part may come again with more figures.
            text: returns all parts as text.
        """
        with self.part(name) as lines:
            found = self.figures[name] = []
            for entry in entries:
                if not found or entry is not found[-1]:
                    found.append(entry)
                self._save(self.figures)
            lines += [title, text(found).rstrip()]
