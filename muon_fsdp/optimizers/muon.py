"""MuonOptimizer: the `step()` that all rules share, its plan, its metrics and its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from muon_fsdp.comm.agreement import NO_GRADIENT, REPLICAS, Agreed, report_failure
from muon_fsdp.comm.process_groups import is_pretended, num_ranks
from muon_fsdp.declarations.option import Option, integer
from muon_fsdp.declarations.settings import (
    MICRO_STEP,
    NUM_UPDATES,
    STARTED,
    Attention,
    CudaGraph,
    NonFinite,
    Overlap,
    Settings,
    Strategy,
)
from muon_fsdp.kernels import on_device
from muon_fsdp.linalg.autocast import without_autocast
from muon_fsdp.optimizers.grouped import GroupedOptimizer
from muon_fsdp.optimizers.rivals import RivalWatch
from muon_fsdp.optimizers.signature import UNSET, show_options
from muon_fsdp.parameters.given_state import find_state, values_of_matrices
from muon_fsdp.parameters.groups import Params
from muon_fsdp.parameters.records import state_bytes
from muon_fsdp.parameters.replicas import Replicas, ReplicateMesh
from muon_fsdp.parameters.state_dict import (
    GivenState,
    StateDict,
    boxes_of,
    check_and_complete,
    create_missing,
    fitting_state,
    loading_hooks,
    what_was_not_loaded,
)
from muon_fsdp.parameters.wrappers import ddp_wrappers, replicate_group_of, warn_about_twin
from muon_fsdp.plan.layout import fsdp_layout, state_layout
from muon_fsdp.plan.report import PlanReport, make_report
from muon_fsdp.plan.speeds import DEVICE_MEMORY
from muon_fsdp.rules import DEFAULT_OTHER_RULE, DEFAULT_RULE
from muon_fsdp.step.changes import plan_key
from muon_fsdp.step.clipping import clip_gradients, find_siblings, parts_to_clip
from muon_fsdp.step.gradients import Gradients, are_finite
from muon_fsdp.step.graph import CapturedStep
from muon_fsdp.step.inputs import StepInputs
from muon_fsdp.step.meter import VANISHED
from muon_fsdp.step.overlap import refuse_grad_scaler
from muon_fsdp.step.planned_step import PlannedStep, parameter_specs
from muon_fsdp.step.shared_sets import StepAgreement, Written, own_memory, ranks_of_agreement, shared_ranks
from muon_fsdp.text import warn_user


@show_options(DEFAULT_RULE)
class MuonOptimizer(GroupedOptimizer):
    """Muon for matrices and AdamW for all other parameters, in one optimizer.

        optimizer = MuonOptimizer(model, lr=0.02)               # routed by module: embeddings and LM head to AdamW
        optimizer = MuonOptimizer(model.named_parameters())     # routed by dimension and name
        optimizer = MuonOptimizer(model.parameters())           # routed by shape alone: embeddings look like matrices

    A matrix W of shape (d_out, d_in) is updated by

        buf = momentum * buf + grad
        O   = orthogonalize(grad + momentum * buf  if nesterov else  buf)
        O   = O * min(1, norm / momentum_eps)          # the Frobenius norm of what was orthogonalized
        W   = W * (1 - lr * weight_decay) - lr * scale(d_out, d_in) * ns_stepsize * O

    and every other parameter by AdamW with the `adamw_*` options. AdamW's learning rate follows from `lr` unless you
    pass `adamw_lr`. A matrix of one row or one column counts as a vector. A group that holds both is replaced by one
    group per rule, matrices first, so every group has one `rule`, one `lr` and one `weight_decay` that you can read
    and schedule. In a group of your own that holds only AdamW parameters, `lr` and `weight_decay` are theirs.

    Options belong to rules. Pass those of the rule of matrices by their names, and those of the element-wise rule with
    the name of the rule as a prefix (`adamw_lr`). This includes rules that you registered. An option that no rule in
    use has raises an error, here, in groups and in overrides.

    Args:
        params: a model, one tensor, tensors, named tensors, or groups with options.
        lr: learning rate of the matrices, a float or a one-element tensor.
        {options}
        rule: the name of the rule of matrices: a built-in one, or one that you registered.
        other_rule: the name of the element-wise rule of all other parameters.
        {settings}
        overrides: {pattern of names: rule, or dict of group options}; the first match wins. Needs names.
        replicate_group: process group over which plain parameters are replicas, so that its ranks can share the work.
            If DDP wraps the model, its process group is the default.
        replicate_mesh: the whole mesh under FSDP2 + tensor parallel, if matrices on a submesh of it are equal on
            all submeshes: each is then orthogonalized once, not once per submesh. The first step raises an error if
            they differ. Pass {pattern of names: mesh or None} to leave out some (local experts); the first match wins.
        agreement_group: process group whose ranks decide about a step together though they share no parameter. With
            pipeline stages, `nonfinite="skip"` must skip the step on all of them.
        options: those of other rules, by name.
    """

    # What a copy of the optimizer begins with too.
    _planned: PlannedStep | None = None
    _agreement_group: dist.ProcessGroup | None = None
    _has_agreed = False  # whether ranks have agreed on a step that was not inert
    _rivals: RivalWatch | None = None  # between the first step and the second
    # The gradients that accumulate since the first call of step(); None once the second has checked them.
    _held: list[tuple[Tensor, Tensor]] | None = None
    # How often PyTorch has seen each parameter change, until the first step compares this.
    _versions: Mapping[int, int] | None = None

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
        max_stage_bytes: int | None = None,
        cuda_graph: CudaGraph = "auto",
        shard_state: bool = False,
        offload_state: bool = False,
        overlap: Overlap = "step",
        attention: Attention = "split",
        strict: bool = False,
        overrides: Mapping[str, str | Mapping[str, Any]] | None = None,
        replicate_group: dist.ProcessGroup | None = None,
        replicate_mesh: ReplicateMesh | None = None,
        agreement_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        settings = Settings(
            nonfinite=nonfinite,
            max_stage_bytes=max_stage_bytes,
            strict=strict,
            strategy=strategy,
            comm_dtype=comm_dtype,
            cuda_graph=cuda_graph,
            shard_state=shard_state,
            overlap=overlap,
            attention=attention,
            offload_state=offload_state,
        )
        ranks_of_agreement(agreement_group)  # raises if it is of no use
        if replicate_group is None:
            replicate_group = replicate_group_of(params)
        self._agreement_group = agreement_group
        self._agreement = StepAgreement()
        self._checks_for_twins = num_ranks() > 1
        self._num_without_gradient = 0  # of the last steps
        self._looks_for_rivals = True
        self._has_seen_vanished = False  # the first number of `vanished_updates`
        self._skipped_steps = 0
        self._stage_counts: Counter[str] = Counter()  # of stages that started in backward
        self._objections: dict[int, int] = {}  # what this rank has against their updates, by position
        self._totals: dict[str, Tensor] = {}  # of the diagnostics of every rule
        # By names of parameter and state, what `set_per_matrix` got before that state existed.
        self._early_values: dict[tuple[str, str], list[Tensor]] = {}
        self._accumulation_steps = 1
        self._held = []
        given = {} if lr is UNSET else {"lr": lr}
        super().__init__(
            params,
            rule,
            other_rule,
            {**given, **options},
            overrides,
            settings=settings,
            replicas=Replicas(replicate_group, replicate_mesh, shards_state=shard_state),
        )
        self._has_loaded = False  # optimizer state, since the last step
        self._given_state = GivenState()
        if num_ranks() > 1:
            self._versions = {id(p): _version(p) for p in self._parameters()}

    # -------------------------------------------------------------------- step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # torch.compile(optimizer.step) would take minutes and gain nothing
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient on some rank; others and their state stay unchanged.

        All ranks that hold parameters must call this. `closure`, if given, is called first, with gradients enabled; its
        result is returned.
        """
        if self._rivals is not None:
            self._rivals.finish()
            self._rivals = None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Ranks that branch differently here would wait for each other. STARTED alone differs, if one rank has loaded a
        # checkpoint and others have not.
        has_begun = any(group.get(STARTED) for group in self.param_groups)
        has_agreed = has_begun and self._has_agreed
        if has_agreed and self._still_accumulates():
            return loss
        if self._planned is not None:  # first of all: if this rank fails, others still wait for its transfers
            self._planned.complete_early()
        self._agreement.finish_report()
        planned, found = self._prepare()
        num_calls = self.param_groups[0].get(MICRO_STEP, 0) + 1
        updates = has_agreed or num_calls % self._accumulation_steps == 0
        inert = not has_begun and self._is_inert(found)
        planned, agreed = self._agree(planned, found, inert=inert, updates=updates)
        self._create_state(planned)
        if agreed.inert:
            return loss
        self._has_agreed = True
        if not has_agreed and self._still_accumulates():
            return loss
        if agreed.not_finite_on is None:
            self._update(planned, found, agreed)
        elif self._settings.nonfinite == "raise":
            raise RuntimeError(found.not_finite_message(agreed.not_finite_on))
        else:
            self._skipped_steps += 1
        return loss

    def _prepare(self, *, checks_state: bool = True) -> tuple[PlannedStep, Gradients]:
        """Return the plan and the gradients.

        If this fails, the error is reported to the other ranks, which would otherwise wait for this one.

        Args:
            checks_state: whether state must fit, as a step needs it.
        """
        try:
            planned = self._current_plan()
            if self._watch is not None:
                self._watch.check(planned.records)
            if checks_state:
                planned.check_state({record.position: self.state[record.tensor] for record in planned.records})
            if self._early_values:  # ranks compare state before this step
                self._create_state(planned)
            if planned.overlap is not None:
                refuse_grad_scaler()
            return planned, Gradients(planned.records, self._other_rule.name)
        except Exception as error:
            if not self._agreement.fail(error) and num_ranks() > 1 and not is_pretended():
                with suppress(Exception):  # finding the ranks may fail for the same reason
                    layouts = self._replicas.layouts(self.param_groups, self._routes)
                    report_failure(shared_ranks(layouts, self._replicas, self._agreement_group), error)
            raise

    def _update(self, planned: PlannedStep, found: Gradients, agreed: Agreed) -> None:
        """Update the parameters for which some rank has a gradient."""
        codes = planned.shared.by_position(agreed.codes)
        gradients = {i: planned.records[i].rows_of(grad) for i, grad in found.in_layout(codes).items()}
        planned.make_groups(measures=agreed.measures)
        kept = planned.kept_results(self._objections | planned.shared.by_position(agreed.early))
        inputs = StepInputs(
            groups=dict(enumerate(self.param_groups)),
            shards=[record.part() for record in planned.records],
            states={record.position: self.state[record.tensor] for record in planned.records},
            gradients=gradients,
            updated=gradients.keys() | {position for position, code in codes.items() if code != NO_GRADIENT},
            divisor=self._accumulation_steps,
            num_updates=agreed.num_updates,
        )
        self._count_without_gradient(planned, agreed, has_none=not inputs.updated)
        device = planned.device
        with on_device(device), without_autocast(device.type):
            failures = planned.run(inputs, kept, measures=agreed.measures)
            planned.written.note(self.state)
            for group in self.param_groups:
                group[NUM_UPDATES] = agreed.num_updates + 1
            error = failures.error()
            if error is None:
                planned.matrices.count(self._totals)
        if self._looks_for_rivals:
            self._looks_for_rivals = False
            self._rivals = RivalWatch(self, planned.records)
        if error is not None:
            self._agreement.report(f"its last {failures.text}")
            raise error

    def _count_without_gradient(self, planned: PlannedStep, agreed: Agreed, *, has_none: bool) -> None:
        """Count successive steps in which no rank has a gradient of any trainable parameter; warn, once, at the second.

        One alone is common: a first step for the scheduler's sake, or two optimizers that take turns.
        """
        if self._num_without_gradient == 2:
            return
        is_elsewhere = any(map(any, agreed.codes.values()))
        if not has_none or is_elsewhere or not any(record.tensor.requires_grad for record in planned.records):
            self._num_without_gradient = 0
            return
        self._num_without_gradient += 1
        if self._num_without_gradient == 2:
            warn_user(
                "step() found no gradient of any parameter, for the second time in succession, so nothing was updated. "
                "Call zero_grad() after step(), not between backward() and step(). With FSDP2, call "
                "set_requires_gradient_sync(True) before the last backward() of a step. If fully_shard, to_empty or "
                "load_state_dict(assign=True) came after the optimizer, the model has other parameters now: build the "
                "optimizer last."
            )

    def _still_accumulates(self) -> bool:
        """Count a call of `step()`, and return whether gradients still accumulate."""
        for group in self.param_groups:
            group[STARTED] = True
        if self._accumulation_steps == 1:
            return False
        micro_step = (self.param_groups[0].get(MICRO_STEP, 0) + 1) % self._accumulation_steps
        if self._held is not None:
            self._check_held(is_first=micro_step == 1)
        for group in self.param_groups:
            group[MICRO_STEP] = micro_step
        return bool(micro_step)

    def _check_held(self, *, is_first: bool) -> None:
        """Warn if the gradients that the first call of `step()` found are gone at the second; checked once."""
        if is_first:
            self._held = [(p, p.grad) for p in self._parameters() if p.grad is not None]
            return
        held, self._held = self._held, None
        # backward(create_graph=True) adds out of place, and DDP moves gradients to its buckets.
        is_lost = [p.grad is None or (p.grad is not grad and not p.grad.requires_grad) for p, grad in held or ()]
        if not any(is_lost) or not all(is_lost):
            return
        if any(wrapper.gradient_as_bucket_view for wrapper, _ in ddp_wrappers(self._parameters())):
            return
        steps = self._accumulation_steps
        warn_user(
            f"gradient_accumulation_steps={steps}: the gradients that the last call of step() found are gone, so their "
            "micro-batch does not count. model.zero_grad() clears gradients: call optimizer.zero_grad(), which keeps "
            f"them for {steps} calls. A trainer that accumulates gradients itself needs the option there, not here."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; while they accumulate over several calls of `step()`, only after the last call."""
        if self.param_groups[0].get(MICRO_STEP, 0) == 0:
            super().zero_grad(set_to_none)

    def _is_inert(self, found: Gradients) -> bool:
        """Return whether this first step only creates state, as torch.distributed.checkpoint does before it loads."""
        return all(float(group["lr"]) == 0 for group in self.param_groups) and not any(
            bool(grad.any()) for grad in found.here().values()
        )

    def _create_state(self, planned: PlannedStep | None = None) -> None:
        """Create the state that is missing, also for parameters without a gradient; no communication."""
        if planned is None:
            self._complete_groups()
            create_missing(self._records(), self.state)
        else:
            if planned.has_state:
                return
            create_missing(planned.records, self.state)
            planned.has_state = True
        for (name, state), values in list(self._early_values.items()):
            del self._early_values[name, state]  # first: a value that no longer fits raises once
            self.set_per_matrix(name, state, values)

    @torch.no_grad()
    def set_per_matrix(self, name: str, state: str, values: float | Tensor | Sequence[Any]) -> None:
        """Set per-matrix state of one parameter to numbers of your own, for a rule that reads them.

        Call it between two steps or before the first one, with equal values on every rank that holds a part of the
        parameter. Ranks compare them at the next step, and all of them raise an error if they differ. Before the first
        step, values are kept by name until that step, or `state_dict()` with gradients present, creates the state; what
        is loaded later replaces them.

        Args:
            name: the name of the parameter, as in `routing_report()`.
            state: the name of the `PerMatrix` state, which the rule of the parameter declares.
            values: one number for all matrices of the parameter; or one value per matrix, in a sequence or in a tensor
                whose first dimension counts them: a number, or a tensor of the shape that the kind of the state gives
                one matrix. For a single matrix also a tensor of that shape. They must be finite.
        """
        planned = self._planned
        if planned is None:
            self._complete_groups()
        record, spec = find_state(self._records() if planned is None else self._current_plan().records, name, state)
        parts = values_of_matrices(record, spec, values)
        existing = self.state.get(record.tensor, {}).get(state)
        if isinstance(existing, Tensor) and existing.numel() == sum(map(Tensor.numel, parts)) and not existing.is_meta:
            existing.copy_(torch.cat([part.reshape(-1) for part in parts]))  # in place: a captured step keeps addresses
        else:
            self._early_values[record.name, state] = parts

    def _agree(
        self, planned: PlannedStep, found: Gradients, *, inert: bool, updates: bool, written: Written | None = None
    ) -> tuple[PlannedStep, Agreed]:
        """Agree with the other ranks on whether to take the step, and which parameters have a gradient somewhere.

        Args:
            planned: the plan.
            found: the gradients of this rank.
            inert: whether the step only creates state on this rank.
            updates: whether the step may update parameters; the first of several that accumulate does not.
            written: per-matrix state that must be equal on all ranks; None if it need not be compared.

        Returns:
            The plan, made anew if another rank has a smaller device than this rank planned for; and what was agreed on.
        """
        not_finite = self._settings.nonfinite != "propagate" and not are_finite(found.here().values())
        if self._checks_for_twins and self._agreement_group is None:
            warn_about_twin(planned.records, has_sharded=bool(planned.shared))
        self._checks_for_twins = False
        changed = self._changed_weights(planned)
        agreed = None
        while agreed is None:  # until no rank has other parameters than when the ranks met
            planned = self._meet(planned)
            self._objections = planned.objections(self.param_groups, self.state)
            agreed = self._agreement.before_step(
                planned.shared,
                self.param_groups,
                found.codes,
                self._objections,
                inert=inert,
                not_finite=not_finite,
                compares=0 if written is not None else planned.wish_to_compare(self.state),
                written=written,
                measures=planned.wants_to_measure,
                starts=written is None and planned.matrices.may_start(found.codes),
                has_loaded=self._has_loaded,
                changed=changed,
            )
        if written is not None:
            planned.written.note(self.state)
        if agreed.inert:
            return planned, agreed
        self._has_loaded, self._versions = False, None
        _warn_about_loads(agreed)
        # A step that updates nothing needs no equal replicas: torch.distributed.checkpoint takes one before it loads
        # weights, and gradients that accumulate may not be reduced yet.
        compares = agreed.compares * any(map(any, agreed.codes.values()))
        if not (compares or agreed.starts) or not updates or agreed.not_finite_on is not None:
            return planned, agreed
        self._create_state(planned)
        with self._agreement.reporting():
            codes, error = planned.shared.by_position(agreed.codes), None
            if agreed.starts:
                updated = found.codes.keys() | {position for position, code in codes.items() if code != NO_GRADIENT}
                error = planned.find_zeros(self.state, updated, measures=agreed.measures)
            if compares == REPLICAS:
                planned.compare_replicas(self.state, found.in_layout(codes))
            if error is not None:  # only now, because other ranks wait for the comparison
                planned.expect_comparison()  # the user will change weights
                raise error
        # Ranks that hold none of the replicas that differ, or of the matrices that are zero, hear of the error here.
        return self._agree(planned, found, inert=inert, updates=updates, written=planned.written.texts(self.state))

    def _meet(self, planned: PlannedStep) -> PlannedStep:
        """Find the other ranks; return the plan, made anew if one of them has a smaller device than it is made for."""
        self._agreement.meet(planned.shared, self.param_groups)
        if not planned.shared.is_planned_for(self._agreement.device_memory):
            with self._agreement.reporting():
                return self._current_plan()
        return planned

    def _changed_weights(self, planned: PlannedStep) -> set[int]:
        """Return the sharded parameters that were written to between the constructor and the first step, by position.

        Replicas are left out, because their weights are compared.
        """
        if self._versions is None:
            return set()
        return {
            position
            for position, record in enumerate(planned.records)
            if record.layout.num_replicas < len(record.layout.ranks)
            and self._versions.get(id(record.tensor), 0) != _version(record.tensor)
        }

    # ---------------------------------------------------------------- clipping

    @_disable_dynamo
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        *,
        rules: str | Sequence[str] | None = None,
        groups: int | Sequence[int] | None = None,
    ) -> dict[str | int, Tensor]:
        """Clip gradients by their norm, in any layout and without waiting for the device.

        Without `rules` and `groups`, one norm over all parameters is clipped, as by `torch.nn.utils.clip_grad_norm_`.
        It covers all ranks that a step connects, also parameters that only some of them hold (local experts). All ranks
        that hold parameters must call this, after backward and before `step()`.

        Args:
            max_norm: the largest norm.
            rules: the name of a rule, or several; the parameters of each are clipped by a norm of their own.
            groups: the number of a parameter group, or several, clipped in the same way.

        Returns:
            The norms before clipping, by name of the rule, number of the group, or "all".
        """
        if not float(max_norm) > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        self._agreement.finish_report()
        planned, found = self._prepare(checks_state=False)  # state may be elsewhere until step()
        agreed = None
        while agreed is None:
            planned = self._meet(planned)
            with self._agreement.reporting():
                parts = parts_to_clip(planned.records, rules, groups)
            ranks = self._agreement.ranks
            is_new = planned.siblings is None or planned.siblings.ranks != ranks
            agreed = self._agreement.before_step(
                planned.shared,
                self.param_groups,
                found.codes,
                {},
                inert=False,
                not_finite=False,
                compares=REPLICAS * is_new,
            )
        device = self._agreement.device or planned.shared.device
        if planned.siblings is None or agreed.compares:  # all ranks look for siblings if one of them does
            planned.siblings = find_siblings(planned.records, ranks, device)
        gradients = found.in_layout(planned.shared.by_position(agreed.codes))
        return clip_gradients(parts, float(max_norm), gradients, planned.siblings, device, planned.shared.like)

    # -------------------------------------------------------------------- plan

    def _current_plan(self) -> PlannedStep:
        """Return the plan, made anew if parameters or planned options have changed since the last step."""
        key = plan_key(self.param_groups)
        agreed_memory = self._agreement.device_memory
        planned = self._planned
        if key is None or planned is None or planned.key != key or not planned.shared.is_planned_for(agreed_memory):
            self._complete_groups()
            key = plan_key(self.param_groups)
            before = planned
            if before is not None:
                before.abandon()
            planned = self._planned = PlannedStep(
                key,
                self._records(),
                self._settings,
                self._accumulation_steps,
                self._replicas.group,
                self._agreement_group,
                agreed_memory,
                self._stage_counts,
            )
            if before is not None and before.has_same_parameters(planned):
                planned.compares_replicas = before.compares_replicas
        self._check_new_keys()
        return planned

    def plan_report(
        self,
        world_size: int | None = None,
        mesh: Sequence[int] | None = None,
        device_memory: int | None = None,
    ) -> PlanReport:
        """Return which ranks orthogonalize what, what travels, and how even the work is; `print` shows a table.

        Without arguments, the report is about the parameters as they are distributed now. With `world_size`, it is
        about parameters that `fully_shard` distributes over that many ranks, which needs neither processes nor memory
        (the model may be on the meta device). `mesh` is the shape of the mesh, (replicas, shards) for HSDP.
        `device_memory` is the total bytes of the smallest device, of which scratch may take 5%. None means 80 GiB for
        such ranks, and the devices of the present ranks without `world_size` and `mesh`.

        Without arguments, the report also says whether this rank runs steps as a CUDA graph, and if not, why; and with
        `overlap="backward"`, how many stages start in backward.
        """
        for name, value in (("world_size", world_size), ("device_memory", device_memory)):
            Option(name, None, "", check=integer).validate(value)
        records = self._records()
        graph = overlap = ""
        if world_size is None and mesh is None:
            planned = self._planned
            graph = (CapturedStep(self._settings.cuda_graph) if planned is None else planned.captured).status
            if planned is not None and planned.overlap is not None:
                overlap = planned.overlap.status
            memory = {**own_memory(records), **self._agreement.device_memory}
        else:
            layout = fsdp_layout(world_size, mesh)
            rows = state_layout(layout, shard_state=self._settings.shard_state)
            records = [replace(r, layout=layout, step_layout=rows if r.shape else layout) for r in records]
            memory = {layout.ranks: DEVICE_MEMORY}
        if device_memory is not None:
            memory = dict.fromkeys(memory, device_memory)
        report = make_report(parameter_specs(records, self._settings, memory), self._settings)
        of_records = [(r.all_state, r.tensor, r.view, r.step_layout) for r in records]
        stored = [record.group.get("state_dtype", "float32") for record in records]
        return replace(
            report,
            cuda_graph=graph,
            overlap=overlap,
            state_bytes=sum(state_bytes(*each, form) for each, form in zip(of_records, stored, strict=True)),
            state_dict_bytes=sum(state_bytes(*each) for each in of_records),
        )

    def metrics(self, per_matrix: bool = False) -> dict[str, float]:
        """Return numbers for a logger, by name; one rank may call this alone. Rules add their own.

        Updates are measured in the step, on a sample: one matrix of every batch that this rank computes. On a CPU
        `update_rms` is that of the last step. On a GPU, and for the residual, it is that of the first step after the
        last call; with CUDA graphs, samples are at least 50 steps apart. That step also measures, on all ranks, what it
        changes in every matrix of two or more dimensions that is not zero; before the first call no step does.

        Args:
            per_matrix: whether `relative_update/NAME` and `update_angle/NAME` are returned too, for every matrix of
                which this rank holds a part. NAME is that of the parameter, followed by [0], [1], ... if it has several
                matrices.

        Keys:
            skipped_steps: steps skipped by `nonfinite="skip"` since the optimizer was built.
            overlapped_stages: with `overlap="backward"`, stages that ran in backward, and whose results were used.
            discarded_stages: those whose results were not used, and that ran again in `step()`.
            orthogonality_residual: the largest ||O O^T - I||_F / sqrt(m) of the sample, m the smaller side. Absent
                if there is no sample: before the first step, or if other ranks compute all matrices.
            update_rms: the mean over the sample of the root mean square of what was subtracted: lr times the update,
                times the factor g of rules that have factors. Absent in the same cases.
            relative_update/RULE: the median of ||dW|| / ||W|| over the matrices of a rule, where dW is all that the
                step has changed, weight decay included. Absent until a step after a call has measured it.
            update_angle/RULE: the median of the angle between W and W + dW, in radians. Absent in the same cases.
            vanished_updates: of matrices in half precision that are rounded to the nearest, the share of elements that
                the measured step left unchanged on this rank, most likely because the update was below half an ulp.
        """
        numbers = {"skipped_steps": float(self._skipped_steps)}
        if self._settings.overlap == "backward":
            numbers |= {name: float(self._stage_counts[name]) for name in ("overlapped_stages", "discarded_stages")}
        numbers |= self._current_plan().metrics(self._totals, per_matrix=per_matrix)
        if not self._has_seen_vanished and VANISHED in numbers:
            self._has_seen_vanished = True
            if numbers[VANISHED] > 0.5:
                warn_user(
                    f"{numbers[VANISHED]:.0%} of the elements of half-precision matrices did not change in a step: "
                    "their updates are below half the distance between neighbouring numbers. Keep the weights in "
                    "float32 (mixed precision), or pass rounding='stochastic' or rounding='remainder'"
                )
        return numbers

    # -------------------------------------------------------- state and copies

    def state_dict(self) -> StateDict:
        """Return options and state for `load_state_dict`; for a sharded parameter, this rank's shard.

        The key "boxes" then says which part of each parameter this is, and `load_state_dict` raises for another rank's.

        State that is stored in 8 bits or in bfloat16 is returned in working precision, under the same names.
        Before the first step, state is created if there are gradients, because torch.distributed.checkpoint loads only
        into state that exists. Without gradients it is empty, as in torch's own optimizers.
        """
        if self.state or any(parameter.grad is not None for parameter in self._parameters()):
            self._create_state()

        def decode(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
            return {**state_dict, "state": self._given_state.in_working_precision(self._records(), state_dict["state"])}

        handle = self.register_state_dict_post_hook(decode, prepend=True)
        try:
            return {**super().state_dict(), **boxes_of(self.param_groups, self.state)}
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what `state_dict()` returned; if it does not fit, raise with every mismatch by name and load nothing.

        Unlike torch's own, this keeps the precision of the state (float32 momentum of half-precision weights) and
        never shares memory with `state_dict`. To load the state of another optimizer, use `muon_fsdp.migrate`.
        """
        incoming: StateDict = {}
        present = dict(self.state)

        def before(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
            own = {id(value) for state in self.state.values() for value in state.values()}
            given = own | self._given_state.ids()
            incoming.update(check_and_complete(optimizer, self._records(), state_dict, given))
            return {**incoming, "state": {}}  # torch would copy all of it to the devices of the parameters

        def after(optimizer: torch.optim.Optimizer) -> None:
            optimizer.state.update(fitting_state(self._records(), incoming, present))
            for group in optimizer.param_groups:  # saved while accumulating, and resumed with fewer accumulation steps
                if group[MICRO_STEP] >= self._accumulation_steps:
                    group[MICRO_STEP] = 0
            loaded = {record.name for record in self._records() if optimizer.state.get(record.tensor)}
            self._early_values = {key: parts for key, parts in self._early_values.items() if key[0] not in loaded}

        with loading_hooks(self, before, after):
            super().load_state_dict(state_dict)
        self._routes = [[replace(route, lr_origin="") for route in routes] for routes in self._routes]
        self._has_loaded = True
        if self._planned is not None:
            self._planned.expect_comparison()
        for message in what_was_not_loaded(self._records(), incoming):
            warn_user(message)

    def __getstate__(self) -> dict[str, Any]:
        own = (
            "_rule_name",
            "_other_rule_name",
            "_given",
            "_overrides",
            "_pattern_rules",
            "_is_built",
            "_num_keys",
            "_warned_keys",
            "_checks_for_twins",
            "_num_without_gradient",
            "_looks_for_rivals",
            "_has_seen_vanished",
            "_has_loaded",
            "_settings",
            "_router",
            "_routes",
            "_frozen_rows",
            "_skipped_steps",
            "_stage_counts",
            "_objections",
            "_early_values",
            "_accumulation_steps",
        )
        # Process groups can't be copied. A copy that needs one must be built anew.
        nothing: dict[str, Any] = {
            "_replicas": Replicas(shards_state=self._replicas.shards_state),
            "_agreement": StepAgreement(),
            "_totals": {},
            "_routed": [],
            "_given_state": GivenState(),
        }
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}, **nothing}


def _version(parameter: Tensor) -> int:
    """Return how often PyTorch has seen a parameter change in place; for a DTensor, as a whole."""
    return 0 if parameter.is_inference() else parameter._version


def _warn_about_loads(agreed: Agreed) -> None:
    """Warn if a rank has loaded a checkpoint and another has not."""
    found = {
        "loaded optimizer state since the last step": agreed.state_loaded_on,
        "loaded or changed weights since the optimizer was built": agreed.weights_loaded_on,
    }
    for text, ranks in found.items():
        if ranks is not None:
            warn_user(
                f"Rank {ranks[0]} has {text}, and rank {ranks[1]} has not. A checkpoint that only one rank loads "
                "leaves the others with what they had: load on all ranks, each its own shards, as "
                "torch.distributed.checkpoint does."
            )
