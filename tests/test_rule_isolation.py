"""No module outside of rules/ names a rule, and a rule is one file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from muon_fsdp.rules import BUILT_IN

PACKAGE = Path(__file__).parent.parent / "muon_fsdp"
NAMES = {name for rule in BUILT_IN for name in (rule.name, *rule.aliases)}
CLASSES = {rule.__name__ for rule in BUILT_IN}
# Modules that may speak of rules besides rules and benchmarks: the optimizer whose purpose is one rule, and the demo
# that compares two.
ALLOWED = {"optimizers/spectral_sphere.py", "__init__.py"}


def modules() -> list[str]:
    paths = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")]
    return sorted(p for p in paths if p not in ALLOWED and not p.startswith(("rules/", "benchmarks/")))


@pytest.mark.parametrize("module", modules())
def test_no_rule_is_named(module):
    tree = ast.parse((PACKAGE / module).read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            assert node.value not in NAMES, f"line {node.lineno} names the rule {node.value!r}"
        if isinstance(node, (ast.Name, ast.alias)):
            name = node.id if isinstance(node, ast.Name) else node.name
            assert name not in CLASSES, f"{name} is a rule"


def test_a_rule_is_one_file():
    """NorMuon stands for all rules: no other module of the package mentions it."""
    speaking = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "NorMuon" in path.read_text()}
    assert speaking == {"rules/__init__.py", "rules/normuon.py"}
