"""Sort parameters into lists that fused kernels update, and fill the tables that the kernels read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, TypeAlias
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.dtensors import local
from muon_fsdp.kernels import unusable
from muon_fsdp.kernels.launch import is_aligned
from muon_fsdp.kernels.tables import (
    ALIGNMENT,
    FUSED_DTYPES,
    ListSpec,
    ListValues,
    Tables,
    TensorList,
    make_chunks,
    num_chunks,
)
from muon_fsdp.plan.stages import Plan, Stage
from muon_fsdp.rules import RULES, Rule
from muon_fsdp.step.inputs import StepInputs
from muon_fsdp.step.matrix_state import MatrixStates

Signature: TypeAlias = tuple[tuple[torch.dtype, torch.dtype] | None, ...]


@dataclass(frozen=True)
class FusedList:
    """Parameters of one group that the same kernel launches update."""

    group: int
    positions: tuple[int, ...]  # in the order of the table
    tensors: TensorList
    # Chunks with one factor each, and whether they are aligned; None if the rule does not multiply weights.
    factor_chunks: tuple[Tensor, bool] | None = None

    def with_factor_chunks(self) -> TensorList:
        """Return the list cut so that every chunk has one factor."""
        assert self.factor_chunks is not None
        chunks, aligned = self.factor_chunks
        # These chunks may begin at other addresses than those of the whole list.
        return replace(self.tensors, chunks=chunks, aligned=self.tensors.aligned and aligned)


@dataclass(frozen=True)
class FusedStage:
    """The fused lists of one stage; empty if nothing can be fused."""

    lists: tuple[FusedList, ...] = ()
    positions: frozenset[int] = frozenset()
    example: Tensor | None = None  # an empty tensor with the precision and device of its shards
    # Where the partial norms of each matrix begin; None if matrices are not whole on this rank.
    first_partials: Tensor | None = None
    num_partials: int = 0

    def new_partials(self) -> Tensor | None:
        """Return a buffer (num_partials, 2) for partial norms; None if matrices are not whole on this rank."""
        if self.first_partials is None:
            return None
        return torch.empty(self.num_partials, 2, dtype=torch.float32, device=self.first_partials.device)

    def inverse_norms(self, partials: Tensor) -> Tensor:
        """Return one over the Frobenius norm of each matrix, (B,), from partial norms."""
        from muon_fsdp.kernels import triton_norms

        assert self.first_partials is not None
        return triton_norms.inverse_norms_of_partials(partials, self.first_partials)


@dataclass
class FusedStep:
    """The fused lists of all stages of a plan, for shards and gradients with these precisions."""

    signature: Signature
    stages: list[FusedStage] = field(default_factory=list)
    # The state of all parameters at the last step. Weak references, so that state moved to the CPU frees its memory.
    states: Sequence[ReferenceType[Tensor]] = ()
    kinds: Sequence[object] = ()  # devices, dtypes and sizes of these tensors
    sharded: Sequence[int] = ()  # the indices of DTensors among them
    tables: Tables | None = None
    _own_tables: dict[int, Tables] = field(default_factory=dict)  # of single stages, by number

    @property
    def device(self) -> torch.device:
        assert self.tables is not None
        return self.tables.device

    @property
    def lists(self) -> Iterator[FusedList]:
        return (each for stage in self.stages for each in stage.lists)

    def fits(self, inputs: StepInputs) -> bool:
        """Return whether the lists are still valid; this compares only what can change between two steps."""
        for shard, known in zip(inputs.shards, self.signature, strict=True):
            if known is not None and not shard.is_contiguous():
                return False
        for position, grad in inputs.gradients.items():
            known = self.signature[position]
            if known is not None and grad.dtype is not known[1]:
                return False
        now = self._tensors(inputs.states)
        if len(now) != len(self.states) or not all(map(is_, now, [known() for known in self.states])):
            return False
        # Assigning to `data` moves a tensor or changes its size. A DTensor does not notice this of its local tensor.
        return self._kinds_of(now) == self.kinds

    def accept(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Remember the tensors of state, which `fits` compares."""
        now = self._tensors(states)
        self.sharded = [index for index, value in enumerate(now) if isinstance(value, DTensor)]
        self.states, self.kinds = [ref(value) for value in now], self._kinds_of(now)

    def _kinds_of(self, tensors: Sequence[Tensor]) -> Sequence[object]:
        """Return the numbers of the devices, the dtypes and the sizes of tensors; of a DTensor, its local tensor."""
        tensors = list(tensors)
        for index in self.sharded:
            tensors[index] = local(tensors[index])
        return list(map(Tensor.get_device, tensors)), [t.dtype for t in tensors], list(map(Tensor.numel, tensors))

    @staticmethod
    def _tensors(states: Mapping[int, Mapping[str, Any]]) -> list[Tensor]:
        """Return all tensors of state; others may keep numbers there."""
        return [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]

    def fill_tables(self, inputs: StepInputs) -> None:
        """Write the addresses and numbers of this step into the tables of the kernels; never waits for the device."""
        if self.tables is not None:
            self.tables.fill([_values_of(each, inputs) for each in self.lists])

    def with_tables(self, stage: Stage, inputs: StepInputs) -> FusedStage:
        """Return the fused lists of one stage with tables of their own, filled from the inputs of the stage alone."""
        own = self.stages[stage.number]
        if self.tables is None or not own.lists:
            return own
        if stage.number not in self._own_tables:
            first = sum(len(other.lists) for other in self.stages[: stage.number])
            specs = self.tables.specs[first : first + len(own.lists)]
            self._own_tables[stage.number] = Tables(specs, self.tables.device)
        tables = self._own_tables[stage.number]
        tables.fill([_values_of(each, inputs) for each in own.lists])
        lists = [replace(each, tensors=tensors) for each, tensors in zip(own.lists, tables.lists, strict=True)]
        return replace(own, lists=tuple(lists))

    @property
    def variant(self) -> object:
        """Return what launches depend on besides the tables."""
        return tuple(each.tensors.aligned for each in self.lists)


def _values_of(each: FusedList, inputs: StepInputs) -> ListValues:
    """Return the tensors and numbers of a list in a step."""
    group = inputs.groups[each.group]
    kernels = RULES[group["rule"]].fused
    assert kernels is not None
    scalars = {"weight_decay": group["weight_decay"], "gradient_factor": 1 / inputs.divisor}
    return ListValues(
        [inputs.gradients.get(position) for position in each.positions],
        [position in inputs.updated for position in each.positions],
        [inputs.shards[position] for position in each.positions],
        [[local(inputs.states[p][name]) for p in each.positions] for name in kernels.layout.states],
        group["lr"],
        scalars | kernels.scalars(group),
    )


def signature_of(
    rules: Sequence[Rule], inputs: StepInputs, before: FusedStep | None, excluded: Collection[int] = ()
) -> Signature:
    """Return the precisions of every shard and of its gradient; None for a parameter that can't be fused.

    One launch works on one device. Where a model lies on several, only parameters on the first are fused.

    Args:
        rules: the rule of every parameter.
        inputs: the tensors and options of the step.
        before: the fused lists of the last step, if there are any.
        excluded: positions that must not be fused.
    """
    device = next((shard.device for shard in inputs.shards if unusable(shard.device) is None), None)
    result: list[tuple[torch.dtype, torch.dtype] | None] = []
    for position, (shard, rule) in enumerate(zip(inputs.shards, rules, strict=True)):
        grad = inputs.gradients.get(position)
        if (
            rule.fused is None
            or position in excluded
            or shard.device != device
            or not_fusable(shard, [local(inputs.states[position][name]) for name in rule.fused.layout.states])
        ):
            result.append(None)
        elif grad is None:  # keep the last precision: launches are the same with or without a gradient
            known = before.signature[position] if before is not None else None
            result.append(known or (shard.dtype, shard.dtype))
        else:
            result.append((shard.dtype, grad.dtype) if grad.dtype in FUSED_DTYPES else None)
    return tuple(result)


def not_fusable(shard: Tensor, state: Iterable[Tensor]) -> str | None:
    """Return why a shard, with these tensors of its state, can't take part in a fused launch; None if it can."""
    device = shard.device
    reason = unusable(device)
    if reason is not None:
        return reason
    if shard.dtype not in FUSED_DTYPES:
        return f"there are no kernels for {shard.dtype}"
    for tensor in (shard, *state):
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return "it or its state is not a plain tensor"
        if not tensor.is_contiguous():
            return "it or its state is not contiguous"
        if tensor is not shard and tensor.dtype is not torch.float32:
            return "its state is not float32"
        if tensor.device != device:
            return "its state is on another device"
    return None


def make_fused_step(plan: Plan, inputs: StepInputs, signature: Signature, matrices: MatrixStates | None) -> FusedStep:
    """Sort the parameters that can be fused into lists, and allocate their tables."""
    step, shards = FusedStep(signature), inputs.shards
    step.accept(inputs.states)
    if not any(signature):
        step.stages = [FusedStage() for _ in plan.stages]
        return step
    device = next(shards[i].device for i, known in enumerate(signature) if known is not None)
    members: list[list[tuple[int, tuple[int, ...]]]] = []  # per stage and list: group and positions
    partials: list[_Partials] = []
    specs: list[ListSpec] = []
    for stage in plan.stages:
        fusable = [(group, i) for group, positions in stage.positions_by_group for i in positions if signature[i]]
        partials.append(_Partials.of(stage, {position for _, position in fusable}))
        by_kind: dict[tuple[int, Any, bool], list[int]] = defaultdict(list)
        for group, position in fusable:
            # One tensor of another alignment would make its whole list load single elements.
            numel = partials[-1].matrix_numel.get(position, shards[position].numel())
            aligned = numel % ALIGNMENT == 0 and all(is_aligned(shards[position], inputs.gradients.get(position)))
            by_kind[(group, signature[position], aligned)].append(position)
        members.append([(group, tuple(positions)) for (group, _, _), positions in by_kind.items()])
        specs += [
            _list_spec(stage, positions, kind, shards, partials[-1], device)
            for (_, kind, _), positions in by_kind.items()
        ]
    step.tables = Tables(specs, device)
    tensors = iter(step.tables.lists)
    for of_stage, norms in zip(members, partials, strict=True):
        lists = []
        for group, positions in of_stage:
            multiplies = matrices is not None and matrices.factors.multiplies(positions[0])
            chunks = matrices.factors.chunks(positions, device) if matrices is not None and multiplies else None
            lists.append(FusedList(group, positions, next(tensors), chunks))
        step.stages.append(_fused_stage(lists, shards, norms, device))
    return step


def _list_spec(
    stage: Stage,
    positions: Sequence[int],
    precisions: tuple[torch.dtype, torch.dtype],
    shards: Sequence[Tensor],
    partials: _Partials,
    device: torch.device,
) -> ListSpec:
    kernels = RULES[stage.rule].fused
    assert kernels is not None
    numels = [shards[position].numel() for position in positions]
    chunks, aligned = make_chunks(
        numels,
        [partials.matrix_numel.get(i, numel) for i, numel in zip(positions, numels, strict=True)],
        [partials.first.get(position, 0) for position in positions],
        device,
    )
    slots = [stage.shard_slots[position].offset for position in positions]
    slots_on_device = torch.tensor(slots, dtype=torch.int64, device=device)
    return ListSpec(kernels.layout, len(positions), *precisions, chunks, aligned, slots_on_device)


def _fused_stage(
    lists: Sequence[FusedList], shards: Sequence[Tensor], partials: _Partials, device: torch.device
) -> FusedStage:
    positions = [position for each in lists for position in each.positions]
    first_partials = None
    if partials.first_of_matrix:
        first_partials = torch.tensor(partials.first_of_matrix, dtype=torch.int32, device=device)
    example = shards[positions[0]].new_empty(0) if positions else None
    return FusedStage(tuple(lists), frozenset(positions), example, first_partials, partials.count)


@dataclass(frozen=True)
class _Partials:
    """The places of partial norms that `prepare` writes, if a stage's parameters are all fused and whole here."""

    first: Mapping[int, int] = field(default_factory=dict)  # by position
    matrix_numel: Mapping[int, int] = field(default_factory=dict)
    first_of_matrix: tuple[int, ...] = ()  # in the order of the batches, then the end
    count: int = 0

    @classmethod
    def of(cls, stage: Stage, fused: set[int]) -> _Partials:
        positions = [position for _, members in stage.positions_by_group for position in members]
        views = {unit.position: unit.view for unit in stage.units}
        if (
            stage.exchange is not None
            or not stage.batches
            or fused != set(positions)
            or not all(view.in_memory_order for view in views.values())
        ):
            return cls()
        first: dict[int, int] = {}
        matrix_numel: dict[int, int] = {}
        starts: list[int] = []
        count = 0
        in_batches = dict.fromkeys(m.unit for batch in stage.batches for m in batch.members)
        for position in (stage.units[unit].position for unit in in_batches):
            ((matrices, rows, cols),) = views[position].block_shapes
            numel = rows * cols
            first[position], matrix_numel[position] = count, numel
            each = num_chunks(numel, numel)
            starts += [count + each * index for index in range(matrices)]
            count += each * matrices
        return cls(first, matrix_numel, (*starts, count), count)
