"""Writes docs/options.md: every option with its meaning, and the defaults of all constructors side by side.

python docs/generate_options.py            # write the page
python docs/generate_options.py --check    # exit with 1 if the page is not what would be written
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from api_entries import BUILT_IN, GROUP_OPTIONS, names_of_options, rule_table
from api_markdown import code_value, parse, table
from generated_page import write_or_check
from torch import nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer, create_hybrid_optimizer

PAGE = Path(__file__).with_name("options.md")

# The constructors with the heads of their columns.
CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "Muon": MuonOptimizer,
    "FSDPMuon": FSDPMuonOptimizer,
    "Sphere": SpectralSphereOptimizer,
    "hybrid": create_hybrid_optimizer,
}
# What a constructor does not pass on to MuonOptimizer, and what it calls otherwise.
REFUSED = {"Sphere": ("scale", "ns_stepsize", "cautious_weight_decay", "rule"), "hybrid": ("lr",)}
RENAMED = {("hybrid", "muon_lr"): "lr"}
NOT_OPTIONS = ("params", "model", "options")

INTRODUCTION = """\
# Options and defaults

<!-- Written by docs/generate_options.py from signatures and docstrings: edit those, then run it. -->

Four constructors build the same optimizer, with different **defaults**:

- **Muon**: [`MuonOptimizer`](api.md#muonoptimizer), without weight decay and Nesterov momentum.
- **FSDPMuon**: [`FSDPMuonOptimizer`](api.md#fsdpmuonoptimizer), with both.
- **Sphere**: [`SpectralSphereOptimizer`](api.md#spectralsphereoptimizer), which is `MuonOptimizer` with rule
  `"spectral_sphere"`.
- **hybrid**: [`create_hybrid_optimizer`](api.md#create_hybrid_optimizer), where `lr` is called `muon_lr`.

Bold values differ from those of `MuonOptimizer`, and a dash means that the constructor does not have the option. A
table with one column of defaults holds for all constructors. Print `optimizer.routing_report()` to see the current
values. [Hyperparameters](guides/hyperparameters.md) says which to choose.
"""

DECAY = """\
## Which parameters are decayed

The constructors also differ in what `weight_decay` and `adamw_weight_decay` apply to:"""

AFTER_DECAY = """\
In `FSDPMuonOptimizer`, `weight_decay` is also the default of `adamw_weight_decay`, and vectors (biases, norms) are
never decayed unless a group or an override asks for it. Its `beta2` of 0.99 applies to NorMuon too, whose own default
is 0.95."""

SECTIONS = {
    "Options of the matrices": ("lr", "transposed"),
    "Options of AdamW": ("adamw_lr", "adamw_rounding_seed"),
    "Options of the whole optimizer": ("rule", "agreement_group"),
}


def defaults(name: str) -> dict[str, Any]:
    """Return the options that a constructor accepts with their defaults, those of MuonOptimizer included."""
    own = {
        RENAMED.get((name, parameter.name), parameter.name): parameter.default
        for parameter in inspect.signature(CONSTRUCTORS[name]).parameters.values()
        if parameter.name not in NOT_OPTIONS
    }
    passed_on = {
        parameter.name: parameter.default
        for parameter in inspect.signature(MuonOptimizer).parameters.values()
        if parameter.name not in (*NOT_OPTIONS, *REFUSED.get(name, ()))
    }
    return {**passed_on, **own}


def meaning(name: str) -> str:
    """Return an option's documentation."""
    docs = [parse(constructor).arguments for constructor in CONSTRUCTORS.values()]
    text = next(arguments[name] for arguments in docs if name in arguments)
    return text.removesuffix(".").replace("AdamW: ", "")


def decayed() -> str:
    """Return a table: which option decays each kind of parameter, with its default, as built optimizers show it."""
    kinds = {"matrices": "1.weight", "embeddings and heads": "0.weight", "vectors": "1.bias"}
    given = {"weight_decay": 0.25, "adamw_weight_decay": 0.75}

    def decay(make: Callable[..., Any], name: str, **options: float) -> float:
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
        sphere = {"retract_mode": "dynamic"} if make is SpectralSphereOptimizer else {}  # "hard" warns about decay
        groups = make(model, **sphere, **options).param_groups
        return float(next(group["weight_decay"] for group in groups if name in group["param_names"]))

    def cell(make: Callable[..., Any], name: str) -> str:
        applied = [option for option, value in given.items() if decay(make, name, **given) == value]
        return f"`{applied[0]}`, {decay(make, name)}" if applied else "-"

    rows = [(kind, *(cell(make, name) for make in CONSTRUCTORS.values())) for kind, name in kinds.items()]
    return table(["", *CONSTRUCTORS], rows)


def rows_of(names: Sequence[str]) -> str:
    """Return a table with a row for each option, and a column for each constructor if their defaults differ."""
    known = {name: defaults(name) for name in CONSTRUCTORS}
    rows = [
        {name: code_value(values[option]) if option in values else "-" for name, values in known.items()}
        for option in names
    ]
    if all(len({*row.values()} - {"-"}) == 1 for row in rows):
        found = [({*row.values()} - {"-"}).pop() for row in rows]
        cells = [(f"`{option}`", value, meaning(option)) for option, value in zip(names, found, strict=True)]
        return table(["option", "default", "meaning"], cells)
    shown = [[value if value in ("-", row["Muon"]) else f"**{value}**" for value in row.values()] for row in rows]
    cells = [(f"`{option}`", *row, meaning(option)) for option, row in zip(names, shown, strict=True)]
    return table(["option", *CONSTRUCTORS, "meaning"], cells)


def page() -> str:
    """Return the whole page."""
    names = list(defaults("Muon"))
    parts = [INTRODUCTION.rstrip(), DECAY, decayed(), AFTER_DECAY]
    for title, (first, last) in SECTIONS.items():
        shown = names[names.index(first) : names.index(last) + 1]
        for_groups = [name for name in shown if name in GROUP_OPTIONS]
        note = "These can also be set for a group of parameters, and in `overrides`."
        if title == "Options of AdamW":
            note += " Those of storage and rounding follow the options of the matrices unless you pass them."
        if for_groups != shown:
            note = f"Except for {' and '.join(f'`{name}`' for name in for_groups)}, they cannot be set for a group."
        parts += [f"## {title}", note, rows_of(shown)]
    for title, name in (("Options of the sphere", "Sphere"), ("Options of FSDPMuonOptimizer only", "FSDPMuon")):
        parts += [f"## {title}", rows_of([option for option in defaults(name) if option not in names])]
    shown_above = {**defaults("Sphere"), **defaults("Muon")}
    others = [
        (f"`{rule.name}`", f"`{option.name}`", code_value(option.default), option.doc)
        for rule in BUILT_IN.values()
        for option in rule.all_options.values()
        if rule.name != "adamw" and (option.name not in shown_above or shown_above[option.name] != option.default)
    ]
    introduction = 'Pass them together with the rule, for example `MuonOptimizer(model, rule="normuon", beta2=0.95)`.'
    parts += ["## Options of other rules", introduction, table(["rule", "option", "default", "meaning"], others)]
    parts += ["## Rules", "`muon_fsdp.rules.available()` lists the same, and your own rules.", rule_table()]
    parts += ["## Names that options accept", "The default is first.", table(["option", "names"], names_of_options())]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None, path: Path = PAGE) -> int:
    """Write the page, or check it, and return the exit status."""
    return write_or_check(path, page(), argv)


if __name__ == "__main__":
    raise SystemExit(main())
