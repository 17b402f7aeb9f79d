"""Make one record per parameter: its name, tensor, group, rule, view and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.process_groups import Ranks
from muon_fsdp.comm.transfers import layouts_of
from muon_fsdp.declarations.views import MatrixView, matrix_view
from muon_fsdp.parameters.groups import Group
from muon_fsdp.parameters.routing import Route
from muon_fsdp.plan.layout import Layout
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
        group: that group. It is live: `lr` and other per-step options are read from it at every step.
        rule: the rule of its group.
        route: why it has this rule, decided when it was added.
        view: how it is read as matrices; None under an element-wise rule.
        layout: which ranks hold which box of it.
    """

    position: int
    tensor: Tensor
    group_index: int
    group: Group
    rule: Rule
    route: Route
    view: MatrixView | None
    layout: Layout

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


def make_records(
    groups: Sequence[Group], routes: Sequence[Sequence[Route]], replica_ranks: Ranks | None
) -> list[ParameterRecord]:
    """Make the records from the groups as they are now and the routes that were decided when parameters were added.

    Args:
        groups: the parameter groups of an optimizer.
        routes: for every group, the route of each of its parameters.
        replica_ranks: the ranks that each hold a replica of every plain parameter; None if there are none.
    """
    layouts = iter(layouts_of([tensor for group in groups for tensor in group["params"]], replica_ranks))
    records: list[ParameterRecord] = []
    for index, (group, group_routes) in enumerate(zip(groups, routes, strict=True)):
        rule = RULES[group["rule"]]
        for tensor, route in zip(group["params"], group_routes, strict=True):
            view = view_of(group, route, tuple(tensor.shape))
            records.append(ParameterRecord(len(records), tensor, index, group, rule, route, view, next(layouts)))
    return records


def view_of(group: Group, route: Route, shape: tuple[int, ...]) -> MatrixView | None:
    """Return how a parameter of a group is read as matrices; None under an element-wise rule."""
    if not RULES[group["rule"]].needs_matrices:
        return None
    return matrix_view(
        shape,
        name=route.name,
        kind=group["view"] if group["view"] != "auto" else route.view,
        transposed=route.transposed,
        num_heads=group["num_heads"],
        split_sizes=group["split_sizes"],
    )


def held_elements(parameter: Tensor, layout: Layout) -> int:
    """Return the number of elements in the largest shard of a parameter."""
    return layout.largest_box(tuple(parameter.shape)) if parameter.ndim and parameter.numel() else parameter.numel()


def state_bytes(rule: Rule, parameter: Tensor, view: MatrixView | None, layout: Layout) -> int:
    """Return the bytes of state that a rule keeps for a parameter on the rank with the largest shard."""
    total = 0
    for spec in rule.all_state:
        whole = not spec.is_sharded
        numel = spec.shape(parameter, view).numel() if whole else held_elements(parameter, layout)
        total += numel * spec.dtype(parameter).itemsize
    return total
