"""Lay out the pieces of a flat buffer in the messages of an all-to-all, with as few copies as possible.

A matrix that is sharded over 4,096 ranks arrives as 4,096 pieces. They lie one after another both in the message and in
the matrix, so one copy moves all of them. The pieces of 4,000 equal matrices lie at equal distances, so one strided
copy moves these. Copying piece by piece would cost tens of milliseconds of host time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from torch import Tensor

# Longer runs are copied one by one: a fused launch copies several of them and loads longer vectors than a strided copy.
SHORT_RUN = 2**16


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a flat buffer."""

    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, buffer: Tensor) -> Tensor:
        """Return the tensor as a view of the buffer."""
        return buffer[self.offset : self.offset + self.numel].view(self.shape)


BufferBox: TypeAlias = tuple[Slot, tuple[slice, ...]]  # a box of a tensor that lies in a flat buffer


@dataclass(frozen=True)
class Run:
    """Elements that are contiguous in two flat buffers; or several such runs of one length, at equal distances."""

    first: int  # offset in the first buffer
    second: int
    numel: int
    count: int = 1
    first_step: int = 0  # from one run to the next
    second_step: int = 0

    def joined(self, other: Run) -> Run | None:
        """Return both runs as one; None if the other does not continue this one in both buffers."""
        if (self.first + self.numel, self.second + self.numel) != (other.first, other.second):
            return None
        return Run(self.first, self.second, self.numel + other.numel)

    def repeated(self, other: Run) -> Run | None:
        """Return this run, repeated once more where the other is; None if that is not such a repetition."""
        steps = other.first - self.first, other.second - self.second
        if self.count > 1:
            steps = steps[0] - (self.count - 1) * self.first_step, steps[1] - (self.count - 1) * self.second_step
            if steps != (self.first_step, self.second_step):
                return None
        if self.numel != other.numel or self.numel > SHORT_RUN or min(steps) < self.numel:
            return None
        return Run(self.first, self.second, self.numel, self.count + 1, *steps)


@dataclass(frozen=True)
class Copies:
    """The elements of one flat buffer that are copied to another, or back.

    Args:
        runs: those that are contiguous in both, as long as possible; single runs come first.
        strided: all others, by their boxes in both buffers.
    """

    runs: tuple[Run, ...]
    strided: tuple[tuple[BufferBox, BufferBox], ...]

    @cached_property
    def num_dense(self) -> int:
        """Return how many of the views are contiguous, so that one launch can copy them; they come first."""
        return sum(run.count == 1 for run in self.runs)

    def in_first(self, buffer: Tensor) -> list[Tensor]:
        """Return the views of the first buffer."""
        views = [_view(buffer, run.first, run.numel, run.count, run.first_step) for run in self.runs]
        return views + [slot.of(buffer)[slices] for (slot, slices), _ in self.strided]

    def in_second(self, buffer: Tensor) -> list[Tensor]:
        """Return the views of the second buffer, in the same order."""
        views = [_view(buffer, run.second, run.numel, run.count, run.second_step) for run in self.runs]
        return views + [slot.of(buffer)[slices] for _, (slot, slices) in self.strided]


def _view(buffer: Tensor, start: int, numel: int, count: int, step: int) -> Tensor:
    """Return a view of one run, (numel,), or of several at equal distances, (count, numel)."""
    if count == 1:
        return buffer[start : start + numel]
    return buffer.as_strided((count, numel), (step, 1), buffer.storage_offset() + start)


@dataclass(frozen=True)
class Packing:
    """The layout of pieces of a flat buffer in messages to, or from, the other ranks.

    Args:
        sizes: elements per rank, in the order of the process group; 0 for this rank.
        copies: from the buffer to the messages, which lie one after another.
    """

    sizes: tuple[int, ...]
    copies: Copies

    @property
    def numel(self) -> int:
        return sum(self.sizes)


def make_packing(pieces: Sequence[Iterable[BufferBox]], me: int) -> Packing:
    """Arrange pieces in messages, rank after rank.

    Args:
        pieces: per rank, the slot of every piece and the slices of it.
        me: this rank, whose pieces are not sent.
    """
    sizes: list[int] = []
    runs: list[Run] = []
    strided: list[tuple[BufferBox, BufferBox]] = []
    offset = 0
    for rank, of_rank in enumerate(pieces):
        start = offset
        for slot, slices in of_rank if rank != me else ():
            shape = tuple(part.stop - part.start for part in slices)
            first = _contiguous_start(slot.shape, slices)
            if first is None:
                strided.append(((slot, slices), (Slot(offset, shape), tuple(slice(0, size) for size in shape))))
            else:
                _append(runs, Run(slot.offset + first, offset, math.prod(shape)))
            offset += math.prod(shape)
        sizes.append(offset - start)
    return Packing(tuple(sizes), Copies(_repeated(runs), tuple(strided)))


def make_copies(boxes: Iterable[tuple[BufferBox, BufferBox]]) -> Copies:
    """Arrange the copies between two flat buffers, given the boxes of every piece in both."""
    runs: list[Run] = []
    strided: list[tuple[BufferBox, BufferBox]] = []
    for (slot, slices), (other_slot, other_slices) in boxes:
        start, other_start = _contiguous_start(slot.shape, slices), _contiguous_start(other_slot.shape, other_slices)
        if start is None or other_start is None:
            strided.append(((slot, slices), (other_slot, other_slices)))
        else:
            numel = math.prod(part.stop - part.start for part in slices)
            _append(runs, Run(slot.offset + start, other_slot.offset + other_start, numel))
    return Copies(_repeated(runs), tuple(strided))


def _append(runs: list[Run], run: Run) -> None:
    """Append a run, or join it with the last one."""
    joined = runs[-1].joined(run) if runs else None
    runs[-1:] = [joined] if joined is not None else [*runs[-1:], run]


def _repeated(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Combine short runs at equal distances, and put single runs first."""
    found: list[Run] = []
    for run in runs:
        repeated = found[-1].repeated(run) if found else None
        found[-1:] = [repeated] if repeated is not None else [*found[-1:], run]
    return tuple(sorted(found, key=lambda run: run.count > 1))


def _contiguous_start(shape: Sequence[int], slices: Sequence[slice]) -> int | None:
    """Return where a box of a contiguous tensor begins if its elements are contiguous too; else None."""
    start, stride, is_whole = 0, 1, True  # from the last axis on, whether all axes so far are whole
    for size, part in zip(reversed(shape), reversed(slices), strict=True):
        length = part.stop - part.start
        if not is_whole and length != 1:
            return None
        is_whole &= length == size
        start += part.start * stride
        stride *= size
    return start
