"""Make the links of README.md absolute when a package is built, because a package index does not have our files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute_links(text: str, repository: str, version: str) -> str:
    """Return a page of the root folder with absolute links.

    Args:
        text: the page, in Markdown.
        repository: the address of the repository.
        version: the version that is built, which has the tag `v{version}`.

    Returns:
        The page, whose images and links lead to the files of that tag. Links that begin with `../../`, which GitHub
        resolves to the repository, lead there.
    """

    def absolute(target: str, kind: str) -> str:
        if "://" in target or target.startswith("#"):
            return target
        if target.startswith("../../"):
            return f"{repository}/{target.removeprefix('../../')}"
        return f"{repository}/{kind}/v{version}/{target}"

    def replace(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        return f"{mark}[{label}]({absolute(target, 'raw' if mark else 'blob')})"

    def of_prose(text: str) -> str:
        # `<picture>` has an image for light pages and one for dark pages.
        text = re.sub(
            r'(<(?:img|source)\b[^>]*\s(?:src|srcset)=")([^"\s]+)"',
            lambda match: f'{match[1]}{absolute(match[2], "raw")}"',
            text,
        )
        # Other images before links: a badge is an image within the label of a link.
        text = re.sub(r"(!)\[([^\[\]]*)\]\(([^()\s]+)\)", replace, text)
        return re.sub(r"(?<!!)()\[((?:[^\[\]]|!\[[^\[\]]*\]\([^()]*\))*)\]\(([^()\s]+)\)", replace, text)

    # `self["head"](x)` in a program looks like a link.
    pieces = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    return "".join(piece if piece.startswith("```") else of_prose(piece) for piece in pieces)


class CustomMetadataHook(MetadataHookInterface):
    """Sets the long description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add README.md with absolute links to the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute_links(text, metadata["urls"]["Repository"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
