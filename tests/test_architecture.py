"""Folders are layers: what a module may import, and where things live exactly once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "muon_fsdp"
# From the bottom to the top: a module may import from its own folder and from those before it.
LAYERS = (
    "text",  # two modules without dependencies
    "timing",
    "kernels",
    "linalg",
    "declarations",
    "plan",
    "comm",
    "statistics",
    "rules",
    "parameters",
    "step",
    "optimizers",
    "",  # public paths, one thin file each
    "training",
    "benchmarks",
    "cli",
)
MODULES = sorted(PACKAGE.rglob("*.py"))
OTHER_MODULES = [
    *sorted(ROOT.glob("*.py")),
    *(
        path
        for folder in ("tests", "docs", "experiments", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ),
]


def folder_of(module: str) -> str:
    """Return the layer of a dotted name below `muon_fsdp`."""
    first = module.partition(".")[0]
    return first if first in LAYERS or (PACKAGE / first).is_dir() else ""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name below the package of every import, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "muon_fsdp":
            module = (node.module or "").partition(".")[2]
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}".strip(".")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("muon_fsdp."):
                    yield node.lineno, alias.name.partition(".")[2]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    own = folder_of(".".join(path.relative_to(PACKAGE).parts).removesuffix(".py"))
    if path == PACKAGE / "__init__.py":  # what the package shows, for type checkers
        return
    for line, module in imports(path):
        assert LAYERS.index(folder_of(module)) <= LAYERS.index(own), f"line {line} imports {module}"


def test_modules_of_a_folder_do_not_import_each_other_in_a_circle():
    graph = {
        module_name(path): {resolve(name) for _, name in imports(path)} - {module_name(path)}
        for path in MODULES
        if path != PACKAGE / "__init__.py"
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def resolve(name: str) -> str:
    """Return the module that an imported name is, or lives in."""
    place = PACKAGE / name.replace(".", "/")
    if place.with_suffix(".py").exists() or (place / "__init__.py").exists():
        return name
    return name.rpartition(".")[0]


def test_every_folder_is_a_layer():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(LAYERS) - {"", "text", "timing"}


def test_only_tests_import_tests():
    """A wheel has no tests, so a program that imports them would run in a checkout only."""
    for path in [*MODULES, *(path for path in OTHER_MODULES if not path.is_relative_to(ROOT / "tests"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] != "tests", f"{path.relative_to(ROOT)} imports {name}"
