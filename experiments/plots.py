"""Draw the plots of the experiments as SVG, once for light and once for dark pages.

An optimizer has the same colour in every plot. `python -m experiments.redraw` draws all committed plots again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The optimizer, the steps (or other values of the horizontal axis), and the mean, lowest and highest value over seeds.
# A curve of one seed has the same values three times and gets no band.
Curve = tuple[str, Sequence[float], Sequence[float], Sequence[float], Sequence[float]]

# Colours that can be told apart by readers who are colour-blind, and read on white and on dark grey.
COLOURS = {
    "AdamW": "#3b82d0",
    "Muon": "#e07b00",
    "Muon, spectral": "#b3261e",
    "Muon, match_rms_adamw": "#c2a200",
    "Muon per head": "#f2b15c",
    "Muon with cautious decay": "#b3261e",
    "AdamW with cautious decay": "#5aa9c7",
    "NorMuon": "#1f9d72",
    "NorMuon per head": "#7fcbb0",
    "Hyperball": "#5e6ad2",
    "SSO": "#a463d8",
    "MuonSphere": "#d6518f",
    "torch.optim.Muon": "#8a8f98",
    "dion": "#b0913a",
    "float32 state": "#e07b00",
    "bfloat16 state": "#3b82d0",
    "int8 state": "#1f9d72",
    "bf16 weights": "#a463d8",
    "weights": "#3b82d0",
    "gradients": "#8a8f98",
    "state": "#e07b00",
    "scratch": "#1f9d72",
    "degrees up to 17": "#3b82d0",
    "degrees up to 33": "#e07b00",
    "degrees up to 65": "#1f9d72",
    "cubic5": "#8a8f98",
    "Keller's quintic": "#b3261e",
    "Polar Express": "#a463d8",
    "CANS": "#d6518f",
    "DeepSeek-V4": "#c2a200",
}
OTHER_COLOURS = ("#5aa9c7", "#c25b4a", "#7d8f3a")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True)
class Theme:
    """The colours of the text and the grid on pages with a light or a dark background."""

    name: str
    text: str
    grid: str


THEMES = (Theme("light", "#24292f", "#d0d7de"), Theme("dark", "#e6e8eb", "#4a505c"))


@dataclass(frozen=True)
class Panel:
    """One pair of axes: curves with their labels, and how to scale the axes."""

    curves: Mapping[str, Curve]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    target: float | None = None  # draws a dotted horizontal line
    target_label: str = "target"
    x_scale: str = "linear"
    y_scale: str = "linear"
    y_limits: tuple[float, float] | None = None
    x_ticks: Mapping[float, str] = field(default_factory=dict)  # positions and labels; matplotlib's own if empty
    markers: bool = False  # show each point, where points are few and their order is not time
    spread: bool = (
        False  # move the curves apart sideways and show the range of seeds as bars; needs a logarithmic x axis
    )
    marked: tuple[float, float, str] | None = None  # a point to mark, with its text


def draw_curves(
    path_stem: str | Path,
    curves: Mapping[str, Curve],
    *,
    title: str,
    target: float | None = None,
    target_label: str = "target",
    marked: str | None = None,
) -> list[Path]:
    """Plot validation loss against training steps.

    Args:
        path_stem: the path of the files, without "-light.svg" and "-dark.svg".
        curves: for each label of the legend the optimizer, which gives the colour, the steps, and the mean, lowest and
            highest loss over seeds.
        title: the title of the plot.
        target: a loss to mark with a horizontal line, or None.
        target_label: the label of that line.
        marked: the label of the curve whose first step at or below `target` is marked, or None.

    Returns:
        The two files.
    """
    meeting = None if marked is None or target is None else _meeting(curves[marked], target)
    panel = Panel(
        curves, x_label="training step", y_label="validation loss (nats per token)", target=target,
        target_label=target_label, marked=meeting,
    )  # fmt: skip
    return draw_panels(path_stem, [panel], title=title)


def _meeting(curve: Curve, target: float) -> tuple[float, float, str] | None:
    """Return the first point of a curve at or below the target, with its text; None if there is none."""
    optimizer, steps, means, *_ = curve
    for step, mean in zip(steps, means, strict=True):
        if mean <= target:
            return step, mean, f"{optimizer}: step {step:g}, {step / steps[-1]:.0%} of the tokens"
    return None


def curve_over_seeds(optimizer: str, points: Iterable[tuple[float, float]]) -> Curve | None:
    """Compute the mean, lowest and highest result over seeds.

    Args:
        optimizer: the optimizer, which gives the colour.
        points: the place on the horizontal axis and the result of every run. Places where a seed diverged are left out.

    Returns:
        The curve, or None if nothing is left.
    """
    results: dict[float, list[float]] = {}
    for place, value in points:
        results.setdefault(place, []).append(value)
    finite = {place: values for place, values in sorted(results.items()) if all(map(math.isfinite, values))}
    mean, low, high = ([of(values) for values in finite.values()] for of in (statistics.mean, min, max))
    return (optimizer, list(finite), mean, low, high) if finite else None


def draw_panels(path_stem: str | Path, panels: Sequence[Panel], *, title: str, num_columns: int = 1) -> list[Path]:
    """Draw panels row by row into one picture, in both themes.

    Returns:
        The two files.
    """
    num_rows = -(-len(panels) // num_columns)

    def fill(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots(num_rows, num_columns, squeeze=False)
        for axis, panel in zip(axes.flat, panels, strict=True):
            _fill(axis, panel, theme)
        lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
        lines = {label: line for label, line in lines.items() if not str(label).startswith("_")}
        if len(panels) == 1:
            axes[0, 0].legend(handles=list(lines.values()))
        else:  # inside a panel it would hide curves
            figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=3)

    size = (7.2, 4.4) if len(panels) == 1 else (4.8 * num_columns, 3.4 * num_rows + 0.4)
    return _draw(path_stem, title, size, fill)


def draw_bars(
    path_stem: str | Path, bars: Mapping[str, Mapping[str, float]], *, title: str, x_label: str
) -> list[Path]:
    """Draw one horizontal bar per row, stacked from parts, in both themes.

    Args:
        path_stem: the path of the files, without "-light.svg" and "-dark.svg".
        bars: for the label of each bar, from the top, the size of its parts by their label, which gives the colour.
        title: the title of the plot.
        x_label: the label of the horizontal axis.

    Returns:
        The two files.
    """

    def fill(figure: Figure, theme: Theme) -> None:
        axis = figure.subplots()
        ends = dict.fromkeys(bars, 0.0)
        for label in dict.fromkeys(label for parts in bars.values() for label in parts):
            sizes = [parts.get(label, 0.0) for parts in bars.values()]
            axis.barh(
                list(bars), sizes, left=list(ends.values()), label=label, color=COLOURS[label], height=0.62, zorder=3
            )
            ends = {name: end + size for (name, end), size in zip(ends.items(), sizes, strict=True)}
        for place, end in enumerate(ends.values()):
            axis.text(end, place, f" {end:.1f}", va="center", color=theme.text)
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_xlabel(x_label)
        figure.legend(loc="outside lower center", ncols=4)

    return _draw(path_stem, title, (7.2, 0.42 * len(bars) + 1.6), fill)


def _draw(
    path_stem: str | Path, title: str, size: tuple[float, float], fill: Callable[[Figure, Theme], None]
) -> list[Path]:
    """Write a picture for every theme, given what draws it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    paths = []
    for theme in THEMES:
        with rc_context(_settings(theme)):
            figure = Figure(figsize=size, layout="constrained")
            fill(figure, theme)
            figure.suptitle(title)
            path = Path(f"{path_stem}-{theme.name}.svg")
            figure.savefig(path, transparent=True, metadata={"Date": None})
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
        paths.append(path)
    return paths


def _settings(theme: Theme) -> dict[str, Any]:
    """Return matplotlib's settings: text stays text, and the same input gives the same file."""
    text = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(text, theme.text),
        "axes.edgecolor": theme.grid,
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 10,
        "figure.titlesize": 12,
        "font.size": 10,
        "grid.color": theme.grid,
        "grid.linewidth": 0.6,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "muon_fsdp",
    }


def _fill(axis: Any, panel: Panel, theme: Theme) -> None:
    """Draw one panel into matplotlib's axes."""
    looks = list(_looks(panel.curves, theme))
    for number, ((label, curve), look) in enumerate(zip(panel.curves.items(), looks, strict=True)):
        optimizer, places, mean, low, high = curve
        marker = MARKERS[number % len(MARKERS)] if panel.markers else None
        shown = places
        if panel.spread:
            shown = [place * 1.07 ** (number - (len(looks) - 1) / 2) for place in places]
            look |= {"linestyle": STYLES[number % len(STYLES)], "linewidth": 1.6}
        # Muon is drawn last, so that no other curve hides it.
        axis.plot(shown, mean, label=label, marker=marker, markersize=5, zorder=4 if optimizer == "Muon" else 3, **look)
        if panel.spread:
            axis.vlines(shown, low, high, color=look["color"], linewidth=1.2, zorder=2)
        elif list(low) != list(high):
            axis.fill_between(places, low, high, color=look["color"], alpha=0.16, linewidth=0)
    if panel.target is not None:
        axis.axhline(panel.target, color="#8a8f98", linestyle=":", linewidth=1.5, label=panel.target_label, zorder=1)
    if panel.marked is not None:
        x, y, text = panel.marked
        axis.plot([x], [y], "o", color=theme.text, markersize=7, label="_marked", zorder=5)
        axis.annotate(text, (x, y), (-6, -16), textcoords="offset points", ha="right")
    axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, xscale=panel.x_scale, yscale=panel.y_scale)
    if panel.y_limits is not None:
        axis.set_ylim(*panel.y_limits)
    if panel.x_ticks:
        axis.set_xticks(list(panel.x_ticks), list(panel.x_ticks.values()))
        axis.minorticks_off()


def _looks(curves: Mapping[str, Curve], theme: Theme) -> Iterator[dict[str, Any]]:
    """Yield the colour, the style and the width of the line of each curve.

    Curves of one optimizer have shades of its colour. Later ones are thinner, so that equal curves all stay visible.
    """
    from matplotlib.colors import to_hex, to_rgb

    others = [name for name in dict.fromkeys(curve[0] for curve in curves.values()) if name not in COLOURS]
    seen: dict[str, int] = {}
    for optimizer, *_ in curves.values():
        number = seen.get(optimizer, 0)
        seen[optimizer] = number + 1
        colour = COLOURS.get(optimizer) or OTHER_COLOURS[others.index(optimizer) % len(OTHER_COLOURS)]
        share = min(0.28 * number, 0.84)
        shade = [(1 - share) * own + share * text for own, text in zip(to_rgb(colour), to_rgb(theme.text), strict=True)]
        style = STYLES[number % len(STYLES)]
        yield {"color": to_hex(shade), "linestyle": style, "linewidth": max(2.6 - 0.6 * number, 1.0)}
