"""A plan together with the live parameters it was made for: its fused lists, its graph, and one run of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.process_groups import Ranks, make_group, my_rank
from muon_fsdp.comm.transfers import layouts_of, local
from muon_fsdp.declarations.state import State, working_dtype
from muon_fsdp.declarations.views import MatrixView
from muon_fsdp.kernels.recorder import GraphRecorder, Recorder
from muon_fsdp.kernels.tables import FUSED_DTYPES
from muon_fsdp.parameters.routing import Route
from muon_fsdp.plan.layout import Layout, LayoutError, local_layout
from muon_fsdp.plan.matrix_sets import Entry
from muon_fsdp.plan.options import Settings
from muon_fsdp.plan.outline import ParameterSpec, StageOutline, make_outline
from muon_fsdp.plan.stages import Plan, make_plan
from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES
from muon_fsdp.step.fused import FusedStep, make_fused_step, not_fusable, signature_of
from muon_fsdp.step.matrix_state import MatrixStates
from muon_fsdp.step.metrics import Samples
from muon_fsdp.step.pipeline import Work, run_stages, stage_label
from muon_fsdp.step.shared_sets import SharedSets


class PlannedStep:
    """What a step needs besides gradients. Holding the parameters keeps their identities from being re-used."""

    def __init__(
        self,
        key: object,
        groups: Sequence[Mapping[str, Any]],
        routes: Sequence[Sequence[Route]],
        views: Sequence[Sequence[MatrixView | None]],
        settings: Settings,
        accumulation_steps: int,
        replicate_group: dist.ProcessGroup | None,
        agreement_group: dist.ProcessGroup | None,
    ) -> None:
        self.key = key
        self.has_state = False  # whether the state of all parameters was found to fit
        self.parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        self.is_plain = [not isinstance(parameter, DTensor) for parameter in self.parameters]
        self.layouts = layouts_of(self.parameters, replicate_group)
        self._settings = settings
        self.names = names = [route.name for names in routes for route in names]
        for name, parameter, layout in zip(names, self.parameters, self.layouts, strict=True):
            _check_placed(name, parameter, layout)
        specs = parameter_specs(groups, routes, views, self.layouts, settings)
        self._dtypes: list[torch.dtype] = [spec.dtype for spec in specs]
        for spec in specs:
            if spec.view is not None:
                _check_live(names[spec.position], self.parameters[spec.position], spec.layout)
        self.outlines: list[StageOutline] = make_outline(
            [_elementwise_is_local(spec, self.parameters[spec.position]) for spec in specs],
            max_stage_bytes=settings.max_stage_bytes,
            strategy=settings.strategy,
        )
        self.plan: Plan = make_plan(self.outlines, my_rank(), settings.max_stage_bytes)
        entries = [_entry(spec) for spec in specs if RULES[spec.rule].has_matrix_numbers and math.prod(spec.shape) > 0]
        self.matrices = MatrixStates(entries, self.plan.stages) if entries else None
        self.samples = Samples(self.plan.stages, self.parameters, settings.cuda_graph)
        self.labels = [stage_label(number, stage) for number, stage in enumerate(self.plan.stages)]
        self.shared = SharedSets(
            groups, routes, self.layouts, settings, accumulation_steps, replicate_group, agreement_group
        )
        self._group_devices = self._find_group_devices()
        # Made at the first step with these parameters, when the precision of gradients is known.
        self._fused: FusedStep | None = None
        self.graph: GraphRecorder | None = None
        self._graph_key: object = None

    def make_groups(self) -> None:
        """Make the process groups that the stages and the numbers of matrices need; all of their ranks must do so."""
        for ranks, device in self._group_devices:
            make_group(ranks, device, self.shared.like(ranks))

    def _find_group_devices(self) -> list[tuple[Ranks, torch.device]]:
        devices: dict[tuple[Ranks, str], torch.device] = {}
        for stage in self.plan.stages:
            if stage.exchange is not None:
                device = local(self.parameters[stage.units[0].position]).device
                devices[(stage.exchange.ranks, device.type)] = device
        for own in self.matrices.sets if self.matrices is not None else ():
            if len(own.ranks) > 1:
                device = own.classes[0].device
                devices[(tuple(sorted(own.ranks)), device.type)] = device
        return [(ranks, device) for (ranks, _), device in sorted(devices.items(), key=lambda item: item[0])]

    def run(
        self,
        groups: Sequence[Mapping[str, Any]],
        states: Sequence[State],
        gradients: dict[int, Tensor],  # by position, local
        updated: Collection[int],  # positions for which some rank has a gradient
        divisor: int,  # of gradients
    ) -> None:
        """Run the stages, in fused launches where parameters allow it, and as a graph if that was asked for."""
        shards = [p if plain else local(p) for p, plain in zip(self.parameters, self.is_plain, strict=True)]
        fused = self._fuse(groups, shards, states, gradients)
        for position, grad in gradients.items():
            if fused.signature[position] is not None and not grad.is_contiguous():
                gradients[position] = grad.contiguous()
        fused.fill_tables(shards, states, gradients, groups, updated, divisor)
        if self.matrices is not None:
            self.matrices.look_up(groups, states, updated)
        work = self._work(fused, shards, states, gradients, updated, divisor)

        def run(recorder: Recorder) -> None:
            if self.matrices is not None:
                self.matrices.begin(shards, recorder)
            run_stages(
                self.plan.stages,
                self.labels,
                groups,
                fused.stages,
                work,
                updated,
                self._settings,
                recorder,
                self.matrices,
                self.samples if self.samples.wanted else None,
            )
            if self.matrices is not None:
                self.matrices.finish(recorder)

        if not self._settings.cuda_graph or self.samples.wanted:  # which what was captured does not take
            run(Recorder())
            self.samples.end_step()
            return
        self.samples.end_step()
        # What was captured holds for these tables and launches; anything else is done once and then captured anew.
        key = (fused.variant, self.matrices.variant(shards) if self.matrices is not None else None)
        if self.graph is not None and self._graph_key == key:
            self.graph.replay()
        elif self._graph_key == key:
            recorder = GraphRecorder(fused.device)
            try:
                recorder.record(lambda: run(recorder))
            except Exception as error:
                rules = ", ".join(sorted({repr(stage.rule) for stage in self.plan.stages}))
                reason = str(error).partition("\n")[0]
                raise RuntimeError(
                    f"cuda_graph=True can't capture the step: an operation of one of the rules {rules} can't be "
                    f"captured ({reason}). Leave cuda_graph out, or avoid what makes the host wait for the GPU."
                ) from error
            self.graph = recorder
        else:
            self._refuse_what_has_no_graph(groups, shards, states)
            self.graph, self._graph_key = None, key
            run(Recorder())  # compiles and tunes kernels, which a capture can't

    def _fuse(
        self,
        groups: Sequence[Mapping[str, Any]],
        shards: Sequence[Tensor],
        states: Sequence[State],
        gradients: Mapping[int, Tensor],
    ) -> FusedStep:
        """The fused lists, made anew when other tensors than before take part in them."""
        if self._fused is None or not self._fused.fits(shards, states, gradients):
            excluded = self.matrices.factors.unfusable if self.matrices is not None else ()
            signature = signature_of(shards, states, gradients, groups, self._fused, excluded)
            if self._fused is not None and self._fused.signature == signature:
                self._fused.accept(states)  # other tensors of the same kind: the tables will say where
                if self.matrices is not None:  # which reads some of them where they lie
                    self.graph = self._graph_key = None
            else:
                self._fused = make_fused_step(self.plan, shards, states, signature, self.matrices)
                self.graph = self._graph_key = None
        return self._fused

    def _work(
        self,
        fused: FusedStep,
        shards: Sequence[Tensor],
        states: Sequence[State],
        gradients: Mapping[int, Tensor],
        updated: Collection[int],
        divisor: int,
    ) -> dict[int, Work]:
        """Return what is left to do one by one."""
        work = {}
        for position, shard in enumerate(shards):
            if fused.signature[position] is None and position in updated:
                state = states[position]
                if not self.is_plain[position]:
                    state = {name: local(value) for name, value in state.items()}
                work[position] = Work(shard, state, self._dtypes[position], gradients.get(position), divisor)
        return work

    def _refuse_what_has_no_graph(
        self, groups: Sequence[Mapping[str, Any]], shards: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        """Raise if some parameter can't be part of a captured step, naming it and the reason."""
        devices = {shard.device for shard in shards}
        unfusable = self.matrices.factors.unfusable if self.matrices is not None else {}
        of_parameters = [group for group in groups for _ in group["params"]]
        for position, (shard, group) in enumerate(zip(shards, of_parameters, strict=True)):
            reason = self._obstacle(position, shard, group, states[position]) or unfusable.get(position)
            if reason is None and len(devices) > 1:
                reason = f"parameters lie on several devices: {', '.join(sorted(map(str, devices)))}"
            if reason is not None:
                raise RuntimeError(
                    f"cuda_graph=True can't capture the step: parameter {self.names[position]!r}: {reason}. "
                    "Leave cuda_graph out."
                )

    def _obstacle(self, position: int, shard: Tensor, group: Mapping[str, Any], state: State) -> str | None:
        """Return why one parameter can't be part of a captured step, or None."""
        rule, grad = RULES[group["rule"]], self.parameters[position].grad
        if rule.fused is None:
            return f"its rule {rule.name!r} has no kernels for prepare and apply"
        reason = not_fusable(shard, [local(state[name]) for name in rule.fused.layout.states])
        if reason is None and grad is not None and grad.dtype not in FUSED_DTYPES:
            reason = f"its gradient is {grad.dtype}"
        return reason or rule.not_capturable(group)


def parameter_specs(
    groups: Sequence[Mapping[str, Any]],
    routes: Sequence[Sequence[Route]],
    views: Sequence[Sequence[MatrixView | None]],
    layouts: Sequence[Layout],
    settings: Settings,
) -> list[ParameterSpec]:
    """What the planner needs to know of every parameter."""
    specs: list[ParameterSpec] = []
    for index, (group, group_routes, group_views) in enumerate(zip(groups, routes, views, strict=True)):
        rule = RULES[group["rule"]]
        options = rule.planned_options(group)
        costs: dict[tuple[int, int], float] = {}  # by shape: thousands of matrices may share one
        for parameter, route, view in zip(group["params"], group_routes, group_views, strict=True):
            layout, shape = layouts[len(specs)], tuple(parameter.shape)
            block_flops = []
            if view is not None:
                _check_layout(route.name, shape, layout)
                for _, rows, cols in view.block_shapes:
                    if (rows, cols) not in costs:
                        costs[(rows, cols)] = rule.flops(options, rows, cols)
                    block_flops.append(costs[(rows, cols)])
            dtype = working_dtype(parameter.dtype)
            staging = settings.staging_dtype(parameter.device.type, dtype)
            specs.append(
                ParameterSpec(
                    position=len(specs),
                    group=index,
                    rule=rule.name,
                    shape=shape,
                    layout=layout,
                    bytes_per_element=(dtype if view is None else staging).itemsize,
                    device=parameter.device,
                    dtype=dtype,
                    view=view,
                    options=options,
                    block_flops=tuple(block_flops),
                    wire_bytes=staging.itemsize,
                )
            )
    return specs


def _entry(spec: ParameterSpec) -> Entry:
    assert spec.view is not None
    is_observed = bool(RULES[spec.rule].statistics)
    return Entry(
        spec.position,
        spec.view,
        spec.layout,
        spec.group,
        spec.rule,
        spec.options,
        spec.device,
        spec.dtype,
        is_observed,
    )


def _elementwise_is_local(spec: ParameterSpec, parameter: Tensor) -> ParameterSpec:
    """An element-wise rule only sees this rank's shard, whatever the layout."""
    if spec.view is not None:
        return spec
    return replace(spec, shape=tuple(local(parameter).shape), layout=local_layout(my_rank()))


def _check_placed(name: str, parameter: Tensor, layout: Layout) -> None:
    if my_rank() not in layout.ranks:
        raise RuntimeError(f"parameter {name!r} lies on ranks {layout.ranks}, not on this one: leave it out here")
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh.mesh
        if any(bool((mesh.diff(dim=axis) <= 0).any()) for axis in range(mesh.ndim)):
            # Process groups number their ranks in ascending order and FSDP2 goes by them; DTensor goes by the mesh.
            raise RuntimeError(f"parameter {name!r} lies on a mesh whose ranks do not ascend: {mesh.tolist()}")


def _where(name: str, shape: Sequence[int], layout: Layout) -> str:
    return f"parameter {name!r} of shape {tuple(shape)} with placements {layout.placements}"


def _check_layout(name: str, shape: tuple[int, ...], layout: Layout) -> None:
    try:
        layout.boxes(shape)
    except LayoutError as error:
        where = _where(name, shape, layout)
        raise RuntimeError(
            f"{where} can't be orthogonalized: {error}; give it an element-wise rule, as {DEFAULT_OTHER_RULE!r}"
        ) from error


def _check_live(name: str, parameter: Tensor, layout: Layout) -> None:
    if not isinstance(parameter, DTensor):
        return
    where = _where(name, parameter.shape, layout)
    if parameter.device.type not in (parameter.device_mesh.device_type, "meta"):
        raise RuntimeError(
            f"CPU offload is not supported: {where} lies on {parameter.device.type} and its mesh on "
            f"{parameter.device_mesh.device_type}. Leave out offload_policy in fully_shard."
        )
    held, expected = (
        tuple(local(parameter).shape),
        layout.boxes(tuple(parameter.shape))[layout.index_of[my_rank()]].shape,
    )
    if held != expected:
        raise RuntimeError(f"{where} holds a local tensor of shape {held} where its layout says {expected}")
