"""Writes docs/api.md from signatures and docstrings; what is written by hand is the order and the introductions below.

python docs/generate_api.py            # write the page
python docs/generate_api.py --check    # exit with 1 if the page is not what would be written
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import muon_fsdp
import muon_fsdp.distributed
import muon_fsdp.elementwise
import muon_fsdp.integrations
import muon_fsdp.kernels
import muon_fsdp.migrate
import muon_fsdp.parameters.routing
import muon_fsdp.plan.report
import muon_fsdp.rules
import muon_fsdp.spectral
import muon_fsdp.utils
import muon_optimizer
from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer
from muon_fsdp.declarations.state import NUM_VECTORS
from muon_fsdp.kernels.select import CACHE_VARIABLE, KERNELS_VARIABLE
from muon_fsdp.optimizers.grouped import GroupedOptimizer
from muon_fsdp.parameters.groups import prefixed
from muon_fsdp.plan.settings import FOREIGN_KEYS, SETTINGS
from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES, Rule
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

# Rules of the package; tests register others.
BUILT_IN: dict[str, Rule] = {
    name: rule for name, rule in RULES.items() if type(rule).__module__.startswith("muon_fsdp.")
}
OTHER_RULE = RULES[DEFAULT_OTHER_RULE]
GROUP_OPTIONS = {
    *(name for rule in BUILT_IN.values() for name in rule.all_options),
    *(prefixed(OTHER_RULE, name) for name in OTHER_RULE.all_options),
    "rule",
}


def _choices() -> dict[str, Sequence[str]]:
    """List the options that accept names, with their names, the default first."""
    options = [*(o for rule in BUILT_IN.values() for o in rule.all_options.values()), *SETTINGS]
    return {"rule": tuple(BUILT_IN), **{option.name: option.choices for option in options if option.choices}}


TITLE = """# API reference

<!-- Written by docs/generate_api.py from signatures and docstrings: edit those, then run it. -->

Everything that is public, and nothing else: names that are not on this page may change without notice. How to begin:
[README](../README.md). Questions and error messages: [faq.md](faq.md). Coming from another optimizer:
[migration.md](migration.md). The `muon-fsdp` command: [cli.md](cli.md). Trainers and frameworks:
[integrations.md](integrations.md). The training program: [training.md](training.md).
"""

OPTIMIZERS_INTRODUCTION = """\
The three classes share one `step()` and one set of options; with equal options and routing they give
equal results. They are `torch.optim.Optimizer`s: closures, hooks, schedulers, `GradScaler` and checkpoints work as
usual.

```python
import torch
from torch import nn
from muon_fsdp import MuonOptimizer

model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
optimizer = MuonOptimizer(model, lr=0.02, adamw_lr=1e-3)
model(torch.randint(0, 50, (8,))).square().mean().backward()
optimizer.step()
```

In the tables, *group* says whether an option may also be set for a group of parameters, or by `overrides`; the other
options hold for the whole optimizer."""

UTILS_EXAMPLE = """```python
from muon_fsdp.utils import zeropower_via_newtonschulz5

orthogonal = zeropower_via_newtonschulz5(torch.randn(50, 100))
assert torch.norm(orthogonal @ orthogonal.T - torch.eye(50)) < 0.1
```"""

SPECTRAL_EXAMPLE = """```python
from muon_fsdp.spectral import compute_spectral_norm, power_iteration, retract, solve_lambda, target_radius

weight, momentum = torch.randn(64, 32), torch.randn(64, 32)
radius = target_radius(64, 32)  # sqrt(64 / 32)
weight = retract(weight, radius)
assert abs(compute_spectral_norm(weight) - radius) < 0.02 * radius

norm, left, right = power_iteration(weight, steps=100)
tangent = solve_lambda(momentum[None], left[None], right[None])
weight = weight - 0.02 * radius * tangent.direction[0]  # a step along the sphere
```"""

DISTRIBUTED_EXAMPLE = """The optimizers assemble and scatter by themselves; these are for looking at sharded parameters.

<!-- distributed: run by tests/test_docs.py on two ranks -->
```python
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from muon_fsdp.distributed import gather_full, local, scatter_full

model = fully_shard(nn.Linear(8, 6))
whole = gather_full(model.weight)  # on all ranks, a new plain tensor
assert whole.shape == (6, 8) and local(model.weight).shape[0] == 3
with torch.no_grad():
    scatter_full(model.weight, whole / 2)
```"""

KERNELS_INTRODUCTION = """\
Which kernel computes a product, and the two products themselves.

```python
from muon_fsdp.kernels import Product, select

choice = select(Product("symmetric", 12, 768, 768, 3072, torch.float16), torch.device("cpu"))
assert choice.path == "torch" and "cpu" in choice.reason
```

Two variables of the environment:"""

ENVIRONMENT = (
    (
        f"`{KERNELS_VARIABLE}`",
        "`torch` switches all kernels off: PyTorch's library computes everything; `auto` (default) uses them where "
        "they run",
    ),
    (
        f"`{CACHE_VARIABLE}`",
        "folder of the tiles that were timed on GPUs that the committed table does not know; default "
        "`~/.cache/muon_fsdp`",
    ),
)

RULES_INTRODUCTION = """\
For writing an update rule of your own: [rules.md](rules.md) grows one from five lines. The options of the built-in
rules:"""

ELEMENTWISE_INTRODUCTION = """\
*Not* the orthogonalizing Muon: fused element-wise optimizers. Also importable from `muon_optimizer`. State of a
parameter: `step` (an int), `momentum` and `velocity` (float32, float64 for float64). Per group: all options.

```python
from muon_optimizer import TritonMuonW

weight = nn.Parameter(torch.randn(8, 8))
optimizer = TritonMuonW(weight, lr=1e-3)
weight.grad = torch.randn(8, 8)
optimizer.step()
assert set(optimizer.state[weight]) == {"step", "momentum", "velocity"}
```"""

STATE_INTRODUCTION = f"""\
`optimizer.state[parameter]` after the first step, for every parameter, one without a gradient included. What has the
shape of the parameter is distributed as it is; all else is whole on every rank. Precision is float32 for half and
single precision and float64 for double; `step` is always float32.

A logical matrix is what is orthogonalized: `num_heads=8` makes eight of one parameter. k is
min({NUM_VECTORS}, d_out, d_in)."""

GROUPS_INTRODUCTION = """\
Every group has `params` (with `param_names` where parameters have names), `rule`, `micro_step`, `started`, and the
options of its own rule. They can be read and set between steps, and are what a checkpoint holds. When a group is
*given*, options of the rules that its parameters take may be there. In a group that holds matrices, options of the
other parameters have the name of their rule before them (`adamw_lr`). {foreign} may be there for
schedulers and users; any other key is an error."""

ERRORS = (
    (
        "`ValueError`",
        "a value that no rule can work with, an option or a pattern that is unknown, a parameter that can't be "
        "optimized, `strict=True`",
    ),
    ("`TypeError`", "an option of the wrong type, or something that is no tensor, model or group"),
    (
        "`RuntimeError`",
        'at a step or on load: sparse gradients, gradients that are not finite (`nonfinite="raise"`), ranks that '
        "differ, a state that does not fit, a layout or wrapper that is not supported",
    ),
    (
        "`UserWarning`",
        "overrides that match nothing, bare parameters that look like a language model's embedding or head, no matrix "
        "among the parameters (under `strict=True` a `ValueError`), decay that does nothing, a state "
        "dict without state",
    ),
)


# ------------------------------------------------------------------------------------------------------ docstrings


class Doc(NamedTuple):
    """A docstring in parts."""

    summary: str
    body: str  # markdown
    arguments: dict[str, str]
    keys: dict[str, str]


def parse(thing: object) -> Doc:
    text = inspect.getdoc(thing)
    if not text:
        raise SystemExit(f"{thing} has no docstring")
    parts = re.split(r"^(Args|Keys|Returns|Raises):\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    summary, _, rest = parts[0].strip().partition("\n\n")
    return Doc(
        _escaped(" ".join(summary.split())),
        _escaped(_markdown(rest)),
        _entries(sections.get("Args", "")),
        _entries(sections.get("Keys", "")),
    )


def _markdown(text: str) -> str:
    """Convert a docstring: paragraphs stay, and indented lines become a block of code."""
    blocks: list[str] = []
    for paragraph in re.split(r"\n\n+", text.strip("\n")):
        if paragraph.startswith("    "):
            blocks.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
        elif paragraph:
            blocks.append(paragraph)
    return "\n\n".join(blocks)


def _entries(section: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        match = re.match(r"    (\w+): (.*)", line)
        if match:
            name = match.group(1)
            entries[name] = match.group(2)
        elif line.strip():
            entries[name] += " " + line.strip()
    return {name: _escaped(text) for name, text in entries.items()}


def _escaped(text: str) -> str:
    """Escape "<" outside code, where it would begin a tag."""
    parts = re.split(r"(```.*?```|`[^`]*`)", text, flags=re.DOTALL)
    return "".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(header), "|".join("---" for _ in header)]
    lines += [" | ".join(_cell(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" if index != 1 else f"|{line}|" for index, line in enumerate(lines))


def _value(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 2**20 and value % 2**20 == 0:
        return f"`{value // 2**20} * 2**20`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


# -------------------------------------------------------------------------------------------- classes and functions


def _options(signature: inspect.Signature, doc: Doc, where: str, *, with_groups: bool) -> str:
    names = [name for name in signature.parameters if name != "self"]
    if set(names) != set(doc.arguments):
        difference = set(names) ^ set(doc.arguments)
        raise SystemExit(f"{where}: signature and docstring differ in {sorted(difference)}")
    rows = []
    for name in names:
        parameter = signature.parameters[name]
        variadic = parameter.kind is inspect.Parameter.VAR_KEYWORD
        default = "" if variadic or parameter.default is parameter.empty else _value(parameter.default)
        row = [f"`**{name}`" if variadic else f"`{name}`", default]
        if with_groups:
            row.append("yes" if name in GROUP_OPTIONS else "")
        rows.append([*row, doc.arguments[name]])
    return _table(["option", "default", *(["group"] if with_groups else []), "meaning"], rows)


def _signature(thing: Callable[..., object], name: str, *, full: bool = True) -> str:
    signature = inspect.signature(thing)
    shown = []
    star = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            shown.append(f"**{parameter.name}")
        elif parameter.default is parameter.empty:
            shown.append(parameter.name)
        else:
            shown.append(f"{parameter.name}={parameter.default!r}")
    result = signature.return_annotation if full and signature.return_annotation not in (None, "None") else ""
    arrow = f" -> {result}" if result and result is not inspect.Signature.empty else ""
    return f"{name}({', '.join(shown)}){arrow}"


def _method(owner: type, name: str) -> str:
    function = inspect.unwrap(getattr(owner, name))  # decorators and context managers: the plain call
    doc = parse(function)
    title = _signature(function, name, full=name in ("routing_report", "plan_report", "metrics"))
    parts = [f"**`{title}`**: {doc.summary}", doc.body]
    keys = dict(doc.keys)
    for rule in BUILT_IN.values() if name == "metrics" else ():
        keys |= {key: f"under rule `{rule.name}`: {text}" for key, text in parse(rule.metrics).keys.items()}
    if keys:
        parts.append(_table(["key", "meaning"], [(f"`{key}`", text) for key, text in keys.items()]))
    return "\n\n".join(part for part in parts if part)


def own_methods(owner: type) -> list[str]:
    """Return the public methods of a class, and of its bases that have no section of their own."""
    unlisted = [base for base in owner.__mro__ if base.__name__.startswith("_Elementwise")]
    unlisted += [GroupedOptimizer] if owner is MuonOptimizer else []
    bases = [base for base in owner.__mro__ if base is owner or base in unlisted]
    # By where a function was written: torch puts a wrapped `step` into every class of which there is an instance.
    return [
        name
        for base in reversed(bases)
        for name, value in vars(base).items()
        if not name.startswith("_")
        and inspect.isfunction(value)
        and value.__qualname__ == f"{base.__qualname__}.{name}"
    ]


def _optimizer(owner: type, level: str = "##") -> str:
    doc = parse(owner)
    choices = isinstance(owner, type) and issubclass(owner, MuonOptimizer)
    parts = [f"{level} {owner.__name__}", doc.summary, doc.body]
    parts.append(_options(inspect.signature(owner.__init__), doc, owner.__name__, with_groups=choices))
    if owner is MuonOptimizer:
        rows = [
            (f"`{name}`", ", ".join(_value(value) for value in values) + (", or a number" if name == "scale" else ""))
            for name, values in _choices().items()
        ]
        parts.append("Names that options take, the default first:\n\n" + _table(["option", "names"], rows))
    if owner is muon_fsdp.elementwise.TritonMuonW:
        parts.append("Methods as of `TritonMuon`.")
    else:
        parts += [_method(owner, name) for name in own_methods(owner)]
    return "\n\n".join(part for part in parts if part)


def _function(function: Callable[..., object], level: str = "##") -> str:
    doc = parse(function)
    parts = [f"{level} {function.__name__}", f"`{_signature(function, function.__name__)}`", doc.summary, doc.body]
    if doc.arguments:
        parts.append(_options(inspect.signature(function), doc, function.__name__, with_groups=False))
    if doc.keys:
        parts.append(_table(["key", "meaning"], [(f"`{key}`", text) for key, text in doc.keys.items()]))
    return "\n\n".join(part for part in parts if part)


def _record(owner: type, level: str = "###") -> str:
    """Describe a dataclass or named tuple by its fields and properties."""
    doc = parse(owner)
    if is_dataclass(owner):
        defaults = {field.name: field.default for field in fields(owner)}
    else:
        defaults = {name: owner._field_defaults.get(name, MISSING) for name in owner._fields}  # type: ignore[attr-defined]
    if list(defaults) != list(doc.arguments):
        raise SystemExit(f"{owner.__name__}: fields {list(defaults)} and docstring {list(doc.arguments)} differ")
    rows = [
        (f"`{name}`", "" if default is MISSING else _value(default), doc.arguments[name])
        for name, default in defaults.items()
    ]
    rows += [
        (f"`{name}`", "", parse(value.fget).summary)
        for name, value in vars(owner).items()
        if isinstance(value, property)
    ]
    with_defaults = any(default for _, default, _ in rows)
    header = ["field", "default", "meaning"] if with_defaults else ["field", "meaning"]
    body = [row if with_defaults else (row[0], row[2]) for row in rows]
    return "\n\n".join(
        part for part in (f"{level} {owner.__name__}", doc.summary, doc.body, _table(header, body)) if part
    )


# ---------------------------------------------------------------------------------------------------------- the page


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
    return _table(["rule", "key", "shape"], rows)


def _group_section() -> str:
    rows = [
        ("`rule`", "the rule of all parameters of this group"),
        ("`lr`", "their learning rate"),
        ("`weight_decay`", "their decoupled weight decay"),
        ("`micro_step`", "calls of `step()` since the last that updated (`gradient_accumulation_steps`)"),
        ("`started`", "whether `step()` has been called; a part of another optimizer's checkpoint is known by it"),
    ]
    rows += [
        (_names(name for name in rule.all_options if name not in ("lr", "weight_decay")), f"under rule `{rule.name}`")
        for rule in BUILT_IN.values()
    ]
    foreign = _names(key for key in FOREIGN_KEYS if key not in ("params", "param_names"))
    introduction = GROUPS_INTRODUCTION.format(foreign=foreign)
    return "\n\n".join(["## Parameter groups", introduction, _table(["key", "meaning"], rows)])


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _rule_options() -> str:
    rows = [
        (f"`{rule.name}`", f"`{option.name}`", _value(option.default), option.doc, "yes" if option.per_step else "")
        for rule in BUILT_IN.values()
        for option in rule.all_options.values()
    ]
    return _table(["rule", "option", "default", "meaning", "per step"], rows)


# What a subclass of Rule may set, in words.
RULE_ATTRIBUTES = (
    ("name", "what the option `rule` says"),
    ("title", "what tables and plots call the rule; its name by default"),
    ("aliases", "further names on the command line"),
    ("options", "its `Option`s; begin with those of the class that it extends"),
    ("state", "its state: `PerParameter` and `PerMatrix`"),
    ("statistics", "the names of the statistics of W that it needs"),
    ("diagnostics", "the names of numbers per matrix for `metrics`"),
    ("update_dtype", "`torch.float32` if float16 can't hold its updates on GPUs"),
    ("kernels", "its `FusedKernels`; they count unless a subclass overrides `prepare` or `apply`"),
    ("hints", "by the name of an option that users expect and the rule does not have: why"),
    ("recipe", "`lr` and `weight_decay` that the training program starts from"),
)


def _rule_section() -> str:
    rules = muon_fsdp.rules
    parts = [_rule_options(), "### Rule", parse(Rule).summary, parse(Rule).body]
    parts.append(_table(["attribute", "meaning"], [(f"`{name}`", text) for name, text in RULE_ATTRIBUTES]))
    parts.append(_table(["method", "meaning"], _methods_of(Rule)))
    parts += ["Built-in rules, which can be extended:", _built_in_rules()]
    parts.append(_function(rules.register, "###"))
    parts.append(_function(rules.rule_named, "###"))
    parts += ["### RULES", f"The registered rules by name: {_names(BUILT_IN)}, and yours."]
    parts += [_record(owner) for owner in (rules.Option, rules.PerParameter, rules.PerMatrix)]
    for owner in (rules.MatrixBatch, rules.MatrixNumbers):
        doc = parse(owner)
        rows = [(f"`{name}`", text) for name, text in doc.arguments.items()]
        parts += [f"### {owner.__name__}", doc.summary, _table(["attribute", "meaning"], rows)]
    parts += ["### FusedKernels", parse(rules.FusedKernels).summary]
    parts.append(_table(["method", "meaning"], _methods_of(rules.FusedKernels)))
    rows = [(f"`{name}`", statistic.doc) for name, statistic in STATISTICS.items()]
    parts += ["Statistics of the weights:", _table(["name", "value"], rows), _record(rules.TopSingular)]
    return "\n\n".join(part for part in parts if part)


def _built_in_rules() -> str:
    docs = {type(rule).__name__: parse(type(rule)) for rule in BUILT_IN.values()}
    return "\n\n".join(f"### {name}\n\n{doc.summary}\n\n{doc.body}" for name, doc in docs.items())


def _methods_of(owner: type) -> list[tuple[str, str]]:
    return [
        (f"`{_signature(getattr(owner, name), name, full=False)}`", _one_line(getattr(owner, name)))
        for name in vars(owner)
        if not name.startswith("_") and inspect.isfunction(getattr(owner, name))
    ]


def _one_line(function: Callable[..., object]) -> str:
    return parse(function).summary


def _sections() -> list[tuple[str, str]]:
    """Return (title in the table of contents, markdown) of every section, in the order of the page."""
    optimizers = [MuonOptimizer, FSDPMuonOptimizer, SpectralSphereOptimizer]
    spectral, kernels, pair = muon_fsdp.spectral, muon_fsdp.kernels, muon_fsdp.elementwise
    sections = [("Optimizers", f"## Optimizers\n\n{OPTIMIZERS_INTRODUCTION}")]
    sections += [(owner.__name__, _optimizer(owner)) for owner in optimizers]
    sections += [
        (function.__name__, _function(function)) for function in (muon_fsdp.create_hybrid_optimizer, muon_fsdp.label)
    ]
    reports = (
        muon_fsdp.parameters.routing.RoutingReport,
        muon_fsdp.parameters.routing.RoutingRow,
        muon_fsdp.plan.report.PlanReport,
        muon_fsdp.plan.report.PlanRow,
    )
    sections.append(("Reports", "\n\n".join(["## Reports", *map(_record, reports)])))
    sections.append(("State", f"## State\n\n{STATE_INTRODUCTION}\n\n{_state_table()}"))
    sections.append(("Parameter groups", _group_section()))
    messages = "Every message with its cause and remedy: [faq.md](faq.md#error-messages)."
    sections.append(("Errors", f"## Errors\n\n{_table(['exception', 'when'], ERRORS)}\n\n{messages}"))
    utils = _function(muon_fsdp.utils.zeropower_via_newtonschulz5, "###")
    sections.append(("muon_fsdp.utils", f"## muon_fsdp.utils\n\n{utils}\n\n{UTILS_EXAMPLE}"))
    functions = (
        spectral.compute_spectral_norm,
        spectral.power_iteration,
        spectral.target_radius,
        spectral.retract,
        spectral.solve_lambda,
    )
    sections.append(
        (
            "muon_fsdp.spectral",
            "\n\n".join(
                [
                    "## muon_fsdp.spectral",
                    _first_line(spectral),
                    SPECTRAL_EXAMPLE,
                    *[_function(function, "###") for function in functions],
                    *map(_record, (spectral.Triple, spectral.Tangent, spectral.Known, spectral.Msign)),
                ]
            ),
        )
    )
    names = ("gather_full", "scatter_full", "local", "like")
    sections.append(
        (
            "muon_fsdp.distributed",
            "\n\n".join(
                [
                    "## muon_fsdp.distributed",
                    DISTRIBUTED_EXAMPLE,
                    *[_function(getattr(muon_fsdp.distributed, name), "###") for name in names],
                ]
            ),
        )
    )
    names = ("select", "unusable", "on_device", "symmetric_product", "multiply_add")
    sections.append(
        (
            "muon_fsdp.kernels",
            "\n\n".join(
                [
                    "## muon_fsdp.kernels",
                    KERNELS_INTRODUCTION,
                    _table(["variable", "meaning"], ENVIRONMENT),
                    _function(kernels.select, "###"),
                    *map(_record, (kernels.Product, kernels.Choice, kernels.Addend)),
                    *[_function(getattr(kernels, name), "###") for name in names[1:]],
                ]
            ),
        )
    )
    sections.append(("muon_fsdp.rules", f"## muon_fsdp.rules\n\n{RULES_INTRODUCTION}\n\n{_rule_section()}"))
    description = _markdown(inspect.cleandoc(pair.__doc__ or "").partition("\n\n")[2])
    sections.append(
        (
            "muon_fsdp.elementwise",
            "\n\n".join(
                [
                    "## muon_fsdp.elementwise",
                    ELEMENTWISE_INTRODUCTION,
                    description,
                    _optimizer(pair.TritonMuon, "###"),
                    _optimizer(pair.TritonMuonW, "###"),
                    _function(pair.benchmark_muon_optimizers, "###"),
                ]
            ),
        )
    )
    migrated = _function(muon_fsdp.migrate.load_state_dict, "###")
    link = "[migration.md](migration.md#checkpoints-of-other-optimizers)"
    sections.append(("muon_fsdp.migrate", f"## muon_fsdp.migrate\n\nUsed in {link}.\n\n{migrated}"))
    adapter = _function(muon_fsdp.integrations.trainer_optimizer, "###")
    text = f"## muon_fsdp.integrations\n\nUsed in [integrations.md](integrations.md).\n\n{adapter}"
    sections.append(("muon_fsdp.integrations", text))
    return sections


def _first_line(module: ModuleType) -> str:
    return inspect.cleandoc(module.__doc__ or "").splitlines()[0]


def anchor(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def page() -> str:
    sections = _sections()
    contents = "\n".join(f"- [{title}](#{anchor(title)})" for title, _ in sections)
    return "\n\n".join([TITLE.strip(), contents, *[text for _, text in sections]]) + "\n"


def main(argv: Sequence[str] | None = None, path: Path = PAGE) -> int:
    parser = argparse.ArgumentParser(description="Write docs/api.md from signatures and docstrings.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is stale")
    arguments: Any = parser.parse_args(argv)
    text = page()
    if not arguments.check:
        path.write_text(text)
    elif not path.exists() or path.read_text() != text:
        print(f"{path.name} is stale: run python docs/generate_api.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
