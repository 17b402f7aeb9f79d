"""The command `muon-fsdp`: how it starts, its help, mistakes as one line, tables and status lines for a terminal."""

from __future__ import annotations

import sys

import pytest

import muon_fsdp
from muon_fsdp.cli import main, output
from muon_fsdp.training import terminal
from tests.cli_cases import subprocess_run


def test_help_does_not_import_torch():
    code = "import sys; from muon_fsdp.cli import main; sys.argv = ['muon-fsdp', '--help']\ntry: main()\nfinally: "
    done = subprocess_run("-c", code + "print('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    assert all(command in done.stdout for command in ("plan", "doctor", "bench"))


def test_the_package_gives_its_names_when_asked():
    assert set(muon_fsdp.__all__) <= set(dir(muon_fsdp))
    for name in set(muon_fsdp.__all__) - {"recipes"}:
        assert getattr(muon_fsdp, name).__name__ == name
    assert "moonlight" in muon_fsdp.recipes
    with pytest.raises(AttributeError, match="no attribute 'Muon'"):
        muon_fsdp.Muon  # noqa: B018


def test_without_the_extra_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == 'error: muon-fsdp needs typer; install with: pip install "muon_fsdp[cli]"\n'


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["plan", "gtp2-124m", "--world-size", "8"], "unknown model 'gtp2-124m'; did you mean gpt2-124m?"),
        (["plan", "gpt2-124m", "--world-size", "many"], "Invalid value for '--world-size': "),
        (["plan"], "pass a model, such as gpt2-124m; muon-fsdp plan --list shows all that have a name"),
        (["compare"], "Missing argument 'RUN RUN...' (see muon-fsdp compare --help)"),
        (["doctor", "--jsn"], "No such option: --jsn"),
        (["plan", "--model", "demo"], "No such option: --model; pass MODEL without a flag (see muon-fsdp plan --help)"),
        (["plan", "demo", "--optimizer", "sso"], "No such option: --optimizer; pass --rule (see"),
        (["plan", "demo", "--ns-steps", "3"], "No such option: --ns-steps; to plan other options, call plan_report()"),
        (["plan", "demo", "--overlap", "step"], "No such option: --overlap; to plan other options"),
        (["plan", "demo", "--recipe", "moonlight"], "No such option: --recipe; to plan other options"),
        (["plam"], "No such command 'plam'"),
    ],
)
def test_the_entry_point_exits_with_2_after_a_mistake(monkeypatch, capsys, args, says):
    monkeypatch.setattr(sys, "argv", ["muon-fsdp", *args])
    assert main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.lower().startswith(f"error: {says}".lower())


def test_help_and_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["muon-fsdp", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"muon_fsdp {muon_fsdp.__version__}\n"
    monkeypatch.setattr(sys, "argv", ["muon-fsdp"])
    assert main() == 0
    assert "Usage: muon-fsdp" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["", "plan", "bench", "doctor", "compare", "train"])
def test_flags_show_no_type_and_help_fits_a_narrow_terminal(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "argv", ["muon-fsdp", *filter(None, [command]), "--help"])
    assert main() == 0
    text = capsys.readouterr().out
    assert "--help" in text
    assert "bool" not in text
    assert max(map(len, text.splitlines())) <= 60
    assert command == "train" or "…" not in text  # of a word that was cut


def test_tables_for_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    terminal.print_table("Title [x]", ("name", "number"), [("[red]a", "1")])
    text = capsys.readouterr().out
    assert "Title [x]" in text
    assert "│ [red]a │      1 │" in text


def test_a_status_line_for_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with output.status("working"):
        pass
    assert capsys.readouterr().out == ""
