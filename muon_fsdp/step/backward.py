"""Run stages beside one backward, in a thread of their own, and keep their results for `step()`.

Nothing here writes parameters or state: `CopiesSource` lends copies of the state, which `prepare` may change, and
`step()` calls `prepare` again on the state itself. `KeepingSink` keeps the updates until then.
"""

from __future__ import annotations

import atexit
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Condition, Thread
from time import monotonic, sleep
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from muon_fsdp.comm.process_groups import Claim, groups_for, my_rank, world_reference
from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.declarations.settings import NUM_UPDATES
from muon_fsdp.declarations.state import State
from muon_fsdp.kernels import on_device
from muon_fsdp.plan.stages import Member, Stage
from muon_fsdp.rules import RULES, MatrixBatch
from muon_fsdp.rules.base import NamedValues
from muon_fsdp.step.changes import Arrival, NotedOptions, NotedState
from muon_fsdp.step.failures import Failures
from muon_fsdp.step.fused import FusedStep
from muon_fsdp.step.inputs import StepInputs
from muon_fsdp.step.matrix_state import BatchValues
from muon_fsdp.step.metrics import TakenSamples
from muon_fsdp.step.pipeline import run_stages
from muon_fsdp.step.sources import StageInputs, StageResult, StepContext, stage_inputs
from muon_fsdp.text import first_names

PURPOSE = "backward"  # of the process groups that these stages use
SECONDS_AT_EXIT = 10.0  # how long a program that ends waits for exchanges with other ranks
SECONDS_TO_RELEASE = 0.1  # and then for threads of gloo, which free the tensors of an exchange after it has ended


@dataclass(frozen=True)
class RoundContext(StepContext):
    """Everything that the stages of a round need besides gradients.

    Args:
        inputs: those of the last step, without gradients; groups and states are the optimizer's.
        fused: the fused lists of the last step.
        device: where the stages run.
        stream: the CUDA stream on which they run; None on a CPU.
        written: a CUDA event after the last step, which has written the state; None on a CPU.
        num_threads: with how many threads `step()` computes on a CPU. Another number would give other bits, and a new
            thread does not inherit that of `torch.set_num_threads`.
    """

    inputs: StepInputs
    fused: FusedStep
    device: torch.device
    stream: Any = None
    written: Any = None
    num_threads: int = 1


class _Read(NamedTuple):
    """The state and the options by group that a stage has read."""

    state: NotedState
    options: Mapping[int, NotedOptions]


class CopiesSource:
    """Lends stages copies of the state in backward, and notes what they have read.

    Args:
        context: what stages need besides gradients.
        arrivals: the gradients that have arrived, by position.
        sink: is told about a stage that can't read its state.
        changed: guards what `step()` asks for while a stage reads.
    """

    def __init__(
        self, context: RoundContext, arrivals: dict[int, Arrival], sink: KeepingSink, changed: Condition
    ) -> None:
        self.settings, self.recorder = context.settings, Recorder()
        self._context, self._arrivals, self._sink, self._changed = context, arrivals, sink, changed
        self.started: set[int] = set()  # the stages that have read what they found, by number
        self._read: dict[int, _Read] = {}
        # Copies of state, and gradients, until the stage has prepared: tables of kernels know only addresses.
        self._copies: dict[int, tuple[Mapping[int, State], Mapping[int, Tensor]]] = {}
        self._of_matrices: dict[tuple[int, int], State] = {}  # per-matrix state by numbers of stage and batch

    def kept(self, stage: Stage) -> None:
        return None

    def open(self, stage: Stage) -> StageInputs:
        """Read gradients, and copy the state that the stage needs."""
        with self._changed:
            self.started.add(stage.number)
            try:
                return self._load(stage)
            except Exception as error:  # such as state that is missing
                return self._load_nothing(stage, error)

    def _load(self, stage: Stage) -> StageInputs:
        context, rule, number = self._context, RULES[stage.rule], stage.number
        store, positions = context.store, sorted(stage.positions)
        # Noted before it is copied: a change between would go unnoticed.
        stored = {i: store.stored(i, context.inputs.states[i]) for i in positions}
        state = NotedState(stored, by_values=context.stream is None)
        fused = {position for position in positions if context.fused.signature[position] is not None}
        listed = [position for position in positions if position not in fused]
        copies = store.copies(stage, context.inputs.states, listed, fused)
        for position in positions:
            for spec in rule.all_state:
                if spec.name not in copies[position]:
                    raise KeyError(f"{context.records[position].name!r} has no state {spec.name!r}")
        options = {group: NotedOptions(context.inputs.groups[group]) for group, _ in stage.positions_by_group}
        for noted in options.values():
            noted.get(NUM_UPDATES)  # random numbers depend on it
        found = {position: self._read_gradient(position) for position in positions}
        gradients = {i: grad.contiguous() if i in fused else grad for i, grad in found.items() if grad is not None}
        inputs = replace(context.inputs, groups=options, states=copies, gradients=gradients, updated=stage.positions)
        inputs_of_stage = stage_inputs(stage, inputs, context.fused.with_tables(stage, inputs), context.records)
        for noted in options.values():
            # The tables have them too, and the kernels of `prepare` do not read them.
            noted.forget("lr", "weight_decay")
        self._copies[number] = copies, gradients
        if rule.matrix_state and not rule.needs_weights:
            for index in range(len(stage.batches)):
                self._of_matrices[number, index] = self._rows(stage, index, copies)
        self._read[number] = _Read(state, options)
        return inputs_of_stage

    def has_readable(self, position: int) -> bool:
        """Return whether the gradient of a parameter has arrived in time, in a precision that its kernel can read."""
        arrival, kinds = self._arrivals.get(position), self._context.fused.signature[position]
        return arrival is not None and (kinds is None or arrival.dtype is kinds[1])

    def _read_gradient(self, position: int) -> Tensor | None:
        """Return the local gradient of a parameter; None, which stands for zeros, if it can't be used."""
        if not self.has_readable(position):
            self._arrivals.pop(position, None)  # `step()` finds that it was not used
            return None
        return self._context.records[position].rows_of(self._arrivals[position].read())

    def _load_nothing(self, stage: Stage, error: Exception) -> StageInputs:
        """Let a stage send zeros, because other ranks wait for its transfers. `step()` finds that it read nothing."""
        context = self._context
        self._sink.fail(stage, "prepare", error, stage.positions)
        inputs = replace(context.inputs, gradients={}, updated=stage.positions)
        # Without fused lists: their tables are those of `step()`, so that kernels would write the state.
        return stage_inputs(stage, inputs, (), context.records)

    @contextmanager
    def lend(self, stage: Stage, inputs: StageInputs) -> Iterator[Mapping[int, State]]:
        """Lend the copies once, and drop them."""
        copies, _ = self._copies[stage.number]
        try:
            yield copies
        finally:
            del self._copies[stage.number]

    def _rows(self, stage: Stage, number: int, states: Mapping[int, State]) -> State:
        """Return the per-matrix state of a batch by name, given that of its parameters."""
        batch, rows = stage.batches[number], {}
        for spec in RULES[stage.rule].matrix_state:
            parts = []
            for member in batch.members:
                unit = stage.units[member.unit]
                view = self._context.records[unit.position].view
                assert view is not None
                block, first = unit.block_of(member.block)
                span = spec.span(view, block, first + member.start, first + member.stop)
                parts.append(states[unit.position][spec.name][span])
            rows[spec.name] = torch.cat(parts).view(-1, *spec.shape_of_matrix(batch.rows, batch.cols))
        return rows

    def complete(self, stage: Stage, number: int, members: Sequence[Member], batch: MatrixBatch) -> None:
        """Give a batch copies of its per-matrix state. All of its members take part: else the stage is discarded."""
        rows = self._of_matrices.pop((stage.number, number), None)
        if rows is not None:
            batch.state = NamedValues(stage.rule, "state", rows)
        group = stage.positions_by_group[0][0]
        of_step = self._context.inputs.groups[group].get(NUM_UPDATES, 0)
        batch.draw = self._context.random.source(stage, number, members, batch.matrices.device, of_step)

    def is_current(self, stage: Stage, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State]) -> bool:
        """Return whether a stage has read the present state and options, or will read them."""
        context, store = self._context, self._context.store
        now = {position: states[context.records[position].tensor] for position in stage.positions}
        with self._changed:
            if stage.number not in self.started:  # it will read what it finds, unless that was replaced or is missing
                same_groups = all(groups[g] is context.inputs.groups[g] for g, _ in stage.positions_by_group)
                names = {spec.name for spec in RULES[stage.rule].all_state}
                return same_groups and all(
                    state is context.inputs.states[position] and names <= state.keys()
                    for position, state in now.items()
                )
            read = self._read.get(stage.number)
        if read is None:  # it could not read its state
            return False
        if not all(options.is_current(groups[group]) for group, options in read.options.items()):
            return False
        return read.state.is_current({position: store.stored(position, state) for position, state in now.items()})


class KeepingSink:
    """Keeps the results of the stages that run in backward, until `step()` uses or discards them.

    Stages of element-wise rules never run there.

    Args:
        context: what the stages of the round have in common.
        results: by number of the stage, where its result goes.
    """

    applies = False

    def __init__(self, context: RoundContext, results: Mapping[int, Future[StageResult]]) -> None:
        self.failures = Failures()
        self.unproven: set[int] = set()
        self.samples: TakenSamples | None = None  # set when the round runs: `metrics()` may ask for samples until then
        self._stream, self._results = context.stream, results
        self._values: defaultdict[int, dict[int, BatchValues]] = defaultdict(dict)  # by numbers of stage and batch
        self._failed: dict[int, tuple[str, Exception]] = {}  # by number of the stage: the method, and its error

    def has_failed(self, stage: Stage) -> bool:
        return stage.number in self._failed

    def fail(self, stage: Stage, method: str, error: Exception, positions: Collection[int]) -> None:
        """Note that the rule of a stage has raised an error; its transfers continue with zeros."""
        self._failed.setdefault(stage.number, (method, error))

    def take(self, stage: Stage, number: int, selection: Any, values: BatchValues) -> None:
        self._values[stage.number][number] = values

    def sample(self, stage: Stage, number: int, selection: Any, one: MatrixBatch, matrix: int, group: int) -> None:
        if self.samples is not None:
            self.samples.take(stage, number, one, group, None)

    def start_sums(self, stage: Stage, inputs: StageInputs, buffer: Tensor, recorder: Recorder) -> None:
        raise AssertionError("nothing is applied in backward")

    def finish(
        self,
        stage: Stage,
        inputs: StageInputs,
        buffer: Tensor,
        updates: Mapping[int, Tensor],
        states: Mapping[int, State],
    ) -> None:
        """Keep the updates or the gathered units of a stage; if its rule has failed, keep the error for `step()`."""
        failure, values = self._failed.get(stage.number), self._values.pop(stage.number, {})
        samples = self.samples.of(stage) if self.samples is not None else {}
        event = self._stream.record_event() if self._stream is not None else None
        result = StageResult(buffer, values if failure is None else {}, samples, failure, event)
        self._results[stage.number].set_result(result)


class Round:
    """The stages that run beside one backward. Every rank runs all of them, in the same order.

    A stage starts when all of its gradients have arrived and the stages before it have started. After `complete`, it
    starts with zeros in the place of those that have not arrived, because other ranks may wait for it.

    Args:
        stages: the stages, in an order that is the same on all ranks.
        context: what they need besides gradients; None if there are no stages.
    """

    def __init__(self, stages: Sequence[Stage] = (), context: RoundContext | None = None) -> None:
        self.stages = tuple(stages)
        self._context = context
        self._stage_of = {position: stage for stage in stages for position in stage.positions}
        self._changed = Condition()  # guards all that follows
        self._arrivals: dict[int, Arrival] = {}  # by position
        self._is_complete = self._is_cancelled = False
        self._results: dict[int, Future[StageResult]] = {stage.number: Future() for stage in stages}
        if context is not None:  # what these objects know about the round must not be the round, which is freed at once
            self._sink = KeepingSink(context, self._results)
            self._source = CopiesSource(context, self._arrivals, self._sink, self._changed)
        self._world = world_reference()

    @property
    def took_residuals(self) -> bool:
        """Return whether the stages of this round compute residuals for `metrics()`."""
        return self._context is not None and self._sink.samples is not None and self._sink.samples.has_residuals

    # ------------------------------------------------------------------------------------------- called in backward

    def arrive(self, position: int, arrival: Arrival) -> bool:
        """Note a gradient, unless its stage has started without it: then it was not read, and never will be.

        Returns:
            Whether a stage has become complete.
        """
        with self._changed:
            stage = self._stage_of.get(position)
            if stage is None or stage.number in self._source.started:
                self._arrivals.pop(position, None)
                return False
            self._arrivals[position] = arrival
            ready = self._is_ready(stage)
            if ready:
                self._changed.notify_all()
        return ready

    def write(self, position: int, grad: Tensor | None) -> None:
        """Note the gradient that DDP has written to `p.grad` after it had arrived."""
        with self._changed:
            arrival = self._arrivals.get(position)
            if arrival is not None and not arrival.write(grad):
                del self._arrivals[position]

    # --------------------------------------------------------------------------------------------- called in step()

    def complete(self) -> None:
        """Allow all stages to start, with zeros for gradients that have not arrived."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Start no further stage, though other ranks may wait for it."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()

    def has_begun(self) -> bool:
        """Return whether stages have started, here or, as far as this rank can know, on other ranks."""
        with self._changed:
            return self._is_complete or bool(self._arrivals)

    def is_orphaned(self) -> bool:
        """Return whether torch.distributed was initialized anew, so that there is nobody to wait for."""
        return self._world() is not world_reference()()

    def has_read(self, position: int, grad: Tensor | None) -> bool:
        """Return whether a stage has used, or will use, the present gradient of a parameter."""
        with self._changed:
            return self._source.has_readable(position) and self._arrivals[position].is_unchanged(grad)

    def has_arrived(self, position: int) -> bool:
        """Return whether the gradient of a parameter has arrived in time to be read."""
        with self._changed:
            return self._source.has_readable(position)

    def is_current(self, stage: Stage, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State]) -> bool:
        """Return whether a stage has read the present state and options, or will read them."""
        return self._source.is_current(stage, groups, states)

    def result(self, stage: Stage) -> StageResult:
        """Wait for the result of a stage and return it, once; on a GPU the current stream waits, not the host.

        Raises:
            RuntimeError: another rank can't be reached; the message says what was waited for.
        """
        found = self._results[stage.number].result()
        del self._results[stage.number]
        if found.event is not None:
            stream = torch.cuda.current_stream(found.buffer.device)
            stream.wait_event(found.event)
            written = found.values.values()
            values = [value for each in written for part in (each.state, each.diagnostics) for value in part.values()]
            for value in (found.buffer, *values):
                value.record_stream(stream)  # it was allocated on another stream, which must not reuse it too early
        return found

    def wait(self) -> None:
        """Wait until all stages have run or failed; nothing is raised. On a GPU the current stream waits too."""
        for future in self._results.values():
            future.exception()
        if self._context is not None and self._context.stream is not None:
            torch.cuda.current_stream(self._context.device).wait_stream(self._context.stream)

    # ----------------------------------------------------------------------------------------- called in the thread

    def run(self) -> bool:
        """Run the stages, each as soon as it may start.

        Returns:
            Whether all transfers have ended. Otherwise other ranks may be at other transfers of the same groups.
        """
        context = self._context
        assert context is not None
        if context.stream is None:
            torch.set_num_threads(context.num_threads)
        self._sink.samples = context.samples.start(context.device.type, rarely=False)
        try:
            with torch.no_grad(), on_device(context.device), self._on_stream(), groups_for(PURPOSE):
                if context.stream is not None:
                    context.stream.wait_event(context.written)
                run_stages(self._when_due(), self._source, self._sink)
        except Exception as error:
            for stage in self.stages:
                with suppress(Exception):  # the stage has a result already, or nobody wants it
                    self._results[stage.number].set_exception(self._lost(stage, error))
            return False
        return True

    def _lost(self, stage: Stage, error: Exception) -> Exception:
        """Return the error of a stage that another rank did not finish."""
        if stage.exchange is None:
            return error
        assert self._context is not None
        others = [rank for rank in stage.exchange.ranks if rank != my_rank()]
        names = [self._context.records[position].name for position in sorted(stage.positions)]
        return RuntimeError(
            f"Rank {my_rank()} waited for ranks {others} to exchange the matrices of {stage.label}, which started in "
            f"backward ({first_names(names)}), and one of them can't be reached: {error}. Look at its output for the "
            "first error"
        )

    def _on_stream(self) -> AbstractContextManager[object]:
        stream = self._context.stream if self._context is not None else None
        return torch.cuda.stream(stream) if stream is not None else nullcontext()

    def _is_ready(self, stage: Stage) -> bool:
        return stage.positions <= self._arrivals.keys()

    def _when_due(self) -> Iterator[Stage]:
        """Yield the stages, and wait for each until it may start."""
        for stage in self.stages:
            with self._changed:
                while not (self._is_ready(stage) or self._is_complete or self._is_cancelled):
                    self._changed.wait()
                if self._is_cancelled:
                    return
            yield stage


class RoundThread:
    """Runs one round after another in a thread, which outlives the optimizer until its last round has ended."""

    def __init__(self) -> None:
        self.round = Round()
        self.claim: Claim | None = None  # to the process groups that the rounds use
        self._is_running = False  # whether the thread has got the present round
        self._rounds: list[Round] = []  # those that the thread has got and not ended
        self._calls: SimpleQueue[tuple[Round, Claim | None] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def begin(self, round_: Round) -> None:
        """Make this the present round."""
        self.round, self._is_running = round_, False

    def start(self) -> None:
        """Run the present round in the thread, unless it runs there already."""
        if self._is_running or not self.round.stages:
            return
        self._is_running = True
        self._rounds.append(self.round)
        self._calls.put((self.round, self.claim))
        if self._thread is None:
            # A daemon, because a program that ends after an error must not wait for other ranks without end.
            self._thread = Thread(target=self._serve, name="muon_fsdp backward", daemon=True)
            _threads.add(self)
            self._thread.start()

    def leave(self) -> None:
        """Finish what was started, and end the thread, because the optimizer was dropped.

        All ranks finish the same stages, so that those of the next optimizer find the process groups in order.
        """
        if self.round.is_orphaned():
            self.round.cancel()
        elif self.round.has_begun():
            self.round.complete()
            self.start()
        self.begin(Round())
        self.claim = None  # the thread holds it until the round has ended
        self._calls.put(None)

    def cancel(self) -> None:
        """Start no further stage, and end the thread, because the program ends."""
        for round_ in list(self._rounds):
            round_.cancel()
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, at most so long."""
        if self._thread is not None:
            self._thread.join(seconds)

    def is_alive(self) -> bool:
        """Return whether the thread exists; it does not in a process that was forked from this one."""
        return self._thread is not None and self._thread.is_alive()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            round_, claim = call
            if not round_.run() and claim is not None:
                claim.give_up()
            self._rounds.remove(round_)
            del call, round_, claim  # they would keep tensors alive, and the claim, until the next round


_threads: WeakSet[RoundThread] = WeakSet()


@atexit.register
def _end_threads() -> None:
    """End all threads before Python does: one that needs Python's lock while Python shuts down aborts the process.

    A thread may wait for a rank that never comes, so this does not wait without end. Threads of gloo can't be joined.
    """
    alive = [thread for thread in _threads if thread.is_alive()]
    for thread in alive:
        thread.cancel()
    end = monotonic() + SECONDS_AT_EXIT
    for thread in alive:
        thread.join(max(0.0, end - monotonic()))
    if alive:
        sleep(SECONDS_TO_RELEASE)
