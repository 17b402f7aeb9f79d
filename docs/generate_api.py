"""Writes docs/api.md from signatures and docstrings; the order is written here, and the introductions in api_prose.py.

python docs/generate_api.py            # write the page
python docs/generate_api.py --check    # exit with 1 if the page is not what would be written
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import api_prose as prose
from api_entries import BUILT_IN, function_entry, method_entries, method_rows, optimizer_entry, record_entry
from api_markdown import code_names, markdown, parse, table
from generated_page import write_or_check

import muon_fsdp
import muon_fsdp.distributed
import muon_fsdp.elementwise
import muon_fsdp.integrations
import muon_fsdp.kernels
import muon_fsdp.migrate
import muon_fsdp.parameters.routing_report
import muon_fsdp.plan.report
import muon_fsdp.rules
import muon_fsdp.rules.recipes
import muon_fsdp.spectral
import muon_fsdp.utils
import muon_optimizer
from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer
from muon_fsdp.declarations.settings import FOREIGN_KEYS
from muon_fsdp.rules import Rule
from muon_fsdp.statistics.observer import STATISTICS

PAGE = Path(__file__).with_name("api.md")

# Modules whose `__all__` is the public surface; tests/test_api_page.py asks for every name of them on the page.
PUBLIC_MODULES: tuple[ModuleType, ...] = (
    muon_fsdp,
    muon_fsdp.utils,
    muon_fsdp.spectral,
    muon_fsdp.distributed,
    muon_fsdp.kernels,
    muon_fsdp.rules,
    muon_fsdp.elementwise,
    muon_fsdp.integrations,
    muon_optimizer,
)


def _sections() -> list[str]:
    """Return the sections of the page in their order, in markdown."""
    modules = {
        "muon_fsdp.utils": _utils_section,
        "muon_fsdp.spectral": _spectral_section,
        "muon_fsdp.distributed": _distributed_section,
        "muon_fsdp.kernels": _kernels_section,
        "muon_fsdp.rules": _rules_section,
        "muon_fsdp.elementwise": _elementwise_section,
        "muon_fsdp.migrate": _migrate_section,
        "muon_fsdp.integrations": _integrations_section,
    }
    optimizers = (MuonOptimizer, FSDPMuonOptimizer, SpectralSphereOptimizer)
    functions = (muon_fsdp.create_hybrid_optimizer, muon_fsdp.label, muon_fsdp.qk_clip)
    return [
        f"## Optimizers\n\n{prose.OPTIMIZERS_INTRODUCTION}",
        *map(optimizer_entry, optimizers),
        *map(function_entry, functions),
        _recipes_section(),
        _reports_section(),
        f"## State\n\n{prose.STATE_INTRODUCTION}\n\n{_state_table()}",
        _group_section(),
        *["\n\n".join([f"## {name}", *parts()]) for name, parts in modules.items()],
    ]


def _recipes_section() -> str:
    recipes = muon_fsdp.rules.recipes
    parts = [f"## recipes\n\n{prose.RECIPES_INTRODUCTION.format(names=code_names(recipes.recipes))}"]
    parts += [record_entry(recipes.Recipe), *method_entries(recipes.Recipe)]
    return "\n\n".join([*parts, *map(record_entry, (recipes.Schedule, recipes.Phase))])


def _reports_section() -> str:
    reports = (
        muon_fsdp.parameters.routing_report.RoutingReport,
        muon_fsdp.parameters.routing_report.RoutingRow,
        muon_fsdp.parameters.routing_report.RoutingGroup,
        muon_fsdp.plan.report.PlanReport,
        muon_fsdp.plan.report.PlanRow,
    )
    return "\n\n".join(["## Reports", *map(record_entry, reports)])


def _state_table() -> str:
    shapes = {
        "elements": "that of the parameter",
        "scalar": "one number per logical matrix",
        "rows": "d_out of every logical matrix",
        "columns": "d_in of every logical matrix",
        "subspace": "k x d_in of every logical matrix",
    }
    rows = [
        (f"`{rule.name}`", f"`{spec.name}`", "a scalar" if spec.name == "step" else shapes[spec.kind])
        for rule in BUILT_IN.values()
        for spec in rule.all_state
    ]
    return table(["rule", "key", "shape"], rows)


def _group_section() -> str:
    rows = [
        ("`rule`", "the rule of all parameters of this group"),
        ("`lr`", "their learning rate"),
        ("`weight_decay`", "their decoupled weight decay"),
        ("`micro_step`", "calls of `step()` since the last that updated (`gradient_accumulation_steps`)"),
        ("`started`", "whether `step()` has been called; a part of another optimizer's checkpoint is known by it"),
        ("`num_updates`", "steps that have updated parameters; random numbers of rules depend on it"),
    ]
    rows.append(("the name of an option", "its value; [options.md](options.md) lists the options of every rule"))
    foreign = code_names(key for key in FOREIGN_KEYS if key not in ("params", "param_names"))
    introduction = prose.GROUPS_INTRODUCTION.format(foreign=foreign)
    return "\n\n".join(["## Parameter groups", introduction, table(["key", "meaning"], rows)])


# ------------------------------------------------------------- sections of modules, in parts below their headings


def _utils_section() -> list[str]:
    return [function_entry(muon_fsdp.utils.zeropower_via_newtonschulz5, "###"), prose.UTILS_EXAMPLE]


def _spectral_section() -> list[str]:
    spectral = muon_fsdp.spectral
    functions = (
        spectral.compute_spectral_norm,
        spectral.power_iteration,
        spectral.target_radius,
        spectral.retract,
        spectral.solve_lambda,
    )
    return [
        _first_line(spectral),
        prose.SPECTRAL_EXAMPLE,
        *[function_entry(function, "###") for function in functions],
        *map(record_entry, (spectral.Triple, spectral.Tangent, spectral.Known, spectral.Msign)),
    ]


def _distributed_section() -> list[str]:
    names = ("gather_full", "scatter_full", "local", "like")
    return [
        prose.DISTRIBUTED_EXAMPLE,
        *[function_entry(getattr(muon_fsdp.distributed, name), "###") for name in names],
    ]


def _kernels_section() -> list[str]:
    kernels = muon_fsdp.kernels
    names = ("unusable", "on_device", "symmetric_product", "multiply_add")
    return [
        prose.KERNELS_INTRODUCTION,
        table(["variable", "meaning"], prose.ENVIRONMENT),
        function_entry(kernels.select, "###"),
        *map(record_entry, (kernels.Product, kernels.Choice, kernels.Addend)),
        *[function_entry(getattr(kernels, name), "###") for name in names],
    ]


def _rules_section() -> list[str]:
    rules = muon_fsdp.rules
    parts = [prose.RULES_INTRODUCTION, "### Rule", parse(Rule).summary, parse(Rule).body]
    parts.append(table(["attribute", "meaning"], [(f"`{name}`", text) for name, text in prose.RULE_ATTRIBUTES]))
    parts += method_entries(Rule)
    parts += ["Built-in rules, which can be extended:", _built_in_rules()]
    parts.append(function_entry(rules.register, "###"))
    parts.append(function_entry(rules.rule_named, "###"))
    parts += [function_entry(rules.available, "###"), record_entry(rules.RuleInfo)]
    parts += ["### RULES", f"The registered rules by name: {code_names(BUILT_IN)}, and yours."]
    parts += [record_entry(owner) for owner in (rules.Option, rules.PerParameter, rules.PerMatrix)]
    for owner in (rules.MatrixBatch, rules.MatrixValues):
        doc = parse(owner)
        rows = [(f"`{name}`", text) for name, text in doc.arguments.items()]
        parts += [f"### {owner.__name__}", doc.summary, table(["attribute", "meaning"], rows)]
    parts += ["### FusedKernels", parse(rules.FusedKernels).summary]
    parts.append(table(["method", "meaning"], method_rows(rules.FusedKernels)))
    rows = [(f"`{name}`", statistic.doc) for name, statistic in STATISTICS.items()]
    parts += ["Statistics of the weights:", table(["name", "value"], rows), record_entry(rules.TopSingular)]
    parts.append(record_entry(rules.UpdateStatistics))
    return [part for part in parts if part]


def _built_in_rules() -> str:
    docs = {type(rule).__name__: parse(type(rule)) for rule in BUILT_IN.values()}
    return "\n\n".join(f"### {name}\n\n{doc.summary}\n\n{doc.body}" for name, doc in docs.items())


def _elementwise_section() -> list[str]:
    pair = muon_fsdp.elementwise
    return [
        prose.ELEMENTWISE_INTRODUCTION,
        markdown(inspect.cleandoc(pair.__doc__ or "").partition("\n\n")[2]),
        optimizer_entry(pair.TritonMuon, "###"),
        optimizer_entry(pair.TritonMuonW, "###"),
        function_entry(pair.benchmark_muon_optimizers, "###"),
    ]


def _migrate_section() -> list[str]:
    link = "[migration.md](migration.md#checkpoints-of-other-optimizers)"
    return [f"Used in {link}.", function_entry(muon_fsdp.migrate.load_state_dict, "###")]


def _integrations_section() -> list[str]:
    adapter = function_entry(muon_fsdp.integrations.trainer_optimizer, "###")
    return ["Used in [integrations.md](integrations.md).", adapter]


def _first_line(module: ModuleType) -> str:
    return inspect.cleandoc(module.__doc__ or "").splitlines()[0]


def page() -> str:
    return "\n\n".join([prose.TITLE.strip(), *_sections()]) + "\n"


def main(argv: Sequence[str] | None = None, path: Path = PAGE) -> int:
    """Write the page, or check it, and return the exit status."""
    return write_or_check(path, page(), argv)


if __name__ == "__main__":
    raise SystemExit(main())
