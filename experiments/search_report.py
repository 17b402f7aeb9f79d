"""Write what a search of hyperparameters has found: CSV files, markdown tables and a plot with bands over seeds."""

from __future__ import annotations

import csv
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from experiments.frontier_chains import cost_and_slope
from experiments.plots import Curve, Panel, draw_curves, draw_panels
from experiments.search_plan import CHAINS, ONE_LR, SEARCH_SEED, Outlook, Setting, place_of

TITLES = {
    "adamw": "AdamW", ONE_LR: "AdamW, one lr", "muon": "Muon", "normuon": "NorMuon", "muon-per-head": "Muon per head",
    "normuon-per-head": "NorMuon per head", "adamw-cautious": "AdamW with cautious decay",
    "muon-cautious": "Muon with cautious decay", "hyperball": "Hyperball", "spectral_sphere": "SSO",
    "float32": "float32 state", "bfloat16": "bfloat16 state", "int8": "int8 state", "nearest": "bf16 weights, nearest",
    "stochastic": "bf16 weights, stochastic", "remainder": "bf16 weights, remainder",
    "int8-stochastic": "int8 state, bf16 weights, stochastic",
}  # fmt: skip
CHAIN_TITLES = {
    "keller": "Keller", "polar_express": "Polar Express", "accurate": "accurate", "fast": r"fast (33 \| 33)",
    "17-17": r"17 \| 17", "33-17": r"33 \| 17", "65-65": r"65 \| 65",
}  # fmt: skip
TITLES |= {f"{name}-{chain}": f"{TITLES[name]}, {CHAIN_TITLES[chain]}" for name in CHAINS for chain in CHAINS[name]}
BASELINES = ("keller", "accurate")  # the chains that all are compared with
TIE = 2.0  # standard errors: a smaller difference is a tie
COLUMNS = {
    "lr": "lr of matrices", "rest_lr": "lr of others", "weight_decay": "weight decay", "beta2": "beta2",
    "warmup": "warmup",
}  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """The result of one run."""

    setting: Setting
    seed: int
    evaluations: tuple[tuple[int, float], ...]  # step and validation loss
    diverged: bool
    seconds: float
    facts: Mapping[str, Any]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Finished:
        """Make a result from the document that records it."""
        evaluations = tuple((step, loss) for step, loss in document["evaluations"])
        setting = Setting(**document["setting"])
        return cls(setting, document["seed"], evaluations, document["diverged"], document["seconds"], document)

    @property
    def final_loss(self) -> float:
        """Return the validation loss after the last step, which is infinite if the run diverged."""
        return math.inf if self.diverged else self.evaluations[-1][1]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the whole run."""
        return int(self.facts["steps"] * self.facts["tokens_per_step"])


@dataclass(frozen=True)
class Band:
    """The validation losses of one setting over its seeds: the mean, the lowest and the highest at every step."""

    name: str
    setting: Setting
    runs: tuple[Finished, ...]

    @property
    def curve(self) -> Curve:
        """Return the curve as `draw_curves` wants it, without the loss before the first step."""
        steps = [step for step, _ in self.runs[0].evaluations[1:]]
        losses = list(zip(*([loss for _, loss in run.evaluations[1:]] for run in self.runs), strict=True))
        means = [sum(each) / len(each) for each in losses]
        return TITLES[self.setting.name], steps, means, [min(each) for each in losses], [max(each) for each in losses]

    @property
    def final(self) -> tuple[float, float, float]:
        """Return the mean, the lowest and the highest loss after the last step."""
        _, _, mean, low, high = self.curve
        return mean[-1], low[-1], high[-1]

    def first_step_at(self, loss: float) -> int | None:
        """Return the first validation at which the mean over the seeds is at most `loss`, or None."""
        _, steps, mean, _, _ = self.curve
        return next((int(step) for step, value in zip(steps, mean, strict=True) if value <= loss), None)


def bands(outlook: Outlook, done: Sequence[Finished]) -> list[Band]:
    """Return the chosen settings that have been run with other seeds than that of the search."""
    found = []
    for name, setting in outlook.chosen.items():
        runs = [run for run in done if run.setting == setting and run.seed != SEARCH_SEED and not run.diverged]
        if runs and not any(band.setting == setting for band in found):
            found.append(Band(name, setting, tuple(sorted(runs, key=lambda run: run.seed))))
    return found


def write_runs(path: Path, done: Sequence[Finished]) -> None:
    """Write every run as a line of a CSV file, which is replaced as a whole."""
    names = [field.name for field in fields(Setting)]
    measured = ("milliseconds_per_step", "parallel", "device")
    ordered = sorted(done, key=lambda run: (run.seed != SEARCH_SEED, *map(str, astuple(run.setting)), run.seed))
    aside = path.with_suffix(".partial")
    with aside.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*names, "seed", "steps", "tokens", "validation_loss", *measured])
        for run in ordered:
            loss = "diverged" if run.diverged else f"{run.final_loss:.5f}"
            timed = [f"{value:.2f}" if isinstance(value := run.facts[name], float) else value for name in measured]
            writer.writerow([*astuple(run.setting), run.seed, run.facts["steps"], run.num_tokens, loss, *timed])
    os.replace(aside, path)


def write_reports(stem: Path, outlook: Outlook, done: Sequence[Finished], facts: Mapping[str, Any]) -> None:
    """Write all files of a search, also of one that is not finished.

    Args:
        stem: their path without suffix.
        outlook: what the plan has chosen so far.
        done: the finished runs.
        facts: the model, the steps and the flags of all runs.
    """
    if not done:
        return
    compared = bands(outlook, done)
    write_runs(Path(f"{stem}.csv"), done)
    Path(f"{stem}.md").write_text(report(outlook, done, compared, facts))
    if not compared:
        return
    run = done[0].facts
    length = f"{run['steps']:,} steps of {run['tokens_per_step']:,} tokens"
    title = f"GPT of {run['num_parameters'] / 1e6:.1f}M parameters, {length}"
    if facts.get("plan") == "chains":
        _write_means(Path(f"{stem}_means.csv"), compared)
        write_plot_of_chains(stem, title)
        return
    _write_curves(Path(f"{stem}_curves.csv"), compared)
    write_plot(stem, title)


def write_plot(stem: Path, title: str) -> None:
    """Plot the curves of a search, which are in the CSV file beside the plot.

    Args:
        stem: the path of the files of the search without suffix.
        title: the model and the length of the runs.
    """
    with Path(f"{stem}_curves.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    curves: dict[str, Curve] = {}
    for name in dict.fromkeys(line["run"] for line in lines):
        of_run = [line for line in lines if line["run"] == name]
        columns = [[float(line[column]) for line in of_run] for column in ("step", "mean", "lowest", "highest")]
        curves[name] = (name.partition(",")[0], *columns)
    seeds = max(int(line["seeds"]) for line in lines)
    baseline = curves.get(TITLES["adamw"])
    labels = {name: f"{name}: {curve[2][-1]:.3f}" for name, curve in curves.items()}
    draw_curves(
        stem,
        {labels[name]: curve for name, curve in curves.items()},
        title=f"{title}, mean and range of {seeds} seed{'s' if seeds > 1 else ''}",
        target=None if baseline is None else baseline[2][-1],
        target_label="AdamW's final loss",
        marked=labels.get(TITLES["muon"]),
    )


def _write_curves(path: Path, compared: Sequence[Band]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["run", "step", "mean", "lowest", "highest", "seeds"])
        for band in compared:
            _, *columns = band.curve
            for step, *losses in zip(*columns, strict=True):
                writer.writerow([TITLES[band.name], step, *(f"{loss:.5f}" for loss in losses), len(band.runs)])


# -------------------------------------------------------------------------------------------------------------- chains


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, which is NaN for a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def difference(band: Band, other: Band) -> tuple[float, float] | None:
    """Return by how much the loss of `band` is larger, over the seeds that both have, and the standard error of that.

    Runs of one seed have the same initial weights and data, so they vary together.
    """
    losses = {run.seed: run.final_loss for run in other.runs}
    differences = [run.final_loss - losses[run.seed] for run in band.runs if run.seed in losses]
    return mean_and_error(differences) if differences else None


def _difference_from(chain: str, band: Band, compared: Sequence[Band]) -> tuple[float, float] | None:
    """Return the `difference` of a band from that of the same optimizer with this chain."""
    name = f"{band.setting.optimizer}-{chain}"
    return next((difference(band, each) for each in compared if each.name == name), None)


def _write_means(path: Path, compared: Sequence[Band]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        columns = ("optimizer", "chain", "products", "slope", "lr", "seeds", "mean", "standard_error")
        against = [f"{what}_{chain}" for chain in BASELINES for what in ("minus", "error_minus")]
        writer.writerow([*columns, *against])
        for band in compared:
            setting = band.setting
            losses = mean_and_error([run.final_loss for run in band.runs])
            differences = [_difference_from(chain, band, compared) or (math.nan, math.nan) for chain in BASELINES]
            cost, slope = cost_and_slope(setting.orthogonalization)
            facts = (setting.optimizer, setting.orthogonalization, f"{cost:g}", f"{slope:.1f}", f"{setting.lr:g}")
            numbers = [f"{value:.5f}" for pair in (losses, *differences) for value in pair]
            writer.writerow([*facts, len(band.runs), *numbers])


def write_plot_of_chains(stem: Path, title: str) -> None:
    """Plot the mean loss of each chain with its standard error, from the CSV file beside the plot.

    Args:
        stem: the path of the files of the search without suffix.
        title: the model and the length of the runs.
    """
    with Path(f"{stem}_means.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    lines.sort(key=lambda line: float(line["slope"]))
    chains = list(dict.fromkeys(line["chain"] for line in lines))
    places = {chain: 2.0**number for number, chain in enumerate(chains)}  # Panel moves bars apart on a logarithmic axis
    facts = {line["chain"]: f"{line['products']} products\nslope {float(line['slope']):.0f}" for line in lines}
    curves: dict[str, Curve] = {}
    for optimizer in dict.fromkeys(line["optimizer"] for line in lines):
        own = [line for line in lines if line["optimizer"] == optimizer]
        means = [float(line["mean"]) for line in own]
        errors = [0.0 if math.isnan(error := float(line["standard_error"])) else error for line in own]
        lows, highs = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        name = TITLES[optimizer]
        curves[name] = (name, [places[line["chain"]] for line in own], means, lows, highs)
    panel = Panel(
        curves,
        y_label="validation loss (nats per token)",
        x_scale="log",
        x_ticks={places[chain]: f"{_short_title(chain)}\n{facts[chain]}" for chain in chains},
        markers=True,
        spread=True,
    )
    draw_panels(stem, [panel], title=f"{title},\nmean and standard error over seeds")


def _short_title(chain: str) -> str:
    """Return the title of a chain for a plot, without its degrees if it has another name."""
    return CHAIN_TITLES[chain].partition(" (")[0].replace("\\", "")


def _comparison_of_chains(compared: Sequence[Band]) -> str:
    """Return the table of the chains over their seeds, and for each optimizer which of them tie."""
    if not compared:
        return ""
    header = ["optimizer and chain", "products, square", "slope at zero", "lr", "validation loss, mean", "seeds"]
    header += [f"minus {CHAIN_TITLES[chain]}, same seeds" for chain in BASELINES]
    rows = [header, len(header) * ["---"]]
    for band in compared:
        setting = band.setting
        cost, slope = cost_and_slope(setting.orthogonalization)
        loss = _with_error(*mean_and_error([run.final_loss for run in band.runs]))
        row = [TITLES[band.name], f"{cost:g}", f"{slope:.0f}", f"{setting.lr:g}", loss, str(len(band.runs))]
        for chain in BASELINES:
            against = None if chain == setting.orthogonalization else _difference_from(chain, band, compared)
            row.append("-" if against is None else _with_error(*against, sign="+"))
        rows.append(row)
    optimizers = dict.fromkeys(band.setting.optimizer for band in compared)
    ties = [_ties_by_error([band for band in compared if band.setting.optimizer == each]) for each in optimizers]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return table + "\n\n" + "\n".join(ties) + "\n"


def _with_error(mean: float, error: float, sign: str = "") -> str:
    return f"{mean:{sign}.4f}" if math.isnan(error) else f"{mean:{sign}.4f} ± {error:.4f}"


def _ties_by_error(compared: Sequence[Band]) -> str:
    """Return which chain has the lowest mean, and which others tie with it by the standard error of the difference."""
    best = min(compared, key=lambda band: band.final[0])
    tied, unknown = [], []
    for band in compared:
        against = None if band is best else difference(band, best)
        if against is None or math.isnan(against[1]):
            unknown += [TITLES[band.name]] if band is not best else []
        elif against[0] <= TIE * against[1]:
            tied.append(TITLES[band.name])
    within = f"within {TIE:g} standard errors of the difference over the same seeds"
    text = f"The lowest mean is that of {TITLES[best.name]}. "
    text += f"A tie, {within}: {', '.join(tied)}." if tied else f"No other is {within}."
    return text + (f" Too few common seeds to tell: {', '.join(unknown)}." if unknown else "")


# -------------------------------------------------------------------------------------------------------------- tables


def report(outlook: Outlook, done: Sequence[Finished], compared: Sequence[Band], facts: Mapping[str, Any]) -> str:
    """Return the markdown text: the data, the comparison over seeds, every setting that was tried, and its limits."""
    of_chains = facts.get("plan") == "chains"
    comparison = _comparison_of_chains(compared) if of_chains else _comparison(compared)
    parts = [_data(done[0], facts), comparison, _diverged(outlook, done), _trials(outlook, done), _places(outlook)]
    return "\n".join(part for part in parts if part)


def _data(run: Finished, facts: Mapping[str, Any]) -> str:
    size = run.facts["training_tokens"]
    return (
        f"{run.facts['num_parameters']:,} parameters (`--model {facts['model']}`), {run.facts['steps']:,} steps of "
        f"{run.facts['tokens_per_step']:,} tokens: {run.num_tokens:,} tokens, drawn at random from {size:,} "
        f"({run.num_tokens / size:.2f} epochs). Flags of all runs: `{' '.join(facts['flags'])}`.\n"
    )


def _comparison(compared: Sequence[Band]) -> str:
    """Return the table of the chosen settings over their seeds."""
    baseline = next((band for band in compared if band.name in ("adamw", "float32")), None)
    if baseline is None:
        return ""
    goal = baseline.final[0]
    rows = [
        f"| optimizer | validation loss, mean (lowest to highest) | seeds | first validation at or below {goal:.3f} "
        "| ms per step |",
        "|---|---|---|---|---|",
    ]
    for band in compared:
        mean, low, high = band.final
        steps, reached = band.runs[0].facts["steps"], band.first_step_at(goal)
        share = "never" if reached is None else f"step {reached}, {reached / steps:.0%} of the tokens"
        rows.append(
            f"| {TITLES[band.name]} | {mean:.3f} ({low:.3f} to {high:.3f}) | {len(band.runs)} | {share} "
            f"| {_milliseconds(band.runs)} |"
        )
    return "\n".join(rows) + f"\n\n{_ties(compared)}\n"


def _ties(compared: Sequence[Band]) -> str:
    """Return which setting has the lowest mean, and which others tie with it because their ranges overlap."""
    best = min(compared, key=lambda band: band.final[0])
    tied = [TITLES[band.name] for band in compared if band is not best and band.final[1] <= best.final[2]]
    text = f"The lowest mean is that of {TITLES[best.name]}."
    return f"{text} A tie, because ranges overlap: {', '.join(tied)}." if tied else f"{text} No other range overlaps."


def _diverged(outlook: Outlook, done: Sequence[Finished]) -> str:
    """Return which runs of the chosen settings diverged: their losses are in no mean."""
    runs = [
        f"{TITLES[name]}, seed {run.seed}"
        for name, setting in outlook.chosen.items()
        for run in done
        if run.diverged and run.setting == setting
    ]
    return f"Diverged, and left out of the means: {'; '.join(runs)}.\n" if runs else ""


def _milliseconds(runs: Sequence[Finished]) -> str:
    times = [run.facts["milliseconds_per_step"] for run in runs if run.facts["milliseconds_per_step"] is not None]
    together = max(run.facts["parallel"] for run in runs)
    beside = "" if together == 1 else f", {together} runs at once"
    return f"{sum(times) / len(times):.1f}{beside}" if times else "-"


def _trials(outlook: Outlook, done: Sequence[Finished]) -> str:
    """Return the table of every setting of the search; the chosen ones are bold."""
    losses = {run.setting: run.final_loss for run in done if run.seed == SEARCH_SEED}
    rows = [f"| optimizer | {' | '.join(COLUMNS.values())} | validation loss |", "|---" * (len(COLUMNS) + 2) + "|"]
    tried = [setting for settings in outlook.tried.values() for setting in settings if setting in losses]
    if not tried:
        return ""
    rows += [_trial(setting, losses[setting], setting in outlook.chosen.values()) for setting in tried]
    return "\n".join(rows) + "\n"


def _trial(setting: Setting, loss: float, is_chosen: bool) -> str:
    values = {name: f"{getattr(setting, name):g}" for name in COLUMNS}
    if setting.rest_weight_decay:
        values["weight_decay"] += ", embedding and head too"
    shown = "diverged" if math.isinf(loss) else f"{loss:.4f}"
    name = TITLES[ONE_LR if setting.optimizer == "adamw" and setting.has_one_lr else setting.name]
    return f"| {name} | {' | '.join(values.values())} | {f'**{shown}**' if is_chosen else shown} |"


def _places(outlook: Outlook) -> str:
    """Return for every optimizer whether the chosen values lie inside the range that was tried."""
    lines = []
    for name, chosen in outlook.chosen.items() if outlook.tried else ():
        tried = [each for each in outlook.tried[chosen.name] if each.has_one_lr == chosen.has_one_lr]
        coordinates = {"lr": "lr of matrices", "rest_lr": "lr of others"} if name == "adamw" else {"lr": "lr"}
        for field, title in coordinates.items():
            values = [getattr(each, field) for each in tried]
            lines.append(f"- {TITLES[name]}: the {title} {place_of(getattr(chosen, field), values)}.")
    return "\n".join(lines) + "\n"
