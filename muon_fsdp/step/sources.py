"""Lend stages what they read: gradients, options and state. `step()` lends what is live, backward lends copies.

A stage takes everything from its source and gives its result to a sink (`step/sinks.py`). Where state is stored, and in
which form, is the affair of the `StateStore` behind the source: stages and rules see working tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from muon_fsdp.comm.dtensors import local
from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.declarations.settings import Settings
from muon_fsdp.declarations.state import PerParameter, State, StateSpec
from muon_fsdp.kernels.tables import SCALES, TensorList
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.parameters.stored_state import decode_state, encoding_of, is_offloaded
from muon_fsdp.plan.stages import Member, Stage
from muon_fsdp.rules import RULES, MatrixBatch
from muon_fsdp.rules.base import GroupOptions
from muon_fsdp.step.fused import FusedStep
from muon_fsdp.step.inputs import StepInputs, in_precision
from muon_fsdp.step.matrix_state import BatchValues, MatrixStates
from muon_fsdp.step.metrics import Sample, Samples
from muon_fsdp.step.random_numbers import RandomNumbers


class ListedShard(NamedTuple):  # a dataclass takes three times as long to make, for thousands of parameters a step
    """The shard of one parameter that lists of tensors update, outside fused launches; or some rows of it."""

    record: ParameterRecord  # of these rows
    shard: Tensor  # on the host or on the device of the record, as the gradient
    grad: Tensor | None  # None if only other ranks have a gradient; it counts as zero here
    divisor: int

    def working_gradient(self) -> Tensor:
        """Return the gradient in working precision. Call it per stage, so that few converted copies exist at once."""
        if self.grad is None:
            return torch.zeros_like(self.shard, dtype=self.record.dtype, device=self.record.device)
        grad = in_precision(self.on_device(self.grad), self.record.dtype)
        return grad / self.divisor if self.divisor > 1 else grad

    def on_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is on the host, or on the device, on the device."""
        device = self.record.device
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class StageInputs:
    """The shards that a stage updates, and their options.

    Args:
        groups: the options of its groups, by number.
        lists: the number of a group and its shards that lists of tensors update.
        fused: the lists that kernels update, with their tables filled.
        updated: the parameters, of all stages, for which some rank has a gradient.
        positions: the parameters that take part. If they travel these are all, because the plan fixes the sizes of
            messages.
    """

    groups: Mapping[int, GroupOptions]
    lists: Sequence[tuple[int, Sequence[ListedShard]]]
    fused: Sequence[TensorList]
    updated: Collection[int]
    positions: frozenset[int]

    @property
    def fused_positions(self) -> set[int]:
        """Return the positions of the shards that kernels update."""
        return {position for each in self.fused for position in each.positions}

    @property
    def listed(self) -> list[int]:
        """Return the positions of the shards that lists of tensors update."""
        return [each.record.position for _, shards in self.lists for each in shards]


def stage_inputs(
    stage: Stage, inputs: StepInputs, fused: Sequence[TensorList], records: Sequence[ParameterRecord]
) -> StageInputs:
    """Return the inputs of one stage, given those of a step."""
    by_kernels = frozenset(position for each in fused for position in each.positions)
    lists = []
    for group, positions in stage.positions_by_group:
        shards = [
            ListedShard(
                records[i].cut(stage.rows.get(i)),
                stage.cut(i, inputs.shards[i]),
                stage.cut(i, inputs.gradients[i]) if i in inputs.gradients else None,
                inputs.divisor,
            )
            for i in positions
            if i in inputs.updated and i not in by_kernels
        ]
        if shards:
            lists.append((group, shards))
    if stage.exchange is not None:
        takes_part = stage.positions
    else:
        takes_part = by_kernels.union(each.record.position for _, shards in lists for each in shards)
    return StageInputs(inputs.groups, lists, fused, inputs.updated, takes_part)


# --------------------------------------------------------------------------------------------------------------- state


class StateStore:
    """Keeps the `PerParameter` state of an optimizer, and lends it to one stage after another.

    This one stores it in `optimizer.state`, which all methods get by position: the moments of some parameters in 8 bits
    or in bfloat16, all other state as rules use it. Kernels read and write what is stored. Lists of tensors get decoded
    copies, which exist for at most the stages in flight. Another way to store state is a subclass. Two threads may
    borrow at once, `step()` and backward, never the same stage.

    Args:
        records: one per parameter.
    """

    def __init__(self, records: Sequence[ParameterRecord]) -> None:
        self._records = records

    def stored(self, position: int, state: State) -> State:
        """Return the tensors that are stored for a parameter, given its `optimizer.state`: changes show there."""
        return state

    def addressed(self, position: int, state: State, stage: int | None = None) -> State:
        """Return the tensors that kernels read and write for a parameter in a stage, or in any one, if it is None."""
        return self.stored(position, state)

    def begin(self, stages: Sequence[Stage], states: Mapping[int, State], updated: Collection[int]) -> None:
        """Prepare for a step with these stages, in this order, that updates some of the parameters."""

    def end(self) -> None:
        """End a step: what was lent is stored when this returns, also if the step has failed."""

    def check(self, states: Mapping[int, State], shards: Sequence[Tensor], *, starts_anew: bool) -> None:
        """Raise if state is not on the device of its shard or has another shape; kernels would write elsewhere.

        Missing state will be created.

        Args:
            states: the state, in any of the forms in which it can be stored.
            shards: the shard of every parameter.
            starts_anew: whether state that was created for another shape, or on the meta device, will be replaced.
        """
        for record, shard in zip(self._records, shards, strict=True):
            state = states[record.position]
            for spec in record.all_state:
                value = state.get(spec.name)
                if value is None:
                    continue
                is_other = (
                    value.shape != spec.shape(record.tensor, record.view) or value.is_meta != record.tensor.is_meta
                )
                if starts_anew and is_other:
                    continue
                _check_tensor(record, spec, local(value), shard)
                encoding = encoding_of(record, spec, state)
                if encoding is not None and encoding.has_scales:
                    _check_scales(record, spec, state[spec.name + SCALES], encoding.scales_shape(shard.shape), shard)

    def lend(
        self, stage: Stage, states: Mapping[int, State], listed: Sequence[int], fused: Collection[int]
    ) -> dict[int, State]:
        """Lend a stage its state, until `take_back`.

        Args:
            stage: the stage.
            states: the optimizer's state.
            listed: the parameters whose working tensors are returned: local tensors, which the stage changes.
            fused: the parameters whose stored tensors kernels change, at the addresses in their tables.
        """
        return {i: _working(self._records[i], states[i]) for i in listed}

    def take_back(
        self, stage: Stage, states: Mapping[int, State], lent: Mapping[int, State], random: RandomNumbers
    ) -> None:
        """Store what a stage has left in the tensors that were lent; `random` draws the bits of this step."""
        for position, working in lent.items():
            record = self._records[position].cut(stage.rows.get(position))
            if record.encoding is None:
                continue
            for spec in record.rule.all_state:
                if isinstance(spec, PerParameter) and spec.is_moment:
                    # 16 random bits for every element decide how second moments are rounded at this step.
                    dither = (random.bits(record) >> 16).to(torch.int32) if spec.code == "positive" else None
                    for name, value in record.encoding.encode(spec, working[spec.name], dither).items():
                        local(states[position][name]).copy_(value)

    def copies(
        self, stage: Stage, states: Mapping[int, State], listed: Sequence[int], fused: Collection[int]
    ) -> dict[int, State]:
        """Return copies that a stage may change and nobody stores: of working tensors, and of stored ones if fused.

        They are on the device of their parameter, though somebody may have moved the state elsewhere.
        """
        found = {}
        for position in (*listed, *fused):
            # A copy of the dict: the user may clear it in another thread.
            state = {n: value for n, value in dict(states[position]).items() if isinstance(value, Tensor)}
            device = self._records[position].device
            found[position] = {name: _copied(local(value), device) for name, value in state.items()}
        return found | {i: _working(self._records[i], found[i]) for i in listed}


def _check_tensor(record: ParameterRecord, spec: StateSpec, state: Tensor, shard: Tensor) -> None:
    """Raise if a local tensor of state has another shape or is on another device than a step needs."""
    shape = shard.shape if spec.is_sharded else spec.shape(record.tensor, record.view)
    if state.shape != shape:
        raise RuntimeError(
            f"state {spec.name!r} of parameter {record.name!r} has shape {tuple(state.shape)} instead of "
            f"{tuple(shape)}: restore it, or delete it from optimizer.state[parameter] to start anew"
        )
    device = shard.device if spec.is_sharded else record.device
    # PyTorch accepts a number on the CPU anywhere.
    if state.device != device and state.ndim > 0 and not is_offloaded(record, spec):
        raise RuntimeError(
            f"state {spec.name!r} of parameter {record.name!r} is on {state.device} and the parameter on "
            f"{device}: move the state back before step()"
        )


def _check_scales(record: ParameterRecord, spec: StateSpec, scales: Tensor, shape: torch.Size, shard: Tensor) -> None:
    """Raise if the scales of state do not fit its codes, or are on another device."""
    if scales.shape != shape or (scales.device != shard.device and not is_offloaded(record, spec)):
        raise RuntimeError(
            f"state {spec.name + SCALES!r} of parameter {record.name!r} has shape {tuple(scales.shape)} on "
            f"{scales.device} instead of {tuple(shape)} on {shard.device}: restore it together with "
            f"{spec.name!r}, or delete both from optimizer.state[parameter] to start anew"
        )


def _working(record: ParameterRecord, state: State) -> State:
    """Return local tensors of state; those that are stored in another form are decoded."""
    if record.encoding is not None:
        state = decode_state(record, state)
    return state if record.is_plain and not record.shards_state else {name: local(v) for name, v in state.items()}


def _copied(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor of state on a device; one number may stay where it is."""
    if value.ndim == 0 or value.device == device:
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))
        return value.clone()
    return value.to(device)


# ------------------------------------------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class StepContext:
    """The records, settings and state that all steps with one plan share, and the stages beside backward too.

    Args:
        records: one per parameter.
        settings: the settings of the whole optimizer.
        store: keeps the state.
        random: draws the random numbers of rules.
        samples: takes samples of updates for `metrics()`.
    """

    records: Sequence[ParameterRecord]
    settings: Settings
    store: StateStore
    random: RandomNumbers
    samples: Samples


class StageResult(NamedTuple):
    """The result of a stage that ran in backward.

    Args:
        buffer: the updates, (stage.shard_numel,); the gathered units, (stage.unit_numel,), if the rule needs weights.
        values: by number of the batch, the per-matrix state that `direction` has written; empty for units.
        samples: the samples that were taken for `metrics()`.
        failure: the method of the rule that failed and what it raised; None if all is well.
        event: a CUDA event after which it is written; None on a CPU.
    """

    buffer: Tensor
    values: Mapping[int, BatchValues]
    samples: Mapping[tuple[int, int], Sample]
    failure: tuple[str, Exception] | None
    event: Any


class Source(Protocol):
    """Lends the stages of one step, or of one backward, what they read."""

    settings: Settings
    recorder: Recorder  # notes what the host does between launches, for a CUDA graph

    def kept(self, stage: Stage) -> Callable[[], StageResult] | None:
        """Return what waits for the result that backward has kept, and returns it; None if the stage starts anew."""

    def open(self, stage: Stage) -> StageInputs:
        """Return what a stage updates. It is called once, before anything else of the stage."""

    def lend(self, stage: Stage, inputs: StageInputs) -> AbstractContextManager[Mapping[int, State]]:
        """Lend the working tensors of state for lists of tensors, by position, within a block."""

    def complete(self, stage: Stage, number: int, members: Sequence[Member], batch: MatrixBatch) -> Any:
        """Give a batch its per-matrix state, statistics and random numbers.

        Args:
            stage: the stage.
            number: of the batch in the stage.
            members: those of the batch that take part.
            batch: what `direction` will get.

        Returns:
            Which per-matrix state it got, for the sink; None if the rule has none.
        """


class StepSource:
    """Lends what is live to the stages of `step()`.

    Args:
        context: what all steps have in common.
        inputs: the tensors and options of the step.
        fused: the fused lists of every stage; their tables are filled.
        recorder: notes what the host does between launches.
        matrices: per-matrix state, statistics and factors.
        kept: for stages that ran in backward, by number: waits for the result and returns it.
    """

    def __init__(
        self,
        context: StepContext,
        inputs: StepInputs,
        fused: FusedStep,
        recorder: Recorder,
        matrices: MatrixStates,
        kept: Mapping[int, Callable[[], StageResult]],
    ) -> None:
        self.settings, self.recorder = context.settings, recorder
        self._context, self._inputs, self._fused = context, inputs, fused
        self._matrices, self._kept = matrices, kept

    def kept(self, stage: Stage) -> Callable[[], StageResult] | None:
        return self._kept.get(stage.number)

    def open(self, stage: Stage) -> StageInputs:
        return stage_inputs(stage, self._inputs, self._fused.stages[stage.number], self._context.records)

    @contextmanager
    def lend(self, stage: Stage, inputs: StageInputs) -> Iterator[Mapping[int, State]]:
        store, states = self._context.store, self._inputs.states
        lent = store.lend(stage, states, inputs.listed, inputs.fused_positions)
        try:
            yield lent
        finally:
            store.take_back(stage, states, lent, self._context.random)

    def complete(self, stage: Stage, number: int, members: Sequence[Member], batch: MatrixBatch) -> Any:
        selection = None
        if RULES[stage.rule].has_matrix_values:
            selection = self._matrices.selection(stage, number, members)
            self._matrices.complete(selection, batch)
        batch.draw = self._context.random.source(stage, number, members, batch.matrices.device, None)
        return selection
