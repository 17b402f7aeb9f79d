"""Folders are layers: what a module may import, how large it may be, and where things live exactly once."""

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
# Programs, pages and tests are read as often as the package, so their sizes are bounded too.
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
    assert len(list(PACKAGE.glob("*.py"))) <= 14


def test_only_tests_import_tests():
    """A wheel has no tests, so a program that imports them would run in a checkout only."""
    for path in [*MODULES, *(path for path in OTHER_MODULES if not path.is_relative_to(ROOT / "tests"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] != "tests", f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("path", [*MODULES, *OTHER_MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_too_long_to_read(path):
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize("path", [*MODULES, *OTHER_MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_is_too_long_or_takes_too_much(path):
    """At most 60 lines and 8 parameters. Kernels are one function each, and a constructor may list all its fields."""
    wrong = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if any(ast.unparse(decorator).partition("(")[0].endswith(".jit") for decorator in node.decorator_list):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        given = node.args
        count = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
        if length > 60:
            wrong.append(f"{node.name} has {length} lines")
        if count > 8 and node.name != "__init__":
            wrong.append(f"{node.name} has {count} parameters")
    assert not wrong, "\n".join(wrong)


def test_the_picture_of_the_layers_has_every_module():
    page = (ROOT / "docs" / "design.md").read_text()
    picture = page.partition("## Layers")[2].partition("```")[2].partition("```")[0]
    words = set(picture.split())
    programs = {"cli", "training", "benchmarks"}
    missing = [
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if path.name != "__init__.py"
        and folder_of(module_name(path)) not in programs
        and path.stem not in words
        and not path.stem.startswith("triton_")
    ]
    assert not missing, missing
    assert {f"{layer}/" for layer in LAYERS if (PACKAGE / layer).is_dir() and layer} <= words
