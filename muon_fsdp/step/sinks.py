"""Take what stages leave: `step()` applies updates to the weights, backward keeps them (`step/backward.py`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from torch import Tensor

from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.comm.transfers import Collective
from muon_fsdp.declarations.state import State
from muon_fsdp.plan.stages import Stage
from muon_fsdp.rules import RULES, MatrixBatch
from muon_fsdp.rules.checks import GivenStates, check_applied
from muon_fsdp.step.failures import Failures
from muon_fsdp.step.inputs import in_precision
from muon_fsdp.step.matrix_state import BatchValues, MatrixStates
from muon_fsdp.step.meter import MeasuredStep
from muon_fsdp.step.metrics import TakenSamples
from muon_fsdp.step.sources import StageInputs
from muon_fsdp.step.weights import Weights


class Sink(Protocol):
    """Takes what the stages of one step, or of one backward, leave."""

    applies: bool  # whether `finish` applies updates, where kernels may change state
    failures: Failures
    unproven: set[int]  # the numbers of stages whose rule has not been seen to write all of its updates
    samples: TakenSamples | None  # None in most steps on a GPU

    def has_failed(self, stage: Stage) -> bool:
        """Return whether a method of the stage's rule has failed, so that nothing of the stage is applied here."""

    def fail(self, stage: Stage, method: str, error: Exception, positions: Collection[int]) -> None:
        """Note that a method of a rule has failed; raise if nobody waits for the transfers of this rank."""

    def take(self, stage: Stage, number: int, selection: Any, values: BatchValues) -> None:
        """Take the per-matrix state that `direction` has written for a batch with its selection of matrices."""

    def sample(self, stage: Stage, number: int, selection: Any, one: MatrixBatch, matrix: int, group: int) -> None:
        """Sample the update of one matrix of a batch, with its number there, if this step takes samples."""

    def start_sums(self, stage: Stage, inputs: StageInputs, buffer: Tensor, recorder: Recorder) -> None:
        """Start to sum the statistics of updates over ranks, for a rule that reads them; only if the sink applies."""

    def finish(
        self,
        stage: Stage,
        inputs: StageInputs,
        buffer: Tensor,
        updates: Mapping[int, Tensor],
        states: Mapping[int, State],
    ) -> None:
        """Take the updates of a stage, or its gathered units.

        Args:
            stage: the stage.
            inputs: what it updates.
            buffer: the updates, or the gathered units.
            updates: those of an element-wise rule that lists of tensors apply, by position.
            states: the working tensors of state, by position, if the rule changes them in `apply`.
        """


class StepSink:
    """Applies the updates of the stages of `step()`.

    Args:
        failures: what rules have raised.
        unproven: the stages that have not run yet; they are removed as they run.
        matrices: per-matrix state, statistics and factors.
        samples: takes samples of updates for `metrics()`; None if this step takes none.
        weights: lends those of the shards.
        measured: measures how far weights move; None in most steps.
    """

    applies = True

    def __init__(
        self,
        failures: Failures,
        unproven: set[int],
        matrices: MatrixStates,
        samples: TakenSamples | None,
        weights: Weights,
        measured: MeasuredStep | None,
    ) -> None:
        self.failures, self.unproven, self.samples = failures, unproven, samples
        self._matrices, self._weights, self._measured = matrices, weights, measured
        self._failed: set[int] = set()
        self._sums: dict[int, tuple[Tensor, Collective | None]] = {}  # of updates, by number of the stage
        # Samples whose factors are not known yet, by number of the stage: the batch, its selection and a matrix of it.
        self._sampled: defaultdict[int, list[tuple[int, Any, int]]] = defaultdict(list)

    def has_failed(self, stage: Stage) -> bool:
        return stage.number in self._failed or stage.rule in self.failures.rules

    def fail(self, stage: Stage, method: str, error: Exception, positions: Collection[int]) -> None:
        self.failures.add(stage.rule, method, error, positions)
        self._failed.add(stage.number)

    def take(self, stage: Stage, number: int, selection: Any, values: BatchValues) -> None:
        if selection is None:  # the stage ran in backward, with all members of its batches
            selection = self._matrices.selection(stage, number, stage.batches[number].members)
        self._matrices.take(stage, number, selection, values)

    def sample(self, stage: Stage, number: int, selection: Any, one: MatrixBatch, matrix: int, group: int) -> None:
        if self.samples is not None:
            factor = None
            if RULES[stage.rule].update_statistics:
                self._sampled[stage.number].append((number, selection, matrix))
            elif RULES[stage.rule].multiplies_weights:
                factor = self._matrices.factor_of_updates(selection)[matrix]
            self.samples.take(stage, number, one, group, factor)

    def start_sums(self, stage: Stage, inputs: StageInputs, buffer: Tensor, recorder: Recorder) -> None:
        self._matrices.wait()
        self._sums[stage.number] = self._matrices.start_sums(stage, inputs.updated, buffer, recorder)

    def finish(
        self,
        stage: Stage,
        inputs: StageInputs,
        buffer: Tensor,
        updates: Mapping[int, Tensor],
        states: Mapping[int, State],
    ) -> None:
        sums, reduction = self._sums.pop(stage.number, (None, None))
        if reduction is not None:
            reduction.finish()
        if sums is not None:
            self._attempt(stage, "factors", inputs, lambda: self._take_sums(stage, sums))
        if self._measured is not None:
            self._measured.before(stage)
        self._attempt(stage, "apply", inputs, lambda: self._apply(stage, inputs, buffer, updates, states))
        if self._measured is not None:
            self._measured.after(stage)
        if self.has_failed(stage) and RULES[stage.rule].has_matrix_values:
            self._matrices.restore(stage)

    def _attempt(self, stage: Stage, method: str, inputs: StageInputs, work: Callable[[], None]) -> None:
        """Call what a rule computes, unless its stage has failed before."""
        if not self.has_failed(stage):
            try:
                work()
            except Exception as error:
                self.fail(stage, method, error, inputs.positions)

    def _take_sums(self, stage: Stage, sums: Tensor) -> None:
        self._matrices.take_sums(stage, sums)
        for number, selection, matrix in self._sampled.pop(stage.number, ()):
            assert self.samples is not None
            self.samples.multiply(stage, number, self._matrices.factor_of_updates(selection)[matrix])

    def _apply(
        self,
        stage: Stage,
        inputs: StageInputs,
        buffer: Tensor,
        updates: Mapping[int, Tensor],
        states: Mapping[int, State],
    ) -> None:
        rule = RULES[stage.rule]
        if rule.has_matrix_values:  # statistics read the weights that change now
            self._matrices.wait()
        factors = self._matrices.factors if rule.multiplies_weights else None
        for each in inputs.fused:
            assert rule.fused is not None
            tensors = each if factors is None else each.with_factor_chunks()
            rule.fused.apply(inputs.groups[each.group], tensors, buffer, None if factors is None else factors.flat())
        for group, listed in inputs.lists:
            positions = [each.record.position for each in listed]
            if rule.needs_matrices:
                of_shards = stage.shards_in(buffer, positions)
                found = [in_precision(u, each.record.dtype) for u, each in zip(of_shards, listed, strict=True)]
            else:
                found = [updates[position] for position in positions]
            weights = self._weights.lend(listed)
            given: list[Any] = [inputs.groups[group], weights, found]
            if factors is not None:
                given.append(list(map(factors.of, positions, weights)))
            named: dict[str, Any] = {}
            if rule.state_in_apply:
                of_lists = GivenStates(rule, "apply", [states[position] for position in positions])
                named["states"] = of_lists.copies
            check_applied(rule, rule.apply(*given, **named))  # type: ignore[func-returns-value]
            self._weights.take_back(listed, weights)
            if rule.state_in_apply:
                of_lists.take()
