"""Every Python snippet of a page runs, in order and in one namespace; the marked ones on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.pool import RankPool

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = {"docs/integrations.md": (5, 4)}  # the numbers of their snippets for one device and for ranks
MARK = "<!-- distributed"


def snippets(distributed: bool, page: Path = README) -> list[str]:
    found = re.findall(r"(<!-- distributed[^\n]*\n)?```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    return [code for mark, code in found if bool(mark) == distributed]


def run_distributed() -> int:
    names: dict[str, object] = {}
    for snippet in snippets(distributed=True):
        exec(compile(snippet, str(README), "exec"), names)
    return len(snippets(distributed=True))


def test_snippets_for_one_device(capsys):
    codes = snippets(distributed=False)
    assert len(codes) >= 6
    names: dict[str, object] = {"model": nn.Linear(4, 4), "torch": torch}
    for code in codes:
        exec(compile(code, str(README), "exec"), names)
    printed = capsys.readouterr().out
    table = re.search(r"```\n(name .*?)```", README.read_text(), flags=re.DOTALL)
    assert table is not None
    assert table.group(1).strip() in printed
    assert "512 rank(s)" in printed


def test_snippets_for_two_ranks(ranks: RankPool):
    assert ranks.run(2, run_distributed) == [2, 2]


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*many workers", "ignore:'pin_memory'", "ignore:.*log_every_n")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", DOCS)
def test_snippets_of_a_page(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = snippets(distributed=False, page=ROOT / name)
    assert len(codes) == DOCS[name][0]
    names: dict[str, object] = {}
    for code in codes:
        exec(compile(code, name, "exec"), names)


def run_page_distributed(name: str, folder: str) -> int:
    """With what a launcher says to a program; Accelerate is told to use FSDP on CPUs."""
    from tests.integration_cases import fsdp_on_cpus, launched

    codes = snippets(distributed=True, page=ROOT / name)
    names: dict[str, object] = {"__name__": name}
    before = Path.cwd()
    os.chdir(folder)
    try:
        with launched(), fsdp_on_cpus():
            os.environ["ACCELERATE_USE_CPU"] = "true"
            for code in codes:
                exec(compile(code, name, "exec"), names)
    finally:
        os.chdir(before)
    return len(codes)


@pytest.mark.parametrize("name", DOCS)
def test_distributed_snippets_of_a_page(ranks: RankPool, name, tmp_path):
    count = DOCS[name][1]
    assert ranks.run(2, run_page_distributed, name, str(tmp_path)) == [count, count]
