"""The words of the code: docstrings begin with a verb, and one concept has one name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for folder in ("muon_fsdp", "experiments", "examples", "docs") for path in (ROOT / folder).rglob("*.py")
)
# Verbs that docstrings begin with. Add yours if it is missing; articles, nouns and question words are no verbs.
VERBS = set((Path(__file__).parent / "verbs.txt").read_text().split())
# Words of one concept that another name replaced, with that name (the glossary of docs/design.md).
RETIRED = {
    r"\bEngineOptions\b|\bengine options\b": "settings",
    r"\btile of (a|the) (parameter|tensor|matrix)\b": "box",
    r"\bthe rest (go|goes|take|takes|to AdamW)\b": "all other parameters",
    r"\blooked for\b": "searched or tuned",
    r"\bgoes on\b": "continues or resumes",
    r"\bslices? of (a|the|that) (larger )?mesh\b|\bslices? of `?replicate_mesh\b": "submesh",
}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_of_functions_begin_with_a_verb(path):
    wrong = [
        f"line {function.lineno}, {function.name}: {docstring.splitlines()[0]}"
        for function in functions(path)
        if (docstring := ast.get_docstring(function)) and docstring.split()[0].rstrip(",:;") not in VERBS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_and_class_has_a_docstring(path):
    tree = ast.parse(path.read_text())
    if path.name != "__init__.py":
        assert ast.get_docstring(tree), "the module has none"
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    missing = [node.name for node in classes if not node.name.startswith("_") and not ast.get_docstring(node)]
    assert not missing, missing


@pytest.mark.parametrize(
    "path",
    [*SOURCES, *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_one_concept_has_one_name(path):
    text = path.read_text()
    found = [f"{match[0]!r}: write {name}" for word, name in RETIRED.items() for match in re.finditer(word, text)]
    assert not found, "\n".join(found)
