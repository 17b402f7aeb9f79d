"""Python snippets of the pages run, links lead somewhere, commands name what exists, and every error has a heading.

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


# Words in capitals that stand for the parts of a message that vary, and values that stand for themselves.
VARYING = re.compile(
    r"'?\b(?:ATTRIBUTE|DEVICE|DTYPE|KIND|MESH|MODULE|NAMES?|N|OPTION|PATTERNS|PLACEMENTS?|RANKS?|RULE|SHAPE|SIZES|STAGE"
    r"|TIME|VALUE)\b'?|\.\.\.(?!\))|^FSDPMuonOptimizer|^Muon(?= has nothing)|^overrides(?= need)"
    r"|^replicate_mesh(?= must)|(?<=built before )(?:fully_shard|parameters of the model were replaced)"
)
# Messages that say all there is to say, because they name the valid values or what to pass: they need no heading.
COMPLETE = re.compile(
    r"valid names are|valid kinds are|valid names:|must be (an?|one|ordered|positive|True|None|between)\b"
    r"|needs 'params'|\(name, tensor\) pairs|have names or none|param_names must|a list of groups|degrees must"
    r"|did not converge|Invalid ns_steps|is not a tensor|is not a leaf|is complex|pass rules or groups"
    r"|pass num_heads or split_sizes"
    r"|other_rule=|needs a dense tensor|needs a real floating|needs real floating|expected a matrix|left \n with shape"
    r"|does not support sparse|pass the same parameters|has no option|has a name that the optimizers use"
    r"|the default of an option|needs a name|shards the parameters, and|needs at least 3 dimensions|needs a shape"
    r"|add it to statistics|Declare PerMatrix\(|Add it to `statistics`|within direction only|assign a tensor"
    r"|change it in direction or factors|assign it to batch\.update|use p\.copy_|must return a dict|must leave a tensor"
    r"|in floating point, got|declare a statistic, or|choose another name|: rename it|write a tensor of shape"
    r"|write it in one of them|It was applied: resume"
)
# Messages that only appear within others, or around them.
PARTS = re.compile(
    r"^a parameter group: \n$|^strict: \n|^\n\n \n routing_report\(\) gives|^placements \n|^saved (by|with)"
    r"|^\n \(on rank"
)


def text_of(node: ast.AST) -> str:
    """Return the text of a literal, with a line break in place of every part that varies."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "\n"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return "\n"


def library() -> Iterator[ast.AST]:
    """Yield every node of the library. Programs have pages of their own."""
    for path in sorted((ROOT / "muon_fsdp").rglob("*.py")):
        if path.relative_to(ROOT / "muon_fsdp").parts[0] not in ("training", "cli", "benchmarks", "__init__.py"):
            yield from ast.walk(ast.parse(path.read_text()))


def messages() -> Iterator[str]:
    """Yield every error that is raised or returned, and every warning, if it is written as one literal."""
    for node in library():
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = ast.unparse(node.func)
        if (
            name in ("warnings.warn", "warn_user")
            or name.endswith("_warn")
            or re.fullmatch(r"\w*(?<!Assertion)(?<!Kernel)Error", name)
        ):
            text = text_of(node.args[0])
            if re.search(r"\w+ \w+", text):
                yield text


def headings() -> list[list[str]]:
    """Return the fixed pieces of every message that is a heading of the page on errors."""
    page = (ROOT / "docs/errors.md").read_text().partition("\n## Options\n")[2]
    found = re.findall(r"^### `(.+)`$", page, flags=re.MULTILINE)
    return [[piece.strip(" :;,.()[]'") for piece in VARYING.split(heading)] for heading in found]


def test_every_message_is_a_heading():
    known = [max(pieces, key=len) for pieces in headings()]
    found = [text for text in messages() if not COMPLETE.search(text) and not PARTS.search(text)]
    missing = [text for text in found if not any(piece in text for piece in known)]
    assert len(found) > 60
    assert not missing, "\n".join(["docs/errors.md has no heading for", *map(repr, missing)])


def test_every_heading_is_a_message():
    """A message that the code no longer has would send users the wrong way."""
    texts = [text_of(node) for node in library() if isinstance(node, (ast.Constant, ast.JoinedStr))]
    missing = [piece for pieces in headings() for piece in pieces if not any(piece in text for text in texts)]
    assert len(headings()) > 60
    assert not missing, "\n".join(["no message has these words of docs/errors.md:", *missing])


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
