"""Lend `apply` the weights of shards where it computes, and round what it leaves as their group asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from muon_fsdp.comm.dtensors import local
from muon_fsdp.declarations.state import State
from muon_fsdp.kernels.tables import REMAINDER
from muon_fsdp.linalg.rounding import remainder_of, round_at_random, with_remainder
from muon_fsdp.step.random_numbers import RandomNumbers
from muon_fsdp.step.sources import ListedShard


class Weights:
    """The weights that lists of tensors update. Kernels round on their own.

    Args:
        states: the state of every parameter, which includes what rounding has dropped.
        random: draws the bits that decide how weights are rounded at random.
    """

    def __init__(self, states: Mapping[int, State], random: RandomNumbers) -> None:
        self._states, self._random = states, random

    def lend(self, listed: Sequence[ListedShard]) -> list[Tensor]:
        """Return tensors for `apply` to change: the shards, or copies of those that are not rounded by it or not here.

        Copies are float32 if their group asks for another rounding than to the nearest.
        """
        return [self._working(each) for each in listed]

    def take_back(self, listed: Sequence[ListedShard], weights: Sequence[Tensor]) -> None:
        """Round what `apply` has left in copies, and store it in the shards."""
        for each, weight in zip(listed, weights, strict=True):
            if weight is each.shard:
                continue
            rounded = weight
            if each.record.rounding == "stochastic":
                rounded = round_at_random(weight, self._random.bits(each.record) & 0xFFFF, each.shard.dtype)
            elif each.record.rounding == "remainder":
                rounded = weight.to(each.shard.dtype)
                self._remainder(each).copy_(remainder_of(weight, rounded), non_blocking=True)
            each.shard.copy_(rounded, non_blocking=True)

    def _working(self, each: ListedShard) -> Tensor:
        shard, rounding = each.on_device(each.shard), each.record.rounding
        if rounding == "remainder":
            return with_remainder(shard, each.on_device(self._remainder(each)))
        return shard.float() if rounding == "stochastic" else shard

    def _remainder(self, each: ListedShard) -> Tensor:
        remainder, rows = local(self._states[each.record.position][REMAINDER]), each.record.rows
        return remainder if rows is None else remainder[slice(*rows)]
