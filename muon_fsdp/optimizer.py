"""MuonOptimizer: parameter groups, state and the one `step()` that every update rule goes through."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from muon_fsdp.checkpoint import (
    StateDict,
    check_and_complete,
    first_names,
    fitting_state,
    own_hooks,
    what_was_not_loaded,
)
from muon_fsdp.distributed import News, agree, difference, layouts_of, local, local_gradient
from muon_fsdp.groups import (
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
from muon_fsdp.kernels import on_device
from muon_fsdp.newton_schulz import without_autocast
from muon_fsdp.option import canonical
from muon_fsdp.options import MICRO_STEP, SCHEDULED_LRS, STARTED, EngineOptions, NonFinite
from muon_fsdp.plan import Strategy
from muon_fsdp.planned import PlannedStep, parameter_specs
from muon_fsdp.report import PlanReport, fsdp_layouts, make_report
from muon_fsdp.routing import Route, Router, RoutingReport, RoutingRow, clean_name, frozen_rows
from muon_fsdp.rules import DEFAULT_OTHER_RULE, DEFAULT_RULE, RULES, MatrixBatch, Rule, rule_named
from muon_fsdp.signature import UNSET, show_options
from muon_fsdp.views import MatrixView, matrix_view


@show_options(DEFAULT_RULE)
class MuonOptimizer(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as one optimizer.

        optimizer = MuonOptimizer(model, lr=0.02)               # routed by module: embeddings and LM head to AdamW
        optimizer = MuonOptimizer(model.named_parameters())     # routed by dimension and name
        optimizer = MuonOptimizer(model.parameters())           # routed by dimension alone

    A matrix W of shape (d_out, d_in) is updated by

        buf = momentum * buf + grad
        O   = orthogonalize(grad + momentum * buf  if nesterov else  buf)
        W   = W * (1 - lr * weight_decay) - lr * scale(d_out, d_in) * ns_stepsize * O

    and everything else by AdamW with the `adamw_*` options. A group that holds both is replaced by one group per
    rule, matrices first, so every group has one `rule`, one `lr` and one `weight_decay` that can be seen and
    scheduled. In a group of your own that holds AdamW parameters only, `lr` and `weight_decay` are theirs.

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
        replicate_group: process group over which plain parameters are replicas (DDP): the work is split over it.
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
        **options: Any,
    ) -> None:
        self._watched_model = weakref.ref(params) if isinstance(params, nn.Module) else None
        self._tells_of_missing = isinstance(params, nn.Module)  # trainable parameters that it lacks, once
        self._rule_name, self._other_rule_name = rule_named(rule).name, rule_named(other_rule).name
        if self._other_rule.needs_matrices:
            raise ValueError(f"other_rule={other_rule!r} works on whole matrices: it needs an element-wise rule")
        given = {} if lr is UNSET else {"lr": lr}
        self._given = Source(type(self).__name__, {**given, **options}, is_constructor=True)
        self._engine = EngineOptions(nonfinite, max_stage_bytes, strict, strategy, comm_dtype, cuda_graph)
        if replicate_group is not None and dist.get_rank(replicate_group) < 0:
            raise ValueError("replicate_group must contain this rank")
        self._replicate_group = replicate_group
        model = params if isinstance(params, nn.Module) else self._model_to_route_by()
        self._router = Router(overrides, model, other_rule)
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
        self._pattern_rules = self._rules_of_patterns(groups) if self._overrides else {}
        self._is_built = False
        super().__init__(groups, defaults)
        self._is_built = True
        if groups and isinstance(groups[0], dict) and len(self.param_groups) != len(groups):
            refuse_zero_redundancy(type(self).__name__)
        self._router.forget_model()
        self._check_use_of_options()
        if self._router.unused_patterns:
            self._warn(f"overrides {sorted(self._router.unused_patterns)} match no parameter")
        for message in dict.fromkeys(text for g in self.param_groups for text in RULES[g["rule"]].warnings(g)):
            self._router.warnings.append(message)
            warnings.warn(message, stacklevel=3)
        if strict and not any(rule.needs_matrices for rule in rules_of(self._all_routes())):
            raise ValueError(f"strict: no parameter takes an orthogonalizing rule\n{self.routing_report()}")

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

    def _parameter_defaults(self, parameter: Tensor, rule: Rule) -> dict[str, Any]:
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
                rule, explicit = self._rule_of_group(group)
                for index, parameter in enumerate(parameters):
                    name = self._router.name_of(parameter) or (clean_name(named[index]) if named else "")
                    route = self._router.route(parameter, name, named=True, rule=rule, rule_is_explicit=explicit)
                    if route.pattern is not None:
                        found[route.pattern].add(route.rule)
        return found

    def _rule_of_group(self, given: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the rule that a user's group asks for, and whether it binds all that can take it."""
        rule = rule_named(given["rule"]) if "rule" in given else self._rule
        return rule.name, "rule" in given or not rule.needs_matrices

    def _check_use_of_options(self) -> None:
        """Raise for an option that had no effect on any parameter."""
        self._resolved(self._other_rule)  # in use even if no parameter takes it yet: one may be added later
        rules = [RULES[group["rule"]] for group in self.param_groups]
        self._given.require_taken([*rules, self._rule, self._other_rule])
        for pattern, source in self._overrides.items():
            if pattern not in self._router.unused_patterns:
                source.require_taken(rules_of(route for route in self._all_routes() if route.pattern == pattern))

    def _model_to_route_by(self) -> nn.Module | None:
        """Return the model whose modules decide about the rules of `params`; a subclass may have one."""
        return None

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters; a group that mixes matrices and other parameters becomes one group per rule.

        Keys are `rule`, options of the rules that its parameters take, and `name`. In a group with matrices, options
        of the others have the name of their rule before them (`adamw_lr`). A key that has no effect is refused.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        given = {key: value for key, value in param_group.items() if key != "params"}
        options, foreign = split_foreign(given)
        source = Source("a parameter group", options)
        named, parameters = names_and_parameters(param_group)
        routes = self._route(parameters, named, given)
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
        rule, explicit = self._rule_of_group(given)
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
            route = self._router.route(parameter, name, named=has_name, rule=rule, rule_is_explicit=explicit)
            if self._engine.strict and route.guessed:
                raise ValueError(
                    f"strict: parameter {name!r} of shape {tuple(parameter.shape)} would take rule {route.rule!r} "
                    f"by a guess ({route.reason}); pass overrides={{{name!r}: {route.rule!r}}} or "
                    f"{{{name!r}: {rule!r}}}"
                )
            defaults = tuple(self._parameter_defaults(parameter, RULES[route.rule]).items())
            given_name = named[index] if named else None
            routes.append(replace(route, defaults=defaults, given_name=given_name))
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
        return RoutingReport((*rows, *self._frozen_rows), tuple(self._router.warnings))

    def _warn(self, message: str) -> None:
        if self._engine.strict:
            raise ValueError(f"strict: {message}")
        self._router.warnings.append(message)
        warnings.warn(message, stacklevel=3)

    # -------------------------------------------------------------------- step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

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
        planned = self._current_plan()
        gradients = self._gradients(planned)
        decision = None
        if not self.state:
            decision = self._agree(planned, gradients, inert=self._is_inert(gradients))
        self._create_state(planned)
        if (decision is not None and decision.inert) or self._still_accumulates():
            return loss
        if decision is None:
            decision = self._agree(planned, gradients, inert=False)
        if self._admits(decision):
            states = [self.state[parameter] for parameter in planned.parameters]
            device = local(planned.parameters[0]).device if planned.parameters else torch.device("cpu")
            with on_device(device), without_autocast(device.type):
                planned.run(self.param_groups, states, gradients, decision.updated, self._accumulation_steps)
                if planned.matrices is not None:
                    planned.matrices.count(self._totals)
        return loss

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

    def _gradients(self, planned: PlannedStep) -> dict[int, Tensor]:
        """The gradients there are on this rank, by position, dense and local."""
        gradients = {}
        rules = [RULES[group["rule"]] for group in self.param_groups for _ in group["params"]]
        for position, (parameter, rule) in enumerate(zip(planned.parameters, rules, strict=True)):
            grad = parameter.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                if rule.needs_matrices:
                    raise RuntimeError(
                        "Sparse gradients are not supported by Muon optimizer: parameter "
                        f"{self._all_routes()[position].name!r} has one. Give it an element-wise rule: "
                        "create_hybrid_optimizer(model) does so for embeddings; or give it a group with "
                        f"rule={self._other_rule.name!r}."
                    )
                grad = grad.to_dense()
            is_plain = planned.is_plain[position] and type(grad) is Tensor
            gradients[position] = grad if is_plain else local_gradient(parameter, grad)
        return gradients

    def _is_inert(self, gradients: Mapping[int, Tensor]) -> bool:
        """Whether this first step only asks for state, as torch.distributed.checkpoint does before loading."""
        return all(float(group["lr"]) == 0 for group in self.param_groups) and not any(
            bool(grad.any()) for grad in gradients.values()
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

    def _agree(self, planned: PlannedStep, gradients: Mapping[int, Tensor], *, inert: bool) -> _Agreed:
        """Find out with the other ranks what some of them have seen, and which parameters have a gradient somewhere.

        Whoever returned or raised alone would leave the others waiting, so everything that decides about the step is
        agreed on first. Sets of ranks may overlap: a second round carries what one set found to the others.
        """
        checks_gradients = self._engine.nonfinite != "propagate"
        if not planned.shared and not checks_gradients:
            return _Agreed({}, {}, torch.zeros(0), inert=inert)
        largest = _largest_entries(gradients) if checks_gradients else {}
        news = torch.zeros(len(News), dtype=torch.bool)
        if largest:
            not_finite = ~torch.isfinite(torch.stack(list(largest.values()))).all()
            news = news.to(not_finite.device)
            news[News.NOT_FINITE] = not_finite
        news[News.NOT_INERT] = not inert
        news[News.SEVERAL_SETS] = len(planned.shared) > 1
        updated: dict[int, Tensor] = {}
        # On a GPU, looking at every step would stall it.
        looks = planned.shared and (
            not planned.compared or all(local(p).device.type == "cpu" for p in planned.parameters)
        )
        if not planned.compared:
            planned.describe(self.param_groups, self._routes, f"{self._engine}, {self._accumulation_steps} micro-steps")
        disagreeing: list[tuple[int, ...]] = []
        for second_round in (False, True):
            for ranks, positions in planned.shared.items():
                if second_round and not planned.overlaps[ranks]:
                    continue
                device = local(planned.parameters[positions[0]]).device
                has_gradient = [position in gradients for position in positions]
                decision = agree(ranks, planned.fingerprints[ranks], news, has_gradient, device)
                news = decision.news.clone()
                updated.update(zip(positions, decision.has_gradient, strict=True))
                if looks and not second_round:
                    # From what all ranks of the set were told alike: they must agree about the second round too.
                    planned.overlaps[ranks] = bool(decision.news[News.SEVERAL_SETS])
                    if not decision.same_plan:
                        disagreeing.append(ranks)
                        news[News.DISAGREEMENT] = True
        if planned.shared and looks and news[News.DISAGREEMENT]:
            details = [difference(ranks, planned.descriptions[ranks]) for ranks in disagreeing]
            raise RuntimeError(f"Ranks disagree about what to optimize: {'; '.join(details) or 'other ranks do'}")
        return _Agreed(updated, largest, news, inert=inert and not bool(news[News.NOT_INERT]))

    def _admits(self, agreed: _Agreed) -> bool:
        """Apply the policy for gradients that are not finite: whether to go on with this step."""
        if self._engine.nonfinite == "propagate" or not bool(agreed.news[News.NOT_FINITE]):
            return True
        if self._engine.nonfinite == "raise":
            raise RuntimeError(self._not_finite_message(agreed.largest))
        self._skipped_steps += 1
        return False

    def _not_finite_message(self, largest: Mapping[int, Tensor]) -> str:
        routes = self._all_routes()
        bad = [routes[i].name for i, value in largest.items() if not torch.isfinite(value)]
        shown = ", ".join(map(repr, bad[:8])) + (", ..." if len(bad) > 8 else "")
        where = f"of {len(bad)} parameter(s) is not finite: {shown}" if bad else "on another rank is not finite"
        return f"The gradient {where}. Nothing was changed. nonfinite='skip' leaves such steps out."

    # -------------------------------------------------------------------- plan

    def _current_plan(self) -> PlannedStep:
        """The plan, made anew when parameters or options have been exchanged since the last step."""
        parameters = self._parameters()
        self._all_routes()  # refuses groups that no longer fit
        key = self._plan_key(parameters)
        if self._planned is None or self._planned.key != key:
            self._check_model(parameters)
            self._complete_groups()
            key = self._plan_key(parameters)
            self._planned = PlannedStep(
                key, self.param_groups, self._routes, self._all_views(), self._engine, self._replicate_group
            )
        return self._planned

    def _check_model(self, parameters: Sequence[Tensor]) -> None:
        """Raise if the optimizer was built before `fully_shard`, and warn of trainable parameters that it lacks."""
        model = self._watched_model() if self._watched_model is not None else None
        if model is None:
            return
        present, held = {id(p) for p in model.parameters()}, {id(p) for p in parameters}
        names = [route.name for route in self._all_routes()]
        gone = [(name, p) for name, p in zip(names, parameters, strict=True) if id(p) not in present]
        # A DTensor may be gone because FSDP2 shows the whole parameter at the moment.
        lost = [name for name, p in gone if not isinstance(p, DTensor)]
        if lost and any(isinstance(module, FSDPModule) for module in model.modules()):
            raise RuntimeError(
                f"The optimizer was built before fully_shard: {len(lost)} of its {len(parameters)} parameters are no "
                f"longer the model's ({first_names(lost)}), and training would change nothing. Call fully_shard "
                "first, then build the optimizer."
            )
        missing = [clean_name(name) for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
        if missing and not gone and self._tells_of_missing:
            self._tells_of_missing = False
            warnings.warn(
                f"{len(missing)} trainable parameters of the model are not in the optimizer and will not be trained: "
                f"{first_names(missing)}. Build the optimizer after they are there and unfrozen, or add_param_group.",
                stacklevel=4,
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

        Nothing is kept for most of them during training: updates of a sample, one matrix of every shape that this
        rank holds whole, are computed when asked for, from the momentum as it is.

        Keys:
            skipped_steps: steps left out by `nonfinite="skip"` since the optimizer was made.
            orthogonality_residual: the largest ||O O^T - I||_F / sqrt(m) of the sample, m the smaller side. Absent
                where there is no sample: before the first step, where all matrices are sharded, and under rules that
                need statistics of the weights.
            update_rms: the mean over the sample of lr times the root mean square of the update. Absent likewise.
        """
        numbers = {"skipped_steps": float(self._skipped_steps)}
        planned = self._current_plan()
        if planned.matrices is not None:
            numbers.update(planned.matrices.metrics(self._totals))
        residuals, sizes = [], []
        with torch.no_grad():
            for lr, rule, batch in self._samples(planned):
                rule.direction(batch)
                sizes.append(lr * float(batch.update.square().mean().sqrt()))
                residual = rule.residual(batch)
                if residual is not None:
                    residuals.append(float(residual.max()))
        if residuals:
            numbers["orthogonality_residual"] = max(residuals)
        if sizes:
            numbers["update_rms"] = sum(sizes) / len(sizes)
        return numbers

    def _samples(self, planned: PlannedStep) -> Iterator[tuple[float, Rule, MatrixBatch]]:
        """Yield one matrix of every batch that this rank holds whole, with its lr and rule.

        Rules that need statistics of W are left out: these are found by all ranks together.
        """
        group_of = [group for group in self.param_groups for _ in group["params"]]
        for stage in planned.plan.stages:
            rule = RULES[stage.rule]
            for batch in stage.batches if not rule.statistics else ():
                member = batch.members[0]
                unit = stage.units[member.unit]
                parameter = planned.parameters[unit.position]
                state = self.state.get(parameter)
                if not state or "momentum_buffer" not in state or local(parameter).shape != unit.tile.shape:
                    continue
                momentum = unit.view.split(local(state["momentum_buffer"]))[member.block][member.start].unsqueeze(0)
                numbers = {
                    spec.name: torch.zeros(
                        1, *spec.shape_of_matrix(batch.rows, batch.cols), dtype=momentum.dtype, device=momentum.device
                    )
                    for spec in rule.matrix_state
                }
                sample = MatrixBatch(momentum, torch.empty_like(momentum), batch.options, numbers)
                yield float(group_of[unit.position]["lr"]), rule, sample

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
            "_engine",
            "_router",
            "_routes",
            "_frozen_rows",
            "_skipped_steps",
            "_accumulation_steps",
        )
        # Process groups can't be copied; a copy that needs one is built anew.
        nothing: dict[str, Any] = {"_planned": None, "_replicate_group": None, "_totals": {}, "_watched_model": None}
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}, **nothing}


@dataclass(frozen=True)
class _Agreed:
    """What the ranks know before a step."""

    updated: dict[int, Tensor]  # for every shared parameter, whether some rank has a gradient; on its device
    largest: dict[int, Tensor]  # the largest entry of every gradient here, where the policy asks for it
    news: Tensor
    inert: bool  # whether this step only asks for state, on all ranks


def _largest_entries(gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The largest absolute value of every gradient on the first one's device; NaN and infinity show in it."""
    present = {position: grad for position, grad in gradients.items() if grad.numel() > 0}
    if not present:
        return {}
    values = torch._foreach_norm(list(present.values()), ord=torch.inf)
    device = values[0].device
    return {i: value.to(device, torch.float64) for i, value in zip(present, values, strict=True)}
