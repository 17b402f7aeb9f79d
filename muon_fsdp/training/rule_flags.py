"""Make command-line flags from the options that rules declare. Nothing here names a rule."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from muon_fsdp.declarations.option import Option, suggestion
from muon_fsdp.rules import RULES, Rule
from muon_fsdp.rules.base import VIEW_OPTIONS
from muon_fsdp.training.arguments import ConfigError

OWN_FLAGS = ("lr", "weight_decay")  # options for which the program has flags of its own
WITHOUT_FLAGS = (*OWN_FLAGS, *(option.name for option in VIEW_OPTIONS))
# Defaults of the program that replace those of the rules.
STARTS_FROM = {"nesterov": True}


def default_options(rule: Rule) -> dict[str, Any]:
    """Return the options of the hidden matrices, without views, if no flag is passed."""
    views = {option.name for option in VIEW_OPTIONS}
    declared = {name: option.default for name, option in rule.all_options.items() if name not in views}
    starts = {name: value for name, value in STARTS_FROM.items() if name in declared}
    recipe = {name: value for name, value in rule.recipe.items() if name in OWN_FLAGS}
    return {**declared, **starts, **recipe}


@dataclass(frozen=True)
class OptionFlag:
    """A flag for an option of one or more rules."""

    flag: str
    option: str
    rules: tuple[Rule, ...]

    @property
    def destination(self) -> str:
        """Return the argparse destination of the flag; its space keeps it apart from the fields of `TrainConfig`."""
        return f"option {self.flag}"

    @property
    def declarations(self) -> list[Option]:
        """Return the option as each of the rules declares it."""
        return [rule.all_options[self.option] for rule in self.rules]

    @property
    def is_switch(self) -> bool:
        """Return whether the flag has no value, but a form with `--no-`."""
        return all(isinstance(option.default, bool) for option in self.declarations)

    def help(self) -> str:
        """Return the help text: documentation and default of the option, with the names of the rules that have it."""
        shown: dict[str, list[str]] = {}
        for rule in self.rules:
            default = _written(default_options(rule)[self.option])
            shown.setdefault(f"{rule.all_options[self.option].doc} (default: {default}; ", []).append(rule.name)
        return "; ".join(f"{text}{', '.join(names)})" for text, names in shown.items()).replace("%", "%%")


def by_value(value_of: Callable[[Rule], object]) -> str:
    """Return a value of every rule as text, such as "0.02 for a, b; 0.1 for c"."""
    names: dict[str, list[str]] = {}
    for rule in RULES.values():
        names.setdefault(_written(value_of(rule)), []).append(rule.name)
    return "; ".join(f"{value} for {', '.join(rules)}" for value, rules in names.items())


def add_option_flags(parser: argparse.ArgumentParser) -> list[OptionFlag]:
    """Add a flag for every option of every registered rule; a flag that is not passed leaves no value."""
    group = parser.add_argument_group("options of the update rule")
    flags = option_flags(set(parser._option_string_actions))
    for flag in flags:
        shared: dict[str, Any] = {"dest": flag.destination, "default": argparse.SUPPRESS, "help": flag.help()}
        if flag.is_switch:
            group.add_argument(flag.flag, action=argparse.BooleanOptionalAction, **shared)
        else:
            metavar = "|".join(dict.fromkeys(map(_metavar, flag.declarations)))
            group.add_argument(flag.flag, type=str, metavar=metavar, **shared)
    return flags


def option_flags(taken: Iterable[str]) -> list[OptionFlag]:
    """Return the flags of all options; a name that is `taken` already gets the name of the rule as a prefix."""
    taken, owners = set(taken), dict[str, list[Rule]]()
    for rule in RULES.values():
        for name in rule.all_options:
            if name not in WITHOUT_FLAGS:
                owners.setdefault(name, []).append(rule)
    flags = []
    for name, rules in owners.items():
        words = name.replace("_", "-")
        if taken.isdisjoint((f"--{words}", f"--no-{words}")):
            flags.append(OptionFlag(f"--{words}", name, tuple(rules)))
        else:
            flags += [OptionFlag(f"--{rule.name.replace('_', '-')}-{words}", name, (rule,)) for rule in rules]
    return flags


def given_options(values: dict[str, Any], flags: Iterable[OptionFlag], rule: Rule) -> dict[str, Any]:
    """Remove the options of rules from parsed arguments, and return those of `rule` by name.

    Raises:
        ConfigError: the rule does not have an option that was passed, or does not accept its value.
    """
    options = {}
    for flag in flags:
        if flag.destination not in values:
            continue
        given = values.pop(flag.destination)
        if rule not in flag.rules:
            raise ConfigError(_not_an_option(flag.flag, flag.option, rule, flag.rules))
        try:
            value = given if isinstance(given, bool) else _read(rule.all_options[flag.option], given)
            rule.all_options[flag.option].validate(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{flag.flag}: {error}") from None
        options[flag.option] = value
    return options


def check_options(options: Mapping[str, Any], rule: Rule) -> None:
    """Raise ConfigError for an option that a rule does not have, or a value that it does not accept."""
    for name, value in options.items():
        if name in OWN_FLAGS:
            raise ConfigError(f"{name!r} is a field of TrainConfig, not an option: pass {name}={value!r}")
        if name not in rule.all_options:
            owners = [other for other in RULES.values() if name in other.all_options]
            raise ConfigError(_not_an_option(f"option {name!r}", name, rule, owners))
        try:
            rule.all_options[name].validate(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from None


def _not_an_option(what: str, name: str, rule: Rule, owners: Iterable[Rule]) -> str:
    if name in rule.hints:
        return f"{what}: rule {rule.name!r} has no {name}: {rule.hints[name]}"
    names = ", ".join(repr(owner.name) for owner in owners)
    own = [option for option in rule.all_options if option not in WITHOUT_FLAGS]
    instead = f"only {names} has it; leave it out" if names else f"no rule has it{suggestion(name, own)}"
    return f"{what} is not an option of rule {rule.name!r}: {instead}"


def _read(option: Option, text: str) -> Any:
    """Convert the text of a flag to the type of the option's default."""
    default = option.default
    if option.choices and (text in option.choices or option.check is None):
        return text  # the option itself reports a wrong name
    if isinstance(default, bool):
        return _boolean(text)
    if isinstance(default, tuple | list):
        return tuple(_number(part, default[0] if default else 0.0) for part in text.split(","))
    if default is None:
        return _anything(text)
    if isinstance(default, str):
        return _name_or_number(option, text) if option.choices else text
    return _number(text, default)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"must be true or false, got {text!r}")
    return text.lower() == "true"


def _number(text: str, like: object) -> float:
    whole = isinstance(like, int)
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise ValueError(f"must be {'a whole number' if whole else 'a number'}, got {text!r}") from None


def _name_or_number(option: Option, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(option.choices)}, or a number, got {text!r}") from None


def _anything(text: str) -> Any:
    """Convert the text of an option whose default is None: to None, a tuple, a number or the text itself."""
    if text.lower() == "none":
        return None
    if "," in text:
        return tuple(map(_anything, text.split(",")))
    try:
        number = float(text)
    except ValueError:
        return text
    return int(text) if text.lstrip("+-").isdecimal() else number


def _metavar(option: Option) -> str:
    if option.choices:
        return "|".join((*option.choices, *(["X"] if option.check is not None else [])))
    if isinstance(option.default, tuple | list):
        return ",".join(["X"] * max(1, len(option.default)))
    kinds: tuple[tuple[type, str], ...] = ((bool, "true|false"), (int, "N"), (float, "X"), (str, "NAME"))
    return next((shown for kind, shown in kinds if isinstance(option.default, kind)), "VALUE")


def _written(value: object) -> str:
    """Return a value as a user writes it after a flag."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(_written, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
