"""Divide parameters into groups with one rule each, and resolve the options of each group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn

from muon_fsdp.declarations.encoding import check_storage
from muon_fsdp.declarations.option import canonical
from muon_fsdp.declarations.settings import (
    MICRO_STEP,
    NUM_UPDATES,
    PROGRESS,
    SCHEDULED_LRS,
    STARTED,
    Settings,
)
from muon_fsdp.parameters.groups import (
    INDEPENDENT_LR,
    Group,
    Params,
    Source,
    as_torch_params,
    check_parameter,
    names_and_parameters,
    our_name,
    prefixed,
    refuse_zero_redundancy,
    resolve,
    rules_of,
    scheduled_lrs,
    split_foreign,
    with_lists,
)
from muon_fsdp.parameters.names import clean_name, override_pattern, without_numbers
from muon_fsdp.parameters.records import ParameterRecord, is_cut_by_model, looks_fused, make_records, view_of
from muon_fsdp.parameters.replicas import Replicas
from muon_fsdp.parameters.routing import GroupRule, Route, Router
from muon_fsdp.parameters.routing_report import RoutingGroup, RoutingReport, RoutingRow, frozen_rows, shown
from muon_fsdp.parameters.wrappers import ModelWatch, refuse_copies, reshard
from muon_fsdp.rules import RULES, Rule, rule_named
from muon_fsdp.text import warn_user


class GroupedOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups have one rule each; subclasses define the step.

    Args:
        params: a model, one tensor, tensors, named tensors, or groups with options.
        rule: the name of the rule of matrices.
        other_rule: the name of the element-wise rule of all other parameters.
        options: the options of rules that the user passed.
        overrides: {pattern of names: rule, or dict of group options}.
        settings: those of the whole optimizer.
        replicas: over which ranks parameters are replicas, and whether their state is sharded over these.
    """

    # By whose modules `params` are routed if they are not the model itself; a subclass sets it before this constructor.
    _model: nn.Module | None = None
    _watch: ModelWatch | None = None  # of the model; a copy of the optimizer has none

    def __init__(
        self,
        params: Params,
        rule: str,
        other_rule: str,
        options: Mapping[str, Any],
        overrides: Mapping[str, str | Mapping[str, Any]] | None,
        *,
        settings: Settings,
        replicas: Replicas,
    ) -> None:
        self._settings, self._replicas = settings, replicas
        self._rule_name, self._other_rule_name = rule_named(rule).name, rule_named(other_rule).name
        if self._other_rule.needs_matrices:
            raise ValueError(f"other_rule={other_rule!r} works on whole matrices: pass an element-wise rule")
        self._given = Source(type(self).__name__, dict(options), is_constructor=True)
        model = params if isinstance(params, nn.Module) else self._model
        replaced = set()
        if model is not None:
            self._watch = ModelWatch(model, warns_about_missing=model is params)
            replaced = reshard(model.modules())
        self._router = Router(overrides, other_rule, settings.attention)
        self._overrides = {
            pattern: Source(f"overrides[{pattern!r}]", {k: v for k, v in options.items() if k != "rule"})
            for pattern, options in self._router.overrides.items()
        }
        # Schedulers write into a tensor in place; groups that are added later start from its first value.
        first_lr = options["lr"].clone() if isinstance(options.get("lr"), Tensor) else None
        self._routes: list[list[Route]] = []  # decided when parameters are added; one per parameter of each group
        self._routed: list[int] = []  # the `id` of the parameters that they were decided for
        self._num_keys = 0  # of all groups, when they were checked last
        self._warned_keys: set[str] = set()
        self._frozen_rows = frozen_rows(model) if model is not None else ()
        defaults, _ = self._resolved(self._rule)  # torch's cyclic schedulers read momentum from here
        self._given.taken.clear()  # no parameter uses an option yet
        groups = with_lists(as_torch_params(params))
        self._is_built = False
        with self._reading(groups):
            self._preview(groups)
            super().__init__(groups, defaults)
            self._is_built = True
            if first_lr is not None:
                self._given.options["lr"] = first_lr
            if groups and isinstance(groups[0], dict) and len(self.param_groups) != len(groups):
                refuse_zero_redundancy(type(self).__name__)
            self._check_use_of_options()
            unused = self._overrides.keys() - {route.pattern for route in self._all_routes()}
            if unused:
                self._warn(f"overrides {sorted(unused)} match no parameter")
            self._check_doubts(self._all_routes())
            self._check_use_of_meshes()
        if not isinstance(params, nn.Module):
            refuse_copies([route.name for route in self._all_routes()], self._parameters(), replaced)
        messages: dict[str, list[str]] = {}  # of every rule, about the first group that has some
        for group in self.param_groups:
            messages[group["rule"]] = messages.get(group["rule"]) or RULES[group["rule"]].warnings(group)
        for message in dict.fromkeys(text for texts in messages.values() for text in texts):
            self._router.warnings.append(message)
            warn_user(message)
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

    def _resolved(self, rule: Rule, route: Route | None = None, sources: Sequence[Source] = ()) -> tuple[Group, str]:
        """Return the options of parameters of one rule, from the constructor, their group and an override.

        Args:
            rule: the rule.
            route: the route of one of the parameters.
            sources: their group and their override.

        Returns:
            The options, and where `lr` comes from if it may follow from that of the matrices, else "".
        """
        defaults = dict(route.defaults) if route is not None else {}
        places = [self._given, *sources]
        options = resolve(rule, self._class_defaults(rule), defaults, places)
        if rule.all_options["lr"].default is not None:
            return options, ""
        if options["lr"] is None:
            options["lr"], origin = self._following_lr(sources[:1])
            return options, origin
        origins = [source.origin_of_lr(rule) for source in reversed(places)]
        return options, next((origin for origin in origins if origin is not None), "")

    def _following_lr(self, group: Sequence[Source]) -> tuple[float | Tensor, str]:
        """Return the learning rate that follows from that of the matrices of a user's group, and where it comes from.

        Args:
            group: the user's group; empty for the constructor's options alone.
        """
        matrices = next((rule for source in group for rule in source.beside if rule.needs_matrices), self._rule)
        if not matrices.needs_matrices:
            return INDEPENDENT_LR, "the default"
        # Copies: that this reads options does not mean that they have an effect on some parameter.
        places = [replace(source, taken=set()) for source in (self._given, *group)]
        options = resolve(matrices, self._class_defaults(matrices), {}, places)
        ratio = matrices.other_lr_ratio(options)
        if ratio is None:
            return INDEPENDENT_LR, "the default"
        lr = options["lr"]
        if isinstance(lr, Tensor):  # a tensor of its own, computed without waiting for the device
            return lr.detach() * ratio, f"{ratio:g} x the lr of the matrices"
        return lr * ratio, f"{ratio:g} x lr={lr:g}" if ratio != 1 else f"lr={lr:g} of the matrices"

    def _preview(self, groups: Sequence[Any]) -> None:
        """Route all parameters before groups are made, to learn what options of the constructor and overrides mean.

        The effect of an override on matrices and vectors must not depend on how they are grouped. `lr` belongs to the
        element-wise rule if no parameter is a matrix, unless the user has decided that with a rule.
        """
        self._pattern_rules: dict[str, set[str]] = defaultdict(set)
        routes: list[Route] = []
        for group, named, parameters in _readable(groups):
            with suppress(AttributeError, TypeError, ValueError, RuntimeError):  # a wrong group raises when it is added
                routes += self._route(parameters, named, group, {})
        for route in routes:
            if route.pattern is not None:
                self._pattern_rules[route.pattern].add(route.rule)
        is_matrix = any(RULES[route.rule].needs_matrices for route in routes)
        own_lr = self._given.options.get(prefixed(self._other_rule, "lr"))
        is_decided = not self._rule.needs_matrices or any(route.decided for route in routes)
        self._given.lr_is_for_others = bool(routes) and not is_matrix and not is_decided and own_lr is None

    def _reading(self, groups: Sequence[Any]) -> AbstractContextManager[None]:
        """Route inside the block by the model, or else by the names of parameters, in whatever group they are."""
        named_parameters = [
            (name, parameter)
            for _, named, parameters in _readable(groups)
            if named is not None
            for name, parameter in zip(named, parameters, strict=True)
            if isinstance(parameter, Tensor)
        ]
        return self._router.reading(self._known_model(), named_parameters)

    def _check_use_of_options(self) -> None:
        """Raise for an option that had no effect on any parameter."""
        self._resolved(self._other_rule)  # counts as used even if no parameter has it: one may be added later
        rules = [RULES[group["rule"]] for group in self.param_groups]
        self._given.require_taken(rules, unused=[self._rule, self._other_rule])
        for pattern, source in self._overrides.items():
            matched = [route for route in self._all_routes() if route.pattern == pattern]
            if matched:
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
            self._warn(f"replicate_mesh: the patterns {unused} match no matrix")

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
            if self._settings.strict:
                raise ValueError(f"strict: {message} Otherwise pass {self._rule_name!r} there.")
            if message not in self._router.warnings:
                self._router.warnings.append(message)
        about_bare = self._router.doubt_about_bare(routes)
        if about_bare is not None and about_bare not in self._router.warnings:
            self._warn(about_bare)

    def _refuse_guesses(self, new_groups: Sequence[tuple[Group, list[Route]]]) -> None:
        """Raise if a rule is a guess, or if it is not clear whether a weight is one matrix."""
        # The same part of several layers is named once.
        unclear: dict[tuple[str, str, tuple[str, ...]], list[Route]] = defaultdict(list)
        for group, routes in new_groups:
            for route in routes:
                # A user who asks for whole weights has decided.
                fused = looks_fused(group, route) if self._settings.attention != "whole" else None
                if route.guessed and self._rule_name != self._other_rule_name:
                    text = f"would get rule {route.rule!r} by a guess ({route.reason})"
                    answers = (repr(route.rule), "", repr(self._rule_name), "")
                elif fused is not None:
                    text = f"looks fused ({fused.parts}) and would be orthogonalized as one matrix"
                    split = shown(dict(fused.options)) if fused.options else "{'split_sizes': (...)}"
                    purpose, condition = " to split it into parts that follow each other,", " if it is one matrix"
                    answers = (split, purpose, repr(route.rule), condition)
                else:
                    continue
                unclear[without_numbers(route.name), text, answers].append(route)
        lines = []
        for (_, text, (first, purpose, second, condition)), same in unclear.items():
            pattern = repr(override_pattern([route.name for route in same], self._router.names))
            others = f" (and {len(same) - 1} more like it)" if len(same) > 1 else ""
            lines.append(
                f"parameter {same[0].name!r} of shape {same[0].shape}{others} {text}; pass "
                f"overrides={{{pattern}: {first}}}{purpose} or {{{pattern}: {second}}}{condition}"
            )
        if lines:
            raise ValueError("strict: " + "\n".join(lines))

    def _check_use_of_rule(self) -> None:
        """Warn if no parameter is updated as a matrix, unless the user asked for that."""
        routes = self._all_routes()
        if any(rule.needs_matrices for rule in rules_of(routes)):
            return
        is_decided = any(route.decided or route.rule == self._rule_name for route in routes)
        title = self._rule.display_name
        nothing = f"{title} has nothing to update: every parameter is a vector, an embedding or an output head."
        if is_decided:
            nothing = f"rule={self._rule_name!r} updates no parameter as a matrix."
        if self._settings.strict:
            raise ValueError(f"strict: {nothing}\n{self.routing_report()}")
        if not routes or is_decided:
            return
        other, option = self._other_rule, prefixed(self._other_rule, "lr")
        remedy = f"If that is intended, pass rule={other.name!r} and {option}."
        if not self._rule.needs_matrices:
            remedy = f"If it is meant for these, pass other_rule={self._rule_name!r}."
        uses_lr = f" {other.display_name} uses lr as it is." if self._given.lr_is_for_others else ""
        self._warn(f"{nothing}{uses_lr} {remedy} routing_report() gives the reason for each parameter.")

    def _known_model(self) -> nn.Module | None:
        """Return the model that the optimizer was built from; None if there was none or it no longer exists."""
        return self._watch.model() if self._watch is not None else None

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters; a group that mixes matrices and other parameters becomes one group per rule.

        Keys are `rule`, options of the rules of its parameters, and `name`. In a group with matrices, options of the
        other parameters have the name of their rule as a prefix (`adamw_lr`). An option that has no effect raises an
        error, and so does a key that resembles one. Keys of other programs are kept (timm's `lr_scale`). An optimizer
        built from a model routes new parameters by the model as it is now: unfreeze them first.
        """
        if not self._is_built:  # the constructor reads all groups
            self._add(param_group)
            return
        (param_group,) = with_lists([param_group])
        with self._reading([*self.param_groups, param_group]):
            self._add(param_group)

    def _add(self, param_group: Group) -> None:
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        given = {key: value for key, value in param_group.items() if key != "params"}
        options, foreign = split_foreign(given)
        source = Source("a parameter group", options)
        named, parameters = names_and_parameters(param_group)
        taken = {id(p): route.name for p, route in zip(self._parameters(), self._all_routes(), strict=True)}
        routes = self._route(parameters, named, given, taken)
        self._require_rule(source.where, given.get("rule"), routes)
        if self._is_built:
            refuse_copies([route.name for route in routes], parameters)
        divided = self._split(routes, source)
        if not routes:  # keep a group without parameters, as torch does
            rule = rule_named(given["rule"]) if "rule" in given else self._rule
            divided = [(self._resolved(rule, None, [source])[0], [], {})]
        kept = {key: value for key, value in foreign.items() if key not in ("param_names", *SCHEDULED_LRS)}
        progress = {MICRO_STEP: 0, STARTED: False, NUM_UPDATES: 0}
        new_groups: list[tuple[Group, list[Route]]] = []
        for resolved, indices, noted in divided:
            lrs = scheduled_lrs(foreign, options.get("lr"), resolved["lr"])
            members = {"params": [parameters[i] for i in indices]}
            new_groups.append(
                ({**resolved, **kept, **lrs, **progress, **members}, [replace(routes[i], **noted) for i in indices])
            )
        self._name_parts([group for group, _ in new_groups])
        source.require_taken([RULES[group["rule"]] for group, _ in new_groups])
        for pattern in {route.pattern for route in routes if self._is_built and route.pattern is not None}:
            self._overrides[pattern].require_taken(rules_of(route for route in routes if route.pattern == pattern))
        for group, group_routes in new_groups:  # views and state are checked before anything is changed
            for route, parameter in zip(group_routes, group["params"], strict=True):
                view_of(group, route, route.shape)
                check_storage(route.name, parameter, group)
        if self._settings.strict:
            self._refuse_guesses(new_groups)
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
            self._routed += map(id, group["params"])

    def _split(self, routes: Sequence[Route], source: Source) -> list[tuple[Group, list[int], dict[str, Any]]]:
        """Divide the parameters of a user's group by their options.

        Returns:
            Options, the indices of their parameters, and what their routes note about these options: the names of
            those that an override sets, and where `lr` comes from. Matrices come first, otherwise in the user's order.
        """

        def is_other(part: tuple[Group, list[int], dict[str, Any]]) -> bool:
            rule = RULES[part[0]["rule"]]
            return rule is self._other_rule or not (rule.needs_matrices or rule is self._rule)

        # The rule that only an override gives, such as that of an embedding, comes last: AdamW's lr follows the first.
        source = replace(source, beside=rules_of(sorted(routes, key=lambda route: route.pattern is not None)))
        parts: dict[tuple[object, ...], tuple[Group, list[int], dict[str, Any]]] = {}  # by their options
        known: dict[tuple[object, ...], list[int]] = {}  # the members of the part of every kind of route
        for index, route in enumerate(routes):
            kind = (route.rule, route.pattern, route.defaults)
            if kind not in known:
                rule, sources = RULES[route.rule], [source]
                if route.pattern is not None:
                    here = {other.rule for other in routes if other.pattern == route.pattern}
                    beside = [RULES[name] for name in here | self._pattern_rules[route.pattern]]
                    sources.append(replace(self._overrides[route.pattern], beside=beside))
                options, lr_origin = self._resolved(rule, route, sources)
                overridden = {} if route.pattern is None else sources[1].of(rule)
                noted = {"overridden": tuple(overridden), "lr_origin": lr_origin}
                part = parts.setdefault((_key(options, lr_origin), _key(overridden)), (options, [], noted))
                known[kind] = part[1]
            known[kind].append(index)
        return sorted(parts.values(), key=is_other)

    def _name_parts(self, parts: Sequence[Group]) -> None:
        """Give the parts of a divided group names of their own: loggers tell groups apart by `name`.

        The first part keeps the user's name, and the others add their rule: "body", "body.adamw", "body.adamw.2".
        """
        taken = {group.get("name") for group in self.param_groups}
        for part in parts[1:] if "name" in parts[0] else ():
            taken.add(parts[0]["name"])
            first = f"{parts[0]['name']}.{part['rule']}"
            candidates = chain([first], (f"{first}.{number}" for number in count(2)))
            part["name"] = next(name for name in candidates if name not in taken)
            taken.add(part["name"])

    def _name_all_groups(self, new_groups: Sequence[tuple[Group, list[Route]]], named: bool) -> None:
        """Add names to all groups if some group has names: torch requires all or none."""
        if not (named or any("param_names" in group for group in self.param_groups)):
            return
        for group, routes in (*zip(self.param_groups, self._routes, strict=True), *new_groups):
            group.setdefault("param_names", [route.given_name or route.name for route in routes])

    def _route(
        self, parameters: list[Tensor], named: list[str] | None, given: Mapping[str, Any], taken: dict[int, str]
    ) -> list[Route]:
        """Return the routes of the parameters of a group; `taken` are the names of those in other groups, by `id`."""
        group_rule = GroupRule(
            rule_named(given["rule"]).name if "rule" in given else self._rule_name,
            is_explicit="rule" in given,
            is_divided="rule" in given and MICRO_STEP in given,
            view=given.get("view", self._given.options.get("view", "auto")),
        )
        first = len(taken)
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
            defaults = tuple(self._parameter_defaults(parameter, route).items())
            given_name = named[index] if named else None
            position = None if has_name else first + index
            routes.append(replace(route, defaults=defaults, given_name=given_name, unnamed_position=position))
        return routes

    def _records(self) -> list[ParameterRecord]:
        """Return one record per parameter, for the parameters and options that groups have now."""
        self._follow_groups()
        return make_records(
            self.param_groups, self._routes, self._replicas, offloads_state=self._settings.offload_state
        )

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _all_routes(self) -> list[Route]:
        self._follow_groups()
        return [route for routes in self._routes for route in routes]

    def _follow_groups(self) -> None:
        """Find the routes of all parameters again if others have assigned or rearranged `param_groups`.

        Frameworks replace the tensors of a group (Accelerate does), so a new tensor gets the route of its position.
        Others assign groups that one of our optimizers has made (Lightning's BaseFinetuning does): if all parameters
        are still there, each keeps its route, and those of new groups are routed as by `add_param_group`.
        """
        present = [id(parameter) for parameter in self._parameters()]
        has_sizes = [len(group["params"]) for group in self.param_groups] == [len(routes) for routes in self._routes]
        if has_sizes and present == self._routed:
            return
        if self._routed and set(self._routed) <= set(present):
            self._routes = self._routes_of_assigned(dict(zip(self._routed, chain(*self._routes), strict=True)))
        elif not has_sizes:
            raise _changed_by_hand()
        self._routed = present

    def _routes_of_assigned(self, known: Mapping[int, Route]) -> list[list[Route]]:
        """Return the routes of the parameters of groups that were assigned.

        Args:
            known: the routes of the parameters that were there before, by `id`.
        """
        parameters = self._parameters()
        new = [{id(parameter) not in known for parameter in group["params"]} for group in self.param_groups]
        is_ours = all(key in group for group in self.param_groups for key in ("rule", MICRO_STEP, STARTED))
        if not is_ours or any(len(kinds) == 2 for kinds in new) or len(set(map(id, parameters))) != len(parameters):
            raise _changed_by_hand()
        result: list[list[Route]] = []
        taken = {key: route.name for key, route in known.items()}
        with self._reading(self.param_groups):
            for group, kinds in zip(self.param_groups, new, strict=True):
                if True in kinds:
                    named, tensors = names_and_parameters(group)
                    result.append(self._route(tensors, named, group, taken))
                else:
                    result.append([known[id(parameter)] for parameter in group["params"]])
        positions = count()
        for routes in result:  # a parameter without a name is named by its position
            for index, (route, position) in enumerate(zip(routes, positions, strict=False)):
                if route.unnamed_position is not None:
                    routes[index] = replace(route, name=f"param[{position}]", unnamed_position=position)
        if any("param_names" in group for group in self.param_groups):
            for group, routes in zip(self.param_groups, result, strict=True):
                group["param_names"] = [route.given_name or route.name for route in routes]
        return result

    def routing_report(self, full: bool = False) -> RoutingReport:
        """Return which rule each parameter has, why, and its current options; `print` shows a table.

        Args:
            full: whether the table has a row for every parameter. Otherwise equal parameters of repeated layers share
                a row, and all frozen ones.
        """
        records = self._records()
        groups = [
            RoutingGroup.of(index, RULES[group["rule"]], group, routes[0].lr_origin if routes else "")
            for index, (group, routes) in enumerate(zip(self.param_groups, self._routes, strict=True))
        ]
        rows = []
        for record in records:
            shapes = sorted({(rows, cols) for _, rows, cols in record.view.block_shapes}) if record.view else []
            sizes = [record.rule.update_scale(record.group, *shape) for shape in shapes]
            scales = ", ".join(f"{size:.4g}" for size in sizes if size is not None)
            unchanged = record.route.rule == record.rule.name
            reason = record.route.reason if unchanged else "rule of the group was changed"
            if record.view is not None and record.view.transposed:
                reason = f"{reason}, stored (in, out)"
            if is_cut_by_model(record.group, record.route):
                reason = f"{reason}, split: {record.route.fused.parts if record.route.fused else 'heads'}"
            options = groups[record.group_index].options
            overridden = {name: options[name] for name in record.route.overridden if name in options}
            fused = looks_fused(record.group, record.route)
            rows.append(
                RoutingRow(
                    record.name,
                    record.shape,
                    record.rule.name,
                    reason,
                    scales,
                    record.group_index,
                    overridden,
                    fused.parts if fused is not None else "",
                    dict(fused.options) if fused is not None else {},
                    record.view.matrices if record.view is not None else "",
                )
            )
        held = {row.name for row in rows}  # including frozen ones, and ones unfrozen and added since
        frozen = [row for row in self._frozen_rows if row.name not in held]
        return RoutingReport((*rows, *frozen), tuple(self._router.warnings), tuple(groups), full)

    def _complete_groups(self) -> None:
        """Check options that users have changed in groups, and add those that a changed rule lacks."""
        self._follow_groups()
        for number, group in enumerate(self.param_groups):
            rule = rule_named(group["rule"])
            options = rule.all_options
            try:
                for name, option in options.items():
                    option.validate(group.setdefault(name, option.default))
                rule.check_options(group)
            except (TypeError, ValueError) as error:
                raise type(error)(f"param_groups[{number}]: {error}") from None
            group.update(canonical({name: group[name] for name in options}))
            for route, parameter in zip(self._routes[number], group["params"], strict=True):
                check_storage(route.name, parameter, group)  # its dtype may have changed too

    def _check_new_keys(self) -> None:
        """Warn, once, about keys that were written into groups later and have no effect, though they look as if.

        An option of another group is not reported: momentum is often scheduled in a loop over all groups.
        """
        num_keys = sum(map(len, self.param_groups))
        if num_keys == self._num_keys:
            return
        self._num_keys = num_keys
        used = {name for group in self.param_groups for name in RULES[group["rule"]].all_options}
        for number, (group, routes) in enumerate(zip(self.param_groups, self._routes, strict=True)):
            rule = RULES[group["rule"]]
            of_another_rule = any(route.rule != rule.name for route in routes)  # changed by hand, which leaves options
            expected = {*split_foreign(group)[1], *rule.all_options, "rule", *PROGRESS}
            for key in [key for key in group if key not in expected | self._warned_keys]:
                meant = our_name(key)
                if meant != key or not (of_another_rule or key in used):
                    self._warned_keys.add(key)
                    hint = f"; did you mean {meant!r}?" if meant != key else f": rule {rule.name!r} does not have it"
                    warn_user(f"param_groups[{number}]: {key!r} has no effect{hint}")

    def _warn(self, message: str) -> None:
        if self._settings.strict:
            raise ValueError(f"strict: {message}")
        self._router.warnings.append(message)
        warn_user(message)


def _changed_by_hand() -> RuntimeError:
    return RuntimeError(
        "param_groups were changed by hand: use add_param_group to add parameters, and a new optimizer to remove some"
    )


def _key(options: Mapping[str, Any], lr_origin: str = "") -> tuple[object, ...]:
    """Return a key that is equal for equal options.

    A tensor stands for itself, because reading it would wait for the device. An lr that follows from that of the
    matrices is a new tensor each time, so its origin stands for it.
    """
    return tuple(
        (name, (lr_origin or id(value)) if isinstance(value, Tensor) else repr(value))
        for name, value in options.items()
    )


def _readable(groups: Sequence[Any]) -> Iterator[tuple[Group, list[str] | None, list[Tensor]]]:
    """Yield every group with the names of its parameters, if they have names, and the parameters.

    A group that can't be read is left out, because adding it raises an error that says why.
    """
    for group in groups if groups and isinstance(groups[0], dict) else [{"params": groups}]:
        with suppress(TypeError, ValueError, KeyError):
            yield group, *names_and_parameters(group)
