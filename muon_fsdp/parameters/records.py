"""Make one record per parameter: its name, tensor, group, rule, view and layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from muon_fsdp.comm.dtensors import device_of, from_local, is_replica, local
from muon_fsdp.comm.process_groups import Ranks, my_rank
from muon_fsdp.declarations.encoding import HALF_DTYPES, Encoding, encoding_for
from muon_fsdp.declarations.state import Remainder, StateSpec, working_dtype
from muon_fsdp.declarations.views import MatrixView, can_be_transposed, matrix_view
from muon_fsdp.kernels.tables import Rounding
from muon_fsdp.linalg.philox import parameter_key
from muon_fsdp.parameters.facts import Fused
from muon_fsdp.parameters.groups import Group
from muon_fsdp.parameters.replicas import Replicas
from muon_fsdp.parameters.routing import Route
from muon_fsdp.plan.layout import Box, Layout, LayoutError, Runs
from muon_fsdp.rules import RULES, Rule


@dataclass(frozen=True, eq=False)
class ParameterRecord:
    """One parameter of an optimizer, with all that is decided about it.

    Records are made anew when parameters or options change: Accelerate replaces the tensors of groups, users change
    the rule of a group.

    Args:
        position: its number among the parameters of all groups.
        tensor: the parameter that the user passed, a plain tensor or a DTensor.
        group_index: the number of its parameter group.
        group: that group when the record was made. Loading puts another dict with the same planned options in its
            place, so a step reads per-step options from the groups of its inputs.
        rule: the rule of its group.
        route: why it has this rule, decided when it was added.
        view: how it is read as matrices; None under an element-wise rule.
        layout: which ranks hold which box of it, and of its gradient.
        step_layout: which ranks hold which box of its state and update it in a step. This is `layout`, except for a
            replica whose state is sharded.
        repeated_over: the ranks of `replicate_mesh`, if that adds ranks to the parameter's own; else None.
        state_mesh: the ranks over which the state of a replica is sharded; None if its layout is the parameter's.
        offloads_state: whether its moments are kept in the memory of the host, and copied to its device in a step.
        rows: the rows of its shard that are meant, if a step updates these alone; None for all.
    """

    position: int
    tensor: Tensor
    group_index: int
    group: Group
    rule: Rule
    route: Route
    view: MatrixView | None
    layout: Layout
    step_layout: Layout
    repeated_over: Ranks | None = None
    state_mesh: DeviceMesh | None = None
    offloads_state: bool = False
    rows: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """Return the parameter's name in the model, or "param[3]" if it has none."""
        return self.route.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the whole shape of the parameter, even if it is sharded."""
        return tuple(self.tensor.shape)

    @cached_property
    def is_plain(self) -> bool:
        """Return whether the parameter is a plain tensor, not a DTensor."""
        return not isinstance(self.tensor, DTensor)

    @cached_property
    def device(self) -> torch.device:
        """Return the device that updates it: its own, or its mesh's if FSDP2 keeps its shards on the host."""
        return device_of(self.tensor)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return its working precision."""
        return working_dtype(self.tensor.dtype)

    @cached_property
    def is_on_host(self) -> bool:
        """Return whether its shard and its gradient are on the host, and another device updates it."""
        return self.device.type != self.tensor.device.type

    @property
    def shards_state(self) -> bool:
        """Return whether the parameter is whole on every rank and its state is sharded."""
        return self.step_layout is not self.layout

    @cached_property
    def number_in_layout(self) -> int:
        """Return the index of this rank among the ranks that hold the parameter."""
        return self.layout.index_of[my_rank()]

    def cut(self, rows: tuple[int, int] | None) -> ParameterRecord:
        """Return the record of some rows of its shard; the same record if there are none."""
        return self if rows is None else replace(self, rows=rows)

    @cached_property
    def _rows(self) -> slice:
        """Return the rows that this rank updates, if the state is sharded."""
        box = self.step_layout.box_on(my_rank(), self.shape)
        return slice(box.offset[0], box.offset[0] + box.shape[0])

    @cached_property
    def rounding(self) -> Rounding:
        """Return how its weights are rounded: "nearest" unless it is in half precision."""
        asked: Rounding = self.group.get("rounding", "nearest")
        return asked if self.tensor.dtype in HALF_DTYPES else "nearest"

    @cached_property
    def all_state(self) -> tuple[StateSpec, ...]:
        """Return the declarations of its state: those of its rule, and what rounding dropped if that is kept."""
        return (*self.rule.all_state, *((Remainder(),) if self.rounding == "remainder" else ()))

    @cached_property
    def encoding(self) -> Encoding | None:
        """Return how the elements of its state are stored; None in working precision."""
        state_dtype = self.group.get("state_dtype", "float32")
        if state_dtype == "float32":
            return None
        return encoding_for(state_dtype, self.tensor, self.part().shape, self.first_column)

    @cached_property
    def first_column(self) -> int:
        """Return the column of the parameter at which the shard begins that this rank updates."""
        box = None if self.part().shape[-1:] == self.tensor.shape[-1:] else self._box
        return box.offset[-1] if box is not None else 0

    @cached_property
    def _box(self) -> Box | None:
        """Return the box that this rank updates; None if it has several ranges, as element-wise rules allow."""
        try:
            box = self.step_layout.box_on(my_rank(), self.shape)
        except LayoutError:
            return None
        if self.rows is None:
            return box
        start, stop = self.rows
        return Box((box.offset[0] + start, *box.offset[1:]), (stop - start, *box.shape[1:]))

    @cached_property
    def runs(self) -> Runs | None:
        """Return which elements of the parameter this rank updates; None if kernels can't number them."""
        return self._box.runs(self.shape) if self._box is not None else None

    def element_numbers(self) -> Tensor:
        """Return the numbers of the elements that this rank updates in the whole parameter, of the shape of `part`."""
        part = self.part()
        offset = self._box.offset if self._box is not None else (0,) * part.ndim
        numbers = torch.zeros((), dtype=torch.int64, device=self.device)
        for start, size, whole in zip(offset, part.shape, self.shape, strict=True):
            numbers = numbers.unsqueeze(-1) * whole + torch.arange(start, start + size, device=self.device)
        return numbers

    @cached_property
    def random_key(self) -> tuple[int, int]:
        """Return the key of the random numbers of its elements."""
        return parameter_key("elements", self.name)

    def part(self) -> Tensor:
        """Return the local tensor that this rank updates: a shard, some rows of a replica, or the parameter itself."""
        if self.shards_state:  # cut out anew each time: others may replace the data of the parameter
            part = self.tensor.detach()[self._rows]
        else:
            part = self.tensor if self.is_plain else local(self.tensor)
        return part if self.rows is None else part[slice(*self.rows)]

    def rows_of(self, part: Tensor) -> Tensor:
        """Return the rows of a local gradient that this rank updates: all, unless the state is sharded."""
        return part[self._rows] if self.shards_state else part

    def state_template(self) -> Tensor:
        """Return a tensor with the layout of the state: the parameter, or a DTensor of the rows of a replica."""
        if self.state_mesh is None:
            return self.tensor
        return from_local(self.part(), self.state_mesh, (Shard(0),), self.tensor.shape, self.tensor.stride())


def make_records(
    groups: Sequence[Group], routes: Sequence[Sequence[Route]], replicas: Replicas, *, offloads_state: bool
) -> list[ParameterRecord]:
    """Make the records from the groups as they are now and the routes that were decided when parameters were added.

    Args:
        groups: the parameter groups of an optimizer.
        routes: for every group, the route of each of its parameters.
        replicas: over which ranks parameters are replicas, and whether their state is sharded over these.
        offloads_state: whether moments are kept in the memory of the host.
    """
    layouts = iter(replicas.layouts(groups, routes))
    shards_state = replicas.check_state([tensor for group in groups for tensor in group["params"]])
    records: list[ParameterRecord] = []
    for index, (group, group_routes) in enumerate(zip(groups, routes, strict=True)):
        rule = RULES[group["rule"]]
        for tensor, route in zip(group["params"], group_routes, strict=True):
            view = view_of(group, route, tuple(tensor.shape))
            layout, repeated_over = next(layouts)
            step_layout, mesh = layout, None
            if shards_state and is_replica(tensor) and tensor.ndim > 0:
                step_layout, mesh = replicas.state_layout, replicas.state_mesh(tensor.device.type)
            records.append(
                ParameterRecord(
                    position=len(records),
                    tensor=tensor,
                    group_index=index,
                    group=group,
                    rule=rule,
                    route=route,
                    view=view,
                    layout=layout,
                    step_layout=step_layout,
                    repeated_over=repeated_over,
                    state_mesh=mesh,
                    offloads_state=offloads_state or device_of(tensor) != tensor.device,
                )
            )
    return records


def view_of(group: Group, route: Route, shape: tuple[int, ...]) -> MatrixView | None:
    """Return how a parameter of a group is read as matrices; None under an element-wise rule.

    A parameter's own view is part of its route, so parameters with different views share a group. An option that the
    group sets holds for all of its parameters. How rows are cut is taken from the route only if the group leaves open
    everything that it depends on.
    """
    if not RULES[group["rule"]].needs_matrices:
        return None
    kind = group["view"] if group["view"] != "auto" else route.view
    detected = route.transposed and can_be_transposed(shape, kind)
    transposed = detected if group["transposed"] is None else group["transposed"]
    num_heads, split_sizes = group["num_heads"], group["split_sizes"]
    if not _decides_cut(group) and transposed == detected:
        num_heads, split_sizes = route.num_heads, route.split_sizes
    return matrix_view(
        shape, name=route.name, kind=kind, transposed=transposed, num_heads=num_heads, split_sizes=split_sizes
    )


def _decides_cut(group: Group) -> bool:
    """Return whether options of a group say how the rows of its parameters are cut, or that they are not."""
    return any(group.get(name) not in (None, "auto") for name in ("view", "num_heads", "split_sizes"))


def is_cut_by_model(group: Group, route: Route) -> bool:
    """Return whether a parameter is cut into matrices as its model says, and not by options of its group."""
    view = None if _decides_cut(group) else view_of(group, route, route.shape)
    return view is not None and (len(view.row_heights) > 1 or view.stacked_heads > 1)


def looks_fused(group: Group, route: Route) -> Fused | None:
    """Return what a parameter seems to consist of, if it is read as one matrix and the user has not decided that."""
    if route.fused is None or _decides_cut(group) or is_cut_by_model(group, route):
        return None
    view = view_of(group, route, route.shape)
    if view is None:
        return None
    rows = sum(view.row_heights)  # `transposed` may have changed them
    options = dict(route.fused.options)
    fits = sum(options.get("split_sizes", (rows,))) == rows and rows % options.get("num_heads", 1) == 0
    return route.fused if fits else Fused(route.fused.parts)


def held_elements(parameter: Tensor, layout: Layout) -> int:
    """Return the number of elements in the largest shard of a parameter."""
    return _largest_shard(parameter, layout).numel() if parameter.numel() else 0


def _largest_shard(parameter: Tensor, layout: Layout) -> torch.Size:
    """Return the shape of the largest shard of a parameter."""
    try:
        return torch.Size(layout.largest_shape(tuple(parameter.shape))) if parameter.ndim else parameter.shape
    except LayoutError:  # its shards are not boxes, but an element-wise rule updates them: this rank's stands for all
        return local(parameter).shape


def state_bytes(
    specs: Iterable[StateSpec],
    parameter: Tensor,
    view: MatrixView | None,
    layout: Layout,
    state_dtype: str = "float32",
) -> int:
    """Return the bytes of some state of a parameter, stored in this form, on the rank with the largest shard."""
    shard = _largest_shard(parameter, layout)
    encoding = encoding_for(state_dtype, parameter, shard)
    total = 0
    for spec in specs:
        if spec.is_moment and encoding is not None:
            total += encoding.num_bytes(shard)
        else:
            shape = shard if spec.is_sharded else spec.shape(parameter, view)
            total += shape.numel() * spec.dtype(parameter).itemsize
    return total
