"""Takes docstrings apart, and writes the tables and cells of docs/api.md."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Doc(NamedTuple):
    """A docstring in parts."""

    summary: str
    body: str  # markdown
    arguments: dict[str, str]
    keys: dict[str, str]
    returns: str


def parse(thing: object) -> Doc:
    text = inspect.getdoc(thing)
    if not text:
        raise SystemExit(f"{thing} has no docstring")
    parts = re.split(r"^(Args|Keys|Returns|Raises):\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    summary, _, rest = parts[0].strip().partition("\n\n")
    return Doc(
        _escaped(" ".join(summary.split())),
        _escaped(markdown(rest)),
        _entries(sections.get("Args", "")),
        _entries(sections.get("Keys", "")),
        _escaped(" ".join(sections.get("Returns", "").split())),
    )


def markdown(text: str) -> str:
    """Convert a docstring: paragraphs stay, and indented lines become a block of code."""
    blocks: list[str] = []
    for paragraph in re.split(r"\n\n+", text.strip("\n")):
        if paragraph.startswith("    "):
            blocks.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
        elif paragraph:
            blocks.append(paragraph)
    return "\n\n".join(blocks)


def _entries(section: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        match = re.match(r"    ([\w/]+): (.*)", line)
        if match:
            name = match.group(1)
            entries[name] = match.group(2)
        elif line.strip():
            entries[name] += " " + line.strip()
    return {name: _escaped(text) for name, text in entries.items()}


def _escaped(text: str) -> str:
    """Escape "<" outside code, where it would begin a tag."""
    parts = re.split(r"(```.*?```|`[^`]*`)", text, flags=re.DOTALL)
    return "".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(header), "|".join("---" for _ in header)]
    lines += [" | ".join(_cell(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" if index != 1 else f"|{line}|" for index, line in enumerate(lines))


def code_value(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 2**20 and value % 2**20 == 0:
        return f"`{value // 2**20} * 2**20`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def code_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
