"""The documentation site: it builds without a warning, shows every page, and loads nothing from other hosts."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer, create_hybrid_optimizer
from tests.test_api_page import program

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module", name="site")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: warnings that are not shown are not errors either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "TMPDIR": str(folder.parent)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_navigation_names_every_page():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"([\w/]+\.md)$", nav, flags=re.MULTILINE)
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(named) == pages | {"changelog.md"}
    assert len(named) == len(set(named))


def test_every_page_is_built_and_can_be_found(site: Path):
    """`mkdocs build --strict` refuses links that lead nowhere."""
    pages = [path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")]
    for page in [*pages, Path("changelog")]:
        place = site / (page if page.name != "index" else page.parent) / "index.html"
        assert "<h1" in place.read_text(), page
    assert not list(site.rglob("*.py"))
    found = " ".join(entry["text"] for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"])
    assert "TritonMuonW" in found
    assert "张量\u200b并行" in found  # words are separated, so that a search finds each


def test_the_search_finds_errors_by_their_words(site: Path):
    """Titles weigh most in the search, so each message is one; HTML is escaped there."""
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    titles = [
        html.unescape(re.sub(r"<[^>]+>", "", e["title"])) for e in entries if e["location"].startswith("errors/#")
    ]
    for query in ("Ranks disagree", "built before fully_shard", "bf16", "out of memory", "FSDP1", "not finite"):
        assert any(query in title for title in titles), query
    messages = re.findall(r"^### `(.+)`$", (DOCS / "errors.md").read_text(), flags=re.MULTILINE)
    assert set(messages) <= set(titles)


def test_nothing_is_loaded_from_other_hosts(site: Path):
    loading = r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href|srcset)=[\"']?(?:https?:)?//"
    for path in site.rglob("*.html"):
        assert re.search(loading, path.read_text()) is None, path
    for path in (site / "stylesheets").glob("*.css"):
        assert "//" not in path.read_text()


@pytest.fixture(scope="module", name="hooks")
def site_hooks() -> ModuleType:
    return program("site_hooks")


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("rules.md", "[a](../tests/a.py#L3)", "[a](REPOSITORY/blob/main/tests/a.py#L3)"),
        ("guides/sso.md", "[a](../../examples/a.py)", "[a](REPOSITORY/blob/main/examples/a.py)"),
        ("guides/sso.md", "[a](../numerics.md#b)", "[a](../numerics.md#b)"),
        ("rules.md", "[a](https://a/../b)", "[a](https://a/../b)"),
        ("guides/sso.md", "[rules.md](../rules.md#b)", "[Write your own rule](../rules.md#b)"),
        ("rules.md", "[no.md](no.md)", "[no.md](no.md)"),
        ("rules.md", "<!-- distributed: x -->\n```python\n", "```python\n"),
    ],
)
def test_links_out_of_the_pages_lead_to_the_repository(hooks: ModuleType, page: str, link: str, expected: str):
    assert hooks.for_site(link, Path(page)) == expected.replace("REPOSITORY", hooks.repository())


# ---------------------------------------------------------------------------------------------------------- options


def test_the_page_of_options_is_up_to_date(tmp_path: Path, capsys):
    generator = program("generate_options")
    assert generator.main(["--check"]) == 0, "run python docs/generate_options.py"
    stale = tmp_path / "options.md"
    stale.write_text((DOCS / "options.md").read_text().replace("`0.001`", "`0.002`"))
    assert generator.main(["--check"], stale) == 1
    assert "options.md is stale" in capsys.readouterr().err


def shown_defaults() -> dict[str, list[str]]:
    """Return the cells of the rows with one column per constructor, by the name of the option."""
    rows = [line.split(" | ") for line in (DOCS / "options.md").read_text().splitlines() if line.startswith("| `")]
    return {row[0].strip("|` "): [cell.strip("*`") for cell in row[1:5]] for row in rows if len(row) == 6}


def test_the_page_shows_the_values_that_are_in_force():
    """Built optimizers decide, not their signatures."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    built = (
        MuonOptimizer(model),
        FSDPMuonOptimizer(model),
        SpectralSphereOptimizer(model),
        create_hybrid_optimizer(model),
    )
    shown = shown_defaults()
    assert {"lr", "nesterov", "weight_decay", "adamw_lr", "adamw_betas", "adamw_weight_decay"} <= set(shown)
    for option, cells in shown.items():
        for optimizer, cell in zip(built, cells, strict=True):
            is_other = option.startswith("adamw_")
            group = next(g for g in optimizer.param_groups if (g["rule"] == "adamw") == is_other)
            name = option.removeprefix("adamw_")
            if cell == "None" and name == "lr":  # follows from the lr of the matrices
                continue
            expected = "-" if name not in group else str(group[name]).replace("'", '"')
            assert cell.strip('"') == expected, (type(optimizer).__name__, option)


# ---------------------------------------------------------------------------------------------------------- pictures


def test_the_picture_of_the_idea_is_what_its_program_draws():
    """No text lies on an arrow: arrows stay between the rows of boxes, and text outside of these spaces."""
    drawing = program("draw_idea")
    (top, height), (middle, whole), (last, _) = drawing.ROWS.values()
    for theme in drawing.THEMES:
        text = drawing.picture(theme)
        assert (DOCS / "images" / f"idea-{theme.name}.svg").read_text() == text, "run python docs/draw_idea.py"
        for y in map(float, re.findall(r'<text x="[\d.]+" y="([\d.]+)"', text)):
            assert not any(start < y < end for start, end in ((top + height, middle), (middle + whole, last)))
        for y0, y1 in re.findall(r'<path d="M[\d.]+ ([\d.]+) C.* ([\d.]+)" fill="none"', text):
            assert any(
                start <= float(y0) < float(y1) <= end for start, end in ((top + height, middle), (middle + whole, last))
            )
