"""Generate the signatures and docstrings of optimizers from the options that rules declare."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from muon_fsdp.declarations.option import Option
from muon_fsdp.declarations.settings import SETTINGS
from muon_fsdp.parameters.groups import prefixed
from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES

# Lines of a docstring that are replaced by the options of the rules, and by the settings.
RULES_LINE, SETTINGS_LINE = "{options}", "{settings}"
Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


class _Unset:
    """The default of an argument that may be left out on purpose."""

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()


def show_options(rule: str, *, others: Mapping[str, Any] | None = None, **own: Any) -> Callable[[Class], Class]:
    """Show the options of a rule, and of the default element-wise rule, in the signature and docstring of a class.

    `own` and `others` are defaults of the class that differ from those of the rule of matrices and of the element-wise
    rule. Arguments that `__init__` names itself stay where they are.
    """
    other, shown = RULES[DEFAULT_OTHER_RULE], dict(RULES[rule].all_options)
    defaults = {"lr": shown["lr"].default, **own}
    for name, option in other.all_options.items():
        shown[prefixed(other, name)] = replace(option, doc=f"{other.display_name}: {option.doc}")
    defaults |= {prefixed(other, name): value for name, value in (others or {}).items()}

    def decorate(owner: Class) -> Class:
        init: Any = owner.__init__  # type: ignore[misc]
        written = _with_defaults(init, defaults)
        options = {name: option for name, option in shown.items() if name not in {p.name for p in written}}
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, option.default))
            for name, option in options.items()
        ]
        first = sum(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in written)
        init.__signature__ = inspect.Signature([*written[:first], *keywords, *written[first:]])
        if owner.__doc__:
            settings = {option.name: option for option in SETTINGS}
            owner.__doc__ = _documented(owner.__doc__, {RULES_LINE: options, SETTINGS_LINE: settings})
        return owner

    return decorate


def show_defaults(**defaults: Any) -> Callable[[Function], Function]:
    """Show the defaults of a function's UNSET arguments in its signature."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function).replace(parameters=_with_defaults(function, defaults))
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


def _with_defaults(function: Callable[..., Any], defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, with other defaults where they are given by name."""
    return [
        parameter.replace(default=defaults.get(parameter.name, parameter.default))
        for parameter in inspect.signature(function).parameters.values()
    ]


def _documented(doc: str, places: Mapping[str, Mapping[str, Option]]) -> str:
    lines = []
    for line in doc.splitlines():
        if line.strip() not in places:
            lines.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        for name, option in places[line.strip()].items():
            text = f"{name}: {option.doc}."
            lines += textwrap.wrap(text, 120, initial_indent=indent, subsequent_indent=indent + "    ")
    return "\n".join(lines)
