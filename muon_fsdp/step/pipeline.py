"""Run the stages of a step, overlapped: prepare, gather, direction, scatter, forward and apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from muon_fsdp.comm.transfers import StageExchange
from muon_fsdp.declarations.state import working_dtype
from muon_fsdp.kernels.recorder import Recorder
from muon_fsdp.plan.settings import NUM_UPDATES, Settings
from muon_fsdp.plan.stages import Member, Stage
from muon_fsdp.rules import RULES, MatrixBatch
from muon_fsdp.rules.checks import (
    GivenStates,
    check_applied,
    check_direction,
    check_generators,
    check_returned,
    checked_prepared,
    finite_error,
)
from muon_fsdp.step.early_results import BatchNumbers, EarlyResult, Keeper
from muon_fsdp.step.failures import Failures
from muon_fsdp.step.fused import FusedStage
from muon_fsdp.step.gradients import are_finite
from muon_fsdp.step.inputs import SingleUpdate, StepInputs, in_precision
from muon_fsdp.step.matrix_state import LeftNumbers, MatrixStates
from muon_fsdp.step.metrics import TakenSamples
from muon_fsdp.step.random_numbers import RandomNumbers


@dataclass(frozen=True)
class StepContext:
    """Everything that the stages of one step share.

    Args:
        inputs: the tensors and options of the step.
        fused: the fused lists of every stage.
        single: the updated parameters that are not fused, by position.
        settings: the settings of the whole optimizer.
        recorder: notes what the host does between launches, for a CUDA graph.
        random: draws the random numbers of rules.
        failures: what rules have raised; unused beside backward.
        unproven: the numbers of stages whose rule has not been seen to write all of its updates. They are removed as
            the stages run.
        matrices: per-matrix state, statistics and factors; None if no rule has any.
        samples: takes samples of updates for `metrics()`; None in most steps on a GPU.
        keeper: keeps the results of stages that run beside backward; None in `step()`, which applies them.
        early: for stages that ran beside backward, by number: returns the result that was kept.
    """

    inputs: StepInputs
    fused: Sequence[FusedStage]
    single: Mapping[int, SingleUpdate]
    settings: Settings
    recorder: Recorder
    random: RandomNumbers
    failures: Failures = field(default_factory=Failures)
    unproven: set[int] = field(default_factory=set)
    matrices: MatrixStates | None = None
    samples: TakenSamples | None = None
    keeper: Keeper | None = None
    early: Mapping[int, Callable[[], EarlyResult]] = field(default_factory=dict)


def run_stages(stages: Iterable[Stage], context: StepContext) -> None:
    """Run these stages, and overlap their transfers with computation as far as the plan allows it.

    `stages` may wait before it yields one. The order of transfers never depends on when it does.

    While one stage computes, the next is being gathered and the one before it scattered. Where several ranks hold the
    same shards, the one before that is being forwarded among them. `Staging.in_flight` says which stages overlap less,
    to save memory.
    """
    travelling = _Travelling()
    for stage in stages:
        run = _StageRun(stage, context)
        if run.travels:
            travelling.add(run)
        else:  # there is no transfer to overlap with: finish at once, which frees its memory
            travelling.end_scatter()
            run.start(travelling.count)
            run.compute()
            run.forward()
            run.finish()
    travelling.finish()


class _Travelling:
    """The stages whose transfers are running: at most one is gathered, one is scattered and one is forwarded."""

    def __init__(self) -> None:
        self.count = 0  # stages that have been added
        self._gathering: _StageRun | None = None
        self._scattering: _StageRun | None = None
        self._forwarding: _StageRun | None = None

    def add(self, run: _StageRun) -> None:
        """Start a stage, compute the one that was gathered before, and pass on those before that."""
        if run.in_flight == 1:
            self.finish()
        # Two stages in flight: the one being scattered must end before the next one computes. Its transfer buffers are
        # freed before `run` makes its own. Its updates are applied after `run` has started, because the network would
        # be idle meanwhile.
        ending = self._scattering if self._ends_next else None
        if ending is not None:
            ending.forward()
        run.start(self.count)
        self.count += 1
        if ending is not None:
            ending.finish()
            self._scattering = None
        before = self._gathering
        if before is not None:
            before.compute()
        self._pass_on()
        self._gathering, self._scattering = run, before
        if before is None or self._ends_next:
            return
        if before.in_flight < 3:
            self._pass_on()
            self._pass_on()
        elif before.forwards and before.ranks != run.ranks:
            # Some ranks of `run` may first need the results that this forward sends. Waiting for them before forwarding
            # would be a deadlock.
            self._pass_on()

    def end_scatter(self) -> None:
        """Finish the stage being scattered if it must end before another one computes."""
        if self._ends_next:
            self._pass_on()

    def finish(self) -> None:
        """Finish all stages."""
        self.end_scatter()
        if self._gathering is not None:
            self._gathering.compute()
        self._pass_on()
        self._gathering, self._scattering = None, self._gathering
        self._pass_on()
        self._pass_on()

    @property
    def _ends_next(self) -> bool:
        """Return whether the stage being scattered is finished by the next call.

        A stage with replicas is not left to the next call: its buffer of updates is larger than those of a transfer.
        """
        scattering = self._scattering
        return scattering is not None and scattering.in_flight < 3 and not scattering.forwards

    def _pass_on(self) -> None:
        """Finish the stage being forwarded, and start forwarding the one being scattered.

        If that has nothing to forward, it is finished too.
        """
        if self._forwarding is not None:
            self._forwarding.finish()
        self._forwarding, self._scattering = self._scattering, None
        if self._forwarding is not None:
            self._forwarding.forward()
            if not self._forwarding.forwards:
                self._forwarding.finish()
                self._forwarding = None


def _profiled(phase: str, stage: Stage) -> AbstractContextManager[object]:
    """Return a context manager that shows a phase of a stage in a profile; it does nothing unless a profiler runs."""
    if not torch._C._autograd._profiler_enabled():  # entering record_function takes microseconds in any case
        return nullcontext()
    return record_function(f"muon_fsdp.{phase} {stage.label}")


class _StageRun:
    """One stage on its way through a step: `start`, `compute`, `forward` and `finish`, in this order.

    Parameters are updated in fused launches where that is possible, and by lists of tensors elsewhere.
    """

    def __init__(self, stage: Stage, context: StepContext) -> None:
        self.stage, self.rule, self.fused = stage, RULES[stage.rule], context.fused[stage.number]
        self._context, self._groups, self._single = context, context.inputs.groups, context.single
        lists = [
            (self._groups[group], [i for i in positions if i in self._single])
            for group, positions in stage.positions_by_group
        ]
        self._lists = [(group, positions) for group, positions in lists if positions]
        exchange = stage.exchange
        if exchange is not None:  # every shard is sent, because the plan fixes the sizes of messages
            self.positions = {i for _, positions in stage.positions_by_group for i in positions}
        else:
            self.positions = {i for _, positions in self._lists for i in positions} | self.fused.positions
        self._early = context.early.get(stage.number)
        self._has_updates = self._early is not None and not self.rule.needs_weights
        self.travels = not self._has_updates and exchange is not None and (exchange.gathers or exchange.scatters)
        self.forwards = exchange is not None and exchange.forwards
        self.ranks = exchange.ranks if exchange is not None else ()
        self.in_flight = stage.in_flight
        self._matrices = context.matrices if self.rule.has_matrix_numbers else None
        self._numbers: BatchNumbers | None = self._matrices
        if context.keeper is not None and self.rule.has_matrix_numbers:
            self._numbers = context.keeper.numbers
        self._exchange: StageExchange | None = None
        self._inverse_norms: Tensor | None = None
        self._buffer = torch.empty(0)  # shards to be orthogonalized, then their updates
        self._updates: dict[int, Tensor] = {}  # of an element-wise rule
        # A stage that fails on this rank takes part in all transfers, with zeros, because other ranks wait for them.
        self._has_failed = self.rule.name in context.failures.rules
        self._is_proven = stage.number not in context.unproven

    def start(self, number: int) -> None:
        """Prepare the shards and start gathering them; `number` counts the stages that travel.

        Of a stage that ran beside backward only the state is written: its result is taken, and what `prepare` leaves
        in the buffer is dropped. The result is waited for first, because that stage has read the state too.
        """
        early = self._early() if self._early is not None else None
        if self.rule.needs_matrices:
            self._buffer = self._staging()
        with _profiled("prepare", self.stage):
            self._attempt("prepare", self._prepare, self._buffer)
        if early is not None:
            self._buffer = early.buffer
            if early.failure is not None:
                self._fail(*early.failure)
            if self._context.samples is not None:
                self._context.samples.samples.update(early.samples)
            self._attempt("direction", lambda: self._take_early(early.numbers), torch.empty(0))
            if not self._has_updates:
                self._exchange = StageExchange(self.stage, early.buffer, self._context.recorder, number)
        elif self.stage.exchange is not None:
            with _profiled("gather", self.stage):
                self._exchange = StageExchange(self.stage, self._buffer, self._context.recorder, number)
                self._exchange.start_gather()
            self._buffer = torch.empty(0)

    def _take_early(self, numbers: Mapping[int, LeftNumbers]) -> None:
        """Keep the per-matrix state that `direction` has left beside backward; it is stored at the end of the step."""
        for number, left in numbers.items():
            assert self._numbers is not None
            place = self._numbers.place(self.stage, number, self.stage.batches[number].members)
            self._numbers.take(self.stage, number, place, left)

    def _prepare(self) -> None:
        """Update the moments, and write what is to be orthogonalized to the buffer."""
        if self.rule.needs_matrices:
            # Shards that travel without being updated are zeroed: garbage makes some directions raise.
            idle = self.positions - self._single.keys() - self.fused.positions
            if idle:
                torch._foreach_zero_([self.stage.shard_slots[i].of(self._buffer) for i in idle])
        partials = self.fused.new_partials()
        for each in self.fused.lists:
            assert self.rule.fused is not None
            self.rule.fused.prepare(self._groups[each.group], each.tensors, self._buffer, partials)
        if partials is not None:
            self._inverse_norms = self.fused.inverse_norms(partials)
        for options, positions in self._lists:
            updates = [self._single[i] for i in positions]
            gradients = [update.working_gradient() for update in updates]
            states = GivenStates(self.rule, [update.state for update in updates])
            returned = self.rule.prepare(options, gradients, states.copies)
            states.take()
            prepared = checked_prepared(self.rule, returned, [update.shard for update in updates])
            if self.rule.needs_matrices:
                torch._foreach_copy_(self.stage.shards_in(self._buffer, positions), prepared)
                continue
            prepared = [in_precision(each, update.dtype) for each, update in zip(prepared, updates, strict=True)]
            if self._context.settings.nonfinite == "raise" and not are_finite(prepared):
                wrong = [i for i, each in zip(positions, prepared, strict=True) if not are_finite([each])]
                raise ValueError(
                    f"rule {self.rule.name!r}: prepare returned an update of {self._context.failures.names_of(wrong)} "
                    "that is not finite, though gradients are: check what may divide by zero or overflow"
                )
            self._updates.update(zip(positions, prepared, strict=True))

    def _attempt(self, method: str, work: Callable[[], None], result: Tensor) -> None:
        """Call what a rule computes. If that fails, `result` is zero, and nothing of the stage is applied here.

        A rank that left out the transfers of the stage would make the others wait. Beside backward, gradients may be
        changing, so that the stage will be discarded anyway.
        """
        try:
            if not self._has_failed:
                work()
        except Exception as error:
            self._fail(method, error)
        if self._has_failed:
            result.zero_()

    def _fail(self, method: str, error: Exception) -> None:
        """Note that a method of the rule has failed; raise if nobody waits for the transfers of this rank."""
        if self._context.keeper is not None:
            self._context.keeper.fail(self.stage, method, error)
        else:
            self._context.failures.add(self.rule.name, method, error, self.positions)
        self._has_failed = True

    def _staging(self) -> Tensor:
        single = (self._single[i].shard for i in self.positions if i in self._single)
        like = self.fused.example if self.fused.example is not None else next(single)
        dtype = self._context.settings.staging_dtype(like.device.type, working_dtype(like.dtype))
        return torch.empty(self.stage.shard_numel, dtype=dtype, device=like.device)

    def compute(self) -> None:
        """Wait for the gather, orthogonalize the units of this rank, and start scattering the results.

        Beside backward, the units of a rule that needs weights are only gathered.
        """
        if not self.rule.needs_matrices or self._has_updates:
            return
        units = self._buffer
        if self._exchange is not None and self._early is None:
            with _profiled("gathered", self.stage):
                units = self._exchange.finish_gather()
        if self._context.keeper is not None and self.rule.needs_weights:
            self._buffer, self._exchange = units, None
            return
        results = torch.empty(self.stage.unit_numel, dtype=self._update_dtype(units), device=units.device)
        if not self._is_proven:  # what `direction` does not write is found as NaN
            results.fill_(torch.nan)
        with _profiled("orthogonalize", self.stage):
            self._attempt("direction", lambda: self._directions(units, results), results)
        if not self._has_failed:
            self._context.unproven.discard(self.stage.number)
        if self._exchange is not None:
            with _profiled("scatter", self.stage):
                self._exchange.start_scatter(results)
            self._buffer = torch.empty(0)  # the units, if they were gathered beside backward
        else:
            self._buffer = results

    def forward(self) -> None:
        """Wait for the scatter, and start exchanging its results with the ranks that hold the same shards."""
        if self._exchange is not None:
            with _profiled("scattered", self.stage):
                self._exchange.finish_scatter()

    def finish(self) -> None:
        """Wait for the last transfer, and apply the updates to the shards; or keep the result, beside backward."""
        if self._exchange is not None:
            with _profiled("forwarded", self.stage):
                self._buffer = self._exchange.finish_forward()
            self._exchange = None
        if self._context.keeper is not None:
            self._context.keeper.keep(self.stage, self._buffer)
        else:
            self._attempt("apply", self._apply, torch.empty(0))
            if self._has_failed and self._matrices is not None:
                self._matrices.restore(self.stage)
        self._buffer, self._updates = torch.empty(0), {}

    def _apply(self) -> None:
        if self._matrices is not None:  # statistics read the weights that change now
            self._matrices.wait()
        with _profiled("apply", self.stage):
            for each in self.fused.lists:
                assert self.rule.fused is not None
                tensors, factors = each.tensors, None
                if self._matrices is not None and self.rule.multiplies_weights:
                    tensors, factors = each.with_factor_chunks(), self._matrices.factors.flat()
                self.rule.fused.apply(self._groups[each.group], tensors, self._buffer, factors)
            for options, positions in self._lists:
                if self.rule.needs_matrices:
                    shards = self.stage.shards_in(self._buffer, positions)
                    updates = [in_precision(u, self._single[i].dtype) for i, u in zip(positions, shards, strict=True)]
                else:
                    updates = [self._updates[i] for i in positions]
                shards = [self._single[i].shard for i in positions]
                given: list[Any] = [options, shards, updates]
                if self._matrices is not None and self.rule.multiplies_weights:
                    given.append(list(map(self._matrices.factors.of, positions, shards)))
                check_applied(self.rule, self.rule.apply(*given))  # type: ignore[func-returns-value]

    def _update_dtype(self, units: Tensor) -> torch.dtype:
        """Return the precision of updates: on GPUs float16, in which the iteration runs, if the rule allows it."""
        if not units.is_cuda or units.dtype == torch.float64:
            return working_dtype(units.dtype)
        if all(self.rule.half_precision_suffices(b.options, b.rows, b.cols) for b in self.stage.batches):
            return torch.float16
        return self.rule.update_dtype or working_dtype(units.dtype)

    def _directions(self, units: Tensor, results: Tensor) -> None:
        """Pass whole units through `direction`, batch by batch; units of parameters that take no part are left out."""
        for numbers in self.stage.together:
            self._direct_together(numbers, units, results)

    def _direct_together(self, numbers: Sequence[int], units: Tensor, results: Tensor) -> None:
        """Pass batches through `directions`, or one by one through `direction`, and free their copies."""
        parts = [part for number in numbers if (part := self._part(number, units, results)) is not None]
        before = self._generators(parts)
        if self.rule.has_directions:
            check_returned(self.rule, "directions", self.rule.directions([part.batch for part in parts]))  # type: ignore[func-returns-value]
        for part in parts:
            if not self.rule.has_directions:
                check_returned(self.rule, "direction", self.rule.direction(part.batch))  # type: ignore[func-returns-value]
            check_direction(self.rule, part.batch)
            self._check_values(part)
            if self._numbers is not None:
                left = LeftNumbers(len(part.batch.matrices), part.batch.state, part.batch.diagnostics)
                self._numbers.take(self.stage, part.number, part.place, left)
            if self._context.samples is not None:
                self._sample(part, self._context.samples)
            if part.pieces:
                sizes = [len(piece) for piece in part.pieces]
                torch._foreach_copy_(part.pieces, list(torch.split(part.batch.update, sizes)))
        check_generators(self.rule, before, self._generators(parts))

    def _generators(self, parts: Sequence[_BatchPart]) -> list[Tensor]:
        """Return the states of torch's generators, if several ranks compute a batch that is new to its rule."""
        owners = [self.stage.units[part.members[0].unit].owner for part in parts]
        if self._is_proven or self.stage.exchange is None or None not in owners:
            return []
        device = parts[0].batch.matrices.device
        of_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *of_device]

    def _check_values(self, part: _BatchPart) -> None:
        """Raise if the rule has left an update that is not finite, where that matters."""
        raises = self._context.settings.nonfinite == "raise"
        if not raises and self._is_proven:
            return
        positions = [self.stage.units[member.unit].position for member in part.members]
        names = self._context.failures.names_of(positions)
        if not self._context.failures.postpone(part.batch.result, self.rule.name, names):
            error = finite_error(self.rule, part.batch, names, is_first=not raises)
            if error is not None:
                raise error

    def _sample(self, part: _BatchPart, samples: TakenSamples) -> None:
        """Sample the first matrix of a batch whose parameter is updated."""
        number = 0
        for member in part.members:
            position = self.stage.units[member.unit].position
            if position in self._context.inputs.updated:
                group = next(group for group, members in self.stage.positions_by_group if position in members)
                factor = None
                if self._matrices is not None and self.rule.multiplies_weights:
                    factor = self._matrices.factor_of_updates(part.place)[number]
                samples.take(self.stage, part.number, part.batch, number, group, factor)
                return
            number += member.stop - member.start

    def _part(self, number: int, units: Tensor, results: Tensor) -> _BatchPart | None:
        """Return the members of one batch that take part in this step; None if there are none."""
        stage, batch = self.stage, self.stage.batches[number]
        members = [member for member in batch.members if stage.units[member.unit].position in self.positions]
        if not members:
            return None
        is_complete = len(members) == len(batch.members)
        norms = None
        if self._inverse_norms is not None and is_complete:
            first = sum(other.count for other in stage.batches[:number])
            norms = self._inverse_norms[first : first + batch.count]
        start = stage.starts[number] if is_complete else None
        pieces: list[Tensor] = []
        if start is not None:
            stop, shape = start + batch.count * batch.rows * batch.cols, (batch.count, batch.rows, batch.cols)
            matrices, update = units[start:stop].view(shape), results[start:stop].view(shape)
        else:
            sources, pieces = (
                [_block(stage, member.unit, member.block, buffer)[member.start : member.stop] for member in members]
                for buffer in (units, results)
            )
            matrices = torch.cat(sources) if len(sources) > 1 else sources[0].contiguous()
            update = torch.empty_like(matrices, dtype=results.dtype)
            if not self._is_proven:
                update.fill_(torch.nan)
        if self._numbers is None:
            part = _BatchPart(
                number, members, MatrixBatch(matrices, update, batch.options, inverse_norms=norms), pieces
            )
        else:
            place = self._numbers.place(stage, number, members)
            numbered = self._numbers.batch(batch.options, place, matrices, update, norms)
            part = _BatchPart(number, members, numbered, pieces, place)
        of_step = None  # beside backward, the number of the step that comes
        if self._context.keeper is not None:
            of_step = self._groups[stage.positions_by_group[0][0]].get(NUM_UPDATES, 0)
        part.batch.draw = self._context.random.source(stage, number, members, matrices.device, of_step)
        return part


@dataclass(frozen=True)
class _BatchPart:
    """The members of one batch that take part in a step.

    Args:
        number: of the batch in its stage.
        members: those that take part.
        batch: what `direction` gets.
        pieces: where the updates belong, if they are not contiguous in the buffer of results.
        place: the class of the matrices and their numbers there; None if the rule has no per-matrix numbers.
    """

    number: int
    members: Sequence[Member]
    batch: MatrixBatch
    pieces: list[Tensor]
    place: Any = None


def _block(stage: Stage, unit: int, block: int, buffer: Tensor) -> Tensor:
    """Return the matrices of one block of a unit, as a view of the buffer."""
    return stage.units[unit].view.split(stage.unit_slots[unit].of(buffer))[block]
