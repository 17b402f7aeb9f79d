"""A plan together with the live parameters it was made for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.distributed import fingerprint, layouts_of, local, my_rank
from muon_fsdp.engine import stage_label
from muon_fsdp.fused import FusedStep
from muon_fsdp.layout import Layout, LayoutError, local_layout
from muon_fsdp.options import GROUP_OPTIONS, EngineOptions
from muon_fsdp.plan import ParameterSpec, Plan, StageOutline, make_outline, make_plan
from muon_fsdp.recorder import GraphRecorder
from muon_fsdp.routing import Route
from muon_fsdp.rules import RULES
from muon_fsdp.rules.base import working_dtype
from muon_fsdp.views import MatrixView


class PlannedStep:
    """What a step needs besides gradients. Holding the parameters keeps their identities from being re-used."""

    def __init__(
        self,
        key: object,
        groups: Sequence[Mapping[str, Any]],
        routes: Sequence[Sequence[Route]],
        views: Sequence[Sequence[MatrixView | None]],
        engine: EngineOptions,
        replicate_group: dist.ProcessGroup | None,
    ) -> None:
        self.key = key
        self.parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        self.layouts = layouts_of(self.parameters, replicate_group)
        names = [route.name for names in routes for route in names]
        for name, parameter, layout in zip(names, self.parameters, self.layouts, strict=True):
            _check_placed(name, parameter, layout)
        specs = parameter_specs(groups, routes, views, self.layouts, engine)
        for spec in specs:
            if spec.view is not None:
                _check_live(names[spec.position], self.parameters[spec.position], spec.layout)
        self.outlines: list[StageOutline] = make_outline(
            [_elementwise_is_local(spec, self.parameters[spec.position]) for spec in specs],
            max_stage_bytes=engine.max_stage_bytes,
            strategy=engine.strategy,
        )
        self.plan: Plan = make_plan(self.outlines, my_rank(), engine.max_stage_bytes)
        self.labels = [stage_label(number, stage) for number, stage in enumerate(self.plan.stages)]
        # Positions of parameters by the ranks that must agree about them; in one order on all ranks.
        members: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for position, layout in enumerate(self.layouts):
            if len(layout.ranks) > 1:
                members[tuple(sorted(layout.ranks))].append(position)
        self.shared = dict(sorted(members.items()))
        # What every rank must have alike, written down when it is first compared: options may change until then.
        self.descriptions: dict[tuple[int, ...], list[str]] = {}
        # Made at the first step with these parameters, when the precision of gradients is known.
        self.fused: FusedStep | None = None
        self.graph: GraphRecorder | None = None
        self.graph_key: object = None
        self.overlaps = dict.fromkeys(self.shared, True)  # whether a rank of the set belongs to other sets too

    def describe(
        self, groups: Sequence[Mapping[str, Any]], routes: Sequence[Sequence[Route]], engine_options: str
    ) -> None:
        self.descriptions = {
            ranks: [engine_options, *_describe(positions, groups, routes, self.layouts)]
            for ranks, positions in self.shared.items()
        }
        self.fingerprints = {ranks: fingerprint(lines) for ranks, lines in self.descriptions.items()}

    @property
    def compared(self) -> bool:
        """Whether the ranks have been asked if they have the same plan."""
        return bool(self.descriptions) or not self.shared


def parameter_specs(
    groups: Sequence[Mapping[str, Any]],
    routes: Sequence[Sequence[Route]],
    views: Sequence[Sequence[MatrixView | None]],
    layouts: Sequence[Layout],
    engine: EngineOptions,
) -> list[ParameterSpec]:
    """What the planner needs to know of every parameter."""
    specs: list[ParameterSpec] = []
    for index, (group, group_routes, group_views) in enumerate(zip(groups, routes, views, strict=True)):
        rule = RULES[group["rule"]]
        known: dict[tuple[int, int], tuple[Hashable, float]] = {}  # key and cost by shape: thousands may share one
        for parameter, route, view in zip(group["params"], group_routes, group_views, strict=True):
            layout, shape = layouts[len(specs)], tuple(parameter.shape)
            work = []
            if view is not None:
                _check_layout(route.name, shape, layout)
                for _, rows, cols in view.block_shapes:
                    if (rows, cols) not in known:
                        key = rule.batch_key(group, rows, cols)
                        known[(rows, cols)] = (key, rule.flops(key, rows, cols))
                    work.append(known[(rows, cols)])
            dtype = working_dtype(parameter.dtype)
            staging = engine.staging_dtype(parameter.device.type, dtype)
            specs.append(
                ParameterSpec(
                    position=len(specs),
                    group=index,
                    rule=rule.name,
                    shape=shape,
                    layout=layout,
                    bytes_per_element=(dtype if view is None else staging).itemsize,
                    placement=(parameter.device, dtype),
                    view=view,
                    batch_keys=tuple(key for key, _ in work),
                    block_flops=tuple(flops for _, flops in work),
                    wire_bytes=staging.itemsize,
                )
            )
    return specs


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
        layout.tiles(shape)
    except LayoutError as error:
        where = _where(name, shape, layout)
        raise RuntimeError(f"{where} can't be orthogonalized: {error}; let rule 'adamw' take it") from error


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
        layout.tiles(tuple(parameter.shape))[layout.index_of[my_rank()]].shape,
    )
    if held != expected:
        raise RuntimeError(f"{where} holds a local tensor of shape {held} where its layout says {expected}")


def _describe(
    positions: Sequence[int],
    groups: Sequence[Mapping[str, Any]],
    routes: Sequence[Sequence[Route]],
    layouts: Sequence[Layout],
) -> list[str]:
    """One line per parameter with all that must be equal on every rank."""
    flat = [
        (group, index, route) for group, names in zip(groups, routes, strict=True) for index, route in enumerate(names)
    ]
    lines = []
    for position in positions:
        group, index, route = flat[position]
        options = ", ".join(
            f"{key}={float(value) if isinstance(value, Tensor) else value!r}"
            for key, value in sorted(group.items())
            if key in GROUP_OPTIONS
        )
        parameter = group["params"][index]
        lines.append(
            f"parameter {route.name!r} {tuple(parameter.shape)} {parameter.dtype} {layouts[position].placements} "
            f"with {options}"
        )
    return lines
