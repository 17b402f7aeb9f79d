"""Show on stderr what is being measured, because stdout holds only the results."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

Subject = TypeVar("Subject")


class LiveLine:
    """A line on stderr that says what is being measured.

    A terminal shows one line, which is overwritten. Elsewhere every text is printed once. No thread redraws the line:
    it would take time from the host while something is timed.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._place = ""
        self._shown: set[str] = set()

    def each(self, table: str, subjects: Iterable[tuple[str, Subject]]) -> Iterator[tuple[str, Subject]]:
        """Yield what a table measures, such as nine shapes with their names; the line says how far it is."""
        all_subjects = list(subjects)
        for number, (name, subject) in enumerate(all_subjects, start=1):
            self._place = f"{table} {number}/{len(all_subjects)}: {name}"
            yield name, subject

    def running(self, name: str) -> None:
        """Show that this contestant is being measured on what `each` has yielded."""
        self.show(f"{self._place}, {name} ...")

    def show(self, text: str) -> None:
        """Replace the line on a terminal, or print it elsewhere unless it was printed before."""
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r{text[:width]}\x1b[K")
        elif text not in self._shown:
            self._shown.add(text)
            self._write(f"{text}\n")

    def note(self, name: str, text: str) -> None:
        """Print something about a contestant on a line that stays."""
        self.clear()
        self._write(f"{self._place}, {name}: {text}\n")

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._is_terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
