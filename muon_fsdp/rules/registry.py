"""Register update rules by name: those of the package and those of users."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TypeVar, get_args

from muon_fsdp.declarations.option import Option, suggestion
from muon_fsdp.declarations.settings import ARGUMENTS, FOREIGN_KEYS
from muon_fsdp.declarations.state import MatrixKind, ParameterKind, PerMatrix, PerParameter
from muon_fsdp.kernels.tables import SCALES
from muon_fsdp.linalg.codes import CODES
from muon_fsdp.rules.base import PARAMETER_OPTIONS, Rule
from muon_fsdp.statistics.observer import STATISTICS, SummedStatistic

RULES: dict[str, Rule] = {}
KINDS: dict[type, tuple[str, ...]] = {PerParameter: get_args(ParameterKind), PerMatrix: get_args(MatrixKind)}
# Arguments of the optimizers and keys of groups. An option of the same name could not be told apart from them.
RESERVED_NAMES = {*ARGUMENTS, *FOREIGN_KEYS, "self", "model", "rule", "gradient_accumulation_steps"}
AnyRule = TypeVar("AnyRule", bound=type[Rule])
_BUILT_IN: dict[str, type[Rule]] = {}  # by name and alias


def register_built_in(rule: type[Rule]) -> None:
    """Register a rule of the package, whose name and aliases no other rule may have."""
    register(rule)
    _BUILT_IN.update(dict.fromkeys((rule.name, *rule.aliases), rule))


def register(rule: AnyRule) -> AnyRule:
    """Register an update rule under its `name`; use it as a class decorator.

    Afterwards the name works wherever a rule is named: `rule=` and `other_rule=` of the optimizers, groups, overrides
    and `muon-fsdp train --optimizer`. Registering another class under the same name replaces the rule, unless it is
    built in. Optimizers look rules up when they plan a step, so a replacement in a notebook takes effect at their next
    step.

    Args:
        rule: a subclass of `Rule`.

    Returns:
        The same class.

    Raises:
        TypeError: the class is not a subclass of `Rule`, or it has no name of its own.
        ValueError: its declarations contradict each other, or its name is that of a built-in rule; the message names
            which.
    """
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise TypeError(f"register needs a subclass of Rule, got {rule!r}")
    name = vars(rule).get("name")
    if name is None:
        inherited = f"; {rule.name!r} is the name of its base class" if hasattr(rule, "name") else ""
        raise TypeError(
            f"{rule.__name__}: a rule needs a name of its own{inherited}: add a line such as name = 'my_rule'"
        )
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"{rule.__name__}: a rule needs a name that is an identifier, got {name!r}")
    instance = rule()
    _check(instance)
    for each in (name, *rule.aliases):
        if _BUILT_IN.get(each, rule) is not rule:
            raise ValueError(f"{rule.__name__}: {each!r} is the name of a built-in rule: choose another name")
    RULES[name] = instance
    return rule


def rule_named(name: str) -> Rule:
    """Return the registered rule of this name.

    Raises:
        ValueError: no rule has this name; the message lists the valid names.
    """
    if not isinstance(name, str) or name not in RULES:
        of_alias = [rule.name for rule in RULES.values() if name in rule.aliases]
        near = f"; did you mean {of_alias[0]!r}?" if of_alias else suggestion(str(name), RULES)
        raise ValueError(
            f"Unknown rule {name!r}; valid names are {', '.join(RULES)}{near or '.'} A rule of your own must be "
            "registered first: import the file that has it"
        )
    return RULES[name]


@dataclass(frozen=True)
class RuleInfo:
    """What a registered rule is, for a list of rules.

    Args:
        name: the value of the option `rule`.
        title: the name in tables and plots.
        line: one sentence about the rule, the first paragraph of its docstring; empty if it has none.
        paper: where it was published; empty if it says nothing.
        options: its options, those of its statistics and of views included.
    """

    name: str
    title: str
    line: str
    paper: str
    options: tuple[Option, ...]


def available() -> list[RuleInfo]:
    """Return what rules are registered: those of the package first, then those of users.

    Returns:
        One `RuleInfo` per rule, in the order in which the rules were registered.
    """
    return [
        RuleInfo(name, rule.display_name, _first_paragraph(type(rule)), rule.paper, tuple(rule.all_options.values()))
        for name, rule in RULES.items()
    ]


def _first_paragraph(rule: type[Rule]) -> str:
    """Return the first paragraph of a class's own docstring in one line; not that of the class it extends."""
    text = inspect.cleandoc(vars(rule).get("__doc__") or "")
    return " ".join(text.partition("\n\n")[0].split())


def _check(rule: Rule) -> None:
    """Raise if the declarations of a rule are not valid or contradict each other."""
    where = f"rule {rule.name!r}"
    for attribute in ("options", "state", "statistics", "diagnostics", "aliases"):
        if not isinstance(getattr(rule, attribute), tuple):
            raise TypeError(f"{where}: {attribute} must be a tuple, got {getattr(rule, attribute)!r}")
    for statistic in rule.statistics:
        if statistic not in STATISTICS:
            near = suggestion(statistic, STATISTICS)
            raise ValueError(f"{where}: unknown statistic {statistic!r}{near} (valid names: {', '.join(STATISTICS)})")
    _check_options(rule, where)
    _check_state(rule, where)


def _check_options(rule: Rule, where: str) -> None:
    """Raise if a default is not valid, a required option is missing, or a name is reserved."""
    for option in rule.all_options.values():
        if option.default is not None:  # None means "not set" and is valid for every option
            try:
                option.check_value(option.default, option.name)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}: the default of an option is not valid: {error}") from None
    for needed in ("lr", "weight_decay"):
        if needed not in rule.all_options or not rule.all_options[needed].per_step:
            raise ValueError(f"{where}: options must include {needed!r} as a per_step option: begin with *Rule.options")
    reserved = sorted(RESERVED_NAMES & rule.all_options.keys())
    if reserved:
        raise ValueError(f"{where}: option {reserved[0]!r} has a name that the optimizers use themselves: rename it")
    for option in rule.options:
        if PARAMETER_OPTIONS.get(option.name, option) is not option:
            raise ValueError(
                f"{where}: option {option.name!r} has the name of an option that says how a parameter is read as "
                "matrices, or how its state is stored: rename it"
            )


def _check_state(rule: Rule, where: str) -> None:
    """Raise if state has an unknown kind, a repeated name or no valid start, or if kernels need other state."""
    for spec in rule.all_state:
        if spec.kind not in KINDS[type(spec)]:
            valid = ", ".join(map(repr, KINDS[type(spec)]))
            raise ValueError(
                f"{where}: state {spec.name!r} has the unknown kind {spec.kind!r}; valid kinds are {valid}"
            )
        if isinstance(spec, PerParameter) and spec.code not in CODES:
            raise ValueError(
                f"{where}: state {spec.name!r} has the unknown code {spec.code!r}; valid codes are "
                + ", ".join(map(repr, CODES))
            )
    of_scales = [spec.name + SCALES for spec in rule.all_state if spec.is_sharded]
    names = [*(spec.name for spec in rule.all_state), *of_scales, *rule.diagnostics]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{where}: {', '.join(map(repr, repeated))} is declared twice, as state or as a diagnostic")
    of_matrices = [spec for spec in rule.all_state if isinstance(spec, PerMatrix)]
    if rule.update_statistics and not rule.multiplies_weights:
        raise ValueError(f"{where}: update_statistics are for factors, which the rule does not define")
    if (of_matrices or rule.statistics or rule.multiplies_weights) and not rule.needs_matrices:
        raise ValueError(f"{where}: per-matrix state, statistics and factors need a rule that defines direction")
    for spec in of_matrices:
        if spec.initial is None:
            if spec.zero_error is not None:
                raise ValueError(f"{where}: state {spec.name!r} has a zero_error and starts from zero: pass initial")
            continue
        if spec.initial not in rule.statistics:
            which = f"{where}: state {spec.name!r} starts from {spec.initial!r}"
            raise ValueError(f"{which}, which the rule does not declare: add it to statistics")
        statistic = STATISTICS[spec.initial]
        if not isinstance(statistic, SummedStatistic) or statistic.shape(3, 2) != spec.shape_of_matrix(3, 2):
            raise ValueError(f"{where}: state {spec.name!r} of kind {spec.kind!r} can't start from {spec.initial!r}")
    if rule.fused is not None:
        missing = ", ".join(repr(name) for name in rule.fused.layout.states if name not in names)
        if missing:
            raise ValueError(f"{where}: its kernels need the state {missing}: declare it, or set kernels = None")
