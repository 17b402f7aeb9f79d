"""Detect a rank that has stopped or hangs, name it, and end all ranks that wait for it.

Two threads on every rank and the job's store do this. Every few seconds each rank writes a beat to the store: where it
is, and how many collectives it has started. A rank whose own program makes no progress for the timeout reads the beats
of the others. A rank without new beats has stopped. A rank with new beats that has started fewer collectives than the
others hangs. The first rank that finds out writes a verdict to the store, and all ranks end with the same message.
Ranks that are all equally slow, as during a long compilation, do not wait for each other, and have twice the time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from muon_fsdp.training.terminal import colored

_LONGEST_INTERVAL = 5.0  # seconds
_INTERVALS_OF_A_STORE = 4  # a store that has not answered for this long is taken to be gone
_VERDICT = "verdict"


@dataclass(frozen=True)
class Beat:
    """The last report that a rank wrote to the store."""

    number: int = 0  # increases with every beat, so that equal beats mean silence
    where: str = ""
    collectives: Mapping[str, int] = field(default_factory=dict)  # started so far, by process group


class Heartbeat:
    """Watches a job while the context is entered, and ends this process when a rank that it waits for does not come.

    `store` is the job's store, and `keeper` the rank that hosts it, or None if no rank does. Only time in which this
    process runs counts, so a job that is suspended as a whole continues afterwards.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float, keeper: int | None = None) -> None:
        own_connection = store.clone()  # type: ignore[attr-defined]  # calls on one connection block each other
        self._store = PrefixStore("heartbeat", own_connection)
        self._rank, self._size, self._timeout, self._keeper = rank, size, timeout, keeper
        self._interval = min(_LONGEST_INTERVAL, timeout / 4)
        self._where, self._moves = "the start", 0
        self._quiet = 0.0  # seconds since the program last made progress
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
            thread.join(_LONGEST_INTERVAL)  # with a limit: it may be waiting for a store that does not answer

    def note(self, where: str | None = None) -> None:
        """Record that the program makes progress, and where it is; a thread writes it to the store later."""
        self._moves += 1
        if where is not None:
            self._where = where

    def _watch(self) -> None:
        """Measure how long the program makes no progress; `_talk` cannot do so, because its store may never answer."""
        before = None
        while not self._left.wait(self._interval):
            now = (self._moves, collectives_begun())
            self._quiet = self._quiet + self._interval if now == before else 0.0
            self._unheard += self._interval
            before = now
            if self._quiet >= self._timeout and self._unheard > _INTERVALS_OF_A_STORE * self._interval:
                self._end(self._unanswered())

    def _talk(self) -> None:
        """Write the beats of this rank to the store, and read verdicts from it."""
        number, earlier = 0, None
        with suppress(dist.DistError):  # the process that hosted the store has ended
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
        """Return the last beat of every rank, None for a rank that has written none."""
        names = [str(rank) for rank in range(self._size)]
        if self._store.check(names):
            texts: Sequence[bytes | None] = self._store.multi_get(names)
        else:
            texts = [self._store.get(name) if self._store.check([name]) else None for name in names]
        return [None if text is None else Beat(**json.loads(text)) for text in texts]

    def _unanswered(self) -> str:
        if self._keeper is None:
            return f"waited {self._timeout:g} s for other ranks, and the job's store does not answer"
        return f"waited {self._timeout:g} s for rank {self._keeper}, which hosts the job's store and does not answer"

    def _end(self, verdict: str) -> None:
        """Print the verdict, give the other ranks time to read it too, and end the process.

        `os._exit` is needed because the main thread waits in a collective. A thread prints the message, because writing
        blocks if nobody reads standard error.
        """
        with self._ending:
            if self._left.is_set():
                return
            error = colored("error:", "red", sys.stderr)
            message = f"{error} rank {self._rank}: {verdict}; the last checkpoint is unchanged\n"
            threading.Thread(target=lambda: os.write(2, message.encode()), daemon=True).start()
            self._left.wait(2 * self._interval)
            os._exit(1)


def collectives_begun() -> dict[str, int]:
    """Return how many collectives this process has started, by process group and type of device."""
    begun = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        with suppress(KeyError, RuntimeError, ValueError):  # the group is being destroyed
            ranks = zlib.crc32(str(dist.get_process_group_ranks(group)).encode())  # groups may share a name
            for device in group._device_types:
                backend = group._get_backend(device)
                count = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]
                begun[f"{name}/{ranks:08x}/{device}"] = int(count)
    return begun


def find_verdict(
    rank: int, earlier: Sequence[Beat | None], now: Sequence[Beat | None], quiet: float, timeout: float
) -> str | None:
    """Find the rank that this one waits for.

    Args:
        rank: this rank. If it is behind itself it does not judge: the others may have been waiting only for a moment.
        earlier: the beats of all ranks, half the timeout ago.
        now: the beats of all ranks.
        quiet: seconds for which this rank has made no progress.
        timeout: seconds after which a rank counts as lost.

    Returns:
        What happened, or None if this rank may not be waiting for any other.
    """
    silent = [other for other, (old, new) in enumerate(zip(earlier, now, strict=True)) if new is None or new == old]
    if silent:
        ranks = [f"{other} ({_where(now[other], 'last seen at ')})" for other in silent]
        return f"waited {timeout:g} s for rank {', '.join(ranks)}, which no longer answers (it has stopped or ended)"
    behind = _behind([beat for beat in now if beat is not None])
    if behind and rank not in behind:
        ranks = [f"{other} ({_where(now[other], 'at ')})" for other in behind]
        return f"waited {timeout:g} s for rank {', '.join(ranks)}, which answers but makes no progress"
    if quiet < 2 * timeout:
        return None
    where = ", ".join(sorted({_where(beat, "at ") for beat in now}))
    return f"no rank has made progress for {2 * timeout:g} s ({where})"


def _behind(beats: Sequence[Beat]) -> list[int]:
    """Return the ranks that have started fewer collectives of a group than its others and do not wait themselves."""
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
    # A rank that is ahead of another one in some group waits for that one itself.
    roots = [rank for rank in behind if not (waited_in & set(beats[rank].collectives)) - lagging[rank]]
    return roots or behind


def _where(beat: Beat | None, words: str) -> str:
    return "never seen" if beat is None else words + beat.where
