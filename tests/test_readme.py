"""The README is short, and shows what the quick start prints; the guide shows the program as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def prose(text: str) -> str:
    """Return a page without code, tables, pictures, comments and targets of links."""
    for pattern in (r"```.*?```", r"<picture>.*?</picture>", r"<!--.*?-->", r"^\|[^\n]*$", r"(?<=\])\([^)]*\)"):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    return text


def test_the_readme_is_short():
    assert 600 < len(prose(README).split()) <= 950


def test_pictures_exist():
    for path in re.findall(r'\b(?:src|srcset)="([^"]*)"', README):
        assert (ROOT / path).exists(), path


def test_the_quick_start_shows_its_program_and_the_readme_what_it_prints():
    program = (ROOT / "examples" / "quickstart.py").read_text()
    assert f"```python\n{program}```" in (ROOT / "docs" / "guides" / "quickstart.md").read_text()
    assert len([line for line in program.splitlines() if line]) <= 42
    # Alone, as torchrun would start it: tests/test_docs.py runs it on two ranks.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "examples/quickstart.py"],
        cwd=ROOT,
        env=os.environ | alone | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", done.stdout, flags=re.MULTILINE)]
    assert len(losses) == 3  # rank 0 alone prints
    assert losses[-1] < 2.3
    report = re.search(r"```\n(name .*?)```", README, flags=re.DOTALL)
    assert report is not None
    printed = done.stdout.splitlines()
    assert [line for line in report[1].splitlines() if line != "..." and line not in printed] == []
