"""Prepare pages for the documentation site: add the changelog, and link to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


def repository() -> str:
    """Return the address of the repository, as pyproject.toml has it."""
    match = re.search(r'^Repository = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert match is not None
    return match[1]


def for_site(text: str, path: Path) -> str:
    """Return the text of a page with links that work on the site, and without the marks of the tests.

    Args:
        text: the page, in Markdown.
        path: its file, relative to docs/.

    Returns:
        The page. Links to other files of the repository lead to its address, and links that show the name of a page
        show its title instead.
    """

    def replace(match: re.Match[str]) -> str:
        target = (ROOT / "docs" / path.parent / match[1]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        return f"]({repository()}/blob/main/{target.relative_to(ROOT)}{match[2]})"

    def named(match: re.Match[str]) -> str:
        target = ROOT / "docs" / path.parent / match[1]
        title = re.search(r"^# (.+)$", target.read_text(), flags=re.MULTILINE) if target.exists() else None
        return match[0] if title is None else f"[{title[1]}]({match[1]}{match[2]})"

    text = re.sub(r"\[[\w/.]+\.md\]\(([^)#\s]+\.md)([^)\s]*)\)", named, text)
    text = re.sub(r"\]\((\.\./[^)#\s]+)([^)\s]*)\)", replace, text)
    return re.sub(r"^<!-- (?:distributed|gpu|not run)[^\n]*-->\n", "", text, flags=re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    """Add a link to the repository to every page. `repo_url` would make the theme ask GitHub's API for stars."""
    config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": repository(), "name": "Repository"}]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add CHANGELOG.md, which lies above docs/, as a page."""
    from mkdocs.structure.files import File

    text = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page as the site shows it."""
    return for_site(markdown, Path(page.file.src_uri))
