"""MuonOptimizer: parameter groups, state and the one `step()` that every update rule goes through."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.agreement import NO_GRADIENT, Agreed, Agreement, Line, tell_failure
from muon_fsdp.comm.process_groups import Ranks, is_pretended, my_rank, num_ranks
from muon_fsdp.comm.transfers import layouts_of, local
from muon_fsdp.declarations.option import canonical
from muon_fsdp.declarations.views import MatrixView, matrix_view
from muon_fsdp.kernels import on_device
from muon_fsdp.linalg.autocast import without_autocast
from muon_fsdp.optimizers.signature import UNSET, show_options
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
from muon_fsdp.parameters.state_dict import (
    StateDict,
    check_and_complete,
    first_names,
    fitting_state,
    own_hooks,
    what_was_not_loaded,
)
from muon_fsdp.parameters.wrappers import drifting_twin, replicate_group_of
from muon_fsdp.plan.options import MICRO_STEP, SCHEDULED_LRS, STARTED, EngineOptions, NonFinite
from muon_fsdp.plan.outline import Strategy
from muon_fsdp.plan.report import PlanReport, fsdp_layouts, make_report
from muon_fsdp.rules import DEFAULT_OTHER_RULE, DEFAULT_RULE, RULES, Rule, rule_named
from muon_fsdp.step.gradients import Gradients
from muon_fsdp.step.metrics import numbers_of, whole_samples
from muon_fsdp.step.planned_step import PlannedStep, parameter_specs


@show_options(DEFAULT_RULE)
class MuonOptimizer(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as one optimizer.

        optimizer = MuonOptimizer(model, lr=0.02)               # routed by module: embeddings and LM head to AdamW
        optimizer = MuonOptimizer(model.named_parameters())     # routed by dimension and name
        optimizer = MuonOptimizer(model.parameters())           # routed by shape alone: embeddings look like matrices

    A matrix W of shape (d_out, d_in) is updated by

        buf = momentum * buf + grad
        O   = orthogonalize(grad + momentum * buf  if nesterov else  buf)
        W   = W * (1 - lr * weight_decay) - lr * scale(d_out, d_in) * ns_stepsize * O

    and everything else by AdamW with the `adamw_*` options; a matrix of one row or one column counts as a vector. A
    group that holds both is replaced by one group per rule, matrices first, so every group has one `rule`, one `lr`
    and one `weight_decay` that can be seen and scheduled. A `rule` of matrices that a group names is that of its
    matrices. In a group of your own that holds AdamW parameters only, `lr` and `weight_decay` are theirs.

    Options belong to rules. Those of the rule of matrices are passed by their names, those of the element-wise rule
    with its name before them (`adamw_lr`), and those of a rule that you registered likewise. An option that no rule in
    use has is an error, here, in groups and in overrides.

    Args:
        params: a model, one tensor, tensors, named tensors, or groups with options.
        lr: learning rate of the matrices, a float or a one-element tensor.
        {options}
        rule: the rule of matrices, by its name: a built-in one, or one that you registered.
        other_rule: the element-wise rule of all other parameters.
        {engine}
        overrides: {pattern of names: rule, or dict of group options}; the first that matches wins. Needs names.
        replicate_group: process group over which plain parameters are replicas: the work is split over it. That of
            DDP is found in a model that DDP has wrapped.
        agreement_group: process group whose ranks decide about a step together though they share no parameter: with
            pipeline stages, `nonfinite="skip"` must leave out the step on all of them.
        options: those of other rules, by name.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = UNSET,
        *,
        rule: str = DEFAULT_RULE,
        other_rule: str = DEFAULT_OTHER_RULE,
        nonfinite: NonFinite = "propagate",
        strategy: Strategy = "auto",
        comm_dtype: torch.dtype | None = None,
        max_stage_bytes: int = 256 * 2**20,
        cuda_graph: bool = False,
        strict: bool = False,
        overrides: Mapping[str, str | Mapping[str, Any]] | None = None,
        replicate_group: dist.ProcessGroup | None = None,
        agreement_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self._watched_model = weakref.ref(params) if isinstance(params, nn.Module) else None
        self._seen: tuple[PlannedStep, Tensor | None] | None = None  # plan and first parameter of the watched model
        self._tells_of_missing = isinstance(params, nn.Module)  # trainable parameters that it lacks, once
        self._rule_name, self._other_rule_name = rule_named(rule).name, rule_named(other_rule).name
        if self._other_rule.needs_matrices:
            raise ValueError(f"other_rule={other_rule!r} works on whole matrices: it needs an element-wise rule")
        given = {} if lr is UNSET else {"lr": lr}
        self._given = Source(type(self).__name__, {**given, **options}, is_constructor=True)
        self._engine = EngineOptions(nonfinite, max_stage_bytes, strict, strategy, comm_dtype, cuda_graph)
        if replicate_group is None:
            replicate_group = replicate_group_of(params)
        for name, group in (("replicate_group", replicate_group), ("agreement_group", agreement_group)):
            if group is not None and dist.get_rank(group) < 0:
                raise ValueError(f"{name} must contain this rank")
        self._replicate_group, self._agreement_group = replicate_group, agreement_group
        self._agreement: Agreement | None = None  # with the ranks that share parameters with this one, or may
        self._checks_for_twins = num_ranks() > 1
        model = params if isinstance(params, nn.Module) else self._model_to_route_by()
        self._router = Router(overrides, other_rule)
        self._overrides = {
            pattern: Source(f"overrides[{pattern!r}]", {k: v for k, v in options.items() if k != "rule"})
            for pattern, options in self._router.overrides.items()
        }
        self._routes: list[list[Route]] = []  # parallel to the parameters of the groups
        self._frozen_rows = frozen_rows(model) if model is not None else ()
        self._skipped_steps = 0
        self._totals: dict[tuple[str, str], Tensor] = {}  # of diagnostics, by rule and name
        self._accumulation_steps = 1
        self._planned: PlannedStep | None = None
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
                self._warn(f"overrides {sorted(self._router.unused_patterns)} match no parameter")
            self._check_doubts(self._routed_shapes())
        for message in dict.fromkeys(text for g in self.param_groups for text in RULES[g["rule"]].warnings(g)):
            self._router.warnings.append(message)
            warnings.warn(message, stacklevel=3)
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
            if self._engine.strict:
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
        if self._engine.strict:
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

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters; a group that mixes matrices and other parameters becomes one group per rule.

        Keys are `rule`, options of the rules that its parameters take, and `name`. In a group with matrices, options
        of the others have the name of their rule before them (`adamw_lr`). A key that has no effect is refused. An
        optimizer that was built from a model routes them by the model as it is now: unfreeze them first.
        """
        model = self._watched_model() if self._is_built and self._watched_model is not None else None
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
            if self._engine.strict and route.guessed:
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

    def _warn(self, message: str, stacklevel: int = 3) -> None:
        if self._engine.strict:
            raise ValueError(f"strict: {message}")
        self._router.warnings.append(message)
        warnings.warn(message, stacklevel=stacklevel)

    # -------------------------------------------------------------------- step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # torch.compile(optimizer.step) would take minutes over what are launches of kernels already
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; the others, their state included, are left as they are.

        A parameter counts as having one if some rank has one for it. All ranks that hold parameters must call this.
        `closure`, if given, is called first, with gradients enabled; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Decided by what only steps change: ranks that took different turns here would wait for each other.
        has_begun = any(group[STARTED] for group in self.param_groups)
        if has_begun and self._still_accumulates():
            return loss
        planned, found = self._prepare()
        agreed = self._agree(planned, found, inert=not has_begun and self._is_inert(found))
        self._create_state(planned)
        if not has_begun and (agreed.inert or self._still_accumulates()):
            return loss
        if agreed.not_finite_on is None or self._admits(found, agreed.not_finite_on):
            self._update(planned, found, agreed)
        return loss

    def _prepare(self) -> tuple[PlannedStep, Gradients]:
        """Return the plan and the gradients; tell the other ranks, which wait for this one, what goes wrong here."""
        try:
            planned = self._current_plan()
            self._check_model(planned)
            rules = [RULES[group["rule"]] for group in self.param_groups for _ in group["params"]]
            return planned, Gradients(planned.parameters, planned.names, rules, self._other_rule.name)
        except Exception as error:
            if self._agreement is not None and self._agreement.is_alive:
                self._agreement.fail(error)
            elif num_ranks() > 1 and not is_pretended():
                with suppress(Exception):  # what is wrong with layouts may be what is being told
                    tell_failure(self._shared_ranks(), error)
            raise

    def _shared_ranks(self) -> set[Ranks]:
        """Return the sets of ranks that share parameters with this one."""
        layouts = layouts_of(self._parameters(), self._replicate_group)
        ranks = {tuple(sorted(layout.ranks)) for layout in layouts}
        if self._agreement_group is not None:
            ranks.add(tuple(sorted(dist.get_process_group_ranks(self._agreement_group))))
        return {each for each in ranks if len(each) > 1}

    def _update(self, planned: PlannedStep, found: Gradients, agreed: Agreed) -> None:
        """Update what has a gradient on some rank."""
        codes = {
            position: code
            for ranks, positions in planned.shared.positions.items()
            for position, code in zip(positions, agreed.codes[ranks], strict=True)
        }
        gradients = found.in_layout(codes)
        updated = gradients.keys() | {position for position, code in codes.items() if code != NO_GRADIENT}
        planned.make_groups()
        states = [self.state[parameter] for parameter in planned.parameters]
        device = local(planned.parameters[0]).device if planned.parameters else torch.device("cpu")
        with on_device(device), without_autocast(device.type):
            planned.run(self.param_groups, states, gradients, updated, self._accumulation_steps)
            if planned.matrices is not None:
                planned.matrices.count(self._totals)

    def _still_accumulates(self) -> bool:
        """Count a call of `step()`; whether it is one of those that only let gradients add up."""
        for group in self.param_groups:
            group[STARTED] = True
        if self._accumulation_steps == 1:
            return False
        micro_step = (self.param_groups[0]["micro_step"] + 1) % self._accumulation_steps
        for group in self.param_groups:
            group["micro_step"] = micro_step
        return bool(micro_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; while they accumulate over several calls of `step()`, only after the last."""
        if self.param_groups[0]["micro_step"] == 0:
            super().zero_grad(set_to_none)

    def _is_inert(self, found: Gradients) -> bool:
        """Whether this first step only asks for state, as torch.distributed.checkpoint does before loading."""
        return all(float(group["lr"]) == 0 for group in self.param_groups) and not any(
            bool(grad.any()) for grad in found.here().values()
        )

    def _create_state(self, planned: PlannedStep | None = None) -> None:
        """Create the state that is missing, for parameters without a gradient too; no communication."""
        if planned is None:
            self._all_routes()  # refuses groups that no longer fit
            self._complete_groups()
        for group, routes in zip(self.param_groups, self._routes, strict=True):
            specs = RULES[group["rule"]].all_state
            names = {spec.name for spec in specs}
            is_known = planned is not None and planned.has_state
            if is_known and all(names <= self.state[parameter].keys() for parameter in group["params"]):
                continue
            for parameter, route, view in zip(group["params"], routes, self._views(group, routes), strict=True):
                state = self.state[parameter]
                for spec in specs:
                    if spec.name in state and state[spec.name].shape != spec.shape(parameter, view):
                        warnings.warn(
                            f"state {spec.name!r} of parameter {route.name!r} starts anew: its rule or view was "
                            "changed, and it no longer fits",
                            stacklevel=4,
                        )
                        del state[spec.name]
                    # What was created on the meta device does not follow a parameter that has been materialised.
                    if spec.name not in state or state[spec.name].is_meta != parameter.is_meta:
                        state[spec.name] = spec.create(parameter, view)
        if planned is not None:
            planned.has_state = True

    def _agree(self, planned: PlannedStep, found: Gradients, *, inert: bool) -> Agreed:
        """Find out with the other ranks what some of them have seen, and which parameters have a gradient somewhere."""
        not_finite = self._engine.nonfinite != "propagate" and not _are_finite(found.here().values())
        shared, groups = planned.shared, self.param_groups
        if self._agreement is not None and not self._agreement.is_alive:
            self._agreement = None
        if self._agreement is not None and self._agreement.counts != shared.counts:
            self._agreement.leave()
            self._agreement = None
        if self._checks_for_twins:
            self._checks_for_twins = False
            self._check_for_twins(planned)
        if not shared:
            return Agreed(inert, my_rank() if not_finite else None)
        prints = shared.prints(groups)

        def describe(ranks: Ranks) -> list[Line]:
            return shared.describe(ranks, groups)

        codes = {
            ranks: [found.codes.get(position, NO_GRADIENT) for position in positions]
            for ranks, positions in shared.positions.items()
        }
        agreed = None
        while agreed is None:
            if self._agreement is None:
                like = shared.like(max(shared.positions, key=len))
                self._agreement = Agreement(shared.counts, prints, describe, shared.device, like)
            agreed = self._agreement.before_step(prints, codes, describe, inert=inert, not_finite=not_finite)
            if agreed is None:  # another rank has other parameters than before
                self._agreement = None
        return agreed

    def _check_for_twins(self, planned: PlannedStep) -> None:
        """Warn if another rank trains the same parameters and nothing keeps them equal."""
        alone = [i for i, layout in enumerate(planned.layouts) if len(layout.ranks) == 1 and planned.is_plain[i]]
        found = None
        if alone and self._agreement_group is None:
            parameters = [planned.parameters[i] for i in alone]
            found = drifting_twin([planned.names[i] for i in alone], parameters)
        # Beside sharded parameters, those that tensor parallelism repeats have equal gradients.
        if found is None or (planned.shared and found[1]):
            return
        which = "the same parameters" if len(alone) == len(planned.names) else first_names([planned.names[alone[0]]])
        warnings.warn(
            f"Ranks {found[0]} and {my_rank()} train {which}, which nothing shards or replicates: they will drift "
            "apart. Call fully_shard on the whole model or wrap it in DDP; if something else averages gradients, pass "
            "replicate_group=, which also splits the work. Pipeline stages: pass agreement_group=.",
            stacklevel=4,
        )

    def _admits(self, found: Gradients, rank: int) -> bool:
        """Apply the policy for gradients that are not finite: whether to go on with this step."""
        if self._engine.nonfinite == "raise":
            raise RuntimeError(self._not_finite_message(found, rank))
        self._skipped_steps += 1
        return False

    def _not_finite_message(self, found: Gradients, rank: int) -> str:
        routes = self._all_routes()
        bad = [routes[i].name for i, grad in found.here().items() if not _are_finite([grad])]
        where = f"of {len(bad)} parameter(s) is not finite: {first_names(bad)}"
        if not bad:
            where = f"on another rank ({rank}) is not finite"
        return f"The gradient {where}. Nothing was changed. nonfinite='skip' leaves such steps out."

    # -------------------------------------------------------------------- plan

    def _current_plan(self) -> PlannedStep:
        """The plan, made anew when parameters or options have been exchanged since the last step."""
        parameters = self._parameters()
        self._all_routes()  # refuses groups that no longer fit
        key = self._plan_key(parameters)
        if self._planned is None or self._planned.key != key:
            self._complete_groups()
            key = self._plan_key(parameters)
            self._planned = PlannedStep(
                key,
                self.param_groups,
                self._routes,
                self._all_views(),
                self._engine,
                self._accumulation_steps,
                self._replicate_group,
                self._agreement_group,
            )
        return self._planned

    def _check_model(self, planned: PlannedStep) -> None:
        """Raise if the model has other parameters than when the optimizer was built; warn of those that it lacks.

        Looks whenever there is a new plan, or the first parameter of the model is not the one from before.
        """
        model = self._watched_model() if self._watched_model is not None else None
        if model is None:
            return
        seen = (planned, next(iter(model.parameters()), None))
        if self._seen is not None and all(a is b for a, b in zip(self._seen, seen, strict=True)):
            return
        self._seen = seen
        current = {clean_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        present, held = set(map(id, current.values())), set(map(id, planned.parameters))
        is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        gone = [(name, p) for name, p in zip(planned.names, planned.parameters, strict=True) if id(p) not in present]
        # FSDP2 shows whole parameters in place of its shards at times.
        lost = [name for name, p in gone if name in current and not (is_sharded and isinstance(p, DTensor))]
        if lost:
            before = "fully_shard" if is_sharded else "parameters of the model were replaced"
            after = "Call fully_shard first, then build the optimizer."
            if not is_sharded:
                after = (
                    "parallelize_module, DDP(device_mesh=...) and load_state_dict(assign=True) do so, for example. "
                    "Build the optimizer after them."
                )
            raise RuntimeError(
                f"The optimizer was built before {before}: {len(lost)} of its {len(planned.names)} parameters are no "
                f"longer the model's ({first_names(lost)}), and training would change nothing. {after}"
            )
        missing = [name for name, p in current.items() if p.requires_grad and id(p) not in held]
        if missing and not gone and self._tells_of_missing:
            self._tells_of_missing = False
            warnings.warn(
                f"{len(missing)} trainable parameters of the model are not in the optimizer and will not be trained: "
                f"{first_names(missing)}. Build the optimizer after they are there and unfrozen, or add_param_group.",
                stacklevel=5,
            )

    def _plan_key(self, parameters: Sequence[Tensor]) -> object:
        """Return all that a plan depends on."""
        rules = [RULES[group["rule"]] for group in self.param_groups]
        options = [
            (rule, *[group.get(name) for name in rule.plan_names])
            for rule, group in zip(rules, self.param_groups, strict=True)
        ]
        return options, [(id(p), p.dtype, p.device) for p in parameters]

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

    def _all_views(self) -> list[list[MatrixView | None]]:
        return [self._views(group, routes) for group, routes in zip(self.param_groups, self._routes, strict=True)]

    def plan_report(self, world_size: int | None = None, mesh: Sequence[int] | None = None) -> PlanReport:
        """Who orthogonalizes what, what travels, and how even the work is; `print` it for a table.

        Without arguments: for the parameters as they lie. With `world_size`: as if every parameter were sharded over
        that many ranks by `fully_shard`, which needs neither processes nor memory (the model may be on the meta
        device). `mesh` is the shape of the mesh, (replicas, shards) for HSDP.
        """
        layouts = fsdp_layouts(self._parameters(), world_size, mesh) if world_size or mesh else None
        if layouts is None:
            layouts = layouts_of(self._parameters(), self._replicate_group)
        specs = parameter_specs(self.param_groups, self._routes, self._all_views(), layouts, self._engine)
        return make_report(specs, self._engine)

    def metrics(self) -> dict[str, float]:
        """Return numbers for a logger, by name; one rank may ask alone. Rules add their own.

        Nothing is kept for most of them during training: updates of a sample, one matrix of every shape that this rank
        computes, are computed when asked for, from the momentum as it is. Of matrices that are sharded, they are those
        of the first step after the last time that somebody asked.

        Keys:
            skipped_steps: steps left out by `nonfinite="skip"` since the optimizer was made.
            orthogonality_residual: the largest ||O O^T - I||_F / sqrt(m) of the sample, m the smaller side. Absent
                where there is no sample: before the first step, and where other ranks compute all matrices.
            update_rms: the mean over the sample of lr times the root mean square of the update. Absent likewise.
        """
        numbers = {"skipped_steps": float(self._skipped_steps)}
        planned = self._current_plan()
        if planned.matrices is not None:
            numbers.update(planned.matrices.metrics(self._totals))
        with torch.no_grad():
            stages, parameters = planned.plan.stages, planned.parameters
            samples = [*whole_samples(stages, parameters, self.state, self.param_groups), *planned.samples.ask()]
        return numbers | numbers_of(samples)

    # -------------------------------------------------------- state and copies

    def state_dict(self) -> StateDict:
        """Return options and state, for `load_state_dict`; of a sharded parameter, this rank's shard.

        Before the first step state is created if there are gradients, because torch.distributed.checkpoint loads only
        what is here already. Without gradients it is empty, as in torch's own optimizers.
        """
        if self.state or any(parameter.grad is not None for parameter in self._parameters()):
            self._create_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict` gave; one that does not fit is refused whole, with every mismatch by name.

        Unlike torch's own, this keeps the precision of the state (float32 momentum of half-precision weights) and
        never shares memory with `state_dict`. State of another optimizer: `muon_fsdp.migrate`.
        """
        incoming: StateDict = {}

        def before(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
            incoming.update(check_and_complete(optimizer, self._routes, self._all_views(), state_dict))
            return incoming

        def after(optimizer: torch.optim.Optimizer) -> None:
            optimizer.state.update(fitting_state(optimizer, incoming))
            for group in optimizer.param_groups:  # saved in mid-accumulation, and resumed with fewer steps of it
                if group[MICRO_STEP] >= self._accumulation_steps:
                    group[MICRO_STEP] = 0

        with own_hooks(self, before, after):
            super().load_state_dict(state_dict)
        for message in what_was_not_loaded(self, self._routes, incoming):
            warnings.warn(message, stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        own = (
            "_rule_name",
            "_other_rule_name",
            "_given",
            "_overrides",
            "_pattern_rules",
            "_is_built",
            "_tells_of_missing",
            "_checks_for_twins",
            "_engine",
            "_router",
            "_routes",
            "_frozen_rows",
            "_skipped_steps",
            "_accumulation_steps",
        )
        # Process groups can't be copied; a copy that needs one is built anew.
        nothing: dict[str, Any] = {
            "_planned": None,
            "_replicate_group": None,
            "_agreement_group": None,
            "_agreement": None,
            "_totals": {},
            "_watched_model": None,
            "_seen": None,
        }
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}, **nothing}


def _are_finite(gradients: Iterable[Tensor]) -> bool:
    """Return whether all gradients are finite; waits for the device."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in gradients:
        if grad.numel() > 0:
            by_device[grad.device].append(grad)
    largest = [torch.stack(torch._foreach_norm(many, ord=torch.inf)) for many in by_device.values()]
    return all(bool(values.isfinite().all()) for values in largest)
