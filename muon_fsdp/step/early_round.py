"""Run stages beside one backward, in a thread of their own, and keep their results for `step()`.

Nothing here writes parameters or state. `prepare` works on copies of the state; `step()` calls it again on the state.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from time import monotonic
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from muon_fsdp.comm.process_groups import Claim, groups_for, my_rank, world_reference
from muon_fsdp.declarations.state import State
from muon_fsdp.kernels import on_device
from muon_fsdp.kernels.recorder import Recorder
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.plan.settings import NUM_UPDATES, Settings
from muon_fsdp.plan.stages import Stage
from muon_fsdp.rules import RULES
from muon_fsdp.step.arrivals import Arrival, NotedOptions, StateCopies
from muon_fsdp.step.early_matrices import EarlyMatrices
from muon_fsdp.step.early_results import EarlyResult
from muon_fsdp.step.fused import FusedStage, FusedStep
from muon_fsdp.step.inputs import SingleUpdate, StepInputs
from muon_fsdp.step.metrics import Samples, TakenSamples
from muon_fsdp.step.pipeline import StepContext, run_stages
from muon_fsdp.step.random_numbers import RandomNumbers
from muon_fsdp.text import first_names

PURPOSE = "backward"  # of the process groups that these stages use
SECONDS_AT_EXIT = 10.0  # how long a program that ends waits for exchanges with other ranks


@dataclass(frozen=True)
class EarlyContext:
    """Everything that the stages of a round need besides gradients.

    Args:
        records: one per parameter.
        dtypes: the working precision of every parameter.
        settings: the settings of the whole optimizer.
        samples: takes samples of updates for `metrics()`.
        random: draws the random numbers of rules.
        inputs: those of the last step, without gradients; groups and states are live.
        fused: the fused lists of the last step.
        device: where the stages run.
        stream: the CUDA stream on which they run; None on a CPU.
        written: a CUDA event after the last step, which has written the state; None on a CPU.
    """

    records: Sequence[ParameterRecord]
    dtypes: Sequence[torch.dtype]
    settings: Settings
    samples: Samples
    random: RandomNumbers
    inputs: StepInputs
    fused: FusedStep
    device: torch.device
    stream: Any = None
    written: Any = None


@dataclass
class _Loaded:
    """Copies of the state that a stage has read, and the options that it has read, by group."""

    state: StateCopies
    options: Mapping[int, NotedOptions]


class Round:
    """The stages that run beside one backward. Every rank runs all of them, in the same order.

    A stage starts when all of its gradients have arrived and the stages before it have started. After `complete`, it
    starts with zeros in the place of those that have not arrived, because other ranks may wait for it.

    Args:
        stages: the stages, in an order that is the same on all ranks.
        context: what they need besides gradients; None if there are no stages.
    """

    def __init__(self, stages: Sequence[Stage] = (), context: EarlyContext | None = None) -> None:
        self.stages = tuple(stages)
        self._context = context
        self._positions = {stage.number: positions_of(stage) for stage in stages}
        self._stage_of = {position: stage for stage in stages for position in self._positions[stage.number]}
        self._changed = Condition()  # guards all that follows
        self._arrivals: dict[int, Arrival] = {}
        self._is_complete = self._is_cancelled = False
        self._started: set[int] = set()  # the stages that have read what they found, by number
        self._loaded: dict[int, _Loaded] = {}
        self._results: dict[int, Future[tuple[EarlyResult, Any]]] = {stage.number: Future() for stage in stages}
        self.numbers = EarlyMatrices(context.records if context is not None else ())
        self._failures: dict[int, tuple[str, Exception]] = {}  # by number of the stage: the method, and its error
        self._samples: TakenSamples | None = None
        self.took_residuals = False
        self._world = world_reference()

    # ------------------------------------------------------------------------------------------- called in backward

    def arrive(self, position: int, arrival: Arrival) -> bool:
        """Note a gradient, unless its stage has started without it: then it was not read, and never will be.

        Returns:
            Whether a stage has become complete.
        """
        with self._changed:
            stage = self._stage_of.get(position)
            if stage is None or stage.number in self._started:
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
            return self._is_readable(position) and self._arrivals[position].is_unchanged(grad)

    def has_arrived(self, position: int) -> bool:
        """Return whether the gradient of a parameter has arrived in time to be read."""
        with self._changed:
            return self._is_readable(position)

    def is_current(self, stage: Stage, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State]) -> bool:
        """Return whether a stage has read the present state and options, or will read them."""
        assert self._context is not None
        inputs, records = self._context.inputs, self._context.records
        now = {position: states[records[position].tensor] for position in self._positions[stage.number]}
        with self._changed:
            if stage.number not in self._started:  # it will read what it finds, unless that was replaced or is missing
                same_groups = all(groups[group] is inputs.groups[group] for group, _ in stage.positions_by_group)
                names = {spec.name for spec in RULES[stage.rule].all_state}
                return same_groups and all(
                    state is inputs.states[position] and names <= state.keys() for position, state in now.items()
                )
            loaded = self._loaded.get(stage.number)
        if loaded is None:  # it could not be loaded
            return False
        of_groups = all(options.are_current(groups[group]) for group, options in loaded.options.items())
        return of_groups and loaded.state.are_current(now)

    def result(self, stage: Stage) -> EarlyResult:
        """Wait for the result of a stage and return it, once; on a GPU the current stream waits, not the host.

        Raises:
            RuntimeError: another rank can't be reached; the message says what was waited for.
        """
        found, event = self._results[stage.number].result()
        del self._results[stage.number]
        if event is not None:
            stream = torch.cuda.current_stream(found.buffer.device)
            stream.wait_event(event)
            left = found.numbers.values()
            numbers = [value for each in left for part in (each.state, each.diagnostics) for value in part.values()]
            for value in (found.buffer, *numbers):
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
        self._inputs = StepInputs(
            groups=list(context.inputs.groups),
            shards=context.inputs.shards,
            states=list(context.inputs.states),
            gradients={},
            updated=range(len(context.records)),
            divisor=context.inputs.divisor,
        )
        self._single: dict[int, SingleUpdate] = {}
        self._fused = list(context.fused.stages)
        self._samples = context.samples.start(context.device.type, rarely=False)
        self.took_residuals = self._samples is not None and self._samples.has_residuals
        shared = StepContext(
            self._inputs,
            self._fused,
            self._single,
            context.settings,
            Recorder(),
            context.random,
            samples=self._samples,
            keeper=self,
        )
        try:
            with torch.no_grad(), on_device(context.device), self._on_stream(), groups_for(PURPOSE):
                if context.stream is not None:
                    context.stream.wait_event(context.written)
                run_stages(self._when_due(), shared)
        except Exception as error:
            for stage in self.stages:
                if stage.number in self._results:
                    self._set_exception(stage, self._lost(stage, error))
            return False
        return True

    def keep(self, stage: Stage, buffer: Tensor) -> None:
        """Keep the updates or the gathered units of a stage; if its rule has failed, keep the error for `step()`."""
        failure = self._failures.get(stage.number)
        left = self.numbers.left(stage) if failure is None else {}
        stream = self._context.stream if self._context is not None else None
        event = stream.record_event() if stream is not None else None
        samples = self._samples.of(stage) if self._samples is not None else {}
        self._results[stage.number].set_result((EarlyResult(buffer, left, samples, failure), event))

    def fail(self, stage: Stage, method: str, error: Exception) -> None:
        """Note that the rule of a stage has raised an error; its transfers continue with zeros."""
        self._failures.setdefault(stage.number, (method, error))

    def _set_exception(self, stage: Stage, error: Exception) -> None:
        with suppress(Exception):  # the stage has a result already, or nobody wants it
            self._results[stage.number].set_exception(error)

    def _lost(self, stage: Stage, error: Exception) -> Exception:
        """Return the error of a stage that another rank did not finish."""
        if stage.exchange is None:
            return error
        assert self._context is not None
        others = [rank for rank in stage.exchange.ranks if rank != my_rank()]
        names = [self._context.records[position].name for position in sorted(self._positions[stage.number])]
        return RuntimeError(
            f"Rank {my_rank()} waited for ranks {others} to exchange the matrices of {stage.label}, which started in "
            f"backward ({first_names(names)}), and one of them can't be reached: {error}. Look at its output for the "
            "first error"
        )

    def _on_stream(self) -> AbstractContextManager[object]:
        stream = self._context.stream if self._context is not None else None
        return torch.cuda.stream(stream) if stream is not None else nullcontext()

    def _is_ready(self, stage: Stage) -> bool:
        return self._positions[stage.number] <= self._arrivals.keys()

    def _when_due(self) -> Iterator[Stage]:
        """Yield the stages, and wait for each until it may start."""
        for stage in self.stages:
            with self._changed:
                while not (self._is_ready(stage) or self._is_complete or self._is_cancelled):
                    self._changed.wait()
                if self._is_cancelled:
                    return
                self._started.add(stage.number)
                try:
                    self._load(stage)
                except Exception as error:  # such as state that is missing
                    self._load_nothing(stage, error)
            yield stage
            for position in self._positions[stage.number]:  # `prepare` was called: free the copies of the state
                self._single.pop(position, None)
                self._inputs.gradients.pop(position, None)
                self._inputs.states[position] = {}  # type: ignore[index]
            if stage.number in self._loaded:
                self._loaded[stage.number].state.copies.clear()

    def _load(self, stage: Stage) -> None:
        """Read gradients, and copy the state that the stage needs."""
        assert self._context is not None
        context, inputs, positions = self._context, self._inputs, sorted(self._positions[stage.number])
        states = StateCopies(
            {position: context.inputs.states[position] for position in positions},
            {position: context.inputs.shards[position] for position in positions},
        )
        for position in positions:
            for spec in RULES[stage.rule].all_state:
                if spec.name not in states.copies[position]:
                    raise KeyError(f"{context.records[position].name!r} has no state {spec.name!r}")
        self.numbers.load(stage, states.copies)
        options = {group: NotedOptions(context.inputs.groups[group]) for group, _ in stage.positions_by_group}
        for group, noted in options.items():
            inputs.groups[group] = noted  # type: ignore[index]
            noted.get(NUM_UPDATES)  # random numbers depend on it
        for position in positions:
            grad, shard = self._read(position), context.inputs.shards[position]
            inputs.states[position] = states.copies[position]  # type: ignore[index]
            if context.fused.signature[position] is None:
                self._single[position] = SingleUpdate(
                    shard, states.copies[position], context.dtypes[position], grad, inputs.divisor
                )
            elif grad is not None:
                inputs.gradients[position] = grad.contiguous()
        self._fused[stage.number] = context.fused.early_stage(stage, inputs)
        for noted in options.values():
            noted.forget(
                "lr", "weight_decay"
            )  # the tables have them too, and the kernels of `prepare` do not read them
        self._loaded[stage.number] = _Loaded(states, options)

    def _load_nothing(self, stage: Stage, error: Exception) -> None:
        """Let a stage send zeros, because other ranks wait for its transfers. `step()` finds that it is not loaded."""
        assert self._context is not None
        context = self._context
        self.fail(stage, "prepare", error)
        # Without its lists: their tables are those of `step()`, so that kernels would write the state.
        self._fused[stage.number] = FusedStage(example=context.fused.stages[stage.number].example)
        for position in self._positions[stage.number]:
            shard, dtype = context.inputs.shards[position], context.dtypes[position]
            self._single[position] = SingleUpdate(shard, {}, dtype, None, context.inputs.divisor)

    def _is_readable(self, position: int) -> bool:
        """Return whether the gradient of a parameter has arrived in time, in a precision that its kernel can read."""
        assert self._context is not None
        arrival, kinds = self._arrivals.get(position), self._context.fused.signature[position]
        return arrival is not None and (kinds is None or arrival.dtype is kinds[1])

    def _read(self, position: int) -> Tensor | None:
        """Return the local gradient of a parameter; None, which stands for zeros, if it can't be used."""
        assert self._context is not None
        if not self._is_readable(position):
            self._arrivals.pop(position, None)  # `step()` finds that it was not used
            return None
        return self._context.records[position].rows_of(self._arrivals[position].read())


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
    """End all threads before Python does: one that comes back from gloo while Python shuts down aborts the process.

    A thread may wait for a rank that never comes, so this does not wait without end.
    """
    alive = [thread for thread in _threads if thread.is_alive()]
    for thread in alive:
        thread.cancel()
    end = monotonic() + SECONDS_AT_EXIT
    for thread in alive:
        thread.join(max(0.0, end - monotonic()))


def positions_of(stage: Stage) -> frozenset[int]:
    """Return the positions of all parameters of a stage."""
    return frozenset(position for _, positions in stage.positions_by_group for position in positions)
