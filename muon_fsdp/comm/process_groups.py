"""Make process groups of our own, found by their ranks, and give access to the store that all ranks share.

We use none of the groups that others have made: FSDP2 uses its communicators at times of its own choosing. We do not
call `dist.new_group` either: it names a group by the number of groups that this rank has made before, so ranks with
different histories would wait for each other forever. Our groups are named by their ranks alone, and by their purpose:
the stages that run beside backward have groups of their own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.tensor import DTensor

Ranks: TypeAlias = tuple[int, ...]  # in ascending order
# Ranks, type of device, the purpose that the caller names, and that of `groups_for`.
_GroupKey: TypeAlias = tuple[Ranks, str, str, str]


class Claim:
    """The right to use the process groups for a purpose in a thread, as long as somebody holds this object.

    Args:
        world: what belongs to the `init_process_group` of these groups.
    """

    def __init__(self, world: _World) -> None:
        self._world = world
        self.is_broken = False  # whether an exchange has failed: ranks no longer agree on what comes next

    def give_up(self) -> None:
        """Hold the claim until the groups are destroyed, because an exchange has failed: nobody may use them again."""
        self.is_broken = True
        self._world.broken.append(self)


@dataclass
class _World:
    """The process groups and counters that belong to one `init_process_group`."""

    # torch.distributed owns the groups. Another reference would keep gloo's threads after `destroy_process_group`,
    # because DTensor's caches may keep the default group, and with it this object, until the program ends.
    groups: WeakValueDictionary[_GroupKey, dist.ProcessGroup] = field(default_factory=WeakValueDictionary)
    meetings: Counter[str] = field(default_factory=Counter)  # calls of `next_meeting`, by name
    claims: dict[str, ReferenceType[Claim]] = field(default_factory=dict)  # by purpose
    broken: list[Claim] = field(default_factory=list)


_worlds: WeakKeyDictionary[dist.ProcessGroup, _World] = WeakKeyDictionary()
_purpose: ContextVar[str] = ContextVar("purpose", default="")


def my_rank() -> int:
    """Return the global rank of this process; 0 if torch.distributed is not initialized."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the world size; 1 if torch.distributed is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def world_reference() -> Callable[[], object]:
    """Return a weak reference to the default process group; one to nothing without torch.distributed."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return ref(world) if world is not None else lambda: None


def is_pretended() -> bool:
    """Return whether the other ranks do not exist, because the backend is torch's "fake" one for dry runs."""
    return dist.get_backend() == "fake"


def name_of(ranks: Iterable[int]) -> str:
    """Return a name for a set of ranks, the same on all of them."""
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:24]


@contextmanager
def groups_for(purpose: str) -> Iterator[None]:
    """Switch `make_group` and `group_of` to process groups for this purpose inside the block, in this thread only.

    Two threads that used one group would start its collectives in an order that differs between ranks.
    """
    token = _purpose.set(purpose)
    try:
        yield
    finally:
        _purpose.reset(token)


def are_claimed(purpose: str) -> bool:
    """Return whether somebody holds the claim to the process groups of `groups_for(purpose)`."""
    claims = _this_world().claims
    return purpose in claims and claims[purpose]() is not None


def claim_groups(purpose: str) -> Claim:
    """Return the claim to the process groups of `groups_for(purpose)`, which nobody else may hold."""
    assert not are_claimed(purpose)
    world = _this_world()
    claim = Claim(world)
    world.claims[purpose] = ref(claim)
    return claim


def group_of(ranks: Ranks, device: torch.device, purpose: str = "") -> dist.ProcessGroup:
    """Return the process group that `make_group` has made for these ranks, this type of device and this purpose."""
    return _this_world().groups[_key(ranks, device, purpose)]


def _key(ranks: Ranks, device: torch.device, purpose: str) -> _GroupKey:
    return tuple(sorted(ranks)), device.type, purpose, _purpose.get()


def make_group(ranks: Ranks, device: torch.device, like: dist.ProcessGroup | None, purpose: str = "") -> None:
    """Make a process group of these ranks unless there is one. All of these ranks must call it, and no others.

    A caller that makes several groups must make them in the order of their ranks as tuples, then by type of device and
    purpose. Otherwise two ranks could each wait for the other in a different group.

    Args:
        ranks: global ranks, including this one.
        device: the device of the tensors that will be sent.
        like: a process group; ours gets the backend that it has for such devices. None for the default group.
        purpose: groups of the same ranks with different purposes need not issue collectives in a common order.
    """
    key = _key(ranks, device, purpose)
    groups = _this_world().groups
    if key not in groups:
        name = "/".join(filter(None, ("muon_fsdp", name_of(key[0]), *key[1:])))
        groups[key] = _new_group(key[0], name, _backend(device, like))


def group_like(parameter: Tensor, replicate_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a process group whose backend serves the device of a parameter.

    Returns:
        A group of the DTensor's mesh; `replicate_group` for a plain tensor; None for the default group.
    """
    if not isinstance(parameter, DTensor):
        return replicate_group
    try:
        return parameter.device_mesh.get_group(0)
    except RuntimeError:  # DTensor caches equal meshes, and may return one whose groups were destroyed
        return None


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Return whether a process group was destroyed, by itself or with all others."""
    return isinstance(group, dist.ProcessGroup) and group not in c10d._world.pg_group_ranks


def next_meeting(name: str) -> int:
    """Return how often this was called with this name before; all ranks that meet under a name count alike."""
    meetings = _this_world().meetings
    meetings[name] += 1
    return meetings[name] - 1


def shared_store() -> Store:
    """Return the store of torch.distributed that all ranks share; its keys get the prefix "muon_fsdp"."""
    return PrefixStore("muon_fsdp", c10d._get_default_store())


def time_limit() -> timedelta:
    """Return the timeout of the default process group, after which ranks stop waiting for each other."""
    world = dist.group.WORLD
    assert world is not None
    types = world._device_types  # none if the group is not made of backends, as torch's threaded one for tests
    options = getattr(world._get_backend(types[0]), "options", None) if types else None
    limit: timedelta = options._timeout if options is not None else c10d.default_pg_timeout
    return limit


def _this_world() -> _World:
    """Return what belongs to the current `init_process_group`."""
    world = dist.group.WORLD
    assert world is not None
    return _worlds.setdefault(world, _World())


def _backend(device: torch.device, like: dist.ProcessGroup | None) -> str:
    """Return the name of the backend that the group `like` uses for a type of device."""
    config = dist.get_backend_config(like)
    by_device = dict(part.split(":") for part in config.split(",") if ":" in part)
    return by_device.get(device.type, config)


def _new_group(ranks: Ranks, name: str, backend: str) -> dist.ProcessGroup:
    """Make a process group with a given name, through a private function of torch: `dist.new_group` accepts no name.

    tests/test_faults_ranks.py fails if that function changes. If `init_process_group` got a `device_id`, torch makes a
    new group by splitting the default communicator, which all ranks of the world would have to call. We therefore clear
    `bound_device_id` during the call.
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
