"""Plots of the experiments: both themes, one colour for each optimizer, bands, and the committed figures."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments import plots, redraw

ROOT = Path(__file__).parent.parent
STEPS = [1.0, 2.0, 3.0]
FLAT = ("AdamW", STEPS, [3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0])
BAND = ("Muon", STEPS, [3.0, 2.0, 1.0], [2.5, 1.5, 0.5], [3.5, 2.5, 1.5])


def test_both_themes_are_drawn_with_text_as_text(tmp_path: Path):
    light, dark = plots.draw_curves(tmp_path / "a", {"one": FLAT, "two": BAND}, title="A title", target=1.25)
    assert (light.name, dark.name) == ("a-light.svg", "a-dark.svg")
    for path, theme in ((light, plots.THEMES[0]), (dark, plots.THEMES[1])):
        text = path.read_text()
        assert all(f">{words}</text>" in text for words in ("A title", "one", "two", "target", "training step"))
        assert f"fill: {theme.text}" in text
        assert plots.COLOURS["AdamW"] in text
        assert plots.COLOURS["Muon"] in text
        assert text.count("fill-opacity: 0.16") == 1  # a band only where seeds differ


def test_an_optimizer_has_one_colour_and_its_curves_differ():
    curves = {"AdamW": FLAT, "a": BAND, "b": BAND, "own": ("mine", *FLAT[1:])}
    adamw, first, second, own = plots._looks(curves, plots.THEMES[0])
    assert adamw["color"] == plots.COLOURS["AdamW"]
    assert first["color"] == plots.COLOURS["Muon"]
    assert own["color"] == plots.OTHER_COLOURS[0]
    assert (first["linestyle"], first["color"]) != (second["linestyle"], second["color"])
    assert next(plots._looks({"b": BAND}, plots.THEMES[1]))["color"] == first["color"]


def test_muon_is_drawn_last_and_its_first_step_at_the_target_is_marked(tmp_path: Path):
    curves = {"Muon": BAND, "NorMuon": ("NorMuon", *FLAT[1:])}
    path, _ = plots.draw_curves(tmp_path / "a", curves, title="", target=2.0, marked="Muon")
    text = path.read_text()
    drawn = [text.index(f"stroke: {plots.COLOURS[name]}; stroke-width") for name in ("NorMuon", "Muon")]
    assert drawn == sorted(drawn)
    assert ">Muon: step 2, 67% of the tokens</text>" in text
    path, _ = plots.draw_curves(tmp_path / "b", curves, title="", target=0.5, marked="Muon")
    assert "of the tokens" not in path.read_text()


def test_curves_that_coincide_are_moved_apart_and_have_a_marker_each():
    axis = Figure().subplots()
    plots._fill(axis, plots.Panel({"a": FLAT, "b": FLAT, "c": FLAT}, markers=True, spread=True), plots.THEMES[0])
    assert len({line.get_xdata()[0] for line in axis.get_lines()}) == 3
    assert len({(line.get_marker(), line.get_linestyle()) for line in axis.get_lines()}) == 3


def test_committed_plots_show_the_committed_figures(tmp_path: Path):
    """The numbers in the files depend on matplotlib's version, so only the words are compared."""
    folder = ROOT / "docs" / "experiments"
    for path in folder.glob("*.csv"):
        shutil.copy(path, tmp_path)
    redraw.main(["--folder", str(tmp_path)])
    drawn = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert drawn == sorted(path.name for path in folder.glob("*.svg"))
    for name in drawn:
        new, committed = (re.findall(r">([^<\n]+)</text>", (place / name).read_text()) for place in (tmp_path, folder))
        assert new == committed, f"{name}: run python -m experiments.redraw"


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/**/*.svg")), ids=lambda path: path.name)
def test_pictures_are_small_and_have_both_themes(path: Path):
    assert path.stat().st_size < 150_000
    assert re.search(r"-(light|dark)\.svg$", path.name)
    other = {"light": "dark", "dark": "light"}[path.stem.rpartition("-")[2]]
    assert path.with_name(f"{path.stem.rpartition('-')[0]}-{other}.svg").exists()
