"""Lay out the pieces of a flat buffer in the messages of an all-to-all, with as few copies as possible.

A matrix that is sharded over 4,096 ranks arrives as 4,096 pieces. They lie one after another both in the message and in
the matrix, so one copy moves all of them. Copying piece by piece would cost tens of milliseconds of host time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


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


@dataclass(frozen=True)
class Run:
    """Elements that are contiguous both in a buffer and in a message."""

    in_buffer: int  # offset
    in_message: int
    numel: int

    def joined(self, other: Run) -> Run | None:
        """Return both runs as one; None if the other does not continue this one on both sides."""
        if (self.in_buffer + self.numel, self.in_message + self.numel) != (other.in_buffer, other.in_message):
            return None
        return Run(self.in_buffer, self.in_message, self.numel + other.numel)


@dataclass(frozen=True)
class StridedPiece:
    """A piece that is contiguous in a message and not in the buffer."""

    slot: Slot
    slices: tuple[slice, ...]  # of the tensor in the slot
    in_message: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """The layout of pieces of a flat buffer in messages to, or from, the other ranks.

    Args:
        sizes: elements per rank, in the order of the process group; 0 for this rank.
        runs: parts that are contiguous on both sides, as long as possible.
        strided: all other parts.
    """

    sizes: tuple[int, ...]
    runs: tuple[Run, ...]
    strided: tuple[StridedPiece, ...]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def parts(self, buffer: Tensor, message: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the buffer, and the views of the message that correspond to them."""
        in_buffer = [buffer[run.in_buffer : run.in_buffer + run.numel] for run in self.runs]
        in_message = [message[run.in_message : run.in_message + run.numel] for run in self.runs]
        for piece in self.strided:
            in_buffer.append(piece.slot.of(buffer)[piece.slices])
            end = piece.in_message + math.prod(piece.shape)
            in_message.append(message[piece.in_message : end].view(piece.shape))
        return in_buffer, in_message


def make_packing(pieces: Sequence[Iterable[tuple[Slot, tuple[slice, ...]]]], me: int) -> Packing:
    """Arrange pieces in messages, rank after rank.

    Args:
        pieces: per rank, the slot of every piece and the slices of it.
        me: this rank, whose pieces are not sent.
    """
    sizes: list[int] = []
    runs: list[Run] = []
    strided: list[StridedPiece] = []
    offset = 0
    for rank, of_rank in enumerate(pieces):
        start = offset
        for slot, slices in of_rank if rank != me else ():
            shape = tuple(part.stop - part.start for part in slices)
            first = _contiguous_start(slot.shape, slices)
            if first is None:
                strided.append(StridedPiece(slot, slices, offset, shape))
            else:
                run = Run(slot.offset + first, offset, math.prod(shape))
                joined = runs[-1].joined(run) if runs else None
                runs[-1:] = [joined] if joined is not None else [*runs[-1:], run]
            offset += math.prod(shape)
        sizes.append(offset - start)
    return Packing(tuple(sizes), tuple(runs), tuple(strided))


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
