"""MuonOptimizer: parameter groups, state and the one `step()` that every update rule goes through."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muon_fsdp.checkpoint import StateDict, check_and_complete, fitting_state, own_hooks
from muon_fsdp.distributed import News, agree, difference, layouts_of, local, local_gradient
from muon_fsdp.groups import (
    Group,
    Params,
    adamw_options,
    any_orthogonalizes,
    as_torch_params,
    check_parameter,
    names_and_parameters,
    options_of,
)
from muon_fsdp.kernels import on_device
from muon_fsdp.options import (
    FOREIGN_KEYS,
    EngineOptions,
    NonFinite,
    canonical,
    check_group,
    check_option_names,
)
from muon_fsdp.plan import Strategy
from muon_fsdp.planned import PlannedStep, parameter_specs
from muon_fsdp.report import PlanReport, fsdp_layouts, make_report
from muon_fsdp.routing import Route, Router, RoutingReport, RoutingRow, clean_name, frozen_rows
from muon_fsdp.rules import RULES
from muon_fsdp.scaling import update_scale
from muon_fsdp.spectral import target_radius
from muon_fsdp.views import MatrixView, matrix_view

# Options of a group on which the plan depends; lr, momentum and the like are read when they are used.
_PLANNED_OPTIONS = (
    "rule",
    "view",
    "num_heads",
    "split_sizes",
    "orthogonalization",
    "ns_steps",
    "scale",
    "ns_stepsize",
    "power_iteration_steps",
    "lambda_mode",
)

NO_SCALE = "rule 'spectral_sphere' has no scale: the radius of a matrix takes its place (radius_mode, radius_scaler)"


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

    Args:
        params: a model, one tensor, tensors, named tensors, or groups with options.
        lr: learning rate of the matrices, a float or a one-element tensor.
        momentum: decay of the momentum buffer, in [0, 1).
        weight_decay: decoupled weight decay of the matrices, times the unscaled lr.
        nesterov: look ahead by one step of momentum.
        ns_steps: steps of the orthogonalizing iteration, at least 1.
        rule: the rule for matrices, "muon", "normuon", "spectral_sphere" or "adamw".
        scale: size of an update by shape: "v2" sqrt(max(1, d_out/d_in)), "v1" sqrt(max(d_out, d_in)),
            "v3" sqrt(d_out/d_in), "v4" 0.2 sqrt(max(d_out, d_in)), or a number.
        orthogonalization: coefficients "default", "keller", "polar_express", "quintic", or "exact" (SVD, slow).
        view: how a parameter is read as matrices: "auto", "matrix", "stacked", "flatten", "attn".
        num_heads: cut the rows of every matrix into this many equal matrices; None leaves it whole.
        split_sizes: cut the rows of every matrix into matrices of these heights, as of a fused QKV; None leaves it
            whole. Not together with num_heads.
        ns_stepsize: further factor of the orthogonalized update.
        power_iteration_steps: of rule "spectral_sphere", as are the next five; see `SpectralSphereOptimizer`.
        radius_mode: see there.
        radius_scaler: see there.
        retract_mode: see there.
        retract_alpha: see there.
        lambda_mode: see there.
        adamw_lr: learning rate of what AdamW takes.
        adamw_betas: decay of its first and second moment; the second is that of "normuon" too.
        adamw_eps: added to the root of its second moment, and of that of "normuon".
        adamw_weight_decay: its decoupled weight decay.
        nonfinite: what a NaN or infinite gradient does: "propagate" as PyTorch does, "skip" the whole step, "raise".
            The last two look at the gradients before anything is changed, which waits for the device.
        strategy: for sharded matrices: "owner" computes each once in the whole job, "replicate" on every rank,
            "auto" lets the planner choose.
        comm_dtype: precision of updates before they are orthogonalized, in memory and between ranks; None is
            bfloat16 on GPUs and float32 on CPUs.
        max_stage_bytes: bytes of updates that are worked on at a time; temporary memory is a few times this.
        cuda_graph: capture the step once and replay it, which takes the host a fraction of a millisecond. Gradients
            may move and options may change between steps; temporary memory stays reserved.
        strict: refuse a matrix that lands in AdamW by a guess, and a model of which nothing lands in Muon.
        overrides: {pattern of names: rule, or dict of group options}; the first that matches wins. Needs names.
        replicate_group: process group over which plain parameters are replicas (DDP): the work is split over it.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        ns_steps: int = 5,
        *,
        rule: str = "muon",
        scale: str | float = "v2",
        orthogonalization: str = "default",
        view: str = "auto",
        num_heads: int | None = None,
        split_sizes: Sequence[int] | None = None,
        ns_stepsize: float = 1.0,
        power_iteration_steps: int = 10,
        radius_mode: str = "spectral_mup",
        radius_scaler: float = 1.0,
        retract_mode: str = "hard",
        retract_alpha: float = 0.05,
        lambda_mode: str = "bracketed",
        adamw_lr: float | Tensor = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        nonfinite: NonFinite = "propagate",
        strategy: Strategy = "auto",
        comm_dtype: torch.dtype | None = None,
        max_stage_bytes: int = 256 * 2**20,
        cuda_graph: bool = False,
        strict: bool = False,
        overrides: Mapping[str, str | Mapping[str, Any]] | None = None,
        replicate_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "rule": rule,
            "scale": scale,
            "orthogonalization": orthogonalization,
            "view": view,
            "num_heads": num_heads,
            "split_sizes": split_sizes,
            "ns_stepsize": ns_stepsize,
            "power_iteration_steps": power_iteration_steps,
            "radius_mode": radius_mode,
            "radius_scaler": radius_scaler,
            "retract_mode": retract_mode,
            "retract_alpha": retract_alpha,
            "lambda_mode": lambda_mode,
        }
        adamw_defaults = {
            "adamw_lr": adamw_lr,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "adamw_weight_decay": adamw_weight_decay,
        }
        check_group(defaults)
        check_group(adamw_defaults)
        if rule == "adamw" and (lr != 0.02 or weight_decay != 0):
            raise ValueError("with rule='adamw' nothing takes lr or weight_decay: say adamw_lr and adamw_weight_decay")
        if RULES[rule].spherical and scale != "v2":
            raise ValueError(NO_SCALE)
        # Not in `defaults`: torch's cyclic schedulers would then move betas instead of the momentum of matrices.
        self._adamw_defaults = canonical(adamw_options(adamw_defaults))
        self._engine = EngineOptions(nonfinite, max_stage_bytes, strict, strategy, comm_dtype, cuda_graph)
        if replicate_group is not None and dist.get_rank(replicate_group) < 0:
            raise ValueError("replicate_group must contain this rank")
        self._replicate_group = replicate_group
        model = params if isinstance(params, nn.Module) else self._model_to_route_by()
        self._router = Router(overrides, model)
        self._routes: list[list[Route]] = []  # parallel to the parameters of the groups
        self._frozen_rows = frozen_rows(model) if model is not None else ()
        self._skipped_steps = 0
        self._sphere_counters: dict[str, Tensor] = {}
        self._accumulation_steps = 1
        self._planned: PlannedStep | None = None
        super().__init__(as_torch_params(params), canonical(defaults))
        self._router.forget_model()
        if self._router.unused_patterns:
            self._warn(f"overrides {sorted(self._router.unused_patterns)} match no parameter")
        self._say_what_decay_does()
        if strict and not any_orthogonalizes(self._all_routes()):
            raise ValueError(f"strict: no parameter takes an orthogonalizing rule\n{self.routing_report()}")

    def _model_to_route_by(self) -> nn.Module | None:
        """The model whose modules say more of `params` than they do themselves; a subclass may have one."""
        return None

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters; a group that mixes matrices and other parameters becomes one group per rule.

        Keys are the per-group options, `adamw_*` for the AdamW parameters of a mixed group, and `name`. A key that is
        none of these, or of torch's schedulers, is refused.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        given = {key: value for key, value in param_group.items() if key != "params"}
        check_option_names(given, "a parameter group", foreign=FOREIGN_KEYS)
        check_group(given)
        named, parameters = names_and_parameters(param_group)
        routes = self._route(parameters, named, given)
        if any(
            RULES[route.rule].spherical and ("scale" in given or "scale" in dict(route.options)) for route in routes
        ):
            raise ValueError(NO_SCALE)
        members: dict[tuple[bool, str, str], list[int]] = defaultdict(list)
        for index, route in enumerate(routes):
            members[(not RULES[route.rule].orthogonalizes, route.rule, repr(route.options))].append(index)
        # torch wants names in all groups or in none; the routes have one for every parameter.
        keep_names = "param_names" in self.param_groups[0] if self.param_groups else named is not None
        new_groups: list[tuple[Group, list[Route]]] = []
        for key in sorted(members, key=lambda key: (key[0], members[key][0])):  # matrices first, else as given
            indices = members[key]
            group = options_of(routes[indices[0]], given, routes, self.defaults, self._adamw_defaults)
            if isinstance(group["lr"], Tensor) and any(
                other["lr"] is group["lr"] for other in (*self.param_groups, *(new for new, _ in new_groups))
            ):
                group["lr"] = group["lr"].clone()  # schedulers write to it in place, group by group
            group["params"] = [parameters[i] for i in indices]
            if keep_names:
                group["param_names"] = [named[i] if named else routes[i].name for i in indices]
            else:
                group.pop("param_names", None)
            new_groups.append((group, [routes[i] for i in indices]))
        if not routes:  # as torch does, keep a group without parameters
            rule = given.get("rule", self.defaults["rule"])
            options = options_of(Route("", rule, ""), given, [], self.defaults, self._adamw_defaults)
            new_groups.append(({**options, "params": []}, []))
        for group, group_routes in new_groups:  # views are checked before anything is changed
            self._views(group, group_routes)
        for group, group_routes in new_groups:
            super().add_param_group(group)
            self._routes.append(group_routes)

    def _route(self, parameters: list[Tensor], named: list[str] | None, given: Mapping[str, Any]) -> list[Route]:
        rule = given.get("rule", self.defaults["rule"])
        explicit = "rule" in given or not RULES[rule].orthogonalizes
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
                    f"by a guess ({route.reason}); say overrides={{{name!r}: {route.rule!r}}} or {{{name!r}: 'muon'}}"
                )
            routes.append(route)
        return routes

    def _say_what_decay_does(self) -> None:
        if any(
            RULES[group["rule"]].spherical and group["retract_mode"] == "hard" and group["weight_decay"] != 0
            for group in self.param_groups
        ):
            message = (
                "weight_decay does nothing to matrices under retract_mode='hard': they are brought back to their "
                "sphere at every step. Say weight_decay=0, or retract_mode='dynamic'."
            )
            self._router.warnings.append(message)
            warnings.warn(message, stacklevel=3)

    def _views(self, group: Group, routes: Sequence[Route]) -> list[MatrixView | None]:
        """How every parameter of a group is read as matrices; None under an element-wise rule."""
        if not RULES[group["rule"]].orthogonalizes:
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
                scales = ", ".join(f"{_scale_of(group, *shape):.4g}" for shape in shapes)
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
        gradients = self._gradients(planned.parameters)
        decision = None
        if not self.state:
            decision = self._agree(planned, gradients, inert=self._is_inert(gradients))
        self._create_state()
        if (decision is not None and decision.inert) or self._still_accumulates():
            return loss
        if decision is None:
            decision = self._agree(planned, gradients, inert=False)
        if self._admits(decision):
            states = [self.state[parameter] for parameter in planned.parameters]
            with on_device(local(planned.parameters[0]).device) if planned.parameters else nullcontext():
                planned.run(self.param_groups, states, gradients, decision.wanted, self._accumulation_steps)
                if planned.sphere is not None:
                    planned.sphere.count(self._sphere_counters)
        return loss

    def _still_accumulates(self) -> bool:
        """Count a call of `step()`; whether it is one of those that only let gradients add up."""
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

    def _gradients(self, parameters: Sequence[Tensor]) -> dict[int, Tensor]:
        """The gradients there are on this rank, by position, dense and local."""
        gradients = {}
        rules = [RULES[group["rule"]] for group in self.param_groups for _ in group["params"]]
        for position, (parameter, rule) in enumerate(zip(parameters, rules, strict=True)):
            grad = parameter.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                if rule.orthogonalizes:
                    raise RuntimeError(
                        "Sparse gradients are not supported by Muon optimizer: parameter "
                        f"{self._all_routes()[position].name!r} has one. Let AdamW take it: "
                        "create_hybrid_optimizer(model) does so for embeddings; or give it a group with rule='adamw'."
                    )
                grad = grad.to_dense()
            gradients[position] = local_gradient(parameter, grad)
        return gradients

    def _is_inert(self, gradients: Mapping[int, Tensor]) -> bool:
        """Whether this first step only asks for state, as torch.distributed.checkpoint does before loading."""
        return all(float(group["lr"]) == 0 for group in self.param_groups) and not any(
            bool(grad.any()) for grad in gradients.values()
        )

    def _create_state(self) -> None:
        for group, routes in zip(self.param_groups, self._routes, strict=True):
            specs, names = RULES[group["rule"]].state, {spec.name for spec in RULES[group["rule"]].state}
            if all(names <= self.state[parameter].keys() for parameter in group["params"]):
                continue
            for parameter, view in zip(group["params"], self._views(group, routes), strict=True):
                state = self.state[parameter]
                for spec in specs:
                    if spec.name not in state:
                        state[spec.name] = spec.create(parameter, view)

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
        wanted: dict[int, Tensor] = {}
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
                wanted.update(zip(positions, decision.has_gradient, strict=True))
                if looks and not second_round:
                    # From what all ranks of the set were told alike: they must agree about the second round too.
                    planned.overlaps[ranks] = bool(decision.news[News.SEVERAL_SETS])
                    if not decision.same_plan:
                        disagreeing.append(ranks)
                        news[News.DISAGREEMENT] = True
        if planned.shared and looks and news[News.DISAGREEMENT]:
            details = [difference(ranks, planned.descriptions[ranks]) for ranks in disagreeing]
            raise RuntimeError(f"Ranks disagree about what to optimize: {'; '.join(details) or 'other ranks do'}")
        return _Agreed(wanted, largest, news, inert=inert and not bool(news[News.NOT_INERT]))

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
        options = tuple(
            (
                *(group[name] for name in _PLANNED_OPTIONS),
                (group["betas"], group["eps"]) if RULES[group["rule"]].normalizes_rows else None,
            )
            for group in self.param_groups
        )
        key = (options, tuple((id(p), p.dtype, p.device) for p in parameters))
        if self._planned is None or self._planned.key != key:
            for group in self.param_groups:
                check_group(group)
            self._planned = PlannedStep(
                key, self.param_groups, self._routes, self._all_views(), self._engine, self._replicate_group
            )
        return self._planned

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
        """Numbers for a logger, by name; one rank may ask alone.

        Nothing is kept for most of them during training: updates of a sample, one matrix of every shape that this
        rank holds whole, are computed when asked for, from the momentum as it is.

        Keys:
            skipped_steps: steps left out by `nonfinite="skip"` since the optimizer was made.
            orthogonality_residual: the largest ||O O^T - I||_F / sqrt(m) of the sample, m the smaller side. Absent
                where there is no sample: before the first step, where all matrices are sharded, and under rule
                "spectral_sphere".
            update_rms: the mean over the sample of lr times the root mean square of the update. Absent likewise.
            lambda_fallbacks: under rule "spectral_sphere", as are the next: matrices and steps in which the search
                for lambda failed, so that lambda = 0 was taken.
            matrices_without_norm: matrices and steps in which a matrix was zero and therefore not retracted.
            spectral_norm_over_radius_min: the smallest s / R before retraction in the last step, over all matrices.
            spectral_norm_over_radius_max: the largest.
            lambda_abs_mean: the mean of |lambda| in the last step.
            lambda_abs_max: the largest.
            msign_calls_median: orthogonalizations that a matrix took in the last step, the median.
            msign_calls_max: the largest.
        """
        numbers = {"skipped_steps": float(self._skipped_steps)}
        residuals, sizes = [], []
        planned = self._current_plan()
        if planned.sphere is not None:
            counters = ("lambda_fallbacks", "matrices_without_norm")
            numbers.update({name: float(self._sphere_counters.get(name, 0)) for name in counters})
            numbers.update(planned.sphere.metrics())
        with torch.no_grad():
            for stage in planned.plan.stages:
                for batch in stage.batches if not RULES[stage.rule].spherical else ():
                    unit = stage.units[batch.members[0].unit]
                    parameter = planned.parameters[unit.position]
                    if not self.state.get(parameter) or local(parameter).shape != unit.tile.shape:
                        continue
                    momentum = unit.view.split(local(self.state[parameter]["momentum_buffer"]))
                    sample = momentum[batch.members[0].block][batch.members[0].start]
                    group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
                    update = torch.empty_like(sample.unsqueeze(0))
                    RULES[group["rule"]].direction(batch.key, sample.unsqueeze(0), update)
                    sizes.append(float(group["lr"]) * float(update.square().mean().sqrt()))
                    factor = update_scale(group["scale"], batch.rows, batch.cols) * group["ns_stepsize"]
                    residuals.append(_orthogonality_residual(update[0] / factor) if factor else 0.0)
        if residuals:
            numbers["orthogonality_residual"] = max(residuals)
            numbers["update_rms"] = sum(sizes) / len(sizes)
        return numbers

    # -------------------------------------------------------- state and copies

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict` gave; one that does not fit is refused whole, with every mismatch by name.

        Unlike torch's own, this keeps the precision of the state (float32 momentum of half-precision weights) and
        never shares memory with `state_dict`.
        """
        incoming: StateDict = {}

        def before(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
            incoming.update(check_and_complete(optimizer, self._routes, self._all_views(), state_dict))
            return incoming

        def after(optimizer: torch.optim.Optimizer) -> None:
            optimizer.state.update(fitting_state(optimizer, incoming))

        with own_hooks(self, before, after):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        own = (
            "_adamw_defaults",
            "_engine",
            "_router",
            "_routes",
            "_frozen_rows",
            "_skipped_steps",
            "_accumulation_steps",
        )
        # Process groups can't be copied; a copy that needs one is built anew.
        nothing: dict[str, Any] = {"_planned": None, "_replicate_group": None, "_sphere_counters": {}}
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}, **nothing}


@dataclass(frozen=True)
class _Agreed:
    """What the ranks know before a step."""

    wanted: dict[int, Tensor]  # for every shared parameter, whether some rank has a gradient; on its device
    largest: dict[int, Tensor]  # the largest entry of every gradient here, where the policy asks for it
    news: Tensor
    inert: bool  # whether this step only asks for state, on all ranks


def _scale_of(group: Group, rows: int, cols: int) -> float:
    """The size of an update: the radius of the sphere takes the place of `scale`."""
    if RULES[group["rule"]].spherical:
        return target_radius(rows, cols, group["radius_mode"], group["radius_scaler"])
    return update_scale(group["scale"], rows, cols)


def _orthogonality_residual(update: Tensor) -> float:
    """||O O^T - I||_F / sqrt(m): 0 for an orthogonal matrix, near 1 for one of low rank."""
    wide = (update.mT if update.shape[0] > update.shape[1] else update).to(torch.float64)
    gram = wide @ wide.mT
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return float((gram - identity).norm() / len(gram) ** 0.5)


def _largest_entries(gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The largest absolute value of every gradient on the first one's device; NaN and infinity show in it."""
    present = {position: grad for position, grad in gradients.items() if grad.numel() > 0}
    if not present:
        return {}
    values = torch._foreach_norm(list(present.values()), ord=torch.inf)
    device = values[0].device
    return {i: value.to(device, torch.float64) for i, value in zip(present, values, strict=True)}
