"""What people see on a terminal: the first line, colours, the line of progress at any width, and the end of a run."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from muon_fsdp.text import plain_table
from muon_fsdp.training import report, terminal
from muon_fsdp.training.results import Evaluation, RunResult, Step
from muon_fsdp.training.run_log import fit, show_progress
from tests.cli_cases import ROOT


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colours_only_where_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal.colored("bad", "red", Terminal()) == "\x1b[1;31mbad\x1b[0m"
    assert terminal.colored("bad", "red", io.StringIO()) == "bad"
    monkeypatch.setenv("TERM", "dumb")
    assert terminal.colored("bad", "red", Terminal()) == "bad"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.colored("bad", "red", Terminal()) == "bad"


@pytest.mark.parametrize("no_color", [False, True])
def test_marked_rows_have_their_colour(no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    terminal.print_table("Title", ("name", "number"), [("a", "1"), ("busiest", "2")], marked={1: "yellow"})
    plain, marked = (
        next(line for line in shown.getvalue().splitlines() if name in line) for name in (" a ", "busiest")
    )
    assert "\x1b" not in plain
    assert ("33m" in marked) is not no_color


@pytest.mark.parametrize("columns", ["16", "100"])
def test_marked_rows_of_a_narrow_table_have_their_colour(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that Rich would have to cut is plain text, broken at spaces."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", columns)
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    terminal.print_table("Title", ("name", "of all"), [("a", "1 kB"), ("the busiest", "2 kB")], marked={1: "yellow"})
    plain = re.sub("\x1b.*?m", "", shown.getvalue())
    assert ("┃" in plain) == (columns == "100")
    assert max(map(len, plain.splitlines())) <= int(columns)
    lines = [line for line in shown.getvalue().splitlines() if "the" in line or "busiest" in line]
    assert all("33m" in line for line in lines)
    assert len(lines) == (2 if columns == "16" else 1)


def test_a_plain_table_is_broken_at_spaces_alone() -> None:
    header, rows = ("what it is", "the number"), [("a long text-of-words", "1.5 GB"), ("b", "20 kB")]
    wide = ["what it is            the number", "--------------------  ----------"]
    wide += ["a long text-of-words      1.5 GB", "b                          20 kB"]
    assert plain_table(header, rows) == plain_table(header, rows, width=32) == "\n".join(wide)
    narrow = ["                  the", "what it is     number", "-------------  ------", "a long         1.5 GB"]
    narrow += ["text-of-words", "b               20 kB"]
    for width in (21, 5):  # no word and no number is ever cut
        assert plain_table(header, rows, width=width) == "\n".join(narrow)


def test_the_line_before_torch_is_erased_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    terminal.announce_torch("muon-fsdp plan")  # torch is imported here already
    terminal.import_torch("muon-fsdp plan")
    assert screen.getvalue() == ""
    monkeypatch.setenv("NO_COLOR", "1")
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        terminal.announce_torch("muon-fsdp plan")
        terminal.announce_torch("muon-fsdp plan")
    assert screen.getvalue() == "muon-fsdp plan: importing PyTorch ..."
    terminal.print_error("no such model")
    assert re.fullmatch(r"muon-fsdp plan: importing PyTorch \.\.\.\r +\rerror: no such model\n", screen.getvalue())


def test_a_command_prints_before_it_imports_torch(tmp_path: Path) -> None:
    """The torch of this test prints when it is imported, so that the order is certain."""
    (tmp_path / "torch.py").write_text("print('torch', flush=True)\nraise SystemExit(3)\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    for command in (["-m", "muon_fsdp.cli", "plan", "gpt2", "--world-size", "2"], ["-m", "muon_fsdp.training"]):
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        name = "muon-fsdp plan" if "plan" in command else "python -m muon_fsdp.training"
        assert done.stdout.splitlines() == [f"{name}: importing PyTorch ...", "torch"]
        assert done.returncode == 3


def run_at(step: int, seconds_per_step: float, name: str = "Muon") -> RunResult:
    """A run that was resumed ten steps ago, a fifth of whose time is the optimizer's."""
    return RunResult(
        name,
        steps=[
            Step(number, 1.5661, 0.02, 1.0, seconds_per_step, seconds_per_step / 5)
            for number in range(step - 9, step + 1)
        ],
        evaluations=[Evaluation(0, 5.5), Evaluation(step, 1.6021)],
        num_steps_before=step - 10,
    )


@pytest.mark.parametrize(
    ("width", "name", "figures"),
    [
        (60, "", "120/200  loss 1.566  8.32k tok/s  opt 20%  32 s left"),
        (80, "Muon", "120/200  loss 1.566  8,321 tok/s  optimizer 20%  32 s left"),
        (120, "Muon", "step 120/200  loss 1.566  val 1.602  8,321 tokens/s  optimizer 20%  32 s left"),
    ],
)
def test_the_line_of_progress_fits(width: int, name: str, figures: str) -> None:
    found = fit(run_at(120, 0.4), 200, 0.4 * 8321, width)
    assert (found[0], found[2]) == (name, figures)
    assert found[1] >= 6
    assert len("  ".join(filter(None, (found[0], found[1] * "-", found[2])))) <= width


def test_the_line_of_progress_never_wraps() -> None:
    """A long run of a large model: the bar goes first, and the five figures stay down to 60 columns."""
    large = run_at(123_456, 9e5 / 876_544, name="spectral sphere")
    for width in range(20, 160):
        name, bar, figures = fit(large, 1_000_000, 1.2e6, width)
        assert len("  ".join(filter(None, (name, bar * "-", figures)))) <= width
        if width >= 60:
            assert all(part in figures for part in ("123456/1000000", "1.566", "20%", " 10.4 days"))
    for left, says in ((119.0, "119 s left"), (3600.0, "60 min left"), (36e3, "10 h left")):
        assert fit(run_at(100, left / 100), 200, 1000, 160)[2].endswith(says)
    assert fit(run_at(100, 1.0), 100, 1000, 160)[2].endswith("  0 s left")


def run_of(losses: list[float], first: int = 0) -> RunResult:
    """A run after step `first`, validated every ten steps; the loss of its steps is 1, 2, 3 ..."""
    evaluations = [Evaluation(first + 10 * number, loss) for number, loss in enumerate(losses)]
    return RunResult(
        "Muon",
        steps=[Step(first + number, float(number), 0.02, 1.0, 0.1, 0.02) for number in range(1, 10 * len(losses) - 9)],
        evaluations=evaluations,
        num_steps_before=first,
    )


def test_the_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    with show_progress("Muon", 40, 1000, 5) as show:
        show(run_of([5.0, 3.0, 2.0]))
    assert "Muon  waiting for the first step" in screen.getvalue()
    last = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.getvalue()).splitlines()[-1]
    assert last.endswith("20/40  loss 15.500  10,000 tok/s  optimizer 20%  2 s left")
    bar = last.split("  ")[1]
    assert bar.count("━") == pytest.approx(len(bar) / 2, abs=0.5)
    assert set(bar) == {"━", "─"}


def test_the_history_has_every_validation_or_an_even_choice() -> None:
    lines = report.history(run_of([5.0, 3.0, 2.0, 2.5])).splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["0", "5.0000"],
        ["10", "5.5000", "3.0000"],
        ["20", "15.5000", "2.0000", "lowest"],
        ["30", "25.5000", "2.5000"],
    ]
    many = run_of([9.0] * 157 + [1.0] + [9.0] * 142)
    lines = report.history(many).splitlines()
    steps = [int(line.split()[0]) for line in lines[2:-1]]
    assert (steps[0], steps[-1]) == (0, 2990)
    assert 1570 in steps  # the lowest
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 160
    assert lines[-1] == f"({300 - len(steps)} more are in metrics.jsonl)"


def test_the_history_of_a_run_whose_first_metrics_are_lost() -> None:
    result = run_of([5.0, 3.0], first=100)
    assert [line.split() for line in report.history(result).splitlines()[2:]] == [
        ["100", "5.0000"],
        ["110", "5.5000", "3.0000", "lowest"],
    ]


def test_the_plot_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_of([5.0, 3.0])
    result.name = "\u76ee\u6807"  # letters that the font of matplotlib does not have
    assert report.write_loss_plot(tmp_path, result) == tmp_path / "loss.png"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.write_loss_plot(tmp_path / "nowhere", result) is None
