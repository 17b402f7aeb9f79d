"""Know over which ranks parameters are replicas although their tensors do not show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from muon_fsdp.comm.dtensors import is_ignored_by_ddp, layouts_of
from muon_fsdp.comm.process_groups import Ranks, is_destroyed
from muon_fsdp.parameters.groups import Group
from muon_fsdp.parameters.names import first_match
from muon_fsdp.parameters.routing import Route
from muon_fsdp.plan.layout import Layout
from muon_fsdp.rules import RULES

ReplicateMesh: TypeAlias = DeviceMesh | Mapping[str, DeviceMesh | None]
EVERY_NAME = "*"


class Replicas:
    """The replicas that a user has named: by the process group of plain parameters, and by the mesh of matrices.

    Args:
        group: the process group over which plain parameters are replicas.
        mesh: a mesh whose submeshes hold equal matrices, or {pattern of names: such a mesh or None}; the first match
            wins.
        shards_state: whether the state of plain parameters is sharded over `group`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        mesh: ReplicateMesh | None = None,
        *,
        shards_state: bool = False,
    ) -> None:
        if group is not None and is_destroyed(group):
            raise RuntimeError(
                "replicate_group was destroyed: make a new process group, or wrap the model in DDP again"
            )
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError("replicate_group must contain this rank: pass a process group that it belongs to")
        if shards_state and mesh is not None:
            raise ValueError(
                "shard_state=True and replicate_mesh= can't be combined: shard_state is for replicas under DDP, "
                "replicate_mesh for DTensors on a submesh. Leave out one of them"
            )
        self.group = group
        self.shards_state = shards_state
        self._state_meshes: dict[str, DeviceMesh] = {}  # by type of device
        # Ranks are read now, because state_dict() may be called after the process group is destroyed.
        self._plain_ranks = None if group is None else tuple(dist.get_process_group_ranks(group))
        self.has_patterns = isinstance(mesh, Mapping)
        meshes = mesh if isinstance(mesh, Mapping) else {} if mesh is None else {EVERY_NAME: mesh}
        self._ranks_of_pattern = {pattern: _ranks_of(pattern, value) for pattern, value in meshes.items()}

    def check_state(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether state is sharded over replicas; raise if it is to be, and nothing says which ranks hold them.

        A model on the meta device is only planned, for ranks that need not exist.
        """
        shards_state = self.shards_state and not all(parameter.is_meta for parameter in parameters)
        if shards_state and self.group is None:
            raise ValueError(
                "shard_state=True shards the state of replicas, but no process group holds replicas here: wrap the "
                "model in DDP before you build the optimizer, or pass replicate_group=. If you call fully_shard, state "
                "is sharded with the parameters: leave out shard_state."
            )
        return shards_state

    @cached_property
    def state_layout(self) -> Layout:
        """Return the layout of sharded state: rows over the ranks that hold replicas."""
        assert self._plain_ranks is not None
        return Layout(self._plain_ranks, (len(self._plain_ranks),), (Shard(0),))

    def state_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh over which state is sharded, for one type of device."""
        if device_type not in self._state_meshes:
            assert self.group is not None
            self._state_meshes[device_type] = DeviceMesh.from_group(self.group, device_type)
        return self._state_meshes[device_type]

    @property
    def mesh_ranks(self) -> set[Ranks]:
        """Return the sets of ranks of all meshes, in ascending order each."""
        return {tuple(sorted(ranks)) for ranks in self._ranks_of_pattern.values() if ranks is not None}

    def over(self, name: str) -> Ranks | None:
        """Return the ranks, in row-major order, of the mesh that a matrix of this name is repeated over."""
        pattern = first_match(self._ranks_of_pattern, name)
        return None if pattern is None else self._ranks_of_pattern[pattern]

    def unused_patterns(self, names: Sequence[str]) -> list[str]:
        """Return the patterns that match none of these names first."""
        used = {first_match(self._ranks_of_pattern, name) for name in names}
        return [pattern for pattern in self._ranks_of_pattern if self.has_patterns and pattern not in used]

    def layouts(self, groups: Sequence[Group], routes: Sequence[Sequence[Route]]) -> list[tuple[Layout, Ranks | None]]:
        """Find the layout of every parameter of all groups.

        Element-wise rules send nothing, so their parameters stay in their own layout.

        Args:
            groups: the parameter groups of an optimizer.
            routes: for every group, the route of each of its parameters.

        Returns:
            Layouts, of which equal ones are the same object; beside each, the ranks of the mesh that the parameter is
            repeated over, or None. If its own ranks are no submesh of that mesh, the layout remains its own.
        """
        found: list[tuple[Layout, Ranks | None]] = []
        known: dict[tuple[int, Ranks], tuple[Layout, Ranks | None]] = {}  # by the id() of the own layout
        parameters = [parameter for group in groups for parameter in group["params"]]
        rules = [RULES[group["rule"]] for group in groups for _ in group["params"]]
        own = layouts_of(parameters, self._plain_ranks)
        same = {layout: layout for layout in own}
        for parameter, layout, route, rule in zip(parameters, own, chain(*routes), rules, strict=True):
            ranks = self.over(route.name) if rule.needs_matrices and not is_ignored_by_ddp(parameter) else None
            if ranks is None:
                found.append((layout, None))
                continue
            key = (id(layout), ranks)
            if key not in known:
                known[key] = _repeated(layout, ranks, same)
            found.append(known[key])
        return found


def _repeated(layout: Layout, ranks: Ranks, same: dict[Layout, Layout]) -> tuple[Layout, Ranks | None]:
    """Return the layout over `ranks`, as the object in `same`, and `ranks` unless the layout covers them already."""
    if set(layout.ranks) == set(ranks):
        return layout, None
    repeated = layout.repeated_over(ranks) or layout
    return same.setdefault(repeated, repeated), ranks


def _ranks_of(pattern: object, mesh: object) -> Ranks | None:
    """Return the ranks of a mesh in row-major order; raise if it is no mesh with this rank."""
    where = "replicate_mesh" if pattern == EVERY_NAME else f"replicate_mesh[{pattern!r}]"
    if not isinstance(pattern, str):
        raise TypeError(f"{where}: a pattern of names must be a string")
    if mesh is None:
        return None
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{where} must be a DeviceMesh or a dict of name patterns, got {type(mesh).__name__}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"{where} must contain this rank: pass a mesh that it belongs to")
    return tuple(mesh.mesh.flatten().tolist())
