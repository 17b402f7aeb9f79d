"""Sort parameters into lists that fused kernels update, and fill the tables that the kernels read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from muon_fsdp.comm.dtensors import local
from muon_fsdp.declarations.state import State
from muon_fsdp.kernels import unusable
from muon_fsdp.kernels.launch import is_aligned
from muon_fsdp.kernels.tables import (
    ALIGNMENT,
    CHUNK,
    FUSED_DTYPES,
    PLACE,
    STATE_BLOCK,
    Tables,
    TensorList,
    make_chunks,
    num_chunks,
)
from muon_fsdp.linalg.codes import num_blocks
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.parameters.stored_state import stored_tensors
from muon_fsdp.plan.stages import Plan, Stage
from muon_fsdp.rules import RULES
from muon_fsdp.rules.base import GroupOptions
from muon_fsdp.step.inputs import StepInputs
from muon_fsdp.step.matrix_state import MatrixStates

Signature: TypeAlias = tuple[tuple[torch.dtype, torch.dtype, torch.dtype] | None, ...]


@dataclass
class FusedStep:
    """The lists of tensors that kernels update, for shards and gradients with these precisions.

    Args:
        signature: the precisions, as `signature_of` returns them.
        stages: the lists of every stage of the plan.
        tables: the tables of all lists; None if there are none.
    """

    signature: Signature
    stages: Sequence[Sequence[TensorList]]
    tables: Tables | None = None
    _own_tables: dict[int, Tables] = field(default_factory=dict)  # of single stages, by number

    @property
    def device(self) -> torch.device:
        assert self.tables is not None
        return self.tables.device

    @property
    def lists(self) -> Sequence[TensorList]:
        return self.tables.lists if self.tables is not None else ()

    def fits(self, inputs: StepInputs) -> bool:
        """Return whether shards and gradients still have these precisions, and shards are contiguous."""
        for shard, known in zip(inputs.shards, self.signature, strict=True):
            if known is not None and not shard.is_contiguous():
                return False
        for position, grad in inputs.gradients.items():
            known = self.signature[position]
            if known is not None and grad.dtype is not known[1]:
                return False
        return True

    def fill_tables(self, inputs: StepInputs, addressed: Callable[[int, int], State]) -> None:
        """Write the addresses and numbers of this step into the tables of the kernels; never waits for the device.

        Args:
            inputs: the tensors and options of the step.
            addressed: returns the state that kernels read and write, given the numbers of a stage and of a parameter.
        """
        if self.tables is not None:
            states = [
                [_in_order(each, addressed(number, position)) for position in each.positions]
                for number, lists in enumerate(self.stages)
                for each in lists
            ]
            _fill(self.tables, inputs, states)

    def with_tables(self, stage: Stage, inputs: StepInputs) -> Sequence[TensorList]:
        """Return the lists of one stage with tables of their own, filled from the inputs of the stage alone."""
        lists = self.stages[stage.number]
        if not lists:
            return lists
        if stage.number not in self._own_tables:
            self._own_tables[stage.number] = Tables(lists)
        tables = self._own_tables[stage.number]
        _fill(tables, inputs, [[_in_order(each, inputs.states[i]) for i in each.positions] for each in tables.lists])
        return tables.lists

    @property
    def variant(self) -> object:
        """Return what launches depend on besides the tables."""
        return tuple(each.aligned for each in self.lists)


def _in_order(each: TensorList, state: State) -> list[Tensor]:
    return [local(state[name]) for name in each.layout.states]


def _fill(tables: Tables, inputs: StepInputs, states: Sequence[Sequence[Sequence[Tensor]]]) -> None:
    scalars = {each.group: _scalars(inputs.groups[each.group], inputs.divisor) for each in tables.lists}
    tables.fill(inputs.shards, inputs.gradients, states, inputs.updated, scalars, inputs.num_updates)


def _scalars(group: GroupOptions, divisor: int) -> dict[str, Any]:
    kernels = RULES[group["rule"]].fused
    assert kernels is not None
    common = {"weight_decay": group["weight_decay"], "gradient_factor": 1 / divisor}
    common["rounding_seed"] = group.get("rounding_seed", 0)
    return {**common, **kernels.scalars(group), "lr": group["lr"]}


def signature_of(
    records: Sequence[ParameterRecord], inputs: StepInputs, before: FusedStep | None, excluded: Collection[int] = ()
) -> Signature:
    """Return the precisions of every shard, of its gradient and of its state; None for one that can't be fused.

    One launch works on one device. Where a model lies on several, only parameters on the first are fused.

    Args:
        records: one per parameter.
        inputs: the tensors and options of the step.
        before: the fused lists of the last step, if there are any.
        excluded: positions that must not be fused.
    """
    device = next((shard.device for shard in inputs.shards if unusable(shard.device) is None), None)
    result: list[tuple[torch.dtype, torch.dtype, torch.dtype] | None] = []
    for position, (shard, record) in enumerate(zip(inputs.shards, records, strict=True)):
        grad = inputs.gradients.get(position)
        stored = record.encoding.dtype if record.encoding is not None else torch.float32
        if (
            record.rule.fused is None
            or position in excluded
            or shard.device != device
            or unread_form(record)
            or not_fusable(shard, stored_tensors(record, inputs.states[position]))
        ):
            result.append(None)
        elif grad is None:  # keep the last precision: launches are the same with or without a gradient
            known = before.signature[position] if before is not None else None
            result.append((*known[:2], stored) if known is not None else (shard.dtype, shard.dtype, stored))
        else:
            result.append((shard.dtype, grad.dtype, stored) if grad.dtype in FUSED_DTYPES else None)
    return tuple(result)


def unread_form(record: ParameterRecord) -> str | None:
    """Return why kernels of its rule can't update a parameter with its state, or round it, as its group asks for."""
    kernels, encoding = record.rule.fused, record.encoding
    assert kernels is not None
    if encoding is not None and encoding.dtype not in kernels.state_dtypes:
        return f"the kernels of its rule {record.rule.name!r} do not read state in {encoding.dtype}"
    if record.rounding not in kernels.roundings:
        return f"the kernels of its rule {record.rule.name!r} do not round by {record.rounding!r}"
    if (encoding is not None or record.rounding == "stochastic") and record.runs is None:
        return "it is cut along several dimensions, where kernels can't number its elements"
    return None


def not_fusable(shard: Tensor, state: Iterable[tuple[Tensor, torch.dtype]]) -> str | None:
    """Return why a shard, with its state and the dtypes that kernels read it in, can't be fused; None if it can."""
    device = shard.device
    reason = unusable(device)
    if reason is not None:
        return reason
    if shard.dtype not in FUSED_DTYPES:
        return f"there are no kernels for {shard.dtype}"
    for tensor, dtype in ((shard, shard.dtype), *state):
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return "it or its state is not a plain tensor"
        if not tensor.is_contiguous():
            return "it or its state is not contiguous"
        if tensor.dtype is not dtype:
            return f"its state is {tensor.dtype}, not {dtype}"
        if tensor.device != device:
            return "its state is on another device"
    return None


def make_fused_step(
    plan: Plan,
    records: Sequence[ParameterRecord],
    inputs: StepInputs,
    signature: Signature,
    matrices: MatrixStates,
) -> FusedStep:
    """Sort the parameters that can be fused into lists, and allocate their tables."""
    step = FusedStep(signature, [_make_lists(stage, records, inputs, signature, matrices) for stage in plan.stages])
    if any(step.stages):
        step.tables = Tables([each for lists in step.stages for each in lists])
        with_tables = iter(step.tables.lists)
        step.stages = [list(islice(with_tables, len(lists))) for lists in step.stages]
    return step


def _make_lists(
    stage: Stage,
    all_records: Sequence[ParameterRecord],
    inputs: StepInputs,
    signature: Signature,
    matrices: MatrixStates,
) -> list[TensorList]:
    """Sort the parameters of a stage that can be fused into lists; each has one group, alignment and precisions."""
    kernels = RULES[stage.rule].fused
    fusable = [(group, i) for group, positions in stage.positions_by_group for i in positions if signature[i]]
    if not fusable:
        return []
    assert kernels is not None
    records = {i: all_records[i].cut(stage.rows.get(i)) for _, i in fusable}
    shards = {i: stage.cut(i, inputs.shards[i]) for _, i in fusable}
    device = shards[fusable[0][1]].device
    rows_of = {position: _row_blocks(records[position], shards[position]) for _, position in fusable}
    partials, starts = _partials(stage, rows_of)
    partials = {position: (0, shards[position].numel()) for _, position in fusable} | partials
    first_partials = torch.tensor(starts, dtype=torch.int32, device=device) if starts else None
    alike: dict[tuple[int, Any, bool], list[int]] = defaultdict(list)
    for group, position in fusable:
        # One tensor of another alignment would make its whole list load single elements.
        _, numel = partials[position]
        grad = inputs.gradients.get(position)
        aligned = numel % ALIGNMENT == 0 and all(
            is_aligned(shards[position], stage.cut(position, grad) if grad is not None else None)
        )
        alike[(group, signature[position], aligned)].append(position)
    lists = []
    for (group, (parameter_dtype, gradient_dtype, state_dtype), _), positions in alike.items():
        numels = [shards[position].numel() for position in positions]
        firsts, matrix_numels = zip(*[partials[position] for position in positions], strict=True)
        chunks, aligned = make_chunks(numels, matrix_numels, firsts, device)
        slots = torch.tensor([stage.shard_slots[i].offset for i in positions], dtype=torch.int64, device=device)
        factor_chunks = None
        if matrices.factors.multiplies(positions[0]):
            factor_chunks = matrices.factors.chunks(positions, device)
        places, block_chunks = None, None
        rounding = records[positions[0]].rounding  # that of the group and of the dtype
        if state_dtype is not torch.float32 or rounding == "stochastic":
            of_tensors = [_place(records[position], shards[position], *rows_of[position]) for position in positions]
            places = torch.tensor(of_tensors, dtype=torch.int64, device=device)
        if state_dtype is torch.int8:
            cols_and_blocks = [rows_of[position] for position in positions]
            counts = [size // cols * count for size, (cols, count) in zip(numels, cols_and_blocks, strict=True)]
            each = [size // cols * count for size, (cols, count) in zip(matrix_numels, cols_and_blocks, strict=True)]
            of_blocks, _ = make_chunks(counts, each, firsts, device, CHUNK // STATE_BLOCK)
            whole = all(cols % ALIGNMENT == 0 and records[i].first_column % ALIGNMENT == 0
                        for i, (cols, _) in zip(positions, cols_and_blocks, strict=True))  # fmt: skip
            block_chunks = of_blocks, whole
        layout = kernels.layout.with_scales() if state_dtype is torch.int8 else kernels.layout
        lists.append(
            TensorList(
                layout=layout.with_remainder() if rounding == "remainder" else layout,
                group=group,
                positions=positions,
                parameter_dtype=parameter_dtype,
                gradient_dtype=gradient_dtype,
                chunks=chunks,
                aligned_chunks=aligned,
                slots=slots,
                factor_chunks=factor_chunks,
                first_partials=first_partials,
                state_dtype=state_dtype,
                rounding=rounding,
                starts=[_start(stage, i, shards[i]) for i in positions] if stage.rows else (),
                places=places,
                one_run=places is None or not bool(places[:, PLACE.index("stride")].any()),
                block_chunks=block_chunks,
            )
        )
    return lists


def _start(stage: Stage, position: int, part: Tensor) -> int:
    """Return the element of a shard at which the part begins that a stage updates."""
    return stage.rows[position][0] * part.stride(0) if position in stage.rows else 0


def _row_blocks(record: ParameterRecord, shard: Tensor) -> tuple[int, int]:
    """Return the columns of a shard, and the blocks in a row; zero blocks if state is not stored in 8 bits."""
    if record.encoding is None or not record.encoding.has_scales:
        return max(1, shard.numel()), 0
    return shard.shape[-1], num_blocks(shard.shape[-1], record.first_column)


def _place(record: ParameterRecord, shard: Tensor, cols: int, blocks: int) -> tuple[int, ...]:
    """Return where the elements of a shard lie in the whole parameter, in the order of PLACE."""
    assert record.runs is not None
    return (cols, blocks, record.first_column % STATE_BLOCK, *record.runs, *record.random_key)


def _partials(stage: Stage, row_blocks: Mapping[int, tuple[int, int]]) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Place the partial norms that `prepare` writes, if all parameters of a stage are fused and whole here.

    Args:
        stage: the stage.
        row_blocks: for every parameter that is fused, what `_row_blocks` returns.

    Returns:
        By position, the index of the first partial norm and the number of elements of a matrix; and where the partial
        norms of each matrix begin, in the order of the batches, then the end. Both are empty if there are none.
    """
    views = {unit.position: unit.view for unit in stage.units}
    if (
        stage.exchange is not None
        or not stage.batches
        or row_blocks.keys() != stage.positions
        or not all(view.in_memory_order for view in views.values())
    ):
        return {}, []
    partials: dict[int, tuple[int, int]] = {}
    starts: list[int] = []
    count = 0
    in_batches = dict.fromkeys(m.unit for batch in stage.batches for m in batch.members)
    for position in (stage.units[unit].position for unit in in_batches):
        ((matrices, rows, cols),) = views[position].block_shapes
        numel, (row, blocks) = rows * cols, row_blocks[position]
        if blocks and numel % row:  # a row of the parameter belongs to several matrices, and so does a block
            return {}, []
        partials[position] = count, numel
        each = -(-(numel // row * blocks) // (CHUNK // STATE_BLOCK)) if blocks else num_chunks(numel, numel)
        starts += [count + each * index for index in range(matrices)]
        count += each * matrices
    return partials, [*starts, count]
