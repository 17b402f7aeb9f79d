"""Notice that ranks wait for one that is stopped or hangs, name it, and end: two threads on every rank and a store.

Every rank tells the store, every few seconds, where it is. One whose own program has not moved for the timeout reads
what the others told: who was not heard of is stopped, and who is heard of and has begun fewer collectives than the
others hangs. The first to know tells the store, and all ranks end with the same message. Ranks that are all equally
slow, as in a long compilation, wait for nobody and have twice the time.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

_LONGEST_INTERVAL = 5.0  # seconds
_INTERVALS_OF_A_STORE = 4  # one that does not answer for so long never will
_VERDICT = "verdict"


@dataclass(frozen=True)
class Beat:
    """What a rank last told."""

    number: int = 0  # counts beats
    where: str = ""
    collectives: Mapping[str, int] = field(default_factory=dict)  # begun so far, by process group


class Heartbeat:
    """Watches a job while it is entered, and ends this process when a rank is waited for in vain.

    `store` is the job's, and `keeper` the rank that holds it, None where that is not a rank. Time counts while this
    process runs, so a job that is suspended as a whole goes on.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float, keeper: int | None = None) -> None:
        own_connection = store.clone()  # type: ignore[attr-defined]  # calls of one connection wait for each other
        self._store = PrefixStore("heartbeat", own_connection)
        self._rank, self._size, self._timeout, self._keeper = rank, size, timeout, keeper
        self._interval = min(_LONGEST_INTERVAL, timeout / 4)
        self._where, self._moves = "the start", 0
        self._quiet = 0.0  # seconds since the program last moved
        self._unheard = 0.0  # seconds since the store last answered
        self._left = threading.Event()
        self._ending = threading.Lock()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._talk, self._watch)]

    def __enter__(self) -> Heartbeat:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join(_LONGEST_INTERVAL)  # it may wait for a store that does not answer

    def note(self, where: str | None = None) -> None:
        """Say that the program moves, and where it is. No communication: the thread tells it later."""
        self._moves += 1
        if where is not None:
            self._where = where

    def _watch(self) -> None:
        """Count how long the program has not moved. In a thread of its own, because a store may never answer."""
        before = None
        while not self._left.wait(self._interval):
            now = (self._moves, collectives_begun())
            self._quiet = self._quiet + self._interval if now == before else 0.0
            self._unheard += self._interval
            before = now
            if self._quiet >= self._timeout and self._unheard > _INTERVALS_OF_A_STORE * self._interval:
                self._end(self._unanswered())

    def _talk(self) -> None:
        """Tell the store where this rank is, and look there for a verdict."""
        number, earlier = 0, None
        with suppress(dist.DistError):  # the store has gone with the process that held it
            while True:
                number += 1
                beat = Beat(number, self._where, collectives_begun())
                self._store.set(str(self._rank), json.dumps(asdict(beat)))
                if self._quiet < self._timeout / 2:
                    earlier = None
                elif earlier is None:
                    earlier = self._listen()
                elif self._quiet >= self._timeout:
                    verdict = find_verdict(self._rank, earlier, self._listen(), self._quiet, self._timeout)
                    if verdict is not None:
                        self._store.compare_set(_VERDICT, "", verdict)
                if self._store.check([_VERDICT]):
                    self._end(self._store.get(_VERDICT).decode())
                self._unheard = 0.0
                if self._left.wait(self._interval):
                    return

    def _listen(self) -> list[Beat | None]:
        """Return the last beat of every rank, None for one that never told any."""
        names = [str(rank) for rank in range(self._size)]
        if self._store.check(names):
            told: Sequence[bytes | None] = self._store.multi_get(names)
        else:
            told = [self._store.get(name) if self._store.check([name]) else None for name in names]
        return [None if text is None else Beat(**json.loads(text)) for text in told]

    def _unanswered(self) -> str:
        if self._keeper is None:
            return f"waited {self._timeout:g} s for other ranks, and the store of the job does not answer"
        return f"waited {self._timeout:g} s for rank {self._keeper}, which holds the job's store and does not answer"

    def _end(self, verdict: str) -> None:
        """Say why, leave the others time to hear it too, and end the process, whose main thread waits in a collective.

        The message is printed by a thread of its own, because nobody may be reading it.
        """
        with self._ending:
            if self._left.is_set():
                return
            message = f"error: rank {self._rank}: {verdict}; the last checkpoint is as it was\n"
            threading.Thread(target=lambda: os.write(2, message.encode()), daemon=True).start()
            self._left.wait(2 * self._interval)
            os._exit(1)


def collectives_begun() -> dict[str, int]:
    """Return how many collectives this process has begun, by process group and kind of device."""
    begun = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        with suppress(KeyError, RuntimeError, ValueError):  # destroyed in this moment
            ranks = zlib.crc32(str(dist.get_process_group_ranks(group)).encode())  # another group may have this name
            for device in group._device_types:
                backend = group._get_backend(device)
                count = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]
                begun[f"{name}/{ranks:08x}/{device}"] = int(count)
    return begun


def find_verdict(
    rank: int, earlier: Sequence[Beat | None], now: Sequence[Beat | None], quiet: float, timeout: float
) -> str | None:
    """Say for whom this rank, which has been quiet so long, waits; None if it may wait for nobody.

    The beats are those of all ranks, now and half the timeout ago. A rank that is itself behind does not judge: the
    others may have waited for a moment only.
    """
    silent = [other for other, (old, new) in enumerate(zip(earlier, now, strict=True)) if new is None or new == old]
    if silent:
        told = [f"{other} ({_where(now[other], 'last heard of at ')})" for other in silent]
        return f"waited {timeout:g} s for rank {', '.join(told)}, which no longer answers (stopped, or gone)"
    behind = _behind([beat for beat in now if beat is not None])
    if behind and rank not in behind:
        told = [f"{other} ({_where(now[other], 'at ')})" for other in behind]
        return f"waited {timeout:g} s for rank {', '.join(told)}, which answers but does not go on"
    if quiet < 2 * timeout:
        return None
    where = ", ".join(sorted({_where(beat, "at ") for beat in now}))
    return f"no rank has gone on for {2 * timeout:g} s ({where})"


def _behind(beats: Sequence[Beat]) -> list[int]:
    """Return the ranks that have begun fewer collectives of a group than its others, but not those that wait too."""
    most: dict[str, int] = {}
    for beat in beats:
        for group, count in beat.collectives.items():
            most[group] = max(count, most.get(group, 0))
    lagging = {
        rank: {group for group, count in beat.collectives.items() if count < most[group]}
        for rank, beat in enumerate(beats)
    }
    waited_in = set().union(*lagging.values())
    behind = [rank for rank, groups in lagging.items() if groups]
    # Who leads a group in which another lags waits for that one itself.
    roots = [rank for rank in behind if not (waited_in & set(beats[rank].collectives)) - lagging[rank]]
    return roots or behind


def _where(beat: Beat | None, words: str) -> str:
    return "never heard of" if beat is None else words + beat.where
