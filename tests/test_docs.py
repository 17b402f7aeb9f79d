"""Every Python snippet of the README runs, in order and in one namespace; the marked ones on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

from tests.pool import RankPool

README = Path(__file__).parent.parent / "README.md"
MARK = "<!-- distributed"


def snippets(distributed: bool) -> list[str]:
    found = re.findall(r"(<!-- distributed[^\n]*\n)?```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
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
