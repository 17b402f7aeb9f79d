"""Draw docs/images/idea-light.svg and idea-dark.svg, which show how shards become whole matrices and come back.

python docs/draw_idea.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).with_name("images")
MATRICES = "ABC"  # matrix i belongs to rank i
COLOURS = {"A": "#2f74c0", "B": "#c8690a", "C": "#178a63"}
WIDTH, HEIGHT = 720, 550
BOX_WIDTH, GAP = 208, 24
LEFT = (WIDTH - 3 * BOX_WIDTH - 2 * GAP) // 2
CHIP_WIDTH, CHIP_HEIGHT = 54, 30
# The top and the height of the three rows of boxes. Arrows stay in the space between two rows, where there is no text.
ROWS = {"shards": (62, 48), "whole": (200, 142), "updated": (432, 48)}


class Theme(NamedTuple):
    """The colours of a picture for pages with a light or a dark background."""

    name: str
    text: str
    box: str
    border: str


THEMES = (Theme("light", "#24292f", "#f3f5f8", "#9aa4b2"), Theme("dark", "#e6e8eb", "#2a2f3a", "#6b7482"))


def box_left(rank: int) -> int:
    """Return the left edge of the boxes of a rank."""
    return LEFT + rank * (BOX_WIDTH + GAP)


def chip_centre(rank: int, matrix: int) -> float:
    """Return the horizontal centre of a shard in the boxes of a rank."""
    return box_left(rank) + BOX_WIDTH / 2 + (matrix - 1) * (CHIP_WIDTH + 10)


def port(owner: int, rank: int) -> float:
    """Return where an arrow from or to a rank meets the box of an owner."""
    return box_left(owner) + BOX_WIDTH / 2 + (rank - 1) * 46


def text(
    x: float, y: float, words: str, theme: Theme, *, size: int = 15, anchor: str = "middle", fill: str = ""
) -> str:
    """Return a line of text."""
    weight = ' font-weight="600"' if fill else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="middle"{weight} '
        f'fill="{fill or theme.text}">{words}</text>'
    )


def rectangle(x: float, y: float, width: float, height: float, fill: str, border: str = "none") -> str:
    """Return a rectangle with round corners."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" stroke="{border}"/>'


def arrow(start: tuple[float, float], end: tuple[float, float], matrix: str) -> str:
    """Return a curve with an arrowhead that leaves and arrives vertically."""
    (x0, y0), (x1, y1) = start, (end[0], end[1] - 7)
    middle = (y0 + y1) / 2
    return (
        f'<path d="M{x0:g} {y0:g} C{x0:g} {middle:g} {x1:g} {middle:g} {x1:g} {y1:g}" fill="none" '
        f'stroke="{COLOURS[matrix]}" stroke-width="1.8" marker-end="url(#{matrix})"/>'
    )


def shards(row: str, theme: Theme) -> Iterator[str]:
    """Yield the boxes of all ranks with a shard of every matrix."""
    top, height = ROWS[row]
    for rank in range(3):
        yield rectangle(box_left(rank), top, BOX_WIDTH, height, theme.box, theme.border)
        for index, matrix in enumerate(MATRICES):
            x = chip_centre(rank, index)
            y = top + (height - CHIP_HEIGHT) / 2
            yield rectangle(x - CHIP_WIDTH / 2, y, CHIP_WIDTH, CHIP_HEIGHT, COLOURS[matrix])
            yield text(x, y + 20, f"{matrix}{rank}", theme, fill="#ffffff")


def whole_matrices(theme: Theme) -> Iterator[str]:
    """Yield the boxes of the owners, each with a whole matrix as three strips."""
    top, height = ROWS["whole"]
    for rank, matrix in enumerate(MATRICES):
        x = box_left(rank)
        yield rectangle(x, top, BOX_WIDTH, height, theme.box, theme.border)
        for index in range(3):
            y = top + 10 + index * (CHIP_HEIGHT + 2)
            yield rectangle(x + BOX_WIDTH / 2 - 70, y, 140, CHIP_HEIGHT, COLOURS[matrix])
            yield text(x + BOX_WIDTH / 2, y + 20, f"{matrix}{index}", theme, fill="#ffffff")
        yield text(x + BOX_WIDTH / 2, top + height - 14, f"orthogonalize {matrix}", theme)


def arrows() -> Iterator[str]:
    """Yield the arrows to the owners and back."""
    (top, height), (middle, whole), (last, _) = ROWS.values()
    for owner, matrix in enumerate(MATRICES):
        for rank in range(3):
            yield arrow((chip_centre(rank, owner), top + height + 2), (port(owner, rank), middle), matrix)
            yield arrow((port(owner, rank), middle + whole + 2), (chip_centre(rank, owner), last), matrix)


def picture(theme: Theme) -> str:
    """Return the SVG of one theme."""
    heads = [
        f'<marker id="{matrix}" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 Z" fill="{colour}"/></marker>'
        for matrix, colour in COLOURS.items()
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\">",
        "<title>Each rank sends its shards to the owners, which orthogonalize whole matrices, and back</title>",
        f"<defs>{''.join(heads)}</defs>",
        *(text(box_left(rank) + BOX_WIDTH / 2, 22, f"rank {rank}", theme, size=17) for rank in range(3)),
        text(WIDTH / 2, 50, "FSDP2: every rank holds a shard of every matrix", theme),
        *arrows(),
        *shards("shards", theme),
        *whole_matrices(theme),
        *shards("updated", theme),
        text(WIDTH / 2, 508, "Every rank updates its own shards.", theme),
        text(WIDTH / 2, 534, "Each matrix is orthogonalized once in the whole job.", theme),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write both pictures."""
    for theme in THEMES:
        (FOLDER / f"idea-{theme.name}.svg").write_text(picture(theme))


if __name__ == "__main__":
    main()
