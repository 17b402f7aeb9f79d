"""Writes docs/contributing/faults.md from the promises in tests/test_faults_*.py; the introduction is written by hand.

python docs/generate_faults.py            # write the page
python docs/generate_faults.py --check    # exit with 1 if the page is not what would be written
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from generated_page import write_or_check

PAGE = Path(__file__).with_name("contributing") / "faults.md"
TESTS = Path(__file__).parents[1] / "tests"

INTRODUCTION = """\
# What can go wrong, and what happens

A test checks each line; its name is in the last column. Users look up messages in [errors.md](../errors.md).

<!-- Written by docs/generate_faults.py from tests/test_faults_*.py: edit those, then run it. -->
"""


def promises(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (when, then, name of the test) for every promise in a file of tests."""
    for node in ast.parse(file.read_text()).body:
        for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "promise":
                when, then = (ast.literal_eval(argument) for argument in call.args)
                yield when, then, node.name


def section(file: Path) -> str:
    """Return the heading of a file, from the first line of its docstring, and its table."""
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    if not docstring:
        raise ValueError(f"{file.name} needs a docstring: its first line is a heading of docs/contributing/faults.md")
    lines = [f"## {docstring.splitlines()[0].rstrip('.')}", "", "| when | what happens | test |", "|---|---|---|"]
    for when, then, test in promises(file):
        lines.append(f"| {when} | {then} | `{test}` |")
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    sections = [section(file) for file in sorted(TESTS.glob("test_faults_*.py"))]
    return "\n\n".join([INTRODUCTION.rstrip(), *sections]) + "\n"


def main(argv: Sequence[str] | None = None, path: Path = PAGE) -> int:
    """Write the page, or check it, and return the exit status."""
    return write_or_check(path, page(), argv)


if __name__ == "__main__":
    raise SystemExit(main())
