"""Optimizers whose groups have one rule each: which parameter takes which rule, with which options."""

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
from muon_fsdp.declarations.views import MatrixView, matrix_view
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
from muon_fsdp.parameters.routing import GroupRule, Route, Router, RoutingReport, RoutingRow, clean_name, frozen_rows
from muon_fsdp.parameters.wrappers import ModelWatch
from muon_fsdp.plan.options import MICRO_STEP, SCHEDULED_LRS, STARTED
from muon_fsdp.rules import RULES, Rule, rule_named


class GroupedOptimizer(torch.optim.Optimizer):
    """Divides the parameters of users into groups of one rule each; what a step does is for subclasses.

    Args:
        params: a model, one tensor, tensors, named tensors, or groups with options.
        rule: the rule of matrices, by its name.
        other_rule: the element-wise rule of all other parameters.
        options: those of rules, as they were given to the constructor.
        overrides: {pattern of names: rule, or dict of group options}.
        strict: whether to refuse what is a guess.
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
    ) -> None:
        self._watch = ModelWatch(params, tells_of_missing=True) if isinstance(params, nn.Module) else None
        self._rule_name, self._other_rule_name = rule_named(rule).name, rule_named(other_rule).name
        if self._other_rule.needs_matrices:
            raise ValueError(f"other_rule={other_rule!r} works on whole matrices: it needs an element-wise rule")
        self._given = Source(type(self).__name__, dict(options), is_constructor=True)
        self._is_strict = strict
        model = params if isinstance(params, nn.Module) else self._model_to_route_by()
        self._router = Router(overrides, other_rule)
        self._overrides = {
            pattern: Source(f"overrides[{pattern!r}]", {k: v for k, v in options.items() if k != "rule"})
            for pattern, options in self._router.overrides.items()
        }
        self._routes: list[list[Route]] = []  # parallel to the parameters of the groups
        self._frozen_rows = frozen_rows(model) if model is not None else ()
        defaults = self._resolved(self._rule)  # what torch's schedulers look at: a cyclic one moves momentum
        self._given.taken.clear()  # by parameters, so far
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
            self._check_doubts(self._routed_shapes())
        for message in dict.fromkeys(text for g in self.param_groups for text in RULES[g["rule"]].warnings(g)):
            self._router.warnings.append(message)
            warnings.warn(message, stacklevel=4)
        self._check_use_of_rule()

    @property
    def _rule(self) -> Rule:
        """The rule of matrices, where no group or override names another."""
        return RULES[self._rule_name]

    @property
    def _other_rule(self) -> Rule:
        return RULES[self._other_rule_name]

    def _class_defaults(self, rule: Rule) -> dict[str, Any]:
        """Return the defaults that a subclass gives to the options of a rule."""
        return {}

    def _parameter_defaults(self, parameter: Tensor, route: Route) -> dict[str, Any]:
        """Return the options that a subclass gives to a parameter unless its group or an override says otherwise."""
        return {}

    def _resolved(
        self, rule: Rule, route: Route | None = None, sources: Sequence[tuple[Source, Sequence[Rule]]] = ()
    ) -> Group:
        """Return the options of parameters of one rule, given what their group and an override say."""
        defaults = dict(route.defaults) if route is not None else {}
        return resolve(rule, self._class_defaults(rule), defaults, [(self._given, ()), *sources])

    def _rules_of_patterns(self, groups: Sequence[Any]) -> dict[str, set[str]]:
        """Return the rules of all parameters that each override matches, whatever groups they are in.

        What an override says to matrices and vectors must not depend on how they are grouped.
        """
        found: dict[str, set[str]] = defaultdict(set)
        for group in groups if groups and isinstance(groups[0], dict) else [{"params": groups}]:
            with suppress(TypeError, ValueError, KeyError):  # what is wrong with a group is told when it is added
                named, parameters = names_and_parameters(group)
                group_rule = self._rule_of_group(group)
                for index, parameter in enumerate(parameters):
                    name = self._router.name_of(parameter) or (clean_name(named[index]) if named else "")
                    route = self._router.route(parameter, name, group_rule, named=True)
                    if route.pattern is not None:
                        found[route.pattern].add(route.rule)
        return found

    def _rule_of_group(self, given: Mapping[str, Any]) -> GroupRule:
        """Return the rule that a user's group asks for, and what it binds."""
        rule = rule_named(given["rule"]) if "rule" in given else self._rule
        return GroupRule(
            rule.name,
            is_explicit="rule" in given or not rule.needs_matrices,
            is_divided="rule" in given and MICRO_STEP in given,
            view=given.get("view", self._given.options.get("view", "auto")),
        )

    def _check_use_of_options(self) -> None:
        """Raise for an option that had no effect on any parameter."""
        self._resolved(self._other_rule)  # in use even if no parameter takes it yet: one may be added later
        rules = [RULES[group["rule"]] for group in self.param_groups]
        self._given.require_taken([*rules, self._rule, self._other_rule])
        for pattern, source in self._overrides.items():
            if pattern not in self._router.unused_patterns:
                matched = [(route, shape) for route, shape in self._routed_shapes() if route.pattern == pattern]
                source.require_taken(rules_of(route for route, _ in matched))
                self._require_rule(source.where, self._router.overrides[pattern].get("rule"), matched)

    def _require_rule(self, where: str, rule: str | None, routed: Sequence[tuple[Route, tuple[int, ...]]]) -> None:
        """Raise for a rule of matrices that was named where all parameters are vectors."""
        vectors = [(route.name, shape) for route, shape in routed if not route.decided]
        if rule is None or not vectors or not RULES[rule].needs_matrices or any(r.rule == rule for r, _ in routed):
            return
        name, shape = vectors[0]
        raise ValueError(
            f"{where}: no parameter can take rule {rule!r}: {name!r} of shape {shape} is a vector, as all of them are. "
            f"Leave the rule out or pass rule={self._other_rule_name!r}; one row or one column is orthogonalized if an "
            "override has its full name"
        )

    def _check_doubts(self, routed: Sequence[tuple[Route, tuple[int, ...]]]) -> None:
        """Tell what routing leaves open, or raise under `strict`."""
        for message in self._router.doubts([route for route, _ in routed]):
            if self._is_strict:
                raise ValueError(f"strict: {message} Otherwise pass {self._rule_name!r} there.")
            if message not in self._router.warnings:
                self._router.warnings.append(message)
        about_bare = self._router.doubt_about_bare(routed)
        if about_bare is not None and about_bare not in self._router.warnings:
            self._warn(about_bare, stacklevel=4)

    def _check_use_of_rule(self) -> None:
        """Warn if no parameter takes a rule of matrices, though the user has not asked for that."""
        routes = self._all_routes()
        if any(rule.needs_matrices for rule in rules_of(routes)):
            return
        if self._is_strict:
            raise ValueError(f"strict: no parameter takes an orthogonalizing rule\n{self.routing_report()}")
        if routes and not any(route.decided for route in routes):
            self._warn(
                f"no parameter takes an orthogonalizing rule: rule {self._rule_name!r} has nothing to do. "
                "routing_report() says why each parameter takes another; "
                f"pass rule={self._other_rule_name!r} if that is meant",
                stacklevel=4,
            )

    def _model_to_route_by(self) -> nn.Module | None:
        """Return the model whose modules decide about the rules of `params`; a subclass may have one."""
        return None

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters; a group that mixes matrices and other parameters becomes one group per rule.

        Keys are `rule`, options of the rules that its parameters take, and `name`. In a group with matrices, options
        of the others have the name of their rule before them (`adamw_lr`). A key that has no effect is refused. An
        optimizer that was built from a model routes them by the model as it is now: unfreeze them first.
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
        routed = [(route, tuple(parameter.shape)) for route, parameter in zip(routes, parameters, strict=True)]
        self._require_rule(source.where, given.get("rule"), routed)
        new_groups = [
            self._new_group(group, [parameters[i] for i in indices], [routes[i] for i in indices], source, foreign)
            for group, indices in self._split(routes, source)
        ]
        if not routes:  # as torch does, keep a group without parameters
            rule = rule_named(given["rule"]) if "rule" in given else self._rule
            group = self._resolved(rule, None, [(source, ())])
            new_groups = [self._new_group(group, [], [], source, foreign)]
        source.require_taken([RULES[group["rule"]] for group, _ in new_groups])
        for pattern in {route.pattern for route in routes if self._is_built and route.pattern is not None}:
            self._overrides[pattern].require_taken(rules_of(route for route in routes if route.pattern == pattern))
        for group, group_routes in new_groups:  # views are checked before anything is changed
            self._views(group, group_routes)
        if self._is_built:
            self._check_doubts([*self._routed_shapes(), *routed])
        self._name_all_groups(new_groups, named is not None)
        for group, group_routes in new_groups:
            if isinstance(group["lr"], Tensor) and any(other["lr"] is group["lr"] for other in self.param_groups):
                group["lr"] = group["lr"].clone()  # schedulers write to it in place, group by group
            # torch fills in its defaults, which are those of the matrix rule.
            missing = [key for key in self.defaults if key not in group]
            super().add_param_group(group)
            for key in missing:
                del group[key]
            self._routes.append(group_routes)

    def _split(self, routes: Sequence[Route], source: Source) -> list[tuple[Group, list[int]]]:
        """Divide the parameters of a user's group by their options: matrices first, else as given."""
        rules = rules_of(routes)
        members: dict[tuple[object, ...], list[int]] = defaultdict(list)
        resolved: dict[tuple[object, ...], Group] = {}
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
                said = override.of(RULES[route.rule], beside) if override is not None else None
                known[kind] = (not RULES[route.rule].needs_matrices, repr(options), repr(said or ""))
                resolved[known[kind]] = options
            members[known[kind]].append(index)
        ordered = sorted(members, key=lambda key: (key[0], members[key][0]))
        return [(resolved[key], members[key]) for key in ordered]

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
        return {**options, **kept, **lrs, MICRO_STEP: 0, STARTED: False, "params": parameters}, routes

    def _name_all_groups(self, new_groups: Sequence[tuple[Group, list[Route]]], named: bool) -> None:
        """Give all groups names if some have any: torch wants names in all groups or in none."""
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
                    f"strict: parameter {name!r} of shape {tuple(parameter.shape)} would take rule {route.rule!r} "
                    f"by a guess ({route.reason}); pass overrides={{{name!r}: {route.rule!r}}} or "
                    f"{{{name!r}: {group_rule.rule!r}}}"
                )
            defaults = tuple(self._parameter_defaults(parameter, route).items())
            given_name = named[index] if named else None
            place = None if has_name else first + index
            routes.append(replace(route, defaults=defaults, given_name=given_name, place=place))
        return routes

    def _views(self, group: Group, routes: Sequence[Route]) -> list[MatrixView | None]:
        """How every parameter of a group is read as matrices; None under an element-wise rule."""
        if not RULES[group["rule"]].needs_matrices:
            return [None] * len(routes)
        return [
            matrix_view(
                tuple(parameter.shape),
                name=route.name,
                kind=group["view"] if group["view"] != "auto" else route.view,
                transposed=route.transposed,
                num_heads=group["num_heads"],
                split_sizes=group["split_sizes"],
            )
            for parameter, route in zip(group["params"], routes, strict=True)
        ]

    def _all_views(self) -> list[list[MatrixView | None]]:
        return [self._views(group, routes) for group, routes in zip(self.param_groups, self._routes, strict=True)]

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _all_routes(self) -> list[Route]:
        if [len(group["params"]) for group in self.param_groups] != [len(routes) for routes in self._routes]:
            raise RuntimeError(
                "param_groups were changed by hand: use add_param_group to add parameters, and a new optimizer "
                "to remove some"
            )
        return [route for routes in self._routes for route in routes]

    def _routed_shapes(self) -> list[tuple[Route, tuple[int, ...]]]:
        return [(r, tuple(p.shape)) for r, p in zip(self._all_routes(), self._parameters(), strict=True)]

    def routing_report(self) -> RoutingReport:
        """Which parameter takes which rule, why, and with which scale; `print` it for a table."""
        self._all_routes()  # refuses groups that no longer fit
        rows = []
        for group, routes in zip(self.param_groups, self._routes, strict=True):
            for parameter, route, view in zip(group["params"], routes, self._views(group, routes), strict=True):
                shapes = sorted({(rows, cols) for _, rows, cols in view.block_shapes}) if view else []
                sizes = [RULES[group["rule"]].update_scale(group, *shape) for shape in shapes]
                scales = ", ".join(f"{size:.4g}" for size in sizes if size is not None)
                reason = route.reason if route.rule == group["rule"] else "rule of the group was changed"
                rows.append(RoutingRow(route.name, tuple(parameter.shape), group["rule"], reason, scales))
        held = {row.name for row in rows}  # a parameter may be held though it is frozen, or unfrozen and added since
        frozen = [row for row in self._frozen_rows if row.name not in held]
        return RoutingReport((*rows, *frozen), tuple(self._router.warnings))

    def _complete_groups(self) -> None:
        """Check what users have changed in groups, and give a group whose rule was changed the options it lacks."""
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
