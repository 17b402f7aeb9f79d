"""Draw the random numbers of rules: functions of seed, parameter, matrix and step, equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from muon_fsdp.linalg.philox import element_bits, parameter_key, uniform
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.plan.stages import Member, Stage
from muon_fsdp.rules.base import GroupOptions

Draw: TypeAlias = Callable[[int, tuple[int, ...], torch.dtype], Tensor]  # of a call, a shape and a dtype
_BatchKey: TypeAlias = tuple[int, int, tuple[Member, ...]]  # a stage, a batch in it and its members


class RandomNumbers:
    """The random numbers of all matrices of an optimizer, and the random bits of all elements.

    Args:
        records: one per parameter.
    """

    def __init__(self, records: Sequence[ParameterRecord]) -> None:
        self._records = records
        # Made by the first eager step that draws. A captured step keeps the addresses of these tensors.
        self._streams: dict[_BatchKey, tuple[Tensor, Tensor]] = {}
        self._numbers: dict[torch.device, Tensor] = {}  # of the present step
        self._number = 0
        self._groups: Mapping[int, GroupOptions] = {}

    def fill(self, number: int, groups: Mapping[int, GroupOptions]) -> None:
        """Take the number of the present step, also to where a captured step reads it, and the options of its groups.

        The groups of records may be older: loading puts other ones in their place, and the plan stays.
        """
        self._number, self._groups = number, groups
        for tensor in self._numbers.values():
            tensor.fill_(number)

    def source(
        self, stage: Stage, batch: int, members: Sequence[Member], device: torch.device, number: int | None
    ) -> Draw:
        """Return what draws the numbers of the members of a batch.

        Args:
            stage: the stage.
            batch: the number of the batch in the stage.
            members: its members that take part.
            device: where they are.
            number: the number of the step; None for the present one.
        """
        return partial(self._draw, stage, (stage.number, batch, tuple(members)), device, number)

    def bits(self, record: ParameterRecord) -> Tensor:
        """Return 32 random bits for every element of a parameter that this rank updates, the same on all replicas."""
        seed = self._groups[record.group_index].get("rounding_seed", 0)
        return element_bits(record.random_key, self._number, seed, record.element_numbers())

    def _draw(
        self,
        stage: Stage,
        key: _BatchKey,
        device: torch.device,
        number: int | None,
        call: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        keys, matrices = self._stream_of(stage, key, device)
        counter = torch.empty(len(matrices), 3, dtype=torch.int64, device=device)
        counter[:, 0] = matrices
        counter[:, 1] = self._present(device) if number is None else number
        counter[:, 2] = call
        return uniform(keys, counter, math.prod(shape), dtype).view(len(matrices), *shape)

    def _present(self, device: torch.device) -> Tensor:
        if device not in self._numbers:
            self._numbers[device] = torch.full((), self._number, dtype=torch.int64, device=device)
        return self._numbers[device]

    def _stream_of(self, stage: Stage, key: _BatchKey, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the keys (B, 2) of the parameters of some matrices, and the numbers (B,) of the matrices in these."""
        if key in self._streams:
            return self._streams[key]
        _, batch, members = key
        seed = stage.batches[batch].options.get("seed", 0)
        keys: list[tuple[int, int]] = []
        matrices: list[int] = []
        for member in members:
            unit = stage.units[member.unit]
            record = self._records[unit.position]
            assert record.view is not None
            counts = [count for count, _, _ in record.view.block_shapes]
            block, within = unit.block_of(member.block)
            first = sum(counts[:block]) + within
            matrices += range(first + member.start, first + member.stop)
            keys += [parameter_key(seed, record.name)] * (member.stop - member.start)
        # The host waits for these copies: another stream may use them next.
        stream = (torch.tensor(keys, device=device), torch.tensor(matrices, device=device))
        if len(members) == len(stage.batches[batch].members):  # there may be many other subsets
            self._streams[key] = stream
        return stream
