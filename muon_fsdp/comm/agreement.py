"""Agree with the other ranks before a step changes anything.

Whoever returned or raised alone would leave the others waiting, so everything that decides about a step is agreed on
first, in one small reduction over all ranks that the step ties together: those that share a parameter, those that share
one with these, and so on. Who they are, and that they have the same parameters and options, is found out once, through
the store of torch.distributed, where a rank that has something else to say can't make another one hang.
"""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from muon_fsdp.comm.process_groups import (
    Ranks,
    group_of,
    is_pretended,
    make_group,
    my_rank,
    name_of,
    next_meeting,
    shared_store,
    time_limit,
)

Line: TypeAlias = tuple[str, dict[str, str]]  # what is described, and its properties
Prints: TypeAlias = Mapping[Ranks, int]  # per set of ranks, a hash of what all of them must have alike
Describe: TypeAlias = Callable[[Ranks], Sequence[Line]]  # the same at length, for an error

NO_GRADIENT = 0  # a code, as those that the caller makes for gradients
_LARGEST_CODE = 2**30
_NEUTRAL = -(2**31)  # loses against every other number in a maximum


class _Head(IntEnum):
    """The numbers that come first. All but one are 1 + a rank, or 0: the largest of these ranks can be named."""

    NOT_INERT = 0  # 1 if the step does something
    NOT_FINITE = 1  # has a gradient that is not finite
    FAILED = 2  # can't take the step
    LEAVES = 3  # has other parameters than at the last step


@dataclass(frozen=True)
class Agreed:
    """Hold what all ranks know before a step."""

    inert: bool  # it only asks for state
    not_finite_on: int | None = None  # a rank with a gradient that is not finite
    codes: Mapping[Ranks, Sequence[int]] = field(default_factory=dict)  # of gradients, in the order of a set


class Agreement:
    """Ranks that a step ties together, and the numbers that they exchange at every step.

    Args:
        counts: the sets of ranks that share parameters with this one, and how many parameters each shares.
        prints: a hash per set.
        describe: what to say of a set if its hashes differ.
        device: where the numbers are reduced.
        like: a process group whose backend serves that device; None for the world's.
    """

    def __init__(
        self,
        counts: Mapping[Ranks, int],
        prints: Prints,
        describe: Describe,
        device: torch.device,
        like: dist.ProcessGroup | None,
    ) -> None:
        self.counts = dict(counts)
        self._device = device
        self._known: dict[Ranks, int] = dict(sorted(counts.items()))  # all sets of the ranks that are tied together
        if not is_pretended():
            self._known, device_type = self._find_sets(_publish(counts, prints, device.type), prints, describe)
            if device_type != device.type:  # this rank has no parameters, or on its host alone
                self._device = torch.device(device_type, torch.get_device_module(device_type).current_device())
        self.ranks: Ranks = tuple(sorted({rank for ranks in self._known for rank in ranks}))
        self._starts: dict[Ranks, int] = {}  # of every set, in the numbers
        self._size = len(_Head)
        for ranks, count in self._known.items():
            self._starts[ranks] = self._size
            self._size += 2 + 2 * count
        self._reports = f"reports/{_next_name(self.ranks)}"
        self._num_reports = 0
        self._stream: Any = None
        make_group(self.ranks, self._device, like)
        self._world = weakref.ref(dist.group.WORLD)

    @property
    def is_alive(self) -> bool:
        """Return whether torch.distributed is still that with which this was made."""
        return self._world() is not None and self._world() is dist.group.WORLD

    # -------------------------------------------------------------------------------------------------- once: finding

    def _find_sets(
        self, names: Mapping[Ranks, str], prints: Prints, describe: Describe
    ) -> tuple[dict[Ranks, int], str]:
        """Follow the sets to those that overlap with them, and so on; raise if the ranks of one do not agree.

        Args:
            names: of this rank's sets, in the store.
            prints: a hash per set.
            describe: what to say of a set if its hashes differ.

        Returns:
            The number of parameters of every set, and the type of device on which numbers are reduced.
        """
        store = shared_store()
        for ranks, name in names.items():
            if ranks[0] == my_rank():
                store.set(f"{name}/summary", json.dumps(_summary(store, name, ranks)))
        found: dict[str, dict[str, Any]] = {}
        ahead = [(name, ranks) for ranks, name in names.items()]
        while ahead:
            name, members = ahead.pop()
            if name not in found:
                found[name] = json.loads(_get(store, f"{name}/summary", name, members))
                ahead += [(other, ()) for other in found[name]["sets"]]
        for rank, text in (summary["failed"] for summary in found.values() if summary["failed"] is not None):
            raise _failure(rank, text)
        for name, summary in sorted(found.items()):
            if summary["prints"] is not None:
                raise _disagreement(name, tuple(summary["ranks"]), summary["prints"], prints, describe)
        counts = sorted((tuple(summary["ranks"]), summary["count"]) for summary in found.values())
        types = {device for summary in found.values() for device in summary["devices"]}
        return dict(counts), min(types - {"cpu"}, default="cpu")

    # ------------------------------------------------------------------------------------------------ at every step

    def before_step(
        self,
        prints: Prints,
        codes: Mapping[Ranks, Sequence[int]],
        describe: Describe,
        *,
        inert: bool,
        not_finite: bool,
    ) -> Agreed | None:
        """Tell the others what this rank is about to do, and return what all know then.

        None means that a rank has left: all must meet anew, in another `Agreement`.

        Args:
            prints: a hash per set; where they differ, all ranks raise.
            codes: per set and parameter, `NO_GRADIENT`, or a positive number that says how its gradient lies.
            describe: what to say of a set if its hashes differ.
            inert: whether the step here only asks for state.
            not_finite: whether a gradient here is not finite.
        """
        numbers = self._numbers()
        numbers[_Head.NOT_INERT] = int(not inert)
        numbers[_Head.NOT_FINITE] = (1 + my_rank()) * not_finite
        for ranks, count in self.counts.items():
            of_set = codes[ranks]
            inverse = [_LARGEST_CODE - code if code else NO_GRADIENT for code in of_set]
            start = self._starts[ranks]
            # Hashes are equal everywhere if the largest of both are opposite, and codes likewise.
            numbers[start : start + 2 + 2 * count] = [prints[ranks], -prints[ranks], *of_set, *inverse]
        largest = self._largest(numbers)
        if largest[_Head.LEAVES]:
            return None
        for ranks, start in self._starts.items():
            if largest[start] != -largest[start + 1]:
                report = f"{self._next_report()}/{name_of(ranks)}"
                raise _disagreement(report, ranks, (largest[start], -largest[start + 1]), prints, describe)
        rank = largest[_Head.NOT_FINITE] - 1
        found = {ranks: self._codes_of(ranks, largest, describe) for ranks in self._starts}
        return Agreed(not largest[_Head.NOT_INERT], rank if rank >= 0 else None, found)

    def fail(self, error: Exception) -> None:
        """Tell the others that this rank can't take the step; each of them raises."""
        shared_store().set(f"{self._next_report()}/{my_rank()}", str(error))
        self._reduce(self._numbers(_Head.FAILED))

    def leave(self) -> None:
        """Tell the others that this rank has other parameters than before, so that all meet anew."""
        self._largest(self._numbers(_Head.LEAVES))

    def _numbers(self, says: _Head | None = None) -> list[int]:
        """Return numbers that say one thing, or nothing, and nothing of any set."""
        numbers = [NO_GRADIENT] * self._size
        if says is not None:
            numbers[says] = 1 + my_rank()
        for start in self._starts.values():
            numbers[start : start + 2] = _NEUTRAL, _NEUTRAL
        return numbers

    def _codes_of(self, ranks: Ranks, largest: Sequence[int], describe: Describe) -> Sequence[int]:
        """Return the code of every gradient of a set; raise, on all ranks, where gradients lie differently on some."""
        start, count = self._starts[ranks] + 2, self._known[ranks]
        codes, inverse = largest[start : start + count], largest[start + count : start + 2 * count]
        for index, (code, other) in enumerate(zip(codes, inverse, strict=True)):
            if code and code != _LARGEST_CODE - other:
                # What is described first is the optimizer itself.
                which = describe(ranks)[1 + index][0] if ranks in self.counts else "a parameter"
                raise RuntimeError(
                    f"The gradients of {which} are laid out differently on its ranks {list(ranks)}: redistribute them "
                    "to the parameter's placements first"
                )
        return codes

    def _largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest numbers of all ranks, and raise if one of them has given up."""
        largest = self._reduce(numbers)
        if largest[_Head.FAILED]:
            rank = largest[_Head.FAILED] - 1
            raise _failure(rank, shared_store().get(f"{self._next_report()}/{rank}").decode())
        return largest

    def _reduce(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest numbers of all ranks.

        The host waits for them, on a stream of their own: not for the gradients that the device is still computing.
        """
        group = group_of(self.ranks, self._device)
        if self._device.type == "cpu":
            on_host = torch.tensor(numbers, dtype=torch.int32)
            dist.all_reduce(on_host, op=dist.ReduceOp.MAX, group=group)
            return on_host.tolist()
        module = torch.get_device_module(self._device)
        if self._stream is None:
            self._stream = module.Stream(self._device)
        with module.stream(self._stream):
            on_host = torch.tensor(numbers, dtype=torch.int32).pin_memory()
            on_device = on_host.to(self._device, non_blocking=True)
            dist.all_reduce(on_device, op=dist.ReduceOp.MAX, group=group)
            on_host.copy_(on_device, non_blocking=True)
        self._stream.synchronize()
        return on_host.tolist()

    def _next_report(self) -> str:
        """Return a place in the store for what went wrong; all ranks ask for it at the same time."""
        self._num_reports += 1
        return f"{self._reports}/{self._num_reports}"


# ------------------------------------------------------------------------------------------------------- the store


def tell_failure(counts: Iterable[Ranks], error: Exception) -> None:
    """Tell the others that this rank can't take its first step; each of them raises when it looks for the ranks."""
    _publish(dict.fromkeys(counts, 0), {}, "cpu", failed=str(error))


def _publish(
    counts: Mapping[Ranks, int], prints: Prints, device_type: str, failed: str | None = None
) -> dict[Ranks, str]:
    """Write down what this rank has; return the places in the store where the ranks of each set meet."""
    store, me = shared_store(), my_rank()
    names = {ranks: _next_name(ranks) for ranks in sorted(counts)}
    for ranks, name in names.items():
        own = {"print": prints.get(ranks), "count": counts[ranks], "sets": list(names.values()), "failed": failed}
        own["device"] = device_type
        store.set(f"{name}/{me}", json.dumps(own))
        if failed is not None and ranks[0] == me:
            summary = {"ranks": ranks, "count": 0, "sets": [], "failed": (me, failed), "prints": None, "devices": []}
            store.set(f"{name}/summary", json.dumps(summary))
    return names


def _summary(store: Store, name: str, ranks: Ranks) -> dict[str, Any]:
    """Collect what the ranks of a set have written down."""
    all_of_them = [json.loads(_get(store, f"{name}/{rank}", name, ranks)) for rank in ranks]
    prints = [own["print"] for own in all_of_them if own["failed"] is None]
    failed = next(((rank, own["failed"]) for rank, own in zip(ranks, all_of_them, strict=True) if own["failed"]), None)
    return {
        "ranks": ranks,
        "count": all_of_them[0]["count"],
        "sets": sorted({other for own in all_of_them for other in own["sets"]}),
        "failed": failed,
        "prints": (max(prints), min(prints)) if len(set(prints)) > 1 else None,
        "devices": sorted({own["device"] for own in all_of_them}),
    }


def _get(store: Store, key: str, name: str, ranks: Ranks) -> bytes:
    """Wait for a value; after the time limit of the world, say which ranks did not come."""
    try:
        store.wait([key], time_limit())
        value: bytes = store.get(key)
        return value
    except RuntimeError as error:
        missing = [rank for rank in ranks if not store.check([f"{name}/{rank}"])]
        who = f"ranks {missing}" if missing else "other ranks"
        raise RuntimeError(
            f"Rank {my_rank()} has waited {time_limit()} for {who}: all ranks that hold a part of a parameter must "
            "call step()"
        ) from error


def _next_name(ranks: Ranks) -> str:
    name = name_of(ranks)
    return f"{name}/{next_meeting(name)}"


def twin(values: object, gradients: object) -> tuple[int, bool] | None:
    """Return a rank with the same values, and whether its gradients are the same too.

    It is rank 0, or for rank 0 the next; None if that has other values, or does not come within a second.
    """
    if is_pretended():
        return None
    store, me = shared_store(), my_rank()
    number, own = next_meeting("twins"), (str(fingerprint(values)), str(fingerprint(gradients)))
    store.set(f"twins/{number}/{me}", json.dumps(own))
    other = 1 if me == 0 else 0
    try:
        store.wait([f"twins/{number}/{other}"], timedelta(seconds=1))
    except RuntimeError:
        return None
    theirs = json.loads(store.get(f"twins/{number}/{other}"))
    return (other, theirs[1] == own[1]) if theirs[0] == own[0] else None


# -------------------------------------------------------------------------------------------------------- messages


def fingerprint(*parts: object) -> int:
    """Return 31 bits of a hash, the same in every process."""
    return zlib.crc32(repr(parts).encode()) >> 1


def _failure(rank: int, text: str) -> RuntimeError:
    return RuntimeError(f"Rank {rank} can't take this step, so none does: {text}")


def _disagreement(
    place: str, ranks: Ranks, differing: Sequence[int], prints: Prints, describe: Describe
) -> RuntimeError:
    """Return an error that says what differs between a rank with one hash and a rank with another.

    The first rank with each of them writes down what it has, and all ranks read it.
    """
    store, found = shared_store(), []
    for print_ in differing:
        if prints.get(ranks) == print_ and store.add(f"{place}/{print_}/count", 1) == 1:
            store.set(f"{place}/{print_}", json.dumps([my_rank(), describe(ranks)]))
        found.append(json.loads(store.get(f"{place}/{print_}")))
    found.sort()
    return RuntimeError(f"Ranks disagree about what to optimize: {_difference(*found)}")


def _difference(first: Sequence[Any], second: Sequence[Any]) -> str:
    """Return what differs between two descriptions, each with its rank, and nothing else."""
    (rank, lines), (other_rank, other_lines) = first, second
    texts = []
    one: Line
    other: Line
    for one, other in zip_longest(lines, other_lines, fillvalue=("nothing", {})):
        if one == other:
            continue
        names = [name for name in one[1] if one[1][name] != other[1].get(name)]
        if one[0] != other[0]:
            text = f"rank {rank} has {one[0]} where rank {other_rank} has {other[0]}"
            if "unnamed" in text:
                text += ". Pass the model or named parameters, so that parameters can be told apart by their names"
            return text  # what follows is out of step
        here = ", ".join(f"{name}={one[1][name]}" for name in names)
        there = ", ".join(f"{name}={other[1].get(name)}" for name in names)
        texts.append(f"{one[0]}: rank {rank} has {here}, rank {other_rank} has {there}")
    more = f"; and {len(texts) - 1} more" if len(texts) > 1 else ""
    return (texts[0] if texts else "no difference found") + more
