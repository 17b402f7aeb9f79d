"""Agree with the other ranks before a step changes anything.

A rank that returned or raised alone would leave the others waiting in a collective. So ranks first exchange everything
that decides about a step.

1. Once, before the first step (`Agreement(...)`), ranks find each other through the store of torch.distributed. Each
   rank writes down the sets of ranks that it shares parameters with, a hash of the parameters and options of each set,
   and the total memory of its device. The first rank of a set combines what its ranks wrote into a summary, with the
   smallest of these memories, for which all of them plan. Every rank reads the summaries of its sets, of the sets that
   overlap with these, and so on: together they are the ranks that one step connects. The store is used because a rank
   that fails, or has other parameters, can report that there, and no collective can hang.
2. At every step (`before_step`), these ranks reduce one small vector of integers by maximum: whether the step only
   creates state, whether a gradient is not finite, whether replicas must be compared or matrices checked, a hash for
   every set and whether its ranks have loaded a checkpoint, and for every parameter a code of its gradient and whether
   its stage may start in backward. Every rank gets the same `Agreed` back and decides from that alone.
3. If something is wrong, the same reduction reports it. A rank that cannot take the step calls `fail`, and all ranks
   raise its error. A rank whose parameters have changed calls `leave`; `before_step` then returns None on the others,
   and all ranks start again with 1. Where hashes differ, ranks exchange descriptions through the store, and all raise
   the same error, which names the difference.
"""

from __future__ import annotations

import atexit
import json
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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

Line: TypeAlias = tuple[str, dict[str, str]]  # the title of a parameter or of the optimizer, and its properties
Hashes: TypeAlias = Mapping[Ranks, int]  # for every set of ranks, a hash of what must be equal on all of them
Describe: TypeAlias = Callable[[Ranks], Sequence[Line]]  # returns what the hash of a set stands for, for an error

DECLARED = "declared"  # the properties of a line that the code of a rule declares begin with this
STATE = "state"  # so do the properties that are state, with this
# These depend on options too.
FLOPS, SCRATCH, PRECISION = (f"{DECLARED} {name}" for name in ("flops", "scratch_bytes", "precision of updates"))
NO_GRADIENT = 0  # the code of a parameter without a gradient; the caller chooses the other codes
_LARGEST_CODE = 2**30
WRITTEN, REPLICAS = 1, 2  # what ranks compare: per-matrix state that was written, or that and all replicas
_NEUTRAL = -(2**31)  # smaller than every other number, so a maximum ignores it


class _Flag(IntEnum):
    """The first integers of the vector, by index.

    All but `NOT_INERT`, `COMPARES` and `NUM_UPDATES` are 0, or 1 + the rank that sets them, so that the maximum names a
    rank for the error.
    """

    NOT_INERT = 0  # 1 if the step does more than create state
    NOT_FINITE = 1  # the rank has a gradient that is not finite
    FAILED = 2  # the rank cannot take the step
    LEAVES = 3  # the rank's parameters have changed since the last step
    COMPARES = 4  # what the rank has not compared with other ranks yet: `WRITTEN` or `REPLICAS`, 0 if nothing
    NUM_UPDATES = 5  # steps that have updated parameters
    MEASURES = 6  # the rank wants the step to be measured
    STARTS = 7  # the rank has a matrix that takes part for the first time, with state that must not start from zero


# The integers of a set begin with its hash, minus its hash, and four about loading, of state and of weights:
# 1 + the rank if it has loaded, else 0; and 1 + the rank if it has not, else 0.
_NUM_FIRST = 6


@dataclass(frozen=True)
class Agreed:
    """The result of an agreement before a step, equal on all ranks; or what one rank proposes, of itself alone."""

    inert: bool  # the step only creates state, on every rank
    not_finite_on: int | None = None  # the largest rank that has a gradient that is not finite
    # For every set, one code per parameter: `NO_GRADIENT`, or a positive number for the layout of its gradient.
    codes: Mapping[Ranks, Sequence[int]] = field(default_factory=dict)
    compares: int = 0  # what some rank wants to compare, which needs all of them: `WRITTEN` or `REPLICAS`
    early: Mapping[Ranks, Sequence[int]] = field(default_factory=dict)  # for every set, the largest per parameter
    num_updates: int = 0  # steps that have updated parameters before this one: the largest number
    measures: bool = False  # some rank wants the step to be measured, which needs all of them
    starts: bool = False  # some rank has a matrix that takes part for the first time and must be checked
    # If only some ranks of a set have loaded state, or weights: one that has, and one that has not.
    state_loaded_on: tuple[int, int] | None = None
    weights_loaded_on: tuple[int, int] | None = None


class _Report:
    """A message that the other ranks get at their next agreement; this rank does not wait for that.

    Args:
        key: of the text in the store.
        integers: the vector of this rank.
        group: the process group of the reduction, which starts at once on the CPU; None if it is not started here.
    """

    def __init__(self, key: str, integers: list[int], group: dist.ProcessGroup | None) -> None:
        self.key, self.integers, self.group = key, integers, group
        if group is not None:
            self._tensor = torch.tensor(integers, dtype=torch.int32)
            self._work = dist.all_reduce(self._tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
            atexit.register(self._end)

    def wait(self) -> list[int]:
        """Wait for the other ranks, and return the element-wise maximum."""
        assert self._work is not None
        self._work.wait()
        atexit.unregister(self._end)
        return self._tensor.tolist()

    def _end(self) -> None:
        """Stop the reduction when the program ends: Gloo would wait for the other ranks until the time limit."""
        with suppress(Exception):  # the group may be gone
            dist.destroy_process_group(self.group)


class Agreement:
    """The ranks that one step connects, and the integers that they exchange at every step.

    Args:
        counts: the sets of ranks that share parameters with this rank, and the number of parameters of each set.
        hashes: a hash for every set.
        own_memory: for every set with parameters, the total bytes of this rank's smallest device.
        describe: returns what the hash of a set stands for; called only for an error.
        device: where the integers are reduced.
        like: a process group whose backend serves that device; None for the default group.
    """

    def __init__(
        self,
        counts: Mapping[Ranks, int],
        hashes: Hashes,
        own_memory: Mapping[Ranks, int],
        describe: Describe,
        device: torch.device,
        like: dist.ProcessGroup | None,
    ) -> None:
        self.counts = dict(counts)
        self.device_memory: dict[Ranks, int] = dict(own_memory)  # of the smallest device of each set
        self.device = device  # where the integers are reduced, of the same type on all ranks
        self._known: dict[Ranks, int] = dict(sorted(counts.items()))  # the sets of all ranks that the step connects
        if not is_pretended():
            names = _publish(counts, hashes, own_memory, device.type)
            self._known, device_type = self._find_sets(names, hashes, describe)
            if device_type != device.type:  # this rank has no parameters, or only on the CPU, and others use a GPU
                self.device = torch.device(device_type, torch.get_device_module(device_type).current_device())
        self.ranks: Ranks = tuple(sorted({rank for ranks in self._known for rank in ranks}))
        self._starts: dict[Ranks, int] = {}  # where the integers of every set begin in the vector
        self._size = len(_Flag)
        for ranks, count in self._known.items():
            self._starts[ranks] = self._size
            self._size += _NUM_FIRST + 3 * count
        self._reports = f"reports/{_next_name(self.ranks)}"
        self._num_reports = 0
        self._report: _Report | None = None  # that this rank has made and the others have not heard of
        self._stream: Any = None
        make_group(self.ranks, self.device, like)
        self._world = weakref.ref(dist.group.WORLD)

    @property
    def is_alive(self) -> bool:
        """Return whether torch.distributed is still initialized as it was when this object was made."""
        return self._world() is not None and self._world() is dist.group.WORLD

    # --------------------------------------------------------------------------------------- once: find the other ranks

    def _find_sets(
        self, names: Mapping[Ranks, str], hashes: Hashes, describe: Describe
    ) -> tuple[dict[Ranks, int], str]:
        """Find all sets that overlap with this rank's sets, directly or through others, and the memory of its own sets.

        Args:
            names: for every set of this rank, the prefix of its keys in the store.
            hashes: a hash for every set.
            describe: returns what the hash of a set stands for.

        Returns:
            The number of parameters of every set, and the type of device on which integers are reduced.

        Raises:
            RuntimeError: the hashes of a set differ, or one of the ranks has failed.
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
            if summary["hashes"] is not None:
                raise _disagreement(name, tuple(summary["ranks"]), summary["hashes"], hashes, describe)
        self.device_memory = {ranks: found[names[ranks]]["memory"] for ranks in self.device_memory}
        counts = sorted((tuple(summary["ranks"]), summary["count"]) for summary in found.values())
        types = {device for summary in found.values() for device in summary["devices"]}
        return dict(counts), min(types - {"cpu"}, default="cpu")

    # ------------------------------------------------------------------------------------------------ at every step

    def before_step(
        self,
        hashes: Hashes,
        proposal: Agreed,
        describe: Describe,
        loaded: Mapping[Ranks, tuple[bool, bool]],
    ) -> Agreed | None:
        """Exchange with the other ranks what this rank is about to do.

        Args:
            hashes: a hash for every set; if they differ between ranks, all ranks raise.
            proposal: what this rank would do, with codes and numbers for every set of its own.
            describe: returns what the hash of a set stands for; called only for an error.
            loaded: for sets whose ranks load alike, whether this rank has loaded state, and weights.

        Returns:
            What all ranks know now; None if the parameters of a rank have changed, so that all ranks must make a new
            `Agreement`.

        Raises:
            RuntimeError: a rank has failed, hashes differ, or gradients of one parameter are laid out differently.
                Every rank raises it.
        """
        integers, me = self._integers(), 1 + my_rank()
        integers[_Flag.NOT_INERT] = int(not proposal.inert)
        integers[_Flag.NOT_FINITE] = me * (proposal.not_finite_on is not None)
        integers[_Flag.COMPARES] = proposal.compares
        integers[_Flag.NUM_UPDATES] = proposal.num_updates
        integers[_Flag.MEASURES] = me * proposal.measures
        integers[_Flag.STARTS] = me * proposal.starts
        for ranks, count in self.counts.items():
            of_set = proposal.codes[ranks]
            inverse = [_LARGEST_CODE - code if code else NO_GRADIENT for code in of_set]
            start = self._starts[ranks]
            # One maximum finds the smallest value too, as minus the largest of the negatives. The hashes of all ranks
            # are equal if the smallest is the largest; the same holds for codes.
            integers[start : start + _NUM_FIRST] = [hashes[ranks], -hashes[ranks], *_about_loading(loaded.get(ranks))]
            integers[start + _NUM_FIRST : start + _NUM_FIRST + 3 * count] = [*of_set, *inverse, *proposal.early[ranks]]
        largest = self._largest(integers)
        if largest[_Flag.LEAVES]:
            return None
        for ranks, start in self._starts.items():
            if largest[start] != -largest[start + 1]:
                report = f"{self._next_report()}/{name_of(ranks)}"
                raise _disagreement(report, ranks, (largest[start], -largest[start + 1]), hashes, describe)
        codes: dict[Ranks, Sequence[int]] = {}
        early: dict[Ranks, Sequence[int]] = {}
        for ranks, start in self._starts.items():
            count = self._known[ranks]
            firsts = [start + _NUM_FIRST + number * count for number in range(3)]
            codes[ranks], inverse, early[ranks] = (largest[first : first + count] for first in firsts)
            self._check_codes(ranks, codes[ranks], inverse, describe)
        rank = largest[_Flag.NOT_FINITE] - 1
        return Agreed(
            inert=not largest[_Flag.NOT_INERT],
            not_finite_on=rank if rank >= 0 else None,
            codes=codes,
            compares=largest[_Flag.COMPARES],
            early=early,
            num_updates=largest[_Flag.NUM_UPDATES],
            measures=largest[_Flag.MEASURES] > 0,
            starts=largest[_Flag.STARTS] > 0,
            state_loaded_on=self._loaded_on(largest, 2),
            weights_loaded_on=self._loaded_on(largest, 4),
        )

    def fail(self, error: Exception) -> None:
        """Report to the other ranks that this rank cannot take the step; each of them raises `error`'s message."""
        shared_store().set(f"{self._next_report()}/{my_rank()}", str(error))
        self._reduce(self._integers(_Flag.FAILED))

    def report(self, text: str) -> None:
        """Report to the other ranks that the last step went wrong here; each raises it at its next agreement.

        This rank does not wait for them, because they may need it in a forward pass before. Its part in their next
        agreement is the report: `finish_report` must be called before anything else.
        """
        key = self._next_report()
        shared_store().set(f"{key}/{my_rank()}", text)
        # On a GPU the reduction would wait there for the other ranks, and so would everything that waits for the GPU.
        group = group_of(self.ranks, self.device) if self.device.type == "cpu" else None
        self._report = _Report(key, self._integers(_Flag.FAILED), group)

    def finish_report(self) -> None:
        """Raise what a rank has reported, if this rank has made a report; the others raise it in the same agreement."""
        if self._report is None:
            return
        report, self._report = self._report, None
        rank = self._reduce(report.integers, report)[_Flag.FAILED] - 1
        raise _failure(rank, shared_store().get(f"{report.key}/{rank}").decode())

    def leave(self) -> None:
        """Report to the other ranks that this rank's parameters have changed, so that all make a new `Agreement`."""
        self._largest(self._integers(_Flag.LEAVES))

    def _integers(self, flag: _Flag | None = None) -> list[int]:
        """Return a vector of integers that sets at most one flag and leaves the maximum for every set to others."""
        integers = [NO_GRADIENT] * self._size
        if flag is not None:
            integers[flag] = 1 + my_rank()
        for start in self._starts.values():
            integers[start : start + 2] = _NEUTRAL, _NEUTRAL
        return integers

    def _loaded_on(self, largest: Sequence[int], offset: int) -> tuple[int, int] | None:
        """Return a rank that has loaded and one of the same set that has not; None if no set has both."""
        pairs = [(largest[start + offset] - 1, largest[start + offset + 1] - 1) for start in self._starts.values()]
        return next((pair for pair in pairs if min(pair) >= 0), None)

    def _check_codes(self, ranks: Ranks, codes: Sequence[int], inverse: Sequence[int], describe: Describe) -> None:
        """Raise if the gradients of a parameter of a set are laid out differently on some ranks; every rank does."""
        for index, (code, other) in enumerate(zip(codes, inverse, strict=True)):
            if code and code != _LARGEST_CODE - other:
                # The first line of a description is the optimizer itself; parameters follow.
                which = describe(ranks)[1 + index][0] if ranks in self.counts else "a parameter"
                raise RuntimeError(
                    f"The gradients of {which} are laid out differently on its ranks {list(ranks)}: redistribute them "
                    "to the parameter's placements first"
                )

    def _largest(self, integers: Sequence[int]) -> list[int]:
        """Return the element-wise maximum of the vectors of all ranks; raise if one of the ranks has failed."""
        largest = self._reduce(integers)
        if largest[_Flag.FAILED]:
            rank = largest[_Flag.FAILED] - 1
            raise _failure(rank, shared_store().get(f"{self._next_report()}/{rank}").decode())
        return largest

    def _reduce(self, integers: Sequence[int], report: _Report | None = None) -> list[int]:
        """Return the element-wise maximum of the vectors of all ranks; raise if another rank can't be reached.

        Args:
            integers: the vector of this rank.
            report: a report whose reduction may have been started.
        """
        try:
            return self._all_reduce(integers) if report is None or report.group is None else report.wait()
        except RuntimeError as error:
            others = [rank for rank in self.ranks if rank != my_rank()]
            raise RuntimeError(
                f"Rank {my_rank()} waited for ranks {others} to agree about a step, and one of them can't be reached: "
                f"{error}. Look at its output for the first error"
            ) from error

    def _all_reduce(self, integers: Sequence[int]) -> list[int]:
        """Return the element-wise maximum of the vectors of all ranks, by an all-reduce.

        The host waits for the result. On a GPU the all-reduce has its own stream, so the host does not wait for the
        gradients that the device is still computing.
        """
        group = group_of(self.ranks, self.device)
        if self.device.type == "cpu":
            on_host = torch.tensor(integers, dtype=torch.int32)
            dist.all_reduce(on_host, op=dist.ReduceOp.MAX, group=group)
            return on_host.tolist()
        module = torch.get_device_module(self.device)
        if self._stream is None:
            self._stream = module.Stream(self.device)
        with module.stream(self._stream):
            on_host = torch.tensor(integers, dtype=torch.int32).pin_memory()
            on_device = on_host.to(self.device, non_blocking=True)
            dist.all_reduce(on_device, op=dist.ReduceOp.MAX, group=group)
            on_host.copy_(on_device, non_blocking=True)
        self._stream.synchronize()
        return on_host.tolist()

    def _next_report(self) -> str:
        """Return a key of the store for a report of what went wrong.

        Ranks count their reports, and all of them ask for the next one in the same step, so all get the same key.
        """
        self._num_reports += 1
        return f"{self._reports}/{self._num_reports}"


def _about_loading(loaded: tuple[bool, bool] | None) -> list[int]:
    """Return the four integers of a set about loading, of state and of weights."""
    if loaded is None:
        return [0, 0, 0, 0]
    me = 1 + my_rank()
    return [number for has_loaded in loaded for number in (me * has_loaded, me * (not has_loaded))]


# ------------------------------------------------------------------------------------------------------- the store


def report_failure(counts: Iterable[Ranks], error: Exception) -> None:
    """Report to the other ranks that this rank cannot take its first step; each raises when it reads the summaries.

    Args:
        counts: the sets of ranks that share parameters with this rank.
        error: what went wrong on this rank.
    """
    _publish(dict.fromkeys(counts, 0), {}, {}, "cpu", failed=str(error))


def _publish(
    counts: Mapping[Ranks, int],
    hashes: Hashes,
    own_memory: Mapping[Ranks, int],
    device_type: str,
    failed: str | None = None,
) -> dict[Ranks, str]:
    """Write what this rank has into the store, for every set of ranks that it belongs to.

    Returns:
        For every set, the prefix of the keys under which its ranks write.
    """
    store, me = shared_store(), my_rank()
    names = {ranks: _next_name(ranks) for ranks in sorted(counts)}
    for ranks, name in names.items():
        own = {"hash": hashes.get(ranks), "count": counts[ranks], "sets": list(names.values()), "failed": failed}
        own |= {"device": device_type, "memory": own_memory.get(ranks)}
        store.set(f"{name}/{me}", json.dumps(own))
        if failed is not None and ranks[0] == me:
            summary = {"ranks": ranks, "count": 0, "sets": [], "failed": (me, failed), "hashes": None}
            summary |= {"devices": [], "memory": None}
            store.set(f"{name}/summary", json.dumps(summary))
    return names


def _summary(store: Store, name: str, ranks: Ranks) -> dict[str, Any]:
    """Combine what the ranks of a set have written into the store; wait for those that have not yet.

    Returns:
        The keys "ranks", "count" (parameters), "sets" (prefixes of all sets of these ranks), "failed" (None, or a rank
        and its error), "hashes" (None, or two hashes that differ), "devices" (types) and "memory" (bytes of the
        smallest device, or None for ranks that share no parameters).
    """
    entries = [json.loads(_get(store, f"{name}/{rank}", name, ranks)) for rank in ranks]
    hashes = [entry["hash"] for entry in entries if entry["failed"] is None]
    failures = [(rank, entry["failed"]) for rank, entry in zip(ranks, entries, strict=True) if entry["failed"]]
    return {
        "ranks": ranks,
        "count": entries[0]["count"],
        "sets": sorted({other for entry in entries for other in entry["sets"]}),
        "failed": failures[0] if failures else None,
        "hashes": (max(hashes), min(hashes)) if len(set(hashes)) > 1 else None,
        "devices": sorted({entry["device"] for entry in entries}),
        "memory": min((entry["memory"] for entry in entries if entry["memory"] is not None), default=None),
    }


def _get(store: Store, key: str, name: str, ranks: Ranks) -> bytes:
    """Wait for a value of the store and return it.

    Raises:
        RuntimeError: it did not arrive within the timeout of the default group; the message names the missing ranks.
    """
    try:
        store.wait([key], time_limit())
        value: bytes = store.get(key)
        return value
    except RuntimeError as error:
        missing = [rank for rank in ranks if not store.check([f"{name}/{rank}"])]
        absent = f"ranks {missing}" if missing else "other ranks"
        raise RuntimeError(
            f"Rank {my_rank()} has waited {time_limit()} for {absent}: all ranks that hold a part of a parameter must "
            "call step()"
        ) from error


def _next_name(ranks: Ranks) -> str:
    """Return a prefix for keys of the store that the ranks of a set have not used before; the same on all of them."""
    name = name_of(ranks)
    return f"{name}/{next_meeting(name)}"


# -------------------------------------------------------------------------------------------------------- messages


def fingerprint(*parts: object) -> int:
    """Return a hash of 31 bits that is the same in every process, unlike Python's `hash`."""
    return zlib.crc32(repr(parts).encode()) >> 1


def _failure(rank: int, text: str) -> RuntimeError:
    return RuntimeError(f"Rank {rank} cannot take this step, so no rank does: {text}")


def _disagreement(
    place: str, ranks: Ranks, differing: Sequence[int], hashes: Hashes, describe: Describe
) -> RuntimeError:
    """Return an error that names the difference between a rank with one hash and a rank with another.

    For each of the two hashes, the first rank that has it writes its description into the store. All ranks read both.

    Args:
        place: the prefix of the keys for the descriptions.
        ranks: the set whose hashes differ.
        differing: the two hashes.
        hashes: this rank's hash for every set.
        describe: returns what the hash of a set stands for.
    """
    store, found = shared_store(), []
    for hash_ in differing:
        if hashes.get(ranks) == hash_ and store.add(f"{place}/{hash_}/count", 1) == 1:
            store.set(f"{place}/{hash_}", json.dumps([my_rank(), describe(ranks)]))
        found.append(json.loads(store.get(f"{place}/{hash_}")))
    found.sort()
    return RuntimeError(f"Ranks disagree about what to optimize: {_difference(*found)}")


def _difference(first: Sequence[Any], second: Sequence[Any]) -> str:
    """Return the text that names the first difference between two descriptions and counts the others.

    Args:
        first: a rank, and its description: lines of a title and properties.
        second: the same of another rank.
    """
    (rank, lines), (other_rank, other_lines) = first, second
    texts, remedy = [], ""
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
            return text  # later lines are of different parameters, so comparing them would mislead
        of_code = [name for name in names if name.startswith(DECLARED) and name not in (FLOPS, SCRATCH, PRECISION)]
        others = [name for name in names if not name.startswith(DECLARED)]
        names = (of_code if "rule" not in names else []) or others or names
        here = ", ".join(f"{name}={one[1][name]}" for name in names)
        there = ", ".join(f"{name}={other[1].get(name)}" for name in names)
        if any(name.startswith(DECLARED) for name in names):
            remedy = ". Import the same version of the rule on all ranks"
        elif any(name.startswith(STATE) for name in names):
            remedy = ". Write the same numbers on all ranks: reduce them first"
        texts.append(f"{one[0]}: rank {rank} has {here}, rank {other_rank} has {there}")
    more = f"; and {len(texts) - 1} more" if len(texts) > 1 else ""
    return (texts[0] if texts else "no difference found") + more + remedy


def twin(values: object, gradients: object) -> tuple[int, bool] | None:
    """Compare values and gradients with those of one other rank: rank 0, or rank 1 on rank 0.

    Returns:
        The other rank, and whether its gradients are equal too; None if its values differ, or if it does not answer
        within a second.
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
