"""Plan a step for the current parameters of an optimizer, and run it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.agreement import REPLICAS, WRITTEN
from muon_fsdp.comm.dtensors import local
from muon_fsdp.comm.process_groups import Ranks, groups_for, make_group, my_rank
from muon_fsdp.comm.recorder import GraphRecorder, Recorder
from muon_fsdp.declarations.encoding import HALF_DTYPES
from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.declarations.settings import Settings
from muon_fsdp.declarations.state import State, working_dtype
from muon_fsdp.parameters.groups import Group
from muon_fsdp.parameters.records import ParameterRecord, state_bytes
from muon_fsdp.parameters.stored_state import host_bytes
from muon_fsdp.plan.costs import STREAMED_BYTES
from muon_fsdp.plan.layout import LayoutError, local_layout
from muon_fsdp.plan.outline import StageOutline, make_outline
from muon_fsdp.plan.speeds import DEVICE_MEMORY
from muon_fsdp.plan.stages import Plan, cut_elementwise, make_plan
from muon_fsdp.plan.units import ParameterSpec
from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES
from muon_fsdp.step.backward import PURPOSE
from muon_fsdp.step.changes import StateTensors, addresses_of
from muon_fsdp.step.clipping import Siblings
from muon_fsdp.step.failures import Failures
from muon_fsdp.step.fused import FusedStep, make_fused_step, signature_of
from muon_fsdp.step.graph import CapturedStep, StepKey, capture_obstacle
from muon_fsdp.step.inputs import StepInputs
from muon_fsdp.step.matrix_state import SUMS, MatrixStates
from muon_fsdp.step.meter import Meter
from muon_fsdp.step.metrics import Samples
from muon_fsdp.step.overlap import BackwardOverlap
from muon_fsdp.step.pipeline import run_stages
from muon_fsdp.step.random_numbers import RandomNumbers
from muon_fsdp.step.replica_check import States, compare_replicas
from muon_fsdp.step.shared_sets import SharedSets, own_memory
from muon_fsdp.step.sinks import StepSink
from muon_fsdp.step.sources import StageResult, StateStore, StepContext, StepSource
from muon_fsdp.step.streaming import StreamedStore
from muon_fsdp.step.weight_gather import WeightGather
from muon_fsdp.step.weights import Weights
from muon_fsdp.step.written_state import WrittenState


class PlannedStep:
    """The plan of a step and everything else that it needs besides its inputs.

    It is made again when parameters or planned options change. Its key contains the `id()` of every parameter. The
    records keep the parameters alive, so that no new tensor can get the `id()` of a freed one.

    Args:
        key: what the plan depends on.
        records: one per parameter.
        settings: the settings of the whole optimizer.
        accumulation_steps: calls of `step()` per update.
        replicate_group: the process group over which plain parameters are replicas.
        agreement_group: further ranks that decide about a step together.
        device_memory: what sets of ranks have agreed on so far, as in `SharedSets`.
        stage_counts: counts the stages that started in backward.
    """

    def __init__(
        self,
        key: object,
        records: Sequence[ParameterRecord],
        settings: Settings,
        accumulation_steps: int,
        replicate_group: dist.ProcessGroup | None,
        agreement_group: dist.ProcessGroup | None,
        device_memory: Mapping[Ranks, int],
        stage_counts: Counter[str],
    ) -> None:
        self.key = key
        self.records = records
        self.has_state = False  # whether all parameters have state, unless its tensors have changed since
        self.siblings: Siblings | None = None  # found by the first `clip_grad_norm_`
        for record in records:
            _check_placed(record)
        own = own_memory(records)
        specs = parameter_specs(records, settings, {**own, **device_memory})
        among = (replicate_group, agreement_group)
        self.shared = SharedSets(records, specs, settings, accumulation_steps, *among, own, device_memory)
        for record in records:
            if record.view is not None:
                _check_live(record)
        self.outlines: list[StageOutline] = make_outline(
            [_elementwise_is_local(spec, record) for spec, record in zip(specs, records, strict=True)],
            max_stage_bytes=settings.max_stage_bytes,
            strategy=settings.strategy,
        )
        self.plan: Plan = make_plan(self.outlines, my_rank())
        store = StateStore(records)
        if any(record.offloads_state for record in records):
            self.plan = cut_elementwise(self.plan, *_rows_and_bytes(records), STREAMED_BYTES)
            store = StreamedStore(records, self.plan.stages)
        numbered = [spec for spec in specs if RULES[spec.rule].has_matrix_values and math.prod(spec.shape) > 0]
        self.matrices = MatrixStates(numbered, self.plan.stages)
        self.expect_comparison()
        self._context = StepContext(records, settings, store, RandomNumbers(records), Samples(self.plan.stages))
        self._specs = specs
        self._meter: Meter | None = None  # made by the first step that is measured
        self.weights = WeightGather(records, settings.bucket_bytes)
        self._groups = self._find_groups()
        # Made at the first step with these parameters, when the precision of gradients is known.
        self._fused: FusedStep | None = None
        self.captured = CapturedStep(settings.cuda_graph)
        self.overlap: BackwardOverlap | None = None
        if settings.overlap == "backward":
            self.overlap = BackwardOverlap(self._context, self.plan.stages, stage_counts)
        self.written = WrittenState(records)
        self._names = [record.name for record in records]
        self._failures = Failures()  # of the present step; a captured step finds them here
        self._state_tensors = StateTensors()
        self._unproven = {stage.number for stage in self.plan.stages}  # stages that have not run yet

    @property
    def graph(self) -> GraphRecorder | None:
        """Return the CUDA graph of the step, once it has been captured."""
        return self.captured.graph

    @property
    def device(self) -> torch.device:
        """Return the device on which kernels launch: the first that is no CPU, if there is one."""
        devices = (record.device for record in self.records)
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    def check_state(self, states: Mapping[int, State]) -> None:
        """Raise if state has changed since the last step and can't be used; note what may have to be created."""
        if self.has_state and not self._state_tensors.have_changed(states):
            return
        self._context.store.check(states, [record.part() for record in self.records], starts_anew=not self.has_state)
        self.has_state = False
        self.matrices.expect_start()

    def expect_comparison(self) -> None:
        """Note that the next step that updates anything must compare replicas and check matrices, if there are any."""
        self.compares_replicas = any(record.layout.num_replicas > 1 for record in self.records)
        self.matrices.expect_start()

    def wish_to_compare(self, states: States) -> int:
        """Return what this rank wants to compare with other ranks before the next update."""
        return REPLICAS if self.compares_replicas else WRITTEN * self.written.has_changed(states)

    def has_same_parameters(self, other: PlannedStep) -> bool:
        """Return whether another plan is for the same tensors in the same layouts."""
        return len(self.records) == len(other.records) and all(
            one.tensor is another.tensor and one.layout == another.layout
            for one, another in zip(self.records, other.records, strict=True)
        )

    def compare_replicas(self, states: States, gradients: Mapping[int, Tensor]) -> None:
        """Raise if replicas are not equal; all of their ranks must call this.

        Args:
            states: the state of the optimizer.
            gradients: by position, the gradients that this rank has, in the layouts of their parameters.
        """
        compare_replicas(self.records, states, gradients, self.shared.like)
        self.compares_replicas = False

    def find_zeros(self, states: States, updated: Collection[int], *, measures: bool) -> ValueError | None:
        """Find state that would start from zero and must not; all ranks of the step must call this.

        Args:
            states: the state of the optimizer.
            updated: the positions of the parameters that are updated.
            measures: whether the step is measured, on all ranks alike.
        """
        self.make_groups(measures=measures)
        shards = self._observed([record.part() for record in self.records])
        by_position = {record.position: dict(states[record.tensor]) for record in self.records}
        return self.matrices.find_zeros(shards, by_position, updated, self._names)

    def abandon(self) -> None:
        """Free the memory of a captured step, and end what was started in backward; another plan follows."""
        self.captured.forget()
        if self.overlap is not None:
            self.overlap.abandon()

    def complete_early(self) -> None:
        """Start the stages that other ranks may have started in backward."""
        if self.overlap is not None:
            self.overlap.complete()

    def objections(self, groups: Sequence[Group], states: Mapping[Tensor, State]) -> dict[int, int]:
        """Return what this rank objects to about stages that started in backward, by position of their parameters."""
        return self.overlap.objections(groups, states) if self.overlap is not None else {}

    def kept_results(self, agreed: Mapping[int, int]) -> Mapping[int, Callable[[], StageResult]]:
        """Return, for the stages whose results from backward all ranks use, by number, what returns the result."""
        return self.overlap.settle(agreed) if self.overlap is not None else {}

    @property
    def wants_to_measure(self) -> bool:
        """Return whether `metrics()` was called on this rank, so that the next step should be measured."""
        return self._context.samples.wants_to_measure(rarely=self.captured.is_due)

    @property
    def meter(self) -> Meter:
        """Return what measures how far steps move and turn matrices."""
        if self._meter is None:
            rounded = {
                record.position
                for record in self.records
                if record.view is not None and record.tensor.dtype in HALF_DTYPES and record.rounding == "nearest"
            }
            self._meter = Meter(self._specs, self._names, rounded)
        return self._meter

    def metrics(self, totals: Mapping[str, Tensor], *, per_matrix: bool) -> dict[str, float]:
        """Return numbers about the last steps, and ask for new samples and a new measurement.

        Args:
            totals: of the diagnostics of every rule.
            per_matrix: whether the numbers of every matrix are wanted too.
        """
        of_meter = self._meter.metrics(per_matrix=per_matrix) if self._meter is not None else {}
        return self.matrices.metrics(totals) | self._context.samples.ask() | of_meter

    def make_groups(self, *, measures: bool) -> None:
        """Make the process groups that stages and per-matrix state need; all of their ranks must call this.

        Args:
            measures: whether the step is measured, which may need further groups.
        """
        for purpose_of_all in ("", PURPOSE) if self.overlap is not None else ("",):
            with groups_for(purpose_of_all):
                for ranks, device, purpose, shared_by in self._groups:
                    make_group(ranks, device, self.shared.like(shared_by), purpose)
        for ranks, device in self.meter.groups if measures else ():
            make_group(ranks, device, self.shared.like(ranks))

    def _find_groups(self) -> list[tuple[Ranks, torch.device, str, Ranks]]:
        """Find the process groups that this rank needs.

        Returns:
            Per group its ranks, the device of its tensors, its purpose, and all ranks that share the parameters which
            it serves. Sorted, because all ranks must make their groups in one order.
        """
        found: dict[tuple[Ranks, str, str], tuple[torch.device, Ranks]] = {}
        for stage in self.plan.stages:
            exchange = stage.exchange
            if exchange is not None:
                device = self.records[stage.units[0].position].device
                sums = (SUMS,) if RULES[stage.rule].update_statistics else ()
                for purpose in ("", exchange.scatter_purpose, *sums):
                    found[(exchange.ranks, device.type, purpose)] = device, exchange.ranks
                if exchange.forwards:
                    key = exchange.peers, device.type, exchange.forward_purpose
                    found.setdefault(key, (device, exchange.ranks))
        for ranks, device in self.weights.groups:
            found[(tuple(sorted(ranks)), device.type, "")] = device, tuple(sorted(ranks))
        for matrix_set in self.matrices.sets:
            if len(matrix_set.ranks) > 1:
                device, ranks = matrix_set.classes[0].device, tuple(sorted(matrix_set.ranks))
                found[(ranks, device.type, "")] = device, ranks
        return [
            (ranks, device, purpose, shared_by)
            for (ranks, _, purpose), (device, shared_by) in sorted(found.items(), key=lambda item: item[0])
        ]

    def run(self, inputs: StepInputs, kept: Mapping[int, Callable[[], StageResult]], *, measures: bool) -> Failures:
        """Run the stages, in fused launches where parameters allow it, and as a CUDA graph if that was asked for.

        Args:
            inputs: the tensors and options of the step.
            kept: for stages that ran in backward, by number: waits for the result and returns it.
            measures: whether this step is measured, on all ranks alike.

        Returns:
            What rules have raised. Without other ranks that wait for this one, that is raised here.
        """
        context, store, samples = self._context, self._context.store, self._context.samples
        failures = self._failures = Failures(self._names, others_wait=bool(self.shared))
        context.random.fill(inputs.num_updates, inputs.groups)
        has_begun = False
        observed = self._observed(inputs.shards)
        self.matrices.fill(inputs)
        if not self.matrices.factors.are_known:  # whether weights can be fused depends on the kinds of factors
            self.matrices.begin(observed, Recorder(), failures)
            has_begun = True
            self._fused = None
        fused = self._fuse(inputs)
        gradients = {
            i: grad if fused.signature[i] is None or grad.is_contiguous() else grad.contiguous()
            for i, grad in inputs.gradients.items()
        }
        inputs = replace(inputs, gradients=gradients)
        fused.fill_tables(inputs, lambda stage, i: store.addressed(i, inputs.states[i], stage))
        # `updated` is agreed on, so all ranks of a stage leave it out together: else the others would wait.
        stages = [stage for stage in self.plan.stages if not stage.positions.isdisjoint(inputs.updated)]
        buckets = self.weights.to_run(inputs.updated)
        taken = samples.start(self.device.type, rarely=self.captured.is_due, measures=measures)
        measured = self.meter.start(inputs.shards, inputs.updated) if measures else None

        def run(recorder: Recorder) -> None:
            is_recorded = isinstance(recorder, GraphRecorder)
            found = Failures(self._names, is_recorded=True) if is_recorded else failures
            if not has_begun:
                self.matrices.begin(observed, recorder, found)
            source = StepSource(context, inputs, fused, recorder, self.matrices, kept)
            weights = Weights(inputs.states, context.random)
            sink = StepSink(found, self._unproven, self.matrices, None if is_recorded else taken, weights, measured)
            run_stages(stages, source, sink)
            self.matrices.finish(recorder)
            if measured is not None:
                measured.finish(recorder)
            self.weights.run(buckets, recorder)
            found.end(recorder, lambda: self._failures)

        kept_weights = [*self.weights.tensors(), *self.matrices.observed(observed)]
        is_cold = self.matrices.is_cold
        launches = (fused.variant, [stage.number for stage in stages], buckets, is_cold)
        store.begin(stages, inputs.states, inputs.updated)
        try:
            self.captured.run(
                StepKey((addresses_of(kept_weights), self.matrices.addresses), launches),
                run,
                device=lambda: fused.device,
                # A captured step takes no samples and is not measured.
                eager=measures or (taken is not None and taken.has_residuals) or is_cold or has_begun or not stages,
            )
        finally:
            store.end()
        if taken is not None and self.overlap is not None:
            taken.has_residuals &= self.overlap.took_residuals
        samples.end_step(inputs.groups, taken, measures=measures)
        if measured is not None:
            self.meter.keep(measured)
        if self.overlap is not None:
            self.overlap.begin(inputs, fused)
        return failures

    def _observed(self, shards: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the shards that statistics are taken of; those on the host are copied to their device for the step."""
        return [
            shard.to(record.device) if spec.is_observed and record.is_on_host else shard
            for shard, spec, record in zip(shards, self._specs, self.records, strict=True)
        ]

    def _fuse(self, inputs: StepInputs) -> FusedStep:
        """Return the fused lists; they are made again if other parameters can be fused or precisions have changed."""
        if self._fused is None or not self._fused.fits(inputs) or self._state_tensors.have_changed(inputs.states):
            store, unfusable = self._context.store, self.matrices.factors.unfusable
            addressed = replace(inputs, states={i: store.addressed(i, state) for i, state in inputs.states.items()})
            signature = signature_of(self.records, addressed, self._fused, unfusable)
            self._state_tensors.accept(inputs.states)
            if self._fused is None or self._fused.signature != signature:  # else every step writes new addresses
                self._fused = make_fused_step(self.plan, self.records, addressed, signature, self.matrices)
                obstacle = capture_obstacle(self.records, addressed, unfusable)
                if self.overlap is not None:
                    obstacle = "overlap='backward' runs a part of the step in backward"
                elif self._context.settings.offload_state:
                    obstacle = "offload_state=True copies state from the host while stages run"
                self.captured.start_over(obstacle)
        return self._fused


def parameter_specs(
    records: Sequence[ParameterRecord], settings: Settings, device_memory: Mapping[Ranks, int]
) -> list[ParameterSpec]:
    """Return what the planner needs to know about every parameter.

    Args:
        records: one per parameter.
        settings: the settings of the whole optimizer.
        device_memory: for every set of ranks that share parameters, the total bytes of their smallest device.
    """
    specs: list[ParameterSpec] = []
    options: dict[int, PlannedOptions] = {}  # by group
    costs: dict[tuple[int, int, int], float] = {}  # by group and shape: thousands of matrices may share one
    memory: dict[int, int] = {}  # by the id() of the layout: sets of ranks are long
    for record in records:
        if record.group_index not in options:
            options[record.group_index] = record.rule.planned_options(record.group)
        if id(record.layout) not in memory:
            memory[id(record.layout)] = device_memory.get(tuple(sorted(record.layout.ranks)), DEVICE_MEMORY)
        dtype = working_dtype(record.tensor.dtype)
        staging = settings.staging_dtype(record.device.type, dtype)
        planned = options[record.group_index]
        update = _update_dtype(record, planned, staging)
        block_flops, block_scratch = [], []
        if record.view is not None:
            _check_layout(record)
            for _, rows, cols in record.view.block_shapes:
                key = (record.group_index, rows, cols)
                if key not in costs:
                    costs[key] = record.rule.flops(planned, rows, cols)
                block_flops.append(costs[key])
                block_scratch.append(_scratch_bytes(record, planned, (rows, cols), staging, update))
        settled = record.rule.matrix_state if record.view is not None else ()
        moments = [spec for spec in record.rule.all_state if spec.is_moment] if record.offloads_state else []
        stored = (record.step_layout, record.group.get("state_dtype", "float32"))
        specs.append(
            ParameterSpec(
                position=record.position,
                group=record.group_index,
                rule=record.rule.name,
                shape=record.shape,
                layout=record.step_layout,
                bytes_per_element=(dtype if record.view is None else staging).itemsize,
                device=record.device,
                dtype=dtype,
                view=record.view,
                options=planned,
                block_flops=tuple(block_flops),
                is_observed=bool(record.rule.statistics) or record.rule.update_statistics,
                sums_updates=record.rule.update_statistics,
                settled_bytes=sum(s.shape(record.tensor, record.view).numel() * dtype.itemsize for s in settled),
                has_large_state=any(s.is_large for s in settled),
                weight_bytes=record.tensor.element_size() if record.shards_state else 0,
                streamed_bytes=state_bytes(moments, record.tensor, record.view, *stored),
                device_memory=memory[id(record.layout)],
                block_scratch=tuple(block_scratch),
                update_dtype=update,
            )
        )
    return specs


def _update_dtype(record: ParameterRecord, options: PlannedOptions, staging: torch.dtype) -> torch.dtype:
    """Return the precision of updates: on GPUs float16, in which the iteration runs, if the rule allows it."""
    rule, working = record.rule, working_dtype(staging)
    if record.view is None or record.device.type not in ("cuda", "meta") or staging == torch.float64:
        return working
    if all(rule.half_precision_suffices(options, rows, cols) for _, rows, cols in record.view.block_shapes):
        return torch.float16
    return rule.update_dtype or working


def _scratch_bytes(
    record: ParameterRecord,
    options: PlannedOptions,
    shape: tuple[int, int],
    staging: torch.dtype,
    update: torch.dtype,
) -> int:
    """Return the bytes that a matrix of a parameter needs in a stage beside its part of the two buffers of units."""
    rows, cols = shape
    assert record.view is not None
    more = update.itemsize - staging.itemsize  # the plan counts both buffers in the precision of the first
    if not record.view.in_memory_order:  # a batch of such matrices is a copy, and its updates are copied back
        more += staging.itemsize + update.itemsize
    return (
        record.rule.scratch_bytes(options, rows, cols, staging.itemsize, update.itemsize) + max(0, more) * rows * cols
    )


def _rows_and_bytes(records: Sequence[ParameterRecord]) -> tuple[dict[int, int], dict[int, int]]:
    """Return, by position, the rows between which a shard can be cut, and the bytes of its state on the host."""
    rows, sizes = {}, {}
    for record in records:
        part = record.part()
        in_blocks = part.ndim == 1 and record.encoding is not None and record.encoding.has_scales
        rows[record.position] = len(part) if part.ndim > 0 and not in_blocks else 1
        sizes[record.position] = sum(host_bytes(record, spec) for spec in record.all_state)
    return rows, sizes


def _elementwise_is_local(spec: ParameterSpec, record: ParameterRecord) -> ParameterSpec:
    """Return the spec; for an element-wise rule, make this rank's shard a local parameter that is never sent."""
    if spec.view is not None:
        return spec
    return replace(spec, shape=tuple(record.part().shape), layout=local_layout(my_rank()))


def _check_placed(record: ParameterRecord) -> None:
    """Raise if this rank does not hold the parameter, or its mesh numbers ranks in an order that FSDP2 ignores."""
    name, parameter = record.name, record.tensor
    if my_rank() not in record.layout.ranks:
        raise RuntimeError(
            f"parameter {name!r} lies on ranks {record.layout.ranks}, not on rank {my_rank()}: leave it out here"
        )
    if record.repeated_over is not None and record.layout.ranks != record.repeated_over:
        raise RuntimeError(
            f"parameter {name!r} lies on ranks {record.layout.ranks}, which are no submesh of replicate_mesh with "
            f"ranks {record.repeated_over}: pass a mesh that its mesh is a part of, or leave the parameter out with "
            f"replicate_mesh={{{name!r}: None, '*': mesh}}"
        )
    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh.mesh
    if any(bool((mesh.diff(dim=axis) <= 0).any()) for axis in range(mesh.ndim)):
        # Process groups number their ranks in ascending order and FSDP2 follows them; DTensor follows the mesh.
        raise RuntimeError(
            f"parameter {name!r} lies on a mesh whose ranks do not ascend: {mesh.tolist()}. "
            "Build the mesh from ascending ranks"
        )


def _where(record: ParameterRecord) -> str:
    return f"parameter {record.name!r} of shape {record.shape} with placements {record.layout.placements}"


def _check_layout(record: ParameterRecord) -> None:
    """Raise if the shards of a matrix are not boxes."""
    try:
        record.layout.boxes(record.shape)
    except LayoutError as error:
        raise RuntimeError(
            f"{_where(record)} can't be orthogonalized: {error}; give it an element-wise rule, such as "
            f"{DEFAULT_OTHER_RULE!r}"
        ) from error


def _check_live(record: ParameterRecord) -> None:
    """Raise if the local tensor of a parameter is not the box that its layout says."""
    parameter = record.tensor
    if not isinstance(parameter, DTensor):
        return
    held = tuple(local(parameter).shape)
    expected = record.layout.box_on(my_rank(), record.shape).shape
    if held != expected:
        raise RuntimeError(
            f"{_where(record)} holds a local tensor of shape {held} where its layout says {expected}: make it with "
            "fully_shard or distribute_tensor"
        )
