"""Writes the entry of one class or function in docs/api.md: its signature, its docstring and its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields, is_dataclass

from api_markdown import Doc, code_value, parse, table

from muon_fsdp import MuonOptimizer
from muon_fsdp.declarations.settings import SETTINGS
from muon_fsdp.elementwise import TritonMuonW
from muon_fsdp.optimizers.grouped import GroupedOptimizer
from muon_fsdp.parameters.groups import prefixed
from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES, Rule, available

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


def names_of_options() -> list[tuple[str, str]]:
    """List the options that accept names, with their names, the default first."""
    options = [*(o for rule in BUILT_IN.values() for o in rule.all_options.values()), *SETTINGS]
    choices = {"rule": tuple(BUILT_IN), **{option.name: option.choices for option in options if option.choices}}
    return [
        (f"`{name}`", ", ".join(map(code_value, values)) + (", or a number" if name == "scale" else ""))
        for name, values in choices.items()
    ]


def _options(signature: inspect.Signature, doc: Doc, where: str, shown: Collection[str] | None = None) -> str:
    names = [name for name in signature.parameters if name != "self"]
    if set(names) != set(doc.arguments):
        difference = set(names) ^ set(doc.arguments)
        raise SystemExit(f"{where}: signature and docstring differ in {sorted(difference)}")
    rows = []
    for name in names:
        parameter = signature.parameters[name]
        variadic = parameter.kind is inspect.Parameter.VAR_KEYWORD
        default = "" if variadic or parameter.default is parameter.empty else code_value(parameter.default)
        if shown is None or name in shown:
            rows.append([f"`**{name}`" if variadic else f"`{name}`", default, doc.arguments[name]])
    return table(["option", "default", "meaning"], rows)


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
    if doc.arguments:
        parts.append(table(["argument", "meaning"], [(f"`{key}`", text) for key, text in doc.arguments.items()]))
    keys = dict(doc.keys)
    for rule in BUILT_IN.values() if name == "metrics" else ():
        keys |= {key: f"under rule `{rule.name}`: {text}" for key, text in parse(rule.metrics).keys.items()}
    if keys:
        parts.append(table(["key", "meaning"], [(f"`{key}`", text) for key, text in keys.items()]))
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


def optimizer_entry(owner: type, level: str = "##") -> str:
    doc = parse(owner)
    parts = [f"{level} {owner.__name__}", doc.summary, doc.body]
    # docs/options.md lists the options of these, side by side.
    shown = ("params", "model", "options") if issubclass(owner, MuonOptimizer) else None
    parts.append(_options(inspect.signature(owner.__init__), doc, owner.__name__, shown))
    if shown:
        parts.append("[Options and defaults](options.md) lists all options.")
    if owner is TritonMuonW:
        parts.append("Methods as of `TritonMuon`.")
    else:
        parts += [_method(owner, name) for name in own_methods(owner)]
    return "\n\n".join(part for part in parts if part)


def function_entry(function: Callable[..., object], level: str = "##") -> str:
    doc = parse(function)
    parts = [f"{level} {function.__name__}", f"`{_signature(function, function.__name__)}`", doc.summary, doc.body]
    if doc.arguments:
        parts.append(_options(inspect.signature(function), doc, function.__name__))
    if doc.keys:
        parts.append(table(["key", "meaning"], [(f"`{key}`", text) for key, text in doc.keys.items()]))
    return "\n\n".join(part for part in parts if part)


def record_entry(owner: type, level: str = "###") -> str:
    """Describe a dataclass or named tuple by its fields and properties."""
    doc = parse(owner)
    if is_dataclass(owner):
        defaults = {field.name: field.default for field in fields(owner)}
    else:
        defaults = {name: owner._field_defaults.get(name, MISSING) for name in owner._fields}  # type: ignore[attr-defined]
    if list(defaults) != list(doc.arguments):
        raise SystemExit(f"{owner.__name__}: fields {list(defaults)} and docstring {list(doc.arguments)} differ")
    rows = [
        (f"`{name}`", "" if default is MISSING else code_value(default), doc.arguments[name])
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
        part for part in (f"{level} {owner.__name__}", doc.summary, doc.body, table(header, body)) if part
    )


def _one_line(function: Callable[..., object]) -> str:
    return parse(function).summary


def method_entries(owner: type) -> list[str]:
    """Describe the public methods of a class, each with its arguments and what it returns."""
    entries = []
    for name in vars(owner):
        method = getattr(owner, name)
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        doc = parse(method)
        parts = [f"**`{_signature(method, name, full=False)}`**: {doc.summary}", doc.body]
        if doc.arguments:
            parts.append(table(["argument", "meaning"], [(f"`{key}`", text) for key, text in doc.arguments.items()]))
        if doc.returns:
            parts.append(f"Returns: {doc.returns}")
        entries.append("\n\n".join(part for part in parts if part))
    return entries


def rule_table() -> str:
    """List the rules of the package as `available` does."""
    rows = [
        (f"`{info.name}`", info.title, info.line, info.paper, ", ".join(f"`{option.name}`" for option in info.options))
        for info in available()
        if info.name in BUILT_IN
    ]
    return table(["name", "title", "what it does", "paper", "options"], rows)


def method_rows(owner: type) -> list[tuple[str, str]]:
    return [
        (f"`{_signature(getattr(owner, name), name, full=False)}`", _one_line(getattr(owner, name)))
        for name in vars(owner)
        if not name.startswith("_") and inspect.isfunction(getattr(owner, name))
    ]
