"""Run the stages of a step, overlapped: prepare, gather, direction, scatter, forward and apply."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from muon_fsdp.comm.transfers import StageExchange
from muon_fsdp.declarations.state import State, working_dtype
from muon_fsdp.plan.stages import Member, Stage
from muon_fsdp.rules import RULES, MatrixBatch
from muon_fsdp.rules.checks import (
    GivenStates,
    check_direction,
    check_generators,
    check_returned,
    checked_prepared,
    finite_error,
    finite_matrices,
)
from muon_fsdp.step.gradients import are_finite
from muon_fsdp.step.inputs import in_precision
from muon_fsdp.step.matrix_state import BatchValues
from muon_fsdp.step.sinks import Sink
from muon_fsdp.step.sources import Source, StageResult

NUM_PHASES = 5  # of a stage


def run_stages(stages: Iterable[Stage], source: Source, sink: Sink) -> None:
    """Run these stages, and overlap their transfers with computation as far as the plan allows it.

    `stages` may wait before it yields one. The order of transfers never depends on when it does.

    While one stage computes, the next is being gathered and the one before it scattered. Where several ranks hold the
    same shards, the one before that is being forwarded among them. Where a rule reads statistics of its updates, these
    are being summed over ranks for the one before. `StageLimits.in_flight` says which stages overlap less, to save
    memory.

    Args:
        stages: the stages, in an order that is the same on all ranks.
        source: lends each what it reads.
        sink: takes what each leaves.
    """
    travelling, run = _Travelling(), None
    try:
        for stage in stages:
            run = _StageRun(stage, source, sink, travelling.count)
            if run.travels:
                travelling.add(run)
            else:  # there is no transfer to overlap with: finish at once, which frees its memory
                travelling.end_scatter()
                for _ in range(NUM_PHASES):
                    run.advance()
        travelling.finish()
    except BaseException:  # their buffers would stay until Python looks for cycles
        for each in (run, *travelling.runs):
            if each is not None:
                each.close()
        raise


class _Travelling:
    """The stages whose transfers are running: at most one is gathered, one is scattered and one is forwarded.

    The one before these may wait for the sums over its updates.
    """

    def __init__(self) -> None:
        self.count = 0  # stages that have been added
        self._gathering: _StageRun | None = None
        self._scattering: _StageRun | None = None
        self._forwarding: _StageRun | None = None
        self._summing: list[_StageRun] = []

    @property
    def runs(self) -> tuple[_StageRun | None, ...]:
        """Return the stages on their way."""
        return self._gathering, self._scattering, self._forwarding, *self._summing

    def add(self, run: _StageRun) -> None:
        """Start a stage, compute the one that was gathered before, and pass on those before that."""
        # Sums start late. Ranks that wait for them may be those for which a stage of other ranks would wait here.
        if run.in_flight == 1 or any(each and each.sums and each.ranks != run.ranks for each in self.runs):
            self.finish()
        # Two stages in flight: the one being scattered must end before the next one computes. Its transfer buffers are
        # freed before `run` makes its own. Its updates are applied after `run` has started, because the network would
        # be idle meanwhile.
        ending = self._scattering if self._ends_next else None
        if ending is not None:
            ending.advance()
        run.advance()
        self.count += 1
        if ending is not None:
            ending.advance()
            ending.advance()
            self._scattering = None
        before = self._gathering
        if before is not None:
            before.advance()
        self._pass_on()
        self._gathering, self._scattering = run, before
        if before is None or self._ends_next:
            return
        if before.in_flight < 3:
            self._pass_all_on()
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
            self._gathering.advance()
        self._pass_on()
        self._gathering, self._scattering = None, self._gathering
        self._pass_all_on()

    @property
    def _ends_next(self) -> bool:
        """Return whether the stage being scattered is finished by the next call.

        A stage with replicas is not left to the next call: its buffer of updates is larger than those of a transfer.
        """
        scattering = self._scattering
        return scattering is not None and scattering.in_flight < 3 and not scattering.forwards

    def _pass_on(self) -> None:
        """Finish the stage being forwarded, and start forwarding the one being scattered.

        If that has nothing to forward, it is finished too. A stage with sums over its updates is finished by the next
        call.
        """
        for summed in self._summing:
            summed.advance()
        self._summing = []
        if self._forwarding is not None:
            self._end_forward(self._forwarding)
        self._forwarding, self._scattering = self._scattering, None
        if self._forwarding is not None:
            self._forwarding.advance()
            if not self._forwarding.forwards:
                self._end_forward(self._forwarding)
                self._forwarding = None

    def _end_forward(self, run: _StageRun) -> None:
        run.advance()
        if run.sums:
            self._summing.append(run)
        else:
            run.advance()

    def _pass_all_on(self) -> None:
        """Finish all stages but the one being gathered."""
        while self._scattering is not None or self._forwarding is not None or self._summing:
            self._pass_on()


def _profiled(phase: str, stage: Stage) -> AbstractContextManager[object]:
    """Return a context manager that shows a phase of a stage in a profile; it does nothing unless a profiler runs."""
    if not torch._C._autograd._profiler_enabled():  # entering record_function takes microseconds in any case
        return nullcontext()
    return record_function(f"muon_fsdp.{phase} {stage.label}")


class _StageRun:
    """One stage on its way from gradients to updates, in `NUM_PHASES` phases: each call of `advance` runs the next one.

    Parameters are updated in fused launches where that is possible, and by lists of tensors elsewhere.

    Args:
        stage: the stage.
        source: lends what it reads.
        sink: takes its result.
        number: counts the stages that travel.
    """

    def __init__(self, stage: Stage, source: Source, sink: Sink, number: int) -> None:
        self.stage, self._rule = stage, RULES[stage.rule]
        self._source, self._sink, self._number = source, sink, number
        self._inputs = source.open(stage)
        self._kept = source.kept(stage)
        self._skips_direction = not self._rule.needs_matrices or (
            self._kept is not None and not self._rule.needs_weights
        )
        # In backward, a rule that needs weights only gathers: `direction` runs in `step()`.
        self._keeps_units = self._rule.needs_weights and not sink.applies
        exchange = stage.exchange
        # Whether sums over its updates travel. Its turn among other stages then matters, though nothing else travels.
        self.sums = exchange is not None and self._rule.update_statistics and not self._keeps_units
        self.travels = self.sums or (
            not self._skips_direction and exchange is not None and (exchange.gathers or exchange.scatters)
        )
        self.forwards = exchange is not None and exchange.forwards
        self.ranks = exchange.ranks if exchange is not None else ()
        self.in_flight = stage.in_flight
        self._is_proven = stage.number not in sink.unproven
        self._inverse_norms: Tensor | None = None
        self._phases = self._start()

    def advance(self) -> None:
        """Run the next phase: up to the start of the gather, the scatter, the forward, the sums, and to the end."""
        next(self._phases, None)

    def close(self) -> None:
        """Drop what the stage holds, because another one has failed."""
        self._phases.close()

    def _start(self) -> Generator[None, None, None]:
        """Return the phases of the stage. State that was lent is taken back when it ends, in whatever way."""
        with ExitStack() as loan:
            yield from self._run(loan)

    def _run(self, loan: ExitStack) -> Iterator[None]:
        """Take the stage through its phases; each but the last ends with a transfer that was started."""
        stage, exchange, starts_anew = self.stage, None, self._kept is None
        # A stage that ran in backward has read the state too: its result comes before `prepare` changes that.
        kept = self._kept() if self._kept is not None else None
        buffer = self._new_buffer() if self._rule.needs_matrices else torch.empty(0)
        updates: dict[int, Tensor] = {}  # of an element-wise rule
        lent: Mapping[int, State] = {}

        def prepare() -> None:
            nonlocal lent
            lent = loan.enter_context(self._source.lend(stage, self._inputs))
            self._prepare(lent, buffer, updates)

        with _profiled("prepare", stage):
            self._attempt("prepare", prepare, buffer)
        if self._rule.needs_matrices:  # else updates may be tensors of the state
            loan.close()
            lent = {}
        if kept is not None:  # only the state was wanted: what `prepare` has written to the buffer is dropped
            buffer, kept = self._take(kept), None
        if stage.exchange is not None and not self._skips_direction:
            with _profiled("gather", stage):
                exchange = StageExchange(stage, buffer, self._source.recorder, self._number)
                if starts_anew:
                    exchange.start_gather()
                    buffer = torch.empty(0)
        yield

        if not self._skips_direction:
            if exchange is not None and starts_anew:
                with _profiled("gathered", stage):
                    buffer = exchange.finish_gather()
            if self._keeps_units:
                exchange = None
            else:
                buffer = self._directions(buffer)
                if exchange is not None:
                    with _profiled("scatter", stage):
                        exchange.start_scatter(buffer)
                    buffer = torch.empty(0)
        yield

        if exchange is not None:
            with _profiled("scattered", stage):
                exchange.finish_scatter()  # starts to exchange its results with the ranks that hold the same shards
        yield

        if exchange is not None:
            with _profiled("forwarded", stage):
                buffer, exchange = exchange.finish_forward(), None
        if self._rule.update_statistics and self._sink.applies:
            with _profiled("sum", stage):
                self._sink.start_sums(stage, self._inputs, buffer, self._source.recorder)
        yield

        with _profiled("apply", stage):
            if self._rule.needs_matrices and self._sink.applies and self._wants_state_in_apply:
                lent = loan.enter_context(self._source.lend(stage, self._inputs))
            self._sink.finish(stage, self._inputs, buffer, updates, lent)

    @property
    def _wants_state_in_apply(self) -> bool:
        """Return whether `apply` of the rule, or of its kernels, changes state."""
        kernels = self._rule.fused if self._inputs.fused else None
        return self._rule.state_in_apply or (kernels is not None and kernels.state_in_apply)

    def _take(self, kept: StageResult) -> Tensor:
        """Take what a stage has left in backward, and return its updates or units."""
        if kept.failure is not None:
            self._fail(*kept.failure)
        if self._sink.samples is not None:
            self._sink.samples.samples.update(kept.samples)

        def take() -> None:
            for number, values in kept.values.items():
                self._sink.take(self.stage, number, None, values)

        self._attempt("direction", take, torch.empty(0))
        return kept.buffer

    def _prepare(self, states: Mapping[int, State], buffer: Tensor, updates: dict[int, Tensor]) -> None:
        """Update the moments, and write what is to be orthogonalized to the buffer; or the updates, if elementwise."""
        inputs, rule = self._inputs, self._rule
        if rule.needs_matrices:
            # Shards that travel without being updated are zeroed: garbage makes some directions raise.
            idle = inputs.positions - inputs.fused_positions - set(inputs.listed)
            if idle:
                torch._foreach_zero_([self.stage.shard_slots[i].of(buffer) for i in idle])
        first_partials = inputs.fused[0].first_partials if inputs.fused else None
        partials = None
        if first_partials is not None:
            num_partials = sum(len(each.state_chunks) for each in inputs.fused)
            partials = torch.empty(num_partials, 2, dtype=torch.float32, device=buffer.device)
        for each in inputs.fused:
            assert rule.fused is not None
            rule.fused.prepare(inputs.groups[each.group], each, buffer, partials)
        if first_partials is not None and partials is not None:
            from muon_fsdp.kernels import triton_norms

            self._inverse_norms = triton_norms.inverse_norms_of_partials(partials, first_partials)
        for group, listed in inputs.lists:
            gradients = [each.working_gradient() for each in listed]
            given = GivenStates(rule, "prepare", [states[each.record.position] for each in listed])
            returned = rule.prepare(inputs.groups[group], gradients, given.copies)
            given.take()
            prepared = checked_prepared(rule, returned, [each.shard for each in listed])
            positions = [each.record.position for each in listed]
            if rule.needs_matrices:
                torch._foreach_copy_(self.stage.shards_in(buffer, positions), prepared)
                continue
            prepared = [in_precision(value, each.record.dtype) for value, each in zip(prepared, listed, strict=True)]
            if self._source.settings.nonfinite == "raise" and not are_finite(prepared):
                wrong = [i for i, each in zip(positions, prepared, strict=True) if not are_finite([each])]
                raise ValueError(
                    f"rule {rule.name!r}: prepare returned an update of {self._sink.failures.names_of(wrong)} "
                    "that is not finite, though gradients are: check what may divide by zero or overflow"
                )
            updates.update(zip(positions, prepared, strict=True))

    def _attempt(self, method: str, work: Callable[[], None], result: Tensor) -> None:
        """Call what a rule computes. If that fails, `result` is zero, and nothing of the stage is applied here.

        A rank that left out the transfers of the stage would make the others wait. In backward, gradients may be
        changing, so that the stage will be discarded anyway.
        """
        try:
            if not self._sink.has_failed(self.stage):
                work()
        except Exception as error:
            self._fail(method, error)
        if self._sink.has_failed(self.stage):
            result.zero_()

    def _fail(self, method: str, error: Exception) -> None:
        self._sink.fail(self.stage, method, error, self._inputs.positions)

    def _new_buffer(self) -> Tensor:
        """Return a buffer for the shards of the stage."""
        if self._inputs.fused:  # all shards of a stage have one device and one working precision
            device, dtype = self._inputs.fused[0].chunks.device, self._inputs.fused[0].parameter_dtype
        else:
            listed = self._inputs.lists[0][1][0]
            device, dtype = listed.record.device, listed.shard.dtype
        staging_dtype = self._source.settings.staging_dtype(device.type, working_dtype(dtype))
        return torch.empty(self.stage.shard_numel, dtype=staging_dtype, device=device)

    def _directions(self, units: Tensor) -> Tensor:
        """Orthogonalize the units of this rank; units of parameters that take no part are left out."""
        results = torch.empty(self.stage.unit_numel, dtype=self.stage.update_dtype, device=units.device)
        if not self._is_proven:  # what `direction` does not write is found as NaN
            results.fill_(torch.nan)

        def direct() -> None:
            for numbers in self.stage.together:
                self._direct_together(numbers, units, results)

        with _profiled("orthogonalize", self.stage):
            self._attempt("direction", direct, results)
        if not self._sink.has_failed(self.stage):
            self._sink.unproven.discard(self.stage.number)
        return results

    def _direct_together(self, numbers: Sequence[int], units: Tensor, results: Tensor) -> None:
        """Pass batches through `directions`, or one by one through `direction`, and free their copies."""
        rule = self._rule
        parts = [part for number in numbers if (part := self._part(number, units, results)) is not None]
        before = self._generators(parts)
        if rule.has_directions:
            check_returned(rule, "directions", rule.directions([part.batch for part in parts]))  # type: ignore[func-returns-value]
        for part in parts:
            if not rule.has_directions:
                check_returned(rule, "direction", rule.direction(part.batch))  # type: ignore[func-returns-value]
            check_direction(rule, part.batch)
            self._check_values(part)
            if rule.has_matrix_values:
                values = BatchValues(len(part.batch.matrices), part.batch.state, part.batch.diagnostics)
                self._sink.take(self.stage, part.number, part.selection, values)
            self._sample(part)
            if part.pieces:
                sizes = [len(piece) for piece in part.pieces]
                torch._foreach_copy_(part.pieces, list(torch.split(part.batch.update, sizes)))
        check_generators(rule, before, self._generators(parts))

    def _generators(self, parts: Sequence[_BatchPart]) -> list[Tensor]:
        """Return the states of torch's generators, if several ranks compute a batch that is new to its rule."""
        owners = [self.stage.units[part.members[0].unit].owner for part in parts]
        if self._is_proven or self.stage.exchange is None or None not in owners:
            return []
        device = parts[0].batch.matrices.device
        of_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *of_device]

    @property
    def _checks_values(self) -> bool:
        """Return whether an update that is not finite matters."""
        return self._source.settings.nonfinite == "raise" or not self._is_proven

    def _check_values(self, part: _BatchPart) -> None:
        """Raise if the rule has left an update that is not finite, where that matters."""
        if not self._checks_values:
            return
        positions = [self.stage.units[member.unit].position for member in part.members]
        names = self._sink.failures.names_of(positions)
        if not self._sink.failures.postpone(part.batch.result, self._rule.name, names):
            is_first = self._source.settings.nonfinite != "raise"
            error = finite_error(self._rule, part.batch, part.finite, names, is_first=is_first)
            if error is not None:
                raise error

    def _sampled(self, members: Sequence[Member]) -> tuple[int, int] | None:
        """Return which matrix of a batch is sampled, the first that is updated, and its group; None if none is."""
        number = 0
        for member in members:
            position = self.stage.units[member.unit].position
            if position in self._inputs.updated:
                groups = self.stage.positions_by_group
                return number, next(group for group, positions in groups if position in positions)
            number += member.stop - member.start
        return None

    def _sample(self, part: _BatchPart) -> None:
        """Sample a matrix of a batch."""
        if part.sampled is None:
            return
        (number, group), batch = part.sampled, part.batch
        here = slice(number, number + 1)
        one = MatrixBatch(
            batch.matrices[here] if part.copy is None else part.copy,
            batch.result[here],
            self.stage.batches[part.number].options,
            inverse_norms=None if batch.inverse_norms is None else batch.inverse_norms[here],
        )
        one.may_overwrite = part.copy is not None and self._rule.residual_overwrites
        self._sink.sample(self.stage, part.number, part.selection, one, number, group)

    def _part(self, number: int, units: Tensor, results: Tensor) -> _BatchPart | None:
        """Return the members of one batch that take part in this step; None if there are none."""
        stage, batch = self.stage, self.stage.batches[number]
        members = [m for m in batch.members if stage.units[m.unit].position in self._inputs.positions]
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
        given = MatrixBatch(matrices, update, batch.options, inverse_norms=norms)
        selection = self._source.complete(stage, number, members, given)
        samples = self._sink.samples
        sampled = self._sampled(members) if samples is not None else None
        finite = copy = None
        if self._rule.may_overwrite:  # what is read afterwards is kept
            given.may_overwrite = True
            if self._checks_values and not self._sink.failures.is_recorded:
                finite = finite_matrices(given)
            if sampled is not None and samples is not None and samples.has_residuals:
                copy = matrices[sampled[0] : sampled[0] + 1].clone()
        return _BatchPart(number, members, given, pieces, selection, sampled, finite, copy)


@dataclass(frozen=True)
class _BatchPart:
    """The members of one batch that take part in a step.

    Args:
        number: of the batch in its stage.
        members: those that take part.
        batch: what `direction` gets.
        pieces: where the updates belong, if they are not contiguous in the buffer of results.
        selection: the class of the matrices and their numbers there; None if the rule has no per-matrix values.
        sampled: the number of the matrix that is sampled, and its group; None if none is.
        finite: which matrices are finite, (B,), if that is asked after the rule may have overwritten them.
        copy: of the matrix that is sampled, (1, d_out, d_in), if the rule may overwrite it.
    """

    number: int
    members: Sequence[Member]
    batch: MatrixBatch
    pieces: list[Tensor]
    selection: Any
    sampled: tuple[int, int] | None
    finite: Tensor | None
    copy: Tensor | None


def _block(stage: Stage, unit: int, block: int, buffer: Tensor) -> Tensor:
    """Return the matrices of one block of a unit, as a view of the buffer."""
    return stage.units[unit].view.split(stage.unit_slots[unit].of(buffer))[block]
