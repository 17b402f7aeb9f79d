"""Which parameters of a plan are updated by fused launches, and the tables through which kernels find them.

The tables are written anew at every step: gradients, states and weights may move between two steps, and
lr may change, without anything being planned or captured again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import is_, or_
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from muon_fsdp.distributed import local
from muon_fsdp.kernels import unusable
from muon_fsdp.plan import Plan, Stage
from muon_fsdp.rules import RULES

if TYPE_CHECKING:
    from muon_fsdp.kernels.triton_elementwise import TensorList

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Signature: TypeAlias = tuple[tuple[torch.dtype, torch.dtype] | None, ...]


@dataclass(frozen=True)
class FusedStage:
    """The fused lists of one stage, each with its group and the positions in it; none where nothing can be fused."""

    lists: tuple[tuple[int, TensorList, tuple[int, ...]], ...] = ()
    positions: frozenset[int] = frozenset()
    example: Tensor | None = None  # an empty tensor of the precision and device of its parameters
    # Where the partial norms of every matrix begin; None where the stage does not know whole matrices.
    first_partials: Tensor | None = None
    num_partials: int = 0

    def new_partials(self) -> Tensor | None:
        if self.first_partials is None:
            return None
        return torch.empty(self.num_partials, 2, dtype=torch.float32, device=self.first_partials.device)

    def inverse_norms(self, partials: Tensor) -> Tensor:
        from muon_fsdp.kernels import triton_norms

        assert self.first_partials is not None
        return triton_norms.inverse_norms_of_partials(partials, self.first_partials)


@dataclass(frozen=True)
class _Members:
    """One list, and the positions of its parameters in the order of its table."""

    positions: list[int]
    group: int
    tensors: TensorList


@dataclass
class FusedStep:
    """Fused lists of all stages of a plan, for parameters of these precisions."""

    signature: Signature
    stages: list[FusedStage] = field(default_factory=list)
    members: list[_Members] = field(default_factory=list)
    states: Sequence[Tensor] = ()  # of all parameters, when the lists were made
    ints: Tensor | None = None
    scalars: Tensor | None = None

    @property
    def device(self) -> torch.device:
        assert self.ints is not None
        return self.ints.device

    def fits(
        self, shards: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], gradients: Mapping[int, Tensor]
    ) -> bool:
        """Whether the lists are still right: a quick look at what can change from one step to the next."""
        for shard, known in zip(shards, self.signature, strict=True):
            if known is not None and not shard.is_contiguous():
                return False
        for position, grad in gradients.items():
            known = self.signature[position]
            if known is not None and grad.dtype is not known[1]:
                return False
        now = tuple(self._all_states(states))
        return len(now) == len(self.states) and all(map(is_, now, self.states))

    def accept(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        self.states = tuple(self._all_states(states))

    @staticmethod
    def _all_states(states: Sequence[Mapping[str, Tensor]]) -> Iterator[Tensor]:
        return (value for state in states for value in state.values())

    def fill_tables(
        self,
        shards: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        gradients: Mapping[int, Tensor],
        groups: Sequence[Mapping[str, Any]],
        wanted: Mapping[int, Tensor],
        divisor: int,
    ) -> None:
        """Write where everything lies and what this step's numbers are; without a wait for the device."""
        if self.ints is None or self.scalars is None:
            return
        refuse_capture(self.device)
        ints: list[int] = []
        scalars: list[float] = []
        for member in self.members:
            group, rule = groups[member.group], RULES[groups[member.group]["rule"]]
            grads = [gradients.get(position) for position in member.positions]
            addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
            addresses += [shards[position].data_ptr() for position in member.positions]
            for spec in rule.state:
                addresses += [local(states[position][spec.name]).data_ptr() for position in member.positions]
            member.tensors.aligned = member.tensors.aligned_chunks and reduce(or_, addresses) % 16 == 0
            ints += addresses
            ints += [int(grad is not None) for grad in grads]
            lr = group["lr"]
            numbers = [0.0 if lr_is_on_device(lr) else float(lr), group["weight_decay"], 1 / divisor]
            numbers += rule.fused_scalars(group)
            scalars += numbers + [0.0] * (len(member.tensors.scalars) - len(numbers))
        self.ints.copy_(pinned(ints, torch.int64, self.device), non_blocking=True)
        self.scalars.copy_(pinned(scalars, torch.float32, self.device), non_blocking=True)
        for member in self.members:
            lr = groups[member.group]["lr"]
            if lr_is_on_device(lr):
                member.tensors.scalars[:1].copy_(lr.reshape(1))
            shared = [index for index, position in enumerate(member.positions) if position in wanted]
            if shared:  # what some rank has a gradient for counts on all of them
                where = pinned(shared, torch.int64, self.device).to(self.device, non_blocking=True)
                flags = [wanted[member.positions[index]] for index in shared]
                active = member.tensors.active
                assert active is not None
                active[where] = torch.stack(flags).to(torch.int64)

    @property
    def variant(self) -> object:
        """What launches depend on besides the tables."""
        return tuple(member.tensors.aligned for member in self.members)


def signature_of(
    shards: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    gradients: Mapping[int, Tensor],
    groups: Sequence[Mapping[str, Any]],
    before: FusedStep | None,
    excluded: Collection[int] = (),
) -> Signature:
    """The precisions of every parameter, given as its local part, and of its gradient; None where it can't be fused.

    One launch works on one device: where a model lies on several, what is not on the first is updated one by one.
    """
    rules = [RULES[group["rule"]] for group in groups for _ in group["params"]]
    device = next((shard.device for shard in shards if unusable(shard.device) is None), None)
    result: list[tuple[torch.dtype, torch.dtype] | None] = []
    for position, (shard, rule) in enumerate(zip(shards, rules, strict=True)):
        grad = gradients.get(position)
        if (
            not rule.fused
            or position in excluded
            or shard.device != device
            or not_fusable(shard, map(local, states[position].values()))
        ):
            result.append(None)
        elif grad is None:  # as it was: whether there is a gradient changes no launch
            known = before.signature[position] if before is not None else None
            result.append(known or (shard.dtype, shard.dtype))
        else:
            result.append((shard.dtype, grad.dtype) if grad.dtype in FUSED_DTYPES else None)
    return tuple(result)


def not_fusable(shard: Tensor, state: Iterable[Tensor]) -> str | None:
    """Why a local tensor, with these of its state, can't take part in a fused launch; None if it can."""
    device = shard.device
    reason = unusable(device)
    if reason is not None:
        return reason
    if shard.dtype not in FUSED_DTYPES:
        return f"there are no kernels for {shard.dtype}"
    for tensor in (shard, *state):
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return "it or its state is no plain tensor"
        if not tensor.is_contiguous():
            return "it or its state is not contiguous"
        if tensor is not shard and tensor.dtype is not torch.float32:
            return "its state is not float32"
        if tensor.device != device:
            return "its state is on another device"
    return None


def pinned(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the host, in memory that a GPU copies from without a wait."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def refuse_capture(device: torch.device) -> None:
    """Tables are copied from host memory that is used again: a graph around that would read what is there later."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("step() can't be part of a graph that you capture; MuonOptimizer has cuda_graph=True for it")


def lr_is_on_device(lr: float | Tensor) -> TypeGuard[Tensor]:
    return isinstance(lr, Tensor) and lr.device.type != "cpu"


def make_fused_step(
    plan: Plan,
    shards: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    signature: Signature,
) -> FusedStep:
    step = FusedStep(signature)
    step.accept(states)
    if not any(signature):
        step.stages = [FusedStage() for _ in plan.stages]
        return step
    lists: list[list[tuple[int, list[int]]]] = []  # per stage: group and positions
    for stage in plan.stages:
        by_kind: dict[tuple[int, Any], list[int]] = defaultdict(list)
        for group, positions in stage.positions_by_group:
            for position in positions:
                if signature[position] is not None:
                    by_kind[(group, signature[position])].append(position)
        lists.append([(group, positions) for (group, _), positions in by_kind.items()])
    device = next(shards[i].device for i, known in enumerate(signature) if known is not None)
    _lay_out(step, plan, lists, shards, device)
    return step


def _lay_out(
    step: FusedStep,
    plan: Plan,
    lists: Sequence[Sequence[tuple[int, list[int]]]],
    shards: Sequence[Tensor],
    device: torch.device,
) -> None:
    from muon_fsdp.kernels.triton_elementwise import FIRST_STATE, MAX_SCALARS, TensorList, make_chunks

    rows = {stage.rule: FIRST_STATE + len(RULES[stage.rule].state) for stage in plan.stages}
    num_ints = sum(
        (rows[stage.rule] + 1) * len(positions)
        for stage, of_stage in zip(plan.stages, lists, strict=True)
        for _, positions in of_stage
    )
    num_lists = sum(map(len, lists))
    step.ints = torch.zeros(num_ints, dtype=torch.int64, device=device)
    step.scalars = torch.zeros(num_lists * MAX_SCALARS, dtype=torch.float32, device=device)
    first_int = first_scalar = 0
    for stage, of_stage in zip(plan.stages, lists, strict=True):
        fused = [position for _, positions in of_stage for position in positions]
        partials = _Partials.of(stage, set(fused))
        members = []
        for group, positions in of_stage:
            numels = [shards[position].numel() for position in positions]
            chunks, aligned = make_chunks(
                numels,
                [partials.matrix_numel.get(i, numel) for i, numel in zip(positions, numels, strict=True)],
                [partials.first.get(position, 0) for position in positions],
                device,
            )
            slots = [stage.shard_slots[position].offset for position in positions]
            num_rows, count = rows[stage.rule], len(positions)
            stop = first_int + num_rows * count
            precisions = step.signature[positions[0]]
            assert precisions is not None
            tensors = TensorList(
                num_tensors=count,
                parameter_dtype=precisions[0],
                gradient_dtype=precisions[1],
                chunks=chunks,
                slots=torch.tensor(slots, dtype=torch.int64, device=device),
                aligned_chunks=aligned,
                addresses=step.ints[first_int:stop].view(num_rows, count),
                active=step.ints[stop : stop + count],
                scalars=step.scalars[first_scalar : first_scalar + MAX_SCALARS],
            )
            step.members.append(_Members(positions, group, tensors))
            members.append((group, tensors, tuple(positions)))
            first_int, first_scalar = stop + count, first_scalar + MAX_SCALARS
        first_partials = None
        if partials.first_of_matrix:
            first_partials = torch.tensor(partials.first_of_matrix, dtype=torch.int32, device=device)
        step.stages.append(
            FusedStage(
                tuple(members),
                frozenset(fused),
                shards[fused[0]].new_empty(0) if fused else None,
                first_partials,
                partials.count,
            )
        )


@dataclass(frozen=True)
class _Partials:
    """Partial norms of a stage whose matrices are whole on this rank and whose parameters are all fused."""

    first: Mapping[int, int] = field(default_factory=dict)  # by position
    matrix_numel: Mapping[int, int] = field(default_factory=dict)
    first_of_matrix: tuple[int, ...] = ()  # in the order of the batches, and the end
    count: int = 0

    @classmethod
    def of(cls, stage: Stage, fused: set[int]) -> _Partials:
        from muon_fsdp.kernels.triton_elementwise import num_chunks

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
