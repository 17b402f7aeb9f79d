"""Every Python snippet of the README runs, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

README = Path(__file__).parent.parent / "README.md"


def test_readme_snippets_run(capsys):
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(snippets) >= 5
    names: dict[str, object] = {"model": nn.Linear(4, 4), "torch": torch}
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), names)
    report = capsys.readouterr().out
    table = re.search(r"```\n(name .*?)```", README.read_text(), flags=re.DOTALL)
    assert table is not None
    assert table.group(1).strip() in report
