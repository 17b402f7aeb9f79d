"""docs/api.md is generated from the code and documents every public name."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from torch import nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer
from muon_fsdp.declarations.settings import FOREIGN_KEYS
from muon_fsdp.elementwise import TritonMuon, benchmark_muon_optimizers
from muon_fsdp.optimizers.grouped import GroupedOptimizer
from muon_fsdp.plan.report import PlanReport
from muon_fsdp.rules import BUILT_IN as BUILT_IN_CLASSES
from muon_fsdp.rules import RULES, Rule

BUILT_IN = [RULES[rule.name] for rule in BUILT_IN_CLASSES]
DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "api.md"
OPTIONS = DOCS / "options.md"


def program(name: str) -> ModuleType:
    """Import a program of docs/, which finds the modules beside it as if it were run."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.object(sys, "path", [str(DOCS), *sys.path]):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return program("generate_api")


def test_the_page_is_up_to_date(generator: ModuleType):
    assert generator.main(["--check"]) == 0, "run python docs/generate_api.py"
    assert program("generate_faults").main(["--check"]) == 0, "run python docs/generate_faults.py"


def test_a_stale_page_is_seen(generator: ModuleType, tmp_path: Path, capsys):
    copy = tmp_path / "api.md"
    assert generator.main(["--check"], copy) == 1
    assert "api.md is stale" in capsys.readouterr().err
    copy.write_text(PAGE.read_text().replace("0.02", "0.03", 1))
    assert generator.main(["--check"], copy) == 1
    assert generator.main([], copy) == 0
    assert copy.read_text() == PAGE.read_text()


def test_every_public_name_is_there(generator: ModuleType):
    headings = set(re.findall(r"^#+ (.*)$", PAGE.read_text(), flags=re.MULTILINE))
    for module in generator.PUBLIC_MODULES:
        missing = [name for name in module.__all__ if name not in headings]
        assert not missing, f"{module.__name__}: {missing}"
        if module.__name__ != "muon_optimizer":
            assert module.__name__ in headings or module.__name__ == "muon_fsdp"


def test_every_public_method_is_there():
    text = PAGE.read_text()
    optimizers = (MuonOptimizer, FSDPMuonOptimizer, SpectralSphereOptimizer, GroupedOptimizer, TritonMuon)
    for owner in (*optimizers, Rule, PlanReport):
        for name, value in vars(owner).items():
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert f"`{name}" in text, f"{owner.__name__}.{name}"


def keys_of_table(after: str) -> list[str]:
    """Return the first column of the first table after a text."""
    rest = PAGE.read_text().partition(after)[2]
    table = re.search(r"^\| key .*\n(^\|.*\n)+", rest, flags=re.MULTILINE)
    assert table is not None
    return re.findall(r"^\| `([^`]+)`", table.group(), flags=re.MULTILINE)


def test_every_metric_is_there():
    """The page lists the metrics that the optimizers return, and no others."""
    given: set[str] = set()
    hyperball = functools.partial(MuonOptimizer, rule="hyperball")
    for make in (functools.partial(MuonOptimizer, overlap="backward"), SpectralSphereOptimizer, hyperball):
        model = nn.Linear(6, 4).to(torch.bfloat16 if make is SpectralSphereOptimizer else torch.float32)
        optimizer = make(model)
        for _ in range(2):
            model(torch.randn(3, 6).to(model.weight.dtype)).square().mean().backward()
            optimizer.step()
            given |= {re.sub("/.*", "/RULE", name) for name in optimizer.metrics()}
    assert given == set(keys_of_table("**`metrics(per_matrix=False) -> dict[str, float]`**"))


def test_every_key_of_the_benchmark_is_there():
    rest = PAGE.read_text().partition("### benchmark_muon_optimizers")[2]
    for key in benchmark_muon_optimizers(model_size=4, num_steps=1):
        assert f"| `{key}` |" in rest


def test_every_key_of_a_group_is_there():
    section = PAGE.read_text().partition("## Parameter groups")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert MuonOptimizer(nn.Linear(6, 4)).param_groups[0].keys() <= named | RULES["muon"].all_options.keys()
    assert set(FOREIGN_KEYS) <= named


def test_every_option_of_every_rule_is_listed_once():
    """docs/options.md is the only list of options; the entries of the constructors link there."""
    tables = OPTIONS.read_text().partition("\n## Rules")[0]
    listed = re.findall(r"^\| (?:`(?:normuon|sinkhorn)` \| )?`(\w+)` \|", tables, flags=re.MULTILINE)
    names = {name for rule in BUILT_IN if rule.needs_matrices for name in rule.all_options}
    names |= {f"adamw_{name}" for name in RULES["adamw"].all_options}
    constructors = (MuonOptimizer, FSDPMuonOptimizer, SpectralSphereOptimizer)
    names |= {name for owner in constructors for name in inspect.signature(owner.__init__).parameters}
    names -= {"self", "params", "model", "options"}
    assert names == set(listed)
    # Of FSDPMuonOptimizer and of NorMuon; Sinkhorn has a learning rate of its own.
    assert {name for name in names if listed.count(name) > 1} == {"beta2", "eps", "lr"}
    assert "| `nesterov` |" not in PAGE.read_text().partition("## muon_fsdp.elementwise")[0]
    for owner in constructors:
        assert "(options.md)" in PAGE.read_text().partition(f"## {owner.__name__}\n")[2].partition("\n## ")[0]


def test_the_state_is_as_told():
    text = PAGE.read_text()
    for make in (functools.partial(MuonOptimizer, overlap="backward"), SpectralSphereOptimizer):
        model = nn.Linear(6, 4)
        optimizer = make(model)
        model(torch.randn(3, 6)).square().mean().backward()
        optimizer.step()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in optimizer.state[parameter].items():
                    assert f"| `{group['rule']}` | `{key}` |" in text
                    assert value.dtype == torch.float32
    assert text.count("| `momentum_buffer` |") == len(BUILT_IN)
