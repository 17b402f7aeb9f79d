"""Running a plan: stages pass through prepare, gather, direction, scatter, forward and apply, and overlap."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from muon_fsdp.comm.transfers import StageExchange
from muon_fsdp.declarations.state import State, working_dtype
from muon_fsdp.kernels.recorder import Recorder
from muon_fsdp.plan.options import Settings
from muon_fsdp.plan.stages import Batch, Member, Stage
from muon_fsdp.rules import RULES, MatrixBatch
from muon_fsdp.step.fused import FusedStage
from muon_fsdp.step.matrix_state import MatrixStates
from muon_fsdp.step.metrics import Samples


@dataclass
class Work:
    """One parameter that is updated in a step and not fused with others, as this rank's local tensors."""

    parameter: Tensor
    state: State
    dtype: torch.dtype  # working precision
    grad: Tensor | None  # None: another rank has one, and it is zero here
    divisor: int  # of the gradient: how many were added up in it

    def working_gradient(self) -> Tensor:
        """Return the gradient in working precision; made when its stage begins, so that only a stage's worth exists."""
        if self.grad is None:
            return torch.zeros_like(self.parameter, dtype=self.dtype)
        grad = self.grad.to(self.dtype)
        return grad / self.divisor if self.divisor > 1 else grad


def run_stages(
    stages: Sequence[Stage],
    labels: Sequence[str],
    groups: Sequence[Mapping[str, Any]],
    fused: Sequence[FusedStage],
    work: Mapping[int, Work],
    updated: Collection[int],
    settings: Settings,
    recorder: Recorder,
    matrices: MatrixStates | None = None,
    samples: Samples | None = None,
) -> None:
    """Run every stage. While one computes, the next is being gathered, the one before it scattered and, where there are
    replicas of several ranks, the one before that forwarded to them."""
    gathering: _StageRun | None = None
    scattering: _StageRun | None = None
    forwarding: _StageRun | None = None
    num_travelling = 0
    for number, (stage, label, part) in enumerate(zip(stages, labels, fused, strict=True)):
        run = _StageRun(number, stage, label, groups, part, work, settings, recorder, matrices, samples)
        # All ranks of a stage must decide alike: by what they have agreed on. A captured step holds every stage.
        if run.present.isdisjoint(updated) and not settings.cuda_graph:
            continue
        run.start(num_travelling)
        if not run.travels:  # nothing to wait for, and nothing is gained by keeping it in memory
            run.compute()
            run.forward()
            run.finish()
            continue
        num_travelling += 1
        if gathering is not None:
            gathering.compute()
        forwarding = _pass_on(scattering, forwarding)
        gathering, scattering = run, gathering
        if scattering is not None and scattering.forwards and scattering.ranks != run.ranks:
            # Ranks of `run` may have more to do before it. To wait for them before forwarding is to wait in a circle.
            forwarding, scattering = _pass_on(scattering, forwarding), None
    if gathering is not None:
        gathering.compute()
    for last in (scattering, gathering):
        forwarding = _pass_on(last, forwarding)
    if forwarding is not None:
        forwarding.finish()


def _pass_on(scattering: _StageRun | None, forwarding: _StageRun | None) -> _StageRun | None:
    """End the stage that is being forwarded and the scatter of the next; what is being forwarded then."""
    if forwarding is not None:
        forwarding.finish()
    if scattering is None:
        return None
    scattering.forward()
    if scattering.forwards:
        return scattering
    scattering.finish()
    return None


class _StageRun:
    """One stage on its way through a step. Parameters are updated in fused launches where they can, else one list
    of tensors after another."""

    def __init__(
        self,
        number: int,
        stage: Stage,
        label: str,
        groups: Sequence[Mapping[str, Any]],
        fused: FusedStage,
        work: Mapping[int, Work],
        settings: Settings,
        recorder: Recorder,
        matrices: MatrixStates | None,
        samples: Samples | None,
    ) -> None:
        self.number, self.stage, self.label, self.rule = number, stage, label, RULES[stage.rule]
        self.fused, self.work = fused, work
        single = [(groups[group], [i for i in positions if i in work]) for group, positions in stage.positions_by_group]
        self.single = [(group, positions) for group, positions in single if positions]
        exchange = stage.exchange
        if exchange is not None:  # what travels does not depend on what is updated
            self.present = {i for _, positions in stage.positions_by_group for i in positions}
        else:
            self.present = {i for _, positions in self.single for i in positions} | fused.positions
        self.travels = exchange is not None and (exchange.gathers or exchange.scatters)
        self.forwards = exchange is not None and exchange.forwards
        self.ranks = exchange.ranks if exchange is not None else ()
        self._groups, self._settings, self._recorder, self._samples = groups, settings, recorder, samples
        self._matrices = matrices if self.rule.has_matrix_numbers else None
        self._exchange: StageExchange | None = None
        self._inverse_norms: Tensor | None = None
        self._buffer = torch.empty(0)  # shards to be orthogonalized, then their updates
        self._updates: dict[int, Tensor] = {}  # of an element-wise rule

    def start(self, number: int) -> None:
        """Prepare, and send what has to be sent; `number` counts the stages that travel."""
        with record_function(f"muon_fsdp.prepare {self.label}"):
            if self.rule.needs_matrices:
                self._buffer = self._staging()
                # What travels and is not updated must still be numbers: some directions refuse others.
                idle = self.present - self.work.keys() - self.fused.positions
                if idle:
                    torch._foreach_zero_([self.stage.shard_slots[i].of(self._buffer) for i in idle])
            partials = self.fused.new_partials()
            for each in self.fused.lists:
                assert self.rule.fused is not None
                self.rule.fused.prepare(self._groups[each.group], each.tensors, self._buffer, partials)
            if partials is not None:
                self._inverse_norms = self.fused.inverse_norms(partials)
            for options, positions in self.single:
                works = [self.work[i] for i in positions]
                prepared = self.rule.prepare(options, [w.working_gradient() for w in works], [w.state for w in works])
                if self.rule.needs_matrices:
                    slots = [self.stage.shard_slots[i].of(self._buffer) for i in positions]
                    torch._foreach_copy_(slots, prepared)
                else:
                    self._updates.update(zip(positions, prepared, strict=True))
        if self.stage.exchange is not None:
            with record_function(f"muon_fsdp.gather {self.label}"):
                self._exchange = StageExchange(self.stage, self._buffer, self._recorder, number)
                self._exchange.start_gather()
            self._buffer = torch.empty(0)

    def _staging(self) -> Tensor:
        single = (self.work[i].parameter for i in self.present if i in self.work)
        like = self.fused.example if self.fused.example is not None else next(single)
        dtype = self._settings.staging_dtype(like.device.type, working_dtype(like.dtype))
        return torch.empty(self.stage.shard_numel, dtype=dtype, device=like.device)

    def compute(self) -> None:
        if not self.rule.needs_matrices:
            return
        units = self._buffer
        if self._exchange is not None:
            with record_function(f"muon_fsdp.gathered {self.label}"):
                units = self._exchange.finish_gather()
        results = torch.empty(self.stage.unit_numel, dtype=self._update_dtype(units), device=units.device)
        with record_function(f"muon_fsdp.orthogonalize {self.label}"):
            self._directions(units, results)
        if self._exchange is not None:
            with record_function(f"muon_fsdp.scatter {self.label}"):
                self._exchange.start_scatter(results)
        else:
            self._buffer = results

    def forward(self) -> None:
        if self._exchange is not None:
            with record_function(f"muon_fsdp.scattered {self.label}"):
                self._exchange.finish_scatter()

    def finish(self) -> None:
        if self._exchange is not None:
            with record_function(f"muon_fsdp.forwarded {self.label}"):
                self._buffer = self._exchange.finish_forward()
            self._exchange = None
        with record_function(f"muon_fsdp.apply {self.label}"):
            for each in self.fused.lists:
                assert self.rule.fused is not None
                tensors, factors = each.tensors, None
                if self._matrices is not None and self.rule.multiplies_weights:
                    tensors, factors = each.with_factor_chunks(), self._matrices.factors.flat()
                self.rule.fused.apply(self._groups[each.group], tensors, self._buffer, factors)
            for options, positions in self.single:
                works = [self.work[i] for i in positions]
                if self.rule.needs_matrices:
                    slots = self.stage.shard_slots
                    updates = [slots[i].of(self._buffer).to(self.work[i].dtype) for i in positions]
                else:
                    updates = [self._updates[i] for i in positions]
                parameters = [work.parameter for work in works]
                if self._matrices is not None and self.rule.multiplies_weights:
                    of_parameters = map(self._matrices.factors.of, positions, parameters)
                    self.rule.apply(options, parameters, updates, list(of_parameters))
                else:
                    self.rule.apply(options, parameters, updates)
        self._buffer, self._updates = torch.empty(0), {}

    def _update_dtype(self, units: Tensor) -> torch.dtype:
        """Return the precision of updates: float16 on GPUs, where it is what the iteration has, if the rule allows."""
        if not units.is_cuda or units.dtype == torch.float64:
            return working_dtype(units.dtype)
        if all(self.rule.half_precision_suffices(b.options, b.rows, b.cols) for b in self.stage.batches):
            return torch.float16
        return self.rule.update_dtype or working_dtype(units.dtype)

    def _directions(self, units: Tensor, results: Tensor) -> None:
        """Pass whole units through `direction`, batch by batch; units that are not there are left out."""
        stage, first_matrix = self.stage, 0
        for number, batch in enumerate(stage.batches):
            norms = self._inverse_norms
            norms = None if norms is None else norms[first_matrix : first_matrix + batch.count]
            first_matrix += batch.count
            members = [member for member in batch.members if stage.units[member.unit].position in self.present]
            is_complete = len(members) == len(batch.members)
            start = _start_of_run(stage, batch) if is_complete else None
            if start is not None:
                stop, shape = start + batch.count * batch.rows * batch.cols, (batch.count, batch.rows, batch.cols)
                self._direction(number, members, units[start:stop].view(shape), results[start:stop].view(shape), norms)
            elif members:
                sources = [
                    _block(stage, member.unit, member.block, units)[member.start : member.stop] for member in members
                ]
                together = torch.cat(sources) if len(sources) > 1 else sources[0].contiguous()
                updates = torch.empty_like(together, dtype=results.dtype)
                self._direction(number, members, together, updates, norms if is_complete else None)
                pieces = torch.split(updates, [member.stop - member.start for member in members])
                for member, piece in zip(members, pieces, strict=True):
                    _block(stage, member.unit, member.block, results)[member.start : member.stop].copy_(piece)

    def _direction(
        self,
        number: int,  # of the batch
        members: Sequence[Member],  # those of the batch that are there
        matrices: Tensor,
        update: Tensor,
        inverse_norms: Tensor | None,
    ) -> None:
        stage = self.stage
        options = stage.batches[number].options
        if self._matrices is None:
            batch = MatrixBatch(matrices, update, options, inverse_norms=inverse_norms)
            self.rule.direction(batch)
        else:
            place = self._matrices.place(self.number, stage, number, members)
            batch = self._matrices.batch(options, place, matrices, update, inverse_norms)
            self.rule.direction(batch)
            self._matrices.take(stage, stage.units[members[0].unit].owner, place, batch)
        if self._samples is not None:
            self._samples.take(self.number, stage, number, batch, self._groups)


def _start_of_run(stage: Stage, batch: Batch) -> int | None:
    """Where the matrices of a batch begin, if they lie one after another in the buffer of units."""
    matrix = batch.rows * batch.cols
    start = expected = stage.unit_slots[batch.members[0].unit].offset + batch.members[0].start * matrix
    for member in batch.members:
        offset = stage.unit_slots[member.unit].offset + member.start * matrix
        if not stage.units[member.unit].view.in_memory_order or offset != expected:
            return None
        expected = offset + (member.stop - member.start) * matrix
    return start


def _block(stage: Stage, unit: int, block: int, buffer: Tensor) -> Tensor:
    """The matrices of one block of a unit, sharing memory with the buffer."""
    return stage.units[unit].view.split(stage.unit_slots[unit].of(buffer))[block]


def stage_label(number: int, stage: Stage) -> str:
    """What a profiler shows: the stage's number, its rule, and the shapes that it orthogonalizes on this rank."""
    shapes = ", ".join(f"{batch.count}x{batch.rows}x{batch.cols}" for batch in stage.batches)
    return f"stage {number} {stage.rule} [{shapes}]"
