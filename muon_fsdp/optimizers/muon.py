"""MuonOptimizer: parameter groups, state and the one `step()` that every update rule goes through."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from muon_fsdp.comm.agreement import NO_GRADIENT, Agreed, Agreement, Line, tell_failure
from muon_fsdp.comm.process_groups import Ranks, is_pretended, my_rank, num_ranks
from muon_fsdp.comm.transfers import layouts_of, local
from muon_fsdp.kernels import on_device
from muon_fsdp.linalg.autocast import without_autocast
from muon_fsdp.optimizers.grouped import GroupedOptimizer
from muon_fsdp.optimizers.signature import UNSET, show_options
from muon_fsdp.parameters.groups import (
    Params,
)
from muon_fsdp.parameters.state_dict import (
    StateDict,
    check_and_complete,
    first_names,
    fitting_state,
    own_hooks,
    what_was_not_loaded,
)
from muon_fsdp.parameters.wrappers import drifting_twin, replicate_group_of
from muon_fsdp.plan.options import MICRO_STEP, STARTED, NonFinite, Settings
from muon_fsdp.plan.outline import Strategy
from muon_fsdp.plan.report import PlanReport, fsdp_layouts, make_report
from muon_fsdp.rules import DEFAULT_OTHER_RULE, DEFAULT_RULE, RULES
from muon_fsdp.step.gradients import Gradients
from muon_fsdp.step.metrics import numbers_of, whole_samples
from muon_fsdp.step.planned_step import PlannedStep, parameter_specs


@show_options(DEFAULT_RULE)
class MuonOptimizer(GroupedOptimizer):
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
        {settings}
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
        self._settings = Settings(nonfinite, max_stage_bytes, strict, strategy, comm_dtype, cuda_graph)
        if replicate_group is None:
            replicate_group = replicate_group_of(params)
        for name, group in (("replicate_group", replicate_group), ("agreement_group", agreement_group)):
            if group is not None and dist.get_rank(group) < 0:
                raise ValueError(f"{name} must contain this rank")
        self._replicate_group, self._agreement_group = replicate_group, agreement_group
        self._agreement: Agreement | None = None  # with the ranks that share parameters with this one, or may
        self._checks_for_twins = num_ranks() > 1
        self._skipped_steps = 0
        self._totals: dict[tuple[str, str], Tensor] = {}  # of diagnostics, by rule and name
        self._accumulation_steps = 1
        self._planned: PlannedStep | None = None
        given = {} if lr is UNSET else {"lr": lr}
        super().__init__(params, rule, other_rule, {**given, **options}, overrides, strict=strict)

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
            if self._watch is not None:
                self._watch.check(planned, planned.names, planned.parameters)
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
        not_finite = self._settings.nonfinite != "propagate" and not _are_finite(found.here().values())
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
        if self._settings.nonfinite == "raise":
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
                self._settings,
                self._accumulation_steps,
                self._replicate_group,
                self._agreement_group,
            )
        return self._planned

    def _plan_key(self, parameters: Sequence[Tensor]) -> object:
        """Return all that a plan depends on."""
        rules = [RULES[group["rule"]] for group in self.param_groups]
        options = [
            (rule, *[group.get(name) for name in rule.plan_names])
            for rule, group in zip(rules, self.param_groups, strict=True)
        ]
        return options, [(id(p), p.dtype, p.device) for p in parameters]

    def plan_report(self, world_size: int | None = None, mesh: Sequence[int] | None = None) -> PlanReport:
        """Who orthogonalizes what, what travels, and how even the work is; `print` it for a table.

        Without arguments: for the parameters as they lie. With `world_size`: as if every parameter were sharded over
        that many ranks by `fully_shard`, which needs neither processes nor memory (the model may be on the meta
        device). `mesh` is the shape of the mesh, (replicas, shards) for HSDP.
        """
        layouts = fsdp_layouts(self._parameters(), world_size, mesh) if world_size or mesh else None
        if layouts is None:
            layouts = layouts_of(self._parameters(), self._replicate_group)
        specs = parameter_specs(self.param_groups, self._routes, self._all_views(), layouts, self._settings)
        return make_report(specs, self._settings)

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
            "_is_strict",
            "_checks_for_twins",
            "_settings",
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
            "_watch": None,
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
