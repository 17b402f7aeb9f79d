"""`muon-fsdp compare`: the table, the plot, the notes and the mistakes; and `muon-fsdp train --help`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muon_fsdp.cli.app import app
from tests.cli_cases import error_of, folder_fixture, run, subprocess_run  # noqa: F401


def write_run(folder: Path, name: str, losses: list[float], data: str | None = None) -> None:
    """Write the metrics of a run with a validation after every tenth step, as the training program does."""
    groups = [{"rule": "muon", "num_tensors": 1, "num_parameters": 4, "lr": 0.02, "weight_decay": 0.0}]
    config, model = {"data": data, "eval_windows": 64}, {"sequence_length": 128, "vocab_size": 256}
    start = {"kind": "start", "name": name, "groups": groups, "config": config, "model": model, "resumed_from": None}
    lines = [start, {"kind": "validation", "step": 0, "loss": 5.0}]
    for number, loss in enumerate(losses, start=1):
        times = {"seconds": 0.1, "optimizer_seconds": 0.025}
        train = {"kind": "train", "loss": loss + 0.5, "lr": 0.02, "gradient_norm": 1.0, **times}
        lines += [train | {"step": step} for step in range(10 * number - 9, 10 * number + 1)]
        lines.append({"kind": "validation", "step": 10 * number, "loss": loss})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_table_and_a_plot(folder: Path) -> None:
    write_run(folder / "slow", "AdamW", [4.0, 3.0])
    write_run(folder / "fast", "Muon", [3.0, 2.0], data="texts")
    printed = run("compare", "slow", "fast").stdout
    assert max(map(len, printed.partition("\n\n")[0].splitlines())) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[3:5]}
    assert rows == {
        "AdamW": ["20", "3.500", "3.000", "3.000", "20", "100", "25%"],
        "Muon": ["20", "2.500", "2.000", "2.000", "10", "100", "25%"],
    }
    assert "Muon reached AdamW's final validation loss of 3.000 after 10 of 20 steps" in printed
    assert "note: the runs differ in --data, so their losses may not be comparable" in printed
    assert printed.endswith("wrote compare.png\n")
    assert Path("compare.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_name_are_told_apart_by_their_folders(folder: Path) -> None:
    for number in range(9):  # more runs than colours
        write_run(folder / "runs" / str(number), "Muon", [3.0 - 0.1 * number])
    runs = [f"runs/{number}" for number in range(9)]
    found = json.loads(run("compare", *runs, "--json").stdout)
    assert [figures["name"] for figures in found] == runs
    assert [figures["final_validation_loss"] for figures in found] == pytest.approx([3.0 - 0.1 * n for n in range(9)])
    assert not Path("compare.png").exists()
    run("compare", *runs, "--plot", "all.png")
    assert Path("all.png").exists()


def test_the_loss_of_a_run_that_diverged_is_null_in_json(folder: Path) -> None:
    write_run(folder / "good", "Muon", [3.0, 2.0])
    write_run(folder / "bad", "AdamW", [3.0, float("nan")])
    good, bad = json.loads(run("compare", "good", "bad", "--json").stdout)
    assert (good["final_validation_loss"], bad["final_validation_loss"]) == (2.0, None)
    assert [each["loss"] for each in bad["evaluations"]] == [5.0, 3.0, None]
    assert "nan" in run("compare", "good", "bad").stdout


def test_missing_files_are_called_missing(folder: Path) -> None:
    write_run(folder / "run", "Muon", [3.0])
    (folder / "other").mkdir()
    assert "no such folder: nowhere" in error_of("compare", "run", "nowhere")
    assert "no such file: other/metrics.jsonl" in error_of("compare", "run", "other")
    assert "at least two runs" in error_of("compare", "run")
    assert "--plot: no such folder: " in error_of("compare", "run", "run", "--plot", "nowhere/a.png")
    (folder / "other" / "metrics.jsonl").write_text("{}\n")
    assert "is not the record of a run" in error_of("compare", "run", "other")
    write_run(folder / "new", "Muon", [])
    assert "new has no step yet" in error_of("compare", "run", "new")


def test_compare_does_not_import_torch(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, "Muon", [3.0])
    code = (
        "import sys; from muon_fsdp.cli import main\n"
        f"sys.argv = ['muon-fsdp', 'compare', r'{tmp_path}/one', r'{tmp_path}/two', '--json']\n"
        "main(); print('torch' in sys.modules)"
    )
    done = subprocess_run("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("command", [[], *([info.callback.__name__] for info in app.registered_commands)])
def test_every_help_has_examples_in_one_style(command: list[str]) -> None:
    printed = run(*command, "--help").stdout
    assert printed.strip().startswith("Usage: ")
    assert "╭─ Options ─" in printed
    lines = printed.partition("Examples:")[2].splitlines()
    assert sum(line.strip().startswith("$ ") for line in lines) >= 3
    assert max(map(len, printed.splitlines())) <= 80


def test_the_help_of_train_has_every_flag(folder: Path) -> None:
    printed = run("train", "--help").stdout
    for flag in ("--model", "--processes", "--no-nesterov", "--betas", "--lambda-mode", "--set", "-h, --help"):
        assert f"│ {flag}" in printed
    assert "[default: small]" in printed
    assert "(default:" not in printed
    assert "%(default)s" not in printed
    (folder / "mine.py").write_text("x = 1\n")
    assert "registers no rule" in run("train", "--plugin", "mine.py", code=2).stderr
