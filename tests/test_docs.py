"""Python snippets of the pages run, links lead somewhere, commands name what exists, and every error has its line.

The snippets of a page run in order and in one namespace. A comment in the line above one says otherwise:
`<!-- distributed ... -->` runs on two ranks, `<!-- gpu ... -->` where there is a GPU, `<!-- not run: reason -->` never.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from muon_fsdp.rules import RULES
from tests.pool import RankPool

ROOT = Path(__file__).parent.parent
PAGES = sorted({"README.md", "CHANGELOG.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))})
# Pages whose Python snippets run.
DOCS = [page for page in PAGES if "```python\n" in (ROOT / page).read_text()]
# What the snippets of a page take for granted.
GIVEN: dict[str, Callable[[], dict[str, object]]] = {"README.md": lambda: {"model": Blocks(), "torch": torch}}



class Blocks(nn.Module):
    """A model as the README's snippets have it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


SNIPPET = re.compile(r"(?:<!-- (distributed|gpu|not run)[^\n]*-->\n)?```python\n(.*?)```", flags=re.DOTALL)


def snippets(page: str, *kinds: str) -> list[tuple[int, str]]:
    """Return the line and the code of the snippets of these kinds; "" is the kind without a comment."""
    text = (ROOT / page).read_text()
    return [
        (text.count("\n", 0, match.start(2)), match.group(2))
        for match in SNIPPET.finditer(text)
        if (match.group(1) or "") in kinds
    ]


def run_snippets(page: str, *kinds: str) -> int:
    """Run the snippets of these kinds; return their number. Tracebacks name the page and its lines."""
    names = {"__name__": page} | (GIVEN[page]() if page in GIVEN else {})
    found = snippets(page, *kinds)
    with patch.dict(RULES):  # what a page registers is gone afterwards
        for line, code in found:
            exec(compile("\n" * line + code, str(ROOT / page), "exec"), names)
    return len(found)


def run_on_ranks(page: str, folder: str) -> int:
    """Run snippets; those of integrations get the environment of a launcher, and Accelerate uses FSDP on CPUs.

    The quick start is a program of its own, but the pool has made the process group already.
    """
    with ExitStack() as surroundings:
        if page == "docs/guides/quickstart.md":
            surroundings.enter_context(patch("torch.distributed.init_process_group"))
            surroundings.enter_context(patch("torch.distributed.destroy_process_group"))
            surroundings.enter_context(patch.dict(os.environ, LOCAL_RANK="0"))
        surroundings.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        if page == "docs/integrations.md":
            from tests.integration_cases import fsdp_on_cpus, launched

            surroundings.enter_context(launched())
            surroundings.enter_context(fsdp_on_cpus())
            os.environ["ACCELERATE_USE_CPU"] = "true"
        return run_snippets(page, "distributed")


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*many workers", "ignore:'pin_memory'", "ignore:.*log_every_n")
@pytest.mark.parametrize("page", DOCS)
def test_snippets_for_one_device(page: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds = ("", "gpu") if torch.cuda.is_available() else ("",)
    assert run_snippets(page, *kinds) > 0


@pytest.mark.parametrize("page", [page for page in DOCS if snippets(page, "distributed")])
def test_snippets_for_two_ranks(page: str, ranks: RankPool, tmp_path: Path):
    expected = len(snippets(page, "distributed"))
    assert ranks.run(2, run_on_ranks, page, str(tmp_path)) == [expected, expected]


def test_marks_are_spelt_right():
    """A comment that is not one of the three would let a snippet run where it should not."""
    for page in DOCS:
        for mark in re.findall(r"(<!--[^\n]*)\n```python", (ROOT / page).read_text()):
            assert re.match(r"<!-- (distributed|gpu|not run: .+)\b.*-->", mark), f"{page}: {mark}"


# ------------------------------------------------------------------------------------------------ links and commands


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    text = (ROOT / page).read_text()
    for target, fragment in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", without_code(text)):
        if "://" in target or target.startswith("../../"):  # GitHub resolves these to pages of the repository
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if fragment in ("gh-light-mode-only", "gh-dark-mode-only"):  # shows a picture in one theme only
            continue
        assert not fragment or fragment in anchors(path.read_text()), f"no heading for #{fragment} in {path.name}"


def commands(page: str) -> Iterator[str]:
    """Return the lines of sh blocks, and code in the text that begins like a command."""
    text = (ROOT / page).read_text()
    for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
        yield from re.sub(r"\\\n", " ", block).splitlines()
    yield from re.findall(
        r"`((?:make|python|torchrun|pytest|pip) [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    )


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_what_exists(page: str):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", project, flags=re.MULTILINE))
    for command in commands(page):
        for target in re.findall(r"^make ([a-z]\w*)", command):
            assert target in targets, f"{page}: {command}"
        for module in re.findall(r"\bpython -m ([\w.]+)", command):
            assert importlib.util.find_spec(module) is not None, f"{page}: {command}"
        for path in re.findall(r"(?<![\w/.])((?:examples|tests|experiments|docs)/[\w/]+\.py)", command):
            assert (ROOT / path).exists(), f"{page}: {command}"
        for names in re.findall(r"^pip install .*\[([\w,]+)\]", command):
            assert set(names.split(",")) <= extras, f"{page}: {command}"


# ----------------------------------------------------------------------------------------------------------- errors


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the longest literal piece of every message that is raised in a file, with its line."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
            continue
        message = node.exc.args[0]
        if isinstance(message, ast.Name):
            message = constants.get(message.id, message)
        name = getattr(node.exc.func, "id", "")
        if name in ("AssertionError", "KernelError", "SystemExit"):  # not for users
            continue
        literals = [
            part.value for part in ast.walk(message) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        if literals:
            yield node.lineno, max(literals, key=len)


def test_every_error_has_its_line():
    """Messages are found by the first words of their longest piece. Programs have pages of their own."""
    page = " ".join((ROOT / "docs/errors.md").read_text().split())
    missing = []
    count = 0
    for path in sorted((ROOT / "muon_fsdp").rglob("*.py")):
        if path.relative_to(ROOT / "muon_fsdp").parts[0] in ("training", "cli", "benchmarks", "__init__.py"):
            continue
        for line, text in messages(path):
            count += 1
            words = " ".join(text.strip(" :;,.()'").split()[:4])
            if words not in page:
                missing.append(f"{path.relative_to(ROOT)}:{line}: {words!r}")
    assert count > 60
    assert not missing, "\n".join(["docs/errors.md has no line for", *missing])


# ---------------------------------------------------------------------------------------------------- the translation


def skeleton(text: str) -> dict[str, object]:
    """Return what a translation has in common with its original."""
    blocks = [re.sub(r"\s*#.*", "", block) for block in re.findall(r"```\w*\n.*?```", text, flags=re.DOTALL)]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return {
        "code": blocks,
        "levels of headings": re.findall(r"^(#+) ", prose, flags=re.MULTILINE),
        "rows of tables": len(re.findall(r"^\|", prose, flags=re.MULTILINE)),
        "links": [target for target in re.findall(r"\]\(([^)]*)\)", prose) if not target.startswith("README")],
        "pictures": re.findall(r'\b(?:src|srcset)="([^"]*)"', prose),
        "names": sorted(set(re.findall(r"`([^`\n]+)`", prose))),
    }


def test_the_translation_keeps_up():
    original, translated = (skeleton((ROOT / page).read_text()) for page in ("README.md", "README.zh.md"))
    for part, expected in original.items():
        assert translated[part] == expected, part
