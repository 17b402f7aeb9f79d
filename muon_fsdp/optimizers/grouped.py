"""Divide parameters into groups with one rule each, and resolve the options of each group."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from muon_fsdp.declarations.option import canonical
from muon_fsdp.parameters.groups import (
    Group,
    Params,
    Source,
    as_torch_params,
    check_parameter,
    names_and_parameters,
    refuse_zero_redundancy,
    resolve,
    rules_of,
    scheduled_lrs,
    split_foreign,
    with_lists,
)
from muon_fsdp.parameters.records import ParameterRecord, make_records, view_of
from muon_fsdp.parameters.replicas import Replicas
from muon_fsdp.parameters.routing import GroupRule, Route, Router, clean_name
from muon_fsdp.parameters.routing_report import RoutingGroup, RoutingReport, RoutingRow, frozen_rows
from muon_fsdp.parameters.wrappers import ModelWatch
from muon_fsdp.plan.settings import MICRO_STEP, NUM_UPDATES, SCHEDULED_LRS, STARTED
from muon_fsdp.rules import RULES, Rule, rule_named


class GroupedOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups have one rule each; subclasses define the step.

    Args:
        params: a model, one tensor, tensors, named tensors, or groups with options.
        rule: the name of the rule of matrices.
        other_rule: the name of the element-wise rule of all other parameters.
        options: the options of rules that the user passed.
        overrides: {pattern of names: rule, or dict of group options}.
        strict: whether to raise where routing is a guess.
        replicas: over which ranks parameters are replicas, and whether their state is sharded over these.
    """

    def __init__(
        self,
        params: Params,
        rule: str,
        other_rule: str,
        options: Mapping[str, Any],
        overrides: Mapping[str, str | Mapping[str, Any]] | None,
        *,
        strict: bool,
        replicas: Replicas,
    ) -> None:
        self._replicas = replicas
        self._watch = ModelWatch(params, warns_about_missing=True) if isinstance(params, nn.Module) else None
        self._rule_name, self._other_rule_name = rule_named(rule).name, rule_named(other_rule).name
        if self._other_rule.needs_matrices:
            raise ValueError(f"other_rule={other_rule!r} works on whole matrices: pass an element-wise rule")
        self._given = Source(type(self).__name__, dict(options), is_constructor=True)
        self._is_strict = strict
        model = params if isinstance(params, nn.Module) else self._model_to_route_by()
        self._router = Router(overrides, other_rule)
        self._overrides = {
            pattern: Source(f"overrides[{pattern!r}]", {k: v for k, v in options.items() if k != "rule"})
            for pattern, options in self._router.overrides.items()
        }
        self._routes: list[list[Route]] = []  # decided when parameters are added; one per parameter of each group
        self._frozen_rows = frozen_rows(model) if model is not None else ()
        defaults = self._resolved(self._rule)  # torch's cyclic schedulers read momentum from here
        self._given.taken.clear()  # no parameter uses an option yet
        groups = with_lists(as_torch_params(params))
        self._is_built = False
        with self._router.reading(model):
            self._pattern_rules = self._rules_of_patterns(groups) if self._overrides else {}
            super().__init__(groups, defaults)
            self._is_built = True
            if groups and isinstance(groups[0], dict) and len(self.param_groups) != len(groups):
                refuse_zero_redundancy(type(self).__name__)
            self._check_use_of_options()
            if self._router.unused_patterns:
                self._warn(f"overrides {sorted(self._router.unused_patterns)} match no parameter", stacklevel=4)
            self._check_doubts(self._all_routes())
            self._check_use_of_meshes()
        for message in dict.fromkeys(text for g in self.param_groups for text in RULES[g["rule"]].warnings(g)):
            self._router.warnings.append(message)
            warnings.warn(message, stacklevel=4)
        self._check_use_of_rule()
        self._replicas.check_state(self._parameters())

    @property
    def _rule(self) -> Rule:
        """Return the rule of matrices whose group or override names no other."""
        return RULES[self._rule_name]

    @property
    def _other_rule(self) -> Rule:
        return RULES[self._other_rule_name]

    def _class_defaults(self, rule: Rule) -> dict[str, Any]:
        """Return the defaults of a subclass for the options of a rule."""
        return {}

    def _parameter_defaults(self, parameter: Tensor, route: Route) -> dict[str, Any]:
        """Return the options of a subclass for a parameter, which its group or an override may change."""
        return {}

    def _resolved(
        self, rule: Rule, route: Route | None = None, sources: Sequence[tuple[Source, Sequence[Rule]]] = ()
    ) -> Group:
        """Return the options of parameters of one rule, from the constructor, their group and an override."""
        defaults = dict(route.defaults) if route is not None else {}
        return resolve(rule, self._class_defaults(rule), defaults, [(self._given, ()), *sources])

    def _rules_of_patterns(self, groups: Sequence[Any]) -> dict[str, set[str]]:
        """Return the rules of all parameters that each override matches, in whatever group they are.

        The effect of an override on matrices and vectors must not depend on how they are grouped.
        """
        found: dict[str, set[str]] = defaultdict(set)
        for group in groups if groups and isinstance(groups[0], dict) else [{"params": groups}]:
            with suppress(TypeError, ValueError, KeyError):  # a wrong group raises when it is added
                named, parameters = names_and_parameters(group)
                group_rule = self._rule_of_group(group)
                for index, parameter in enumerate(parameters):
                    name = self._router.name_of(parameter) or (clean_name(named[index]) if named else "")
                    route = self._router.route(parameter, name, group_rule, named=True)
                    if route.pattern is not None:
                        found[route.pattern].add(route.rule)
        return found

    def _rule_of_group(self, given: Mapping[str, Any]) -> GroupRule:
        """Return the rule that a user's group asks for."""
        rule = rule_named(given["rule"]) if "rule" in given else self._rule
        return GroupRule(
            rule.name,
            is_explicit="rule" in given,
            is_divided="rule" in given and MICRO_STEP in given,
            view=given.get("view", self._given.options.get("view", "auto")),
        )

    def _check_use_of_options(self) -> None:
        """Raise for an option that had no effect on any parameter."""
        self._resolved(self._other_rule)  # counts as used even if no parameter has it: one may be added later
        rules = [RULES[group["rule"]] for group in self.param_groups]
        self._given.require_taken([self._rule, *rules, self._other_rule])
        for pattern, source in self._overrides.items():
            if pattern not in self._router.unused_patterns:
                matched = [route for route in self._all_routes() if route.pattern == pattern]
                source.require_taken(rules_of(matched))
                self._require_rule(source.where, self._router.overrides[pattern].get("rule"), matched)

    def _check_use_of_meshes(self) -> None:
        """Check that the patterns of `replicate_mesh` have names to match, and warn about those that match none."""
        routes = self._all_routes()
        if self._replicas.has_patterns and any(route.unnamed_position is not None for route in routes):
            raise ValueError("patterns in replicate_mesh need names: pass the model, or model.named_parameters()")
        matrices = [route.name for route in routes if RULES[route.rule].needs_matrices]
        unused = self._replicas.unused_patterns(matrices)
        if unused:
            self._warn(f"replicate_mesh: the patterns {unused} match no matrix", stacklevel=5)

    def _require_rule(self, where: str, rule: str | None, routes: Sequence[Route]) -> None:
        """Raise if the user asked for a rule of matrices where all parameters are vectors."""
        vectors = [route for route in routes if not route.decided]
        if rule is None or not vectors or not RULES[rule].needs_matrices or any(r.rule == rule for r in routes):
            return
        first = vectors[0]
        raise ValueError(
            f"{where}: no parameter can have rule {rule!r}: {first.name!r} of shape {first.shape} is a vector, and so "
            f"are all others. Leave the rule out or pass rule={self._other_rule_name!r}. A matrix of one row or one "
            "column is orthogonalized if an override has its full name"
        )

    def _check_doubts(self, routes: Sequence[Route]) -> None:
        """Report what routing leaves open, or raise under `strict`."""
        if self._rule_name == self._other_rule_name:
            return  # either answer is the same rule
        for message in self._router.doubts(routes):
            if self._is_strict:
                raise ValueError(f"strict: {message} Otherwise pass {self._rule_name!r} there.")
            if message not in self._router.warnings:
                self._router.warnings.append(message)
        about_bare = self._router.doubt_about_bare(routes)
        if about_bare is not None and about_bare not in self._router.warnings:
            self._warn(about_bare, stacklevel=4)

    def _check_use_of_rule(self) -> None:
        """Warn if no parameter has a rule of matrices, unless the user asked for that."""
        routes = self._all_routes()
        if any(rule.needs_matrices for rule in rules_of(routes)):
            return
        if self._is_strict:
            raise ValueError(f"strict: no parameter has a rule of matrices\n{self.routing_report()}")
        if not routes or any(route.decided or route.rule == self._rule_name for route in routes):
            return
        remedy = f"pass rule={self._other_rule_name!r} if that is intended"
        if not self._rule.needs_matrices:
            remedy = f"pass other_rule={self._rule_name!r} if it is meant for these"
        self._warn(
            f"no parameter has a rule of matrices: rule {self._rule_name!r} has nothing to do. routing_report() gives "
            f"the reason for each parameter; {remedy}",
            stacklevel=4,
        )

    def _model_to_route_by(self) -> nn.Module | None:
        """Return the model by whose modules `params` are routed; a subclass may have one."""
        return None

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters; a group that mixes matrices and other parameters becomes one group per rule.

        Keys are `rule`, options of the rules of its parameters, and `name`. In a group with matrices, options of the
        other parameters have the name of their rule as a prefix (`adamw_lr`). A key that has no effect raises an
        error. An optimizer built from a model routes new parameters by the model as it is now: unfreeze them first.
        """
        model = self._watch.model() if self._is_built and self._watch is not None else None
        with self._router.reading(model) if self._is_built else nullcontext():
            self._add(param_group)

    def _add(self, param_group: Group) -> None:
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        given = {key: value for key, value in param_group.items() if key != "params"}
        options, foreign = split_foreign(given)
        source = Source("a parameter group", options)
        named, parameters = names_and_parameters(param_group)
        routes = self._route(parameters, named, given)
        self._require_rule(source.where, given.get("rule"), routes)
        new_groups = [
            self._new_group(group, [parameters[i] for i in indices], members, source, foreign)
            for group, indices, overridden in self._split(routes, source)
            for members in [[replace(routes[i], overridden=overridden) for i in indices]]
        ]
        if not routes:  # keep a group without parameters, as torch does
            rule = rule_named(given["rule"]) if "rule" in given else self._rule
            group = self._resolved(rule, None, [(source, ())])
            new_groups = [self._new_group(group, [], [], source, foreign)]
        source.require_taken([RULES[group["rule"]] for group, _ in new_groups])
        for pattern in {route.pattern for route in routes if self._is_built and route.pattern is not None}:
            self._overrides[pattern].require_taken(rules_of(route for route in routes if route.pattern == pattern))
        for group, group_routes in new_groups:  # views are checked before anything is changed
            for route in group_routes:
                view_of(group, route, route.shape)
        if self._is_built:
            self._check_doubts([*self._all_routes(), *routes])
        self._name_all_groups(new_groups, named is not None)
        for group, group_routes in new_groups:
            if isinstance(group["lr"], Tensor) and any(other["lr"] is group["lr"] for other in self.param_groups):
                group["lr"] = group["lr"].clone()  # schedulers write to it in place, for each group
            # torch adds its defaults, which are options of the rule of matrices and may not belong here.
            missing = [key for key in self.defaults if key not in group]
            super().add_param_group(group)
            for key in missing:
                del group[key]
            self._routes.append(group_routes)

    def _split(self, routes: Sequence[Route], source: Source) -> list[tuple[Group, list[int], tuple[str, ...]]]:
        """Divide the parameters of a user's group by their options.

        Returns:
            Options, the indices of their parameters, and the names of the options that an override sets for these;
            matrices come first, otherwise in the user's order.
        """
        rules = rules_of(routes)
        members: dict[tuple[object, ...], list[int]] = defaultdict(list)
        resolved: dict[tuple[object, ...], tuple[Group, tuple[str, ...]]] = {}
        known: dict[tuple[object, ...], tuple[object, ...]] = {}
        for index, route in enumerate(routes):
            kind = (route.rule, route.pattern, route.defaults)
            if kind not in known:
                sources: list[tuple[Source, Sequence[Rule]]] = [(source, rules)]
                override = self._overrides.get(route.pattern) if route.pattern is not None else None
                if override is not None and route.pattern is not None:
                    here = {other.rule for other in routes if other.pattern == route.pattern}
                    beside = [RULES[name] for name in here | self._pattern_rules.get(route.pattern, set())]
                    sources.append((override, beside))
                options = self._resolved(RULES[route.rule], route, sources)
                overridden = override.of(RULES[route.rule], beside) if override is not None else {}
                is_other = route.rule == self._other_rule_name or not (
                    RULES[route.rule].needs_matrices or route.rule == self._rule_name
                )
                known[kind] = (is_other, repr(options), repr(overridden))
                resolved[known[kind]] = options, tuple(overridden)
            members[known[kind]].append(index)
        ordered = sorted(members, key=lambda key: (key[0], members[key][0]))
        return [(resolved[key][0], members[key], resolved[key][1]) for key in ordered]

    def _new_group(
        self,
        options: Group,
        parameters: list[Tensor],
        routes: list[Route],
        source: Source,
        foreign: Mapping[str, Any],
    ) -> tuple[Group, list[Route]]:
        kept = {key: value for key, value in foreign.items() if key not in ("param_names", *SCHEDULED_LRS)}
        lrs = scheduled_lrs(foreign, source.options.get("lr"), options["lr"])
        progress = {MICRO_STEP: 0, STARTED: False, NUM_UPDATES: 0}
        return {**options, **kept, **lrs, **progress, "params": parameters}, routes

    def _name_all_groups(self, new_groups: Sequence[tuple[Group, list[Route]]], named: bool) -> None:
        """Add names to all groups if some group has names: torch requires all or none."""
        if not (named or any("param_names" in group for group in self.param_groups)):
            return
        for group, routes in (*zip(self.param_groups, self._routes, strict=True), *new_groups):
            group.setdefault("param_names", [route.given_name or route.name for route in routes])

    def _route(self, parameters: list[Tensor], named: list[str] | None, given: Mapping[str, Any]) -> list[Route]:
        group_rule = self._rule_of_group(given)
        first = sum(map(len, self._routes))
        taken = {id(p): route.name for p, route in zip(self._parameters(), self._all_routes(), strict=True)}
        routes = []
        for index, parameter in enumerate(parameters):
            model_name = self._router.name_of(parameter) if isinstance(parameter, Tensor) else None
            name = model_name or (clean_name(named[index]) if named else f"param[{first + index}]")
            check_parameter(name, parameter)
            if id(parameter) in taken:
                raise ValueError(f"parameter {name!r} is given twice (first as {taken[id(parameter)]!r})")
            taken[id(parameter)] = name
            has_name = model_name is not None or named is not None
            if self._router.overrides and not has_name:
                raise ValueError("overrides need names: pass the model, or model.named_parameters()")
            route = self._router.route(parameter, name, group_rule, named=has_name)
            if self._is_strict and route.guessed:
                raise ValueError(
                    f"strict: parameter {name!r} of shape {tuple(parameter.shape)} would get rule {route.rule!r} "
                    f"by a guess ({route.reason}); pass overrides={{{name!r}: {route.rule!r}}} or "
                    f"{{{name!r}: {group_rule.rule!r}}}"
                )
            defaults = tuple(self._parameter_defaults(parameter, route).items())
            given_name = named[index] if named else None
            position = None if has_name else first + index
            routes.append(replace(route, defaults=defaults, given_name=given_name, unnamed_position=position))
        return routes

    def _records(self) -> list[ParameterRecord]:
        """Return one record per parameter, for the parameters and options that groups have now."""
        self._all_routes()  # raises if groups were changed by hand
        return make_records(self.param_groups, self._routes, self._replicas)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _all_routes(self) -> list[Route]:
        if [len(group["params"]) for group in self.param_groups] != [len(routes) for routes in self._routes]:
            raise RuntimeError(
                "param_groups were changed by hand: use add_param_group to add parameters, and a new optimizer "
                "to remove some"
            )
        return [route for routes in self._routes for route in routes]

    def routing_report(self) -> RoutingReport:
        """Return the rule of every parameter with its reason, and the options in force; `print` shows a table."""
        groups = [RoutingGroup.of(index, RULES[group["rule"]], group) for index, group in enumerate(self.param_groups)]
        rows = []
        for record in self._records():
            shapes = sorted({(rows, cols) for _, rows, cols in record.view.block_shapes}) if record.view else []
            sizes = [record.rule.update_scale(record.group, *shape) for shape in shapes]
            scales = ", ".join(f"{size:.4g}" for size in sizes if size is not None)
            unchanged = record.route.rule == record.rule.name
            reason = record.route.reason if unchanged else "rule of the group was changed"
            options = groups[record.group_index].options
            overridden = {name: options[name] for name in record.route.overridden if name in options}
            rows.append(
                RoutingRow(record.name, record.shape, record.rule.name, reason, scales, record.group_index, overridden)
            )
        held = {row.name for row in rows}  # including frozen ones, and ones unfrozen and added since
        frozen = [row for row in self._frozen_rows if row.name not in held]
        return RoutingReport((*rows, *frozen), tuple(self._router.warnings), tuple(groups))

    def _complete_groups(self) -> None:
        """Check options that users have changed in groups, and add those that a changed rule lacks."""
        for number, group in enumerate(self.param_groups):
            options = RULES[group["rule"]].all_options
            try:
                for name, option in options.items():
                    option.validate(group.setdefault(name, option.default))
            except (TypeError, ValueError) as error:
                raise type(error)(f"param_groups[{number}]: {error}") from None
            group.update(canonical({name: group[name] for name in options}))

    def _warn(self, message: str, stacklevel: int = 3) -> None:
        if self._is_strict:
            raise ValueError(f"strict: {message}")
        self._router.warnings.append(message)
        warnings.warn(message, stacklevel=stacklevel)
