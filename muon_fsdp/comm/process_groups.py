"""Process groups of our own, by the ranks in them, and the store through which ranks find each other.

A group of torch's is never borrowed: FSDP2 uses its communicators at times of its own choosing, and `new_group` names a
group by how many this rank has made before, so that ranks with different histories wait for each other without end.
Ours are named by their ranks alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.tensor import DTensor

Ranks: TypeAlias = tuple[int, ...]  # in ascending order


@dataclass
class _World:
    """Hold the groups and counters of one `init_process_group`."""

    groups: dict[tuple[Ranks, str], dist.ProcessGroup] = field(default_factory=dict)  # by ranks and type of device
    meetings: Counter[str] = field(default_factory=Counter)  # how often ranks have met, by the name of their set


_worlds: WeakKeyDictionary[dist.ProcessGroup, _World] = WeakKeyDictionary()


def my_rank() -> int:
    """Return the global rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def num_ranks() -> int:
    """Return how many processes there are; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_pretended() -> bool:
    """Return whether the other ranks do not exist, as under torch's "fake" backend for trying a program out."""
    return dist.get_backend() == "fake"


def name_of(ranks: Iterable[int]) -> str:
    """Return a name for a set of ranks, the same on all of them."""
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:24]


def group_of(ranks: Ranks, device: torch.device) -> dist.ProcessGroup:
    """Return the group that `make_group` has made."""
    return _this_world().groups[(tuple(sorted(ranks)), device.type)]


def make_group(ranks: Ranks, device: torch.device, like: dist.ProcessGroup | None) -> None:
    """Make a group of these ranks unless there is one; a collective of these ranks alone.

    Whoever makes several goes by their order as tuples: then no two ranks wait for each other in a circle.

    Args:
        ranks: global ranks, this one among them.
        device: where tensors will lie that are sent.
        like: a group, whose backend for such devices is taken; None for the world's.
    """
    key = (tuple(sorted(ranks)), device.type)
    groups = _this_world().groups
    if key not in groups:
        groups[key] = _new_group(key[0], f"muon_fsdp/{name_of(key[0])}/{device.type}", _backend(device, like))


def group_like(parameter: Tensor, replicate_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a group whose backend serves a parameter: of its mesh, or over which it is replicated; None: the world."""
    if not isinstance(parameter, DTensor):
        return replicate_group
    try:
        return parameter.device_mesh.get_group(0)
    except RuntimeError:  # to DTensor equal meshes are one, and it has kept one of an earlier initialization
        return None


def next_meeting(name: str) -> int:
    """Return how often a set of ranks has met before, by its name, and count one more."""
    meetings = _this_world().meetings
    meetings[name] += 1
    return meetings[name] - 1


def shared_store() -> Store:
    """Return the store that all ranks share, under a prefix of ours."""
    return PrefixStore("muon_fsdp", c10d._get_default_store())


def time_limit() -> timedelta:
    """Return how long ranks of the world wait for each other."""
    world = dist.group.WORLD
    assert world is not None
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    limit: timedelta = options._timeout if options is not None else c10d.default_pg_timeout
    return limit


def _this_world() -> _World:
    world = dist.group.WORLD
    assert world is not None
    return _worlds.setdefault(world, _World())


def _backend(device: torch.device, like: dist.ProcessGroup | None) -> str:
    """Return the name of the backend that a group has for a type of device."""
    config = dist.get_backend_config(like)
    by_device = dict(part.split(":") for part in config.split(",") if ":" in part)
    return by_device.get(device.type, config)


def _new_group(ranks: Ranks, name: str, backend: str) -> dist.ProcessGroup:
    """Make a group with a name of our choice, by a private function of torch: `new_group` takes no name.

    tests/test_faults_ranks.py guards it. A world that is bound to a device would split its own communicator for the new
    group, which all of its ranks would have to call; it is unbound meanwhile.
    """
    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        group: dist.ProcessGroup
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(my_rank()),
            list(ranks),
            dist.Backend(backend),
            c10d._get_default_store(),
            name,  # type: ignore[arg-type]
            timeout=time_limit(),
            group_desc="muon_fsdp",
        )
    finally:
        world.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group
