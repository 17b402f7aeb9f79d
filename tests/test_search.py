"""The search of hyperparameters: its plan, its runs with a stand-in for the training program, and its reports."""

from __future__ import annotations

import csv
import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from experiments import frontier, search, search_report
from experiments.frontier_chains import FRONTIER_CHAINS, cost_and_slope
from experiments.search_plan import (
    ADAMW_RUNS,
    ALTERNATIVES,
    ONE_LR,
    PLUGIN_CHAINS,
    STARTS,
    STORAGE,
    Outlook,
    Setting,
    Start,
    chains_to_compare,
    look_ahead,
    look_at_storage,
    place_of,
    rules_to_compare,
    with_one_lr,
)
from muon_fsdp.training.config import parse
from muon_fsdp.training.model import GPT, preset
from muon_fsdp.training.optimizers import make_optimizer
from muon_fsdp.training.program import main as train
from tests.training_cases import surroundings, text_fixture  # noqa: F401

FRONTIER = Path(__file__).parent.parent / "docs" / "experiments" / "frontier.csv"
START = Start(adamw_lr=0.001, rest_lr=0.004, muon_lr=0.04, num_seeds=2)
MATRIX_LR = {"adamw": 0.002, "muon": 0.04, "normuon": 0.04}


def bowl(lr: float, rest_lr: float) -> Callable[[Setting], float]:
    """Make losses whose only minimum is at these learning rates of AdamW, with all alternatives but one worse."""

    def loss(setting: Setting) -> float:
        best = lr if setting.optimizer == "adamw" else MATRIX_LR[setting.optimizer]
        distance = math.log2(setting.lr / best) ** 2 + 0.5 * math.log2(setting.rest_lr / rest_lr) ** 2
        return distance + 0.1 * (setting.weight_decay > 0.1) + 0.1 * (setting.warmup > 0.1) - (setting.beta2 > 0.95)

    return loss


def follow(loss: Callable[[Setting], float], at_once: int) -> Outlook:
    """Run the plan with made-up losses, of which `at_once` become known at a time, the last first."""
    known: dict[Setting, float] = {}
    for _ in range(100):
        outlook = look_ahead(known, START)
        if not outlook.pending:
            return outlook
        known |= {setting: loss(setting) for setting in outlook.pending[-at_once:]}
    raise AssertionError("the plan does not end")


@pytest.mark.parametrize(("lr", "rest_lr"), [(0.001, 0.004), (0.002, 0.002), (0.004, 0.008), (0.0005, 0.002)])
def test_the_plan_finds_the_best_setting_within_its_limit(lr: float, rest_lr: float) -> None:
    outlook = follow(bowl(lr, rest_lr), at_once=3)
    assert outlook.chosen["adamw"] == Setting("adamw", lr, rest_lr, beta2=ALTERNATIVES["beta2"])
    assert len(set(outlook.tried["adamw"])) == len(outlook.tried["adamw"]) <= ADAMW_RUNS
    assert [len(outlook.tried[name]) for name in ("muon", "normuon")] == [3, 3]
    assert outlook.chosen["muon"] == Setting("muon", 0.04, rest_lr, 0.01, beta2=ALTERNATIVES["beta2"])
    assert outlook.chosen[ONE_LR].has_one_lr


def test_the_plan_does_not_depend_on_the_order_of_the_runs() -> None:
    outlooks = [follow(bowl(0.002, 0.001), at_once) for at_once in (1, 2, 12)]
    assert outlooks[0] == outlooks[1] == outlooks[2]


@pytest.mark.parametrize("lr", [1e-6, 10.0])
def test_a_best_value_beyond_all_tried_is_followed_and_reported(lr: float) -> None:
    outlook = follow(bowl(lr, 0.004), at_once=4)
    values = [setting.lr for setting in outlook.tried["adamw"] if not setting.has_one_lr]
    assert len(set(values)) == 5  # two more than three, so that runs are left for the other hyperparameters
    assert outlook.chosen["adamw"].lr == (min(values) if lr < 1 else max(values))
    side = "smallest" if lr < 1 else "largest"
    assert f"is the {side} value that was tried" in place_of(outlook.chosen["adamw"].lr, values)
    assert "lies inside" in place_of(0.002, [0.001, 0.002, 0.004])


def test_runs_that_diverge_are_worse_than_all_others() -> None:
    good = bowl(0.001, 0.004)
    outlook = follow(lambda setting: math.inf if setting.lr > 0.001 else good(setting), at_once=4)
    assert outlook.chosen["adamw"].lr == 0.001
    assert outlook.chosen["muon"].lr == 0.02  # all three are infinite: the first


def test_the_training_program_accepts_every_setting() -> None:
    setting = Setting("adamw", 0.001, 0.004, 0.3, 0.2, beta2=0.98, warmup=0.25)
    config, _ = parse(["--model", "demo", *setting.flags()], "test")
    hidden, tables, vectors = make_optimizer(GPT(preset("demo")), config).param_groups
    assert [group["lr"] for group in (hidden, tables, vectors)] == [0.001, 0.004, 0.004]
    assert [group["weight_decay"] for group in (hidden, tables, vectors)] == [0.3, 0.2, 0.0]
    assert [group["betas"] for group in (hidden, tables, vectors)] == [(0.9, 0.98)] * 3
    assert config.warmup_fraction == 0.25
    assert len(tables["params"]) == 2
    assert all(parameter.ndim == 1 for parameter in vectors["params"])
    for optimizer in ("muon", "normuon"):
        config, _ = parse(["--model", "demo", *Setting(optimizer, 0.04, 0.004, 0.01, beta2=0.99).flags()], "test")
        hidden, rest = make_optimizer(GPT(preset("demo")), config).param_groups
        assert (hidden["rule"], hidden["lr"], rest["lr"]) == (optimizer, 0.04, 0.004)
        assert rest["betas"] == (0.9, 0.99)
        assert hidden.get("beta2", 0.95) == 0.95  # NorMuon's own, of the rows


def test_results_of_the_training_program_are_read(text: Path, tmp_path: Path) -> None:
    shared = ["--model", "demo", "--steps", "2", "--data", str(text), "--sequence-length", "16", "--batch-size", "4"]
    setting = with_one_lr(Setting("adamw", 0.001, 0.004), 0.002)
    output = tmp_path / "out"
    assert train([*shared, "--eval-windows", "4", *setting.flags(), "--output", str(output)]) == 0
    facts = search.result_facts(output, seconds=1.0, parallel=1)
    assert [step for step, _ in facts["evaluations"]] == [0, 2]
    assert facts["tokens_per_step"] == 64
    assert facts["training_tokens"] == pytest.approx(0.9 * text.stat().st_size, abs=1)
    assert facts["milliseconds_per_step"] > 0


# ---------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(search, "TRAINER", [sys.executable, "-S", str(Path(__file__).with_name("fake_trainer.py"))])
    monkeypatch.setattr(search, "STOPPING_SECONDS", 30.0)
    monkeypatch.setattr(search, "USEFUL_SECONDS", 0.0)
    monkeypatch.setitem(STARTS, "demo", START)
    (tmp_path / "f").mkdir()
    return tmp_path / "f"


def command(folder: Path, *more: str) -> list[str]:
    shared = ["--model", "demo", "--steps", "4", "--folder", str(folder), "--name", "found"]
    return [*shared, "--parallel", "4", *more, "--", "--batch-size", "2"]


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_a_search_runs_everything_once_and_reports_it(folder: Path) -> None:
    assert search.main(command(folder)) == 0
    started = calls(folder)
    assert len(started) == len(set(started))
    assert not any((folder / "runs").iterdir())
    with (folder / "found.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    seeds = Counter((row["optimizer"], row["seed"]) for row in rows)
    assert seeds["adamw", "0"] <= ADAMW_RUNS
    assert (seeds["muon", "0"], seeds["muon", "1"], seeds["muon", "2"]) == (3, 1, 1)
    assert seeds["adamw", "1"] == seeds["adamw", "2"] == 2  # the best, and the best with one lr
    best = {row["lr"] for row in rows if row["optimizer"] == "adamw" and row["seed"] == "2"}
    assert "0.004" in best
    assert {row["tokens"] for row in rows} == {"64"}
    with (folder / "found_curves.csv").open() as stream:
        curves = [row for row in csv.DictReader(stream) if row["run"] == "Muon"]
    assert [row["step"] for row in curves] == ["2", "4"]
    final = curves[-1]
    assert float(final["mean"]) == pytest.approx((float(final["lowest"]) + float(final["highest"])) / 2)
    assert float(final["highest"]) - float(final["lowest"]) == pytest.approx(0.01, abs=1e-4)  # of the second seed
    text = (folder / "found.md").read_text()
    assert "64 tokens, drawn at random from 1,000 (0.06 epochs)" in text
    assert "| Muon | 1.9" in text
    assert "Muon: the lr 0.02 is the smallest value that was tried" in text
    assert "AdamW: the lr of matrices 0.004 lies inside the range" in text
    assert text.count("**") == 2 * 4
    for theme in ("light", "dark"):
        assert "AdamW's final loss" in (folder / f"found-{theme}.svg").read_text()
    assert search.main(command(folder)) == 0
    assert calls(folder) == started  # nothing is run again


def times_started(folder: Path) -> Counter[str]:
    """Return how often each run was started."""
    return Counter(line.removesuffix(" resumed") for line in calls(folder))


def names_of_finished(folder: Path) -> list[str]:
    """Return the names of the runs that a search has kept."""
    runs = json.loads((folder / "search.json").read_text())["runs"]
    return [search.Job(Setting(**run["setting"]), run["seed"]).name for run in runs]


def test_an_interrupted_search_continues_where_it_stopped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped, finished = [], {}
    for part in ("-0.008-", "-w0.25"):  # the lr of the other parameters, and later the warmup
        (folder / "slow").write_text(part)
        assert search.main(command(folder)) == 3
        assert "runs are left: the same command continues" in capsys.readouterr().out
        stopped += [path for path in (folder / "runs").iterdir() if path.is_dir() and part in path.name]
        so_far = times_started(folder)  # a run that was stopped beside the slow one is started again later
        finished |= {name: so_far[name] for name in names_of_finished(folder) if name not in finished}
    assert len(stopped) == 2
    saved = stopped[1] / "checkpoints" / "step-1"
    saved.rename(saved.with_name("step-1.partial"))  # as after a kill while the checkpoint was written
    assert len(finished) > 5
    (folder / "slow").unlink()
    assert search.main(command(folder)) == 0
    again = times_started(folder)
    assert [again[path.name] for path in stopped] == [2, 2]
    assert {name: again[name] for name in finished} == finished  # what was finished was never started again
    resumed = [line.removesuffix(" resumed") for line in calls(folder) if line.endswith(" resumed")]
    assert resumed == [stopped[0].name]


def test_runs_stop_when_the_time_is_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "STOPPING_SECONDS", 0.2)
    monkeypatch.setattr(search, "TRAINER", [sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    assert search.main(command(folder, "--seconds", "0.5")) == 3
    assert names_of_finished(folder) == []


def test_a_run_that_diverges_is_a_result_and_another_failure_ends_the_search(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "fault").write_text("muon-lr0.08 1 the loss of it is nan at step 3; lower the learning rate")
    assert search.main(command(folder)) == 0
    assert "muon-lr0.08-0.002-wd0.01-0-b0.99-w0.1-seed0: diverged" in capsys.readouterr().out
    assert "| NorMuon | 0.08 | 0.002 | 0.01 | 0.99 | 0.1 | diverged |" in (folder / "found.md").read_text()
    other = folder.parent / "g"
    other.mkdir()
    (other / "fault").write_text("adamw-lr0.001 2 no such file or folder: nowhere")
    assert search.main(command(other)) == 1
    assert "ended with exit code 2: error: no such file or folder: nowhere" in capsys.readouterr().err


def test_a_folder_belongs_to_one_search(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search.main(command(folder, "--seconds", "30")) == 3  # no time for any run
    with pytest.raises(SystemExit):
        search.main([*command(folder), "--compile"])
    assert "flags is ['--batch-size', '2'] there and ['--batch-size', '2', '--compile'] here" in capsys.readouterr().err


def test_settings_have_names_of_their_own() -> None:
    settings = {
        Setting(optimizer, lr, rest, decay, rest_decay, beta2, warmup)
        for optimizer, lr, rest, decay, rest_decay, beta2, warmup in itertools.product(
            ("adamw", "muon"), (0.001, 0.0005), (0.001, 0.01), (0.1, 0.0), (0.1, 0.0), (0.95, 0.99), (0.1, 0.25)
        )
    }
    assert len({setting.slug for setting in settings}) == len(settings)


def test_the_plan_of_rules_compares_all_of_them(folder: Path) -> None:
    """Three learning rates each, three other seeds at the best, heads apart from whole weights, and ties by name."""
    rules = [*command(folder)[:-3], "--plan", "rules", "--", "--batch-size", "2"]
    (folder / "slow").write_text("hyperball-lr0.04")
    assert search.main(rules) == 3
    (folder / "slow").unlink()
    assert search.main(rules) == 0
    with (folder / "found.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    runs = Counter((row["optimizer"], row["attention"], row["seed"]) for row in rows)
    names = ("adamw", "muon", "normuon", "hyperball", "spectral_sphere")
    whole = {(name, "split", str(seed)): 1 if seed else 3 for name in names for seed in range(4)}
    heads = {(name, "per_head", str(seed)): 1 if seed else 3 for name in names[1:3] for seed in range(4)}
    assert runs == whole | heads | {key: 2 * count for key, count in whole.items() if key[0] in ("adamw", "muon")}
    cautious = Counter((row["optimizer"], row["cautious"], row["seed"]) for row in rows)
    assert [cautious[name, "True", seed] for name in ("adamw", "muon") for seed in "0123"] == 2 * [3, 1, 1, 1]
    assert {row["rest_lr"] for row in rows} == {"0.004"}  # that of AdamW's start, in every run
    text = (folder / "found.md").read_text()
    assert "The lowest mean is that of NorMuon per head. No other range overlaps." in text
    assert "| Muon per head | " in text
    assert "| Muon with cautious decay | " in text
    assert text.count("\n- ") == 10  # a line for the learning rate of each, and a second one for AdamW's
    assert search.main(rules) == 0
    assert max(times_started(folder).values()) <= 2  # one that was stopped; nothing is run again
    with pytest.raises(SystemExit):
        search.main([*rules[:-3], "--compare", "adamw,shampoo", *rules[-3:]])


def test_the_plan_of_chains_compares_them_over_seeds(folder: Path) -> None:
    """Three learning rates each, all of them first, then five other seeds, and what ties by the standard error."""
    chains = [*command(folder)[:-3], "--plan", "chains", "--", "--batch-size", "2"]
    (folder / "slow").write_text("fast-lr0.04")
    assert search.main(chains) == 3
    (folder / "slow").unlink()
    assert search.main(chains) == 0
    assert max(times_started(folder).values()) <= 2  # one that was stopped; nothing is run again
    names = [line.removesuffix(" resumed") for line in calls(folder)]
    settings = len(chains_to_compare("demo"))
    assert len(set(names)) == settings * 3 + settings * 5
    seeds = [int(name[-1]) for name in dict.fromkeys(names)]  # several runs start at once: nearly in order
    assert set(seeds[: settings * 3 - 4]) == {0}
    assert all(later >= earlier for earlier, later in zip(seeds, seeds[5:], strict=False))  # seed by seed
    with (folder / "found_means.csv").open() as stream:
        rows = {(row["optimizer"], row["chain"]): row for row in csv.DictReader(stream)}
    assert len(rows) == settings
    fast, keller = rows["muon", "fast"], rows["muon", "keller"]
    assert (fast["products"], fast["slope"], fast["lr"], fast["seeds"]) == ("7", "656.5", "0.02", "5")
    assert (keller["products"], keller["minus_keller"]) == ("10", "0.00000")
    # The losses of fast over seeds 1 to 5 differ from Keller's by -0.0025 and -0.0005 in turn.
    assert float(fast["minus_keller"]) == pytest.approx(-0.0017, abs=1e-5)
    assert float(fast["error_minus_keller"]) == pytest.approx(0.001 * math.sqrt(1.2 / 5), abs=1e-5)
    means = {chain: float(rows["muon", chain]["mean"]) for chain in ("fast", "accurate")}
    assert float(fast["minus_accurate"]) == pytest.approx(means["fast"] - means["accurate"], abs=2e-5)
    assert float(fast["mean"]) == pytest.approx(float(keller["mean"]) - 0.0017, abs=1e-5)
    assert float(keller["standard_error"]) == pytest.approx(0.01 * math.sqrt(2.5 / 5), abs=1e-5)
    text = (folder / "found.md").read_text()
    assert "| Muon, 17 | 17 | 6 | 207 | 0.02 | " not in text  # a bar would end the cell
    assert r"| Muon, 17 \| 17 | 6 | 207 | 0.02 | " in text
    assert (
        "The lowest mean is that of Muon, Polar Express. A tie, within 2 standard errors of the difference over the "
        in text
    )
    assert r": Muon, accurate, Muon, fast (33 \| 33), Muon, 33 \| 17, Muon, 65 \| 65." in text
    assert "17 | 17" in (folder / "found-dark.svg").read_text()
    assert search.main(chains) == 0
    assert calls(folder)[len(names) :] == []  # nothing is run again


def test_the_training_program_accepts_the_chains() -> None:
    for setting in chains_to_compare("small").values():
        if setting.orthogonalization not in PLUGIN_CHAINS:
            config, _ = parse(["--model", "small", *setting.flags()], "test")
            assert config.optimizer == setting.optimizer
            assert config.options["orthogonalization"] == setting.orthogonalization


def test_a_chain_of_the_frontier_trains(text: Path, tmp_path: Path) -> None:
    """In a process of its own, because the plugin adds to what the package knows."""
    flags = chains_to_compare("demo")["muon-65-65"].flags()
    shared = ["--model", "demo", "--steps", "2", "--data", str(text), "--sequence-length", "16", "--batch-size", "4"]
    command = [*search.TRAINER, *shared, *flags, "--output", str(tmp_path / "out")]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    start = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert start["config"]["options"]["orthogonalization"] == "65-65"


@pytest.mark.parametrize("name", list(FRONTIER_CHAINS))
def test_the_chains_of_the_plugin_are_those_of_the_frontier(name: str) -> None:
    steps = FRONTIER_CHAINS[name].steps
    (row,) = [row for row in frontier.read(FRONTIER) if row["chain"] == name.replace("-", "|")]
    numbers = (*frontier.band(steps), *cost_and_slope(name))
    assert numbers == pytest.approx([float(row[each]) for each in ("lower", "low", "high", "cost", "slope")], rel=1e-4)


def test_ties_are_counted_by_the_standard_error_of_paired_differences() -> None:
    keller, close, worse = (
        band("muon", *losses, orthogonalization=chain)
        for chain, losses in (
            ("keller", (2.0, 2.1, 2.2)),
            ("fast", (2.003, 2.099, 2.203)),  # differs by 0.0017 +- 0.0013
            ("accurate", (2.003, 2.104, 2.203)),  # differs by 0.0033 +- 0.0003, far less than seeds differ
        )
    )
    assert search_report.difference(worse, keller) == pytest.approx((0.00333, 0.00033), abs=1e-5)
    text = search_report._ties_by_error([keller, close, worse])
    assert "lowest mean is that of Muon, Keller. A tie" in text
    assert text.endswith(r"same seeds: Muon, fast (33 \| 33).")
    alone = band("muon", 2.3, orthogonalization="polar_express")
    assert "Too few common seeds to tell: Muon, Polar Express." in search_report._ties_by_error([keller, alone])


def band(optimizer: str, *losses: float, orthogonalization: str = "default") -> search_report.Band:
    """Return a band with one run for each loss."""
    facts = {"steps": 4, "tokens_per_step": 8, "milliseconds_per_step": None, "parallel": 1}
    setting = Setting(optimizer, 0.1, 0.1, orthogonalization=orthogonalization)
    runs = [
        search_report.Finished(setting, seed, ((0, 3.0), (4, x)), False, 1.0, facts) for seed, x in enumerate(losses)
    ]
    return search_report.Band(setting.name, setting, tuple(runs))


def test_ranges_that_overlap_are_a_tie() -> None:
    text = search_report._ties([band("adamw", 2.2, 2.3), band("muon", 2.0, 2.1), band("normuon", 2.09, 2.2)])
    assert text == "The lowest mean is that of Muon. A tie, because ranges overlap: NorMuon."


def test_the_training_program_accepts_the_rules() -> None:
    for setting in rules_to_compare("small").values():
        config, _ = parse(["--model", "small", *setting.flags()], "test")
        assert (config.optimizer, config.attention) == (setting.optimizer, setting.attention)
        assert (setting.rest_lr, setting.warmup) == (0.008, 0.25)
        assert config.matrix_options.get("cautious_weight_decay", False) == setting.cautious


def test_the_plan_of_storage_runs_every_way_with_three_seeds(folder: Path) -> None:
    storage = [*command(folder)[:-3], "--plan", "storage", "--", "--batch-size", "2"]
    assert search.main(storage) == 0
    with (folder / "found.csv").open() as stream:
        runs = Counter((row["storage"], row["lr"], row["seed"]) for row in csv.DictReader(stream))
    assert runs == {(name, "0.04", str(seed)): 1 for name in STORAGE for seed in (1, 2, 3)}
    text = (folder / "found.md").read_text()
    assert "| int8 state | 2.1" in text
    assert "A tie, because ranges overlap: bfloat16 state, int8 state, bf16 weights, nearest" in text
    assert "range that was tried" not in text
    assert "int8 state, bf16 weights, stochastic: 2.1" in (folder / "found-light.svg").read_text()
    assert search.main(storage) == 0
    assert max(times_started(folder).values()) == 1


def test_the_training_program_accepts_every_way_to_store() -> None:
    for setting in look_at_storage("small").chosen.values():
        config, _ = parse(["--model", "demo", *setting.flags()], "test")
        groups = make_optimizer(GPT(preset("demo")).to(getattr(torch, config.weights)), config).param_groups
        stored = {(group["state_dtype"], group["rounding"]) for group in groups}
        assert stored == {(config.state_dtype, config.rounding)}
        assert (config.lr, config.rest_lr) == (0.04, 0.008)
