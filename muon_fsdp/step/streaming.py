"""Keep moments in the memory of the host, and copy those of a few stages to the device at a time.

A stage computes on one of three slots on the device. Meanwhile the state of the next stage is copied to another slot,
and that of the stage before is copied back from the third, each on a stream of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muon_fsdp.comm.dtensors import local
from muon_fsdp.comm.host_memory import HostArena
from muon_fsdp.declarations.state import PerParameter, State
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.parameters.stored_state import is_offloaded, stored_forms
from muon_fsdp.plan.costs import NUM_SLOTS
from muon_fsdp.plan.stages import Stage
from muon_fsdp.rules import RULES
from muon_fsdp.step.random_numbers import RandomNumbers
from muon_fsdp.step.sources import StateStore


class _Place(NamedTuple):
    """Where a tensor of state lies in the slot of its stage."""

    name: str
    offset: int  # in bytes
    shape: torch.Size
    dtype: torch.dtype


class _Slot:
    """Memory on a device for the state of one stage at a time.

    Args:
        num_bytes: the bytes of the largest of its stages.
        device: the device.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.holds: int | None = None  # the number of the stage whose state it has
        self.filled: Any = None  # a CUDA event after which this state has arrived
        self.free: Any = None  # one after which the state before has been copied back

    def tensor(self, place: _Place) -> Tensor:
        """Return a tensor of state."""
        num_bytes = place.shape.numel() * place.dtype.itemsize
        return self.memory[place.offset : place.offset + num_bytes].view(place.dtype).view(place.shape)


class StreamedStore(StateStore):
    """Keeps moments on the host, in the forms of `StateStore`, and lends stages copies on the device.

    Args:
        records: one per parameter.
        stages: the stages of the plan.
    """

    def __init__(self, records: Sequence[ParameterRecord], stages: Sequence[Stage]) -> None:
        super().__init__(records)
        self._has_weights = any(record.is_on_host for record in records)
        self._stages = {stage.number: stage for stage in stages}
        self._stage_of = {position: stage.number for stage in stages for position in stage.positions}  # one of them
        # By number of the stage: what it has in a slot, by position, and which slot that is.
        self._places: dict[int, Mapping[int, Sequence[_Place]]] = {}
        self._slot_of: dict[int, tuple[torch.device, int]] = {}
        self._sizes: defaultdict[tuple[torch.device, int], int] = defaultdict(int)
        for stage in stages:
            self._places[stage.number], size = self._lay_out(stage)
            if size:
                device = records[min(stage.positions)].device
                slot = self._slot_of[stage.number] = (device, stage.number % NUM_SLOTS)
                self._sizes[slot] = max(self._sizes[slot], size)
        # Made by the first step: slots, the tensors of state in them, by numbers of stage and position, and streams.
        self._slots: dict[tuple[torch.device, int], _Slot] = {}
        self._copies: dict[int, dict[int, dict[str, Tensor]]] = {}
        self._streams: dict[torch.device, Mapping[str, Any]] = {}  # of every GPU
        # Of the present step: the stage that follows the one with a number, all state, and the positions that change.
        self._next: Mapping[int, Stage] = {}
        self._states: Mapping[int, State] = {}
        self._updated: Collection[int] = ()
        self._seen: dict[int, dict[int, State]] = {}  # the state in slots of the stages that have a loan

    def _lay_out(self, stage: Stage) -> tuple[Mapping[int, Sequence[_Place]], int]:
        """Return where the state of a stage lies in its slot, by position, and the bytes of all."""
        places: dict[int, list[_Place]] = defaultdict(list)
        size = 0
        for position in sorted(stage.positions):
            record = self._records[position].cut(stage.rows.get(position))
            for spec in record.rule.all_state:
                if is_offloaded(record, spec):
                    forms = stored_forms(record, spec)
                elif position in stage.rows and isinstance(spec, PerParameter) and not spec.is_sharded:
                    # Every stage that updates some rows must count from the same number.
                    forms = [(spec.name, torch.Size(()), spec.dtype(record.tensor))]
                else:
                    continue
                for name, shape, dtype in forms:
                    places[position].append(_Place(name, size, shape, dtype))
                    size += HostArena.bytes_of(shape, dtype)
        return places, size

    # ---------------------------------------------------------------------------------------------------- in a step

    def begin(self, stages: Sequence[Stage], states: Mapping[int, State], updated: Collection[int]) -> None:
        self._next = {stage.number: after for stage, after in pairwise(stages)}
        self._states, self._updated = states, updated
        self._make_slots()  # one that is made later would have memory that kernels before it may still use
        for device, streams in self._streams.items():
            for stream in streams.values():  # for slots that are new, and state that is on the device
                stream.wait_stream(torch.cuda.current_stream(device))
        for slot in self._slots.values():
            slot.holds = None  # state may have been loaded since
        first = self._slot(stages[0].number) if stages else None
        if first is not None:
            self._fetch(stages[0], first)

    def end(self) -> None:
        for device, streams in self._streams.items():
            for stream in streams.values():  # a step that fails may leave a slot that is still being filled
                stream.synchronize()
            if self._has_weights:
                torch.cuda.current_stream(device).synchronize()  # `Weights` copies them
        self._next, self._states, self._updated = {}, {}, ()

    def lend(
        self, stage: Stage, states: Mapping[int, State], listed: Sequence[int], fused: Collection[int]
    ) -> dict[int, State]:
        slot = self._slot(stage.number)
        if slot is not None:
            self._fetch(stage, slot)
            if slot.filled is not None:
                torch.cuda.current_stream(slot.memory.device).wait_event(slot.filled)
        after = self._next.get(stage.number)
        # A stage that will borrow its state again, to apply, may need the slot of the next one until then.
        if after is not None and not RULES[stage.rule].state_in_apply:
            slot_after = self._slot(after.number)
            if slot_after is not None and slot_after is not slot:
                self._fetch(after, slot_after)
        self._seen[stage.number] = seen = {i: self.addressed(i, states[i], stage.number) for i in (*listed, *fused)}
        return super().lend(stage, seen, listed, fused)

    def take_back(
        self, stage: Stage, states: Mapping[int, State], lent: Mapping[int, State], random: RandomNumbers
    ) -> None:
        super().take_back(stage, self._seen.pop(stage.number), lent, random)
        slot = self._slot(stage.number)
        if slot is not None:
            with self._copying(slot, "out"):
                torch._foreach_copy_(*self._pairs(stage, back=True), non_blocking=True)

    def _fetch(self, stage: Stage, slot: _Slot) -> None:
        """Start to copy the state of a stage to its slot, unless it is there."""
        if slot.holds != stage.number:
            slot.holds = stage.number
            with self._copying(slot, "in"):
                kept, copies = self._pairs(stage, back=False)
                torch._foreach_copy_(copies, kept, non_blocking=True)

    @contextmanager
    def _copying(self, slot: _Slot, way: str) -> Iterator[None]:
        """Copy to or from a slot within a block: after what must end before, and beside everything else."""
        device = slot.memory.device
        if device.type != "cuda":
            yield
            return
        stream = self._streams[device][way]
        if way == "out":
            stream.wait_stream(torch.cuda.current_stream(device))  # on which the stage has computed
        elif slot.free is not None:
            stream.wait_event(slot.free)
        with torch.cuda.stream(stream):
            yield
        if way == "out":
            slot.free = stream.record_event()
        else:
            slot.filled = stream.record_event()

    def _pairs(self, stage: Stage, *, back: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return what is kept of the state that changes in this step, and its copies in the slot of a stage.

        Args:
            stage: the stage.
            back: whether the copies go back to the host; a count that later stages start from too then stays as it is.
        """
        kept, copies = [], []
        for position, of_parameter in self._copies[stage.number].items():
            if position in self._updated:
                for name, copy in of_parameter.items():
                    if copy.ndim > 0 or not back or self._is_last(stage, position):
                        value = local(self._states[position][name])
                        kept.append(stage.cut(position, value) if copy.ndim > 0 else value)
                        copies.append(copy)
        return kept, copies

    def _is_last(self, stage: Stage, position: int) -> bool:
        """Return whether no later stage updates further rows of a shard."""
        return position not in stage.rows or stage.rows[position][1] == len(self._records[position].part())

    def _slot(self, number: int) -> _Slot | None:
        """Return the slot of a stage; None if nothing of it is kept on the host."""
        key = self._slot_of.get(number)
        return self._slots[key] if key is not None else None

    def _make_slots(self) -> None:
        """Make all slots and the streams that fill them, unless they exist."""
        if self._slots:
            return
        self._slots = {key: _Slot(num_bytes, key[0]) for key, num_bytes in self._sizes.items()}
        for number, key in self._slot_of.items():
            self._copies[number] = {
                position: {place.name: self._slots[key].tensor(place) for place in places}
                for position, places in self._places[number].items()
            }
        for device in {device for device, _ in self._slots if device.type == "cuda"}:
            self._streams[device] = {way: torch.cuda.Stream(device) for way in ("in", "out")}  # type: ignore[no-untyped-call]

    # -------------------------------------------------------------------------------------------- what others see

    def addressed(self, position: int, state: State, stage: int | None = None) -> State:
        number = self._stage_of.get(position) if stage is None else stage
        if number is None or number not in self._slot_of:
            return state
        self._make_slots()
        found = dict(state)
        if position in self._stages[number].rows:
            for spec in self._records[position].all_state:
                if spec.is_sharded:
                    found[spec.name] = self._stages[number].cut(position, local(state[spec.name]))
        return found | self._copies[number].get(position, {})

    def copies(
        self, stage: Stage, states: Mapping[int, State], listed: Sequence[int], fused: Collection[int]
    ) -> dict[int, State]:
        on_device: dict[int, State] = {}
        for position in (*listed, *fused):
            device, state = self._records[position].device, dict(states[position])
            places = self._places[stage.number].get(position, ())
            on_device[position] = state | {p.name: local(state[p.name]).to(device) for p in places}
        return super().copies(stage, on_device, listed, fused)
