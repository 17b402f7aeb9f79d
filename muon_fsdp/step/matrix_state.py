"""Keep what belongs to whole matrices in a step: statistics of W, per-matrix state and factors of weights.

Before the stages, `begin` observes statistics and asks rules for factors. Within them, `complete` and `take` serve
`direction`, and `start_sums` and `take_sums` ask rules for factors that depend on the update. After them, `finish`
settles: state that one rank has changed reaches all ranks that need it, in one reduction per set of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.comm.process_groups import my_rank
from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.comm.transfers import Collective, add_up, start_sum
from muon_fsdp.declarations.state import PerMatrix, State
from muon_fsdp.kernels.tables import is_on_device, pinned
from muon_fsdp.plan.matrix_sets import Block, MatrixClass, MatrixSet, make_sets
from muon_fsdp.plan.stages import Member, Stage
from muon_fsdp.plan.units import ParameterSpec
from muon_fsdp.rules import RULES, MatrixBatch, MatrixValues, Rule
from muon_fsdp.rules.base import NamedValues, UpdateStatistics, shown
from muon_fsdp.rules.checks import check_names, checked_factors, checked_metrics
from muon_fsdp.statistics.observer import STATISTICS, Observer
from muon_fsdp.step.changes import addresses_of
from muon_fsdp.step.failures import Failures
from muon_fsdp.step.inputs import StepInputs
from muon_fsdp.step.weight_factors import FactorOptions, Factors, WeightFactors, as_factor
from muon_fsdp.text import first_names

# The first steps, in which an iterative statistic may have no vector to start from. They are two, because a matrix of
# zeros gets its first direction in the first step.
COLD_STEPS = 2

SUMS = "update statistics"  # the purpose of the process groups that sum statistics of updates
SUMS_IN_FLIGHT = 4  # stages whose sums use one buffer in turn, more than ever wait for them

Selection: TypeAlias = tuple[int, Tensor | slice]  # a class, and the indices of the matrices in it


@dataclass(frozen=True)
class BatchValues:
    """The state and the diagnostics that `direction` has written for the matrices of a batch: tensors (count, ...)."""

    count: int
    state: Mapping[str, Tensor]
    diagnostics: Mapping[str, Tensor]


@dataclass
class _ClassValues:
    """The values of one class in one step; every tensor is (count, ...)."""

    is_alone: bool  # whether this is the only rank that holds the class
    state: State  # what `factors` and `direction` may change
    observed: State  # the state of the statistics
    statistics: dict[str, Any]
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    # What `direction` has written here, by name of the state or diagnostic. Several ranks add it up, so there it begins
    # with zeros; a single rank keeps the tensors of a batch that has all matrices, without a copy.
    found: dict[str, Tensor] = field(default_factory=dict)
    # For a rule whose `factors` depend on the update: the state before `direction`, and what `factors` has left.
    before: State = field(default_factory=dict)
    after: State = field(default_factory=dict)
    diagnostics_after: dict[str, Tensor] = field(default_factory=dict)

    def take_after(self) -> None:
        """Store what `factors` has changed after the update was known."""
        for name, value in self.after.items():
            self.state[name] = torch.where(value != self.before[name], value, self.state[name])
        self.diagnostics.update(self.diagnostics_after)


@dataclass(frozen=True)
class _StageSums:
    """The matrices of a stage over whose updates a rule needs sums: those of all ranks of the stage.

    Args:
        selections: the matrices, class by class.
        counts: the number of matrices of every selection.
        blocks: the parts of the matrices on this rank that it adds up, each with their range among all matrices.
    """

    selections: tuple[Selection, ...]
    counts: tuple[int, ...]
    blocks: tuple[tuple[Block, slice], ...]


class MatrixStates:
    """All matrices of an optimizer whose rules have statistics, per-matrix state or factors."""

    def __init__(self, parameters: Sequence[ParameterSpec], stages: Sequence[Stage]) -> None:
        rank = my_rank()
        self._parameters = {parameter.position: parameter for parameter in parameters}
        self.sets: list[MatrixSet] = make_sets(parameters, rank)
        self._classes: list[MatrixClass] = [class_ for matrix_set in self.sets for class_ in matrix_set.classes]
        self._rules: list[Rule] = [RULES[class_.rule] for class_ in self._classes]
        self._set_states: list[_SetState] = []
        for matrix_set in self.sets:
            first = self._set_states[-1].indices.stop if self._set_states else 0
            self._set_states.append(_SetState(matrix_set, first))
        self._class_of = {  # (position, block of its view): its class, and its first matrix there
            (member.position, member.block): (index, member.first)
            for index, class_ in enumerate(self._classes)
            for member in class_.members
        }
        boxes = {p.position: p.layout.box_on(rank, p.shape) for p in parameters}
        self.factors = WeightFactors(parameters, boxes, self._classes, self._class_of)
        self._per_step = [_PerStepValues(rule, class_) for rule, class_ in zip(self._rules, self._classes, strict=True)]
        # The matrices of every batch, found once: a captured step keeps the addresses of these tensors.
        self._selections = [
            [self._select(stage, b.members) for b in stage.batches] if RULES[stage.rule].has_matrix_values else []
            for stage in stages
        ]
        self._stage_sums = {s.number: self._sums_of(s) for s in stages if RULES[s.rule].update_statistics}
        self._num_sums = 0  # that were started
        self._shards: dict[int, Tensor] = {}  # of this step, by position, while stages may sum over them
        self.addresses: tuple[int, ...] = ()  # of all per-matrix state at the last step; a captured step keeps them
        self._times = 0  # steps with these tensors
        # Positions of parameters that have not taken part yet and whose state must not start from zero.
        self._unstarted: set[int] = set()
        self.expect_start()
        self._now: list[_ClassValues] = []
        self._finished: list[_ClassValues] = []  # of the last step that has ended
        self._stream = self._own_stream(stages)
        self._is_pending = False  # whether the stream of its own may still be at work

    def _own_stream(self, stages: Sequence[Stage]) -> torch.cuda.Stream | None:
        """Return a stream on which `begin` overlaps the first stage, until that reads a result.

        It has a high priority: its short kernels start before further programs of the long kernels beside them.

        Returns:
            None without statistics, which are what takes long, and where ranks communicate: a capture that ends at a
            host call can't contain a second stream that is still at work.
        """
        devices = {class_.device for class_ in self._classes}
        communicates = any(stage.exchange is not None for stage in stages) or any(len(s.ranks) > 1 for s in self.sets)
        if communicates or not any(rule.statistics for rule in self._rules) or len(devices) > 1:
            return None
        (device,) = devices
        return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    # -------------------------------------------------------------------------------------------- before the stages

    def expect_start(self) -> None:
        """Note that all matrices whose state must not start from zero may take part for the first time."""
        members = [member for class_ in self._classes if _nonzero(class_) for member in class_.members]
        self._unstarted = {member.position for member in members}

    def may_start(self, positions: Iterable[int]) -> bool:
        """Return whether one of these parameters takes part for the first time, with state that must not be zero."""
        return bool(self._unstarted) and not self._unstarted.isdisjoint(positions)

    def find_zeros(
        self,
        shards: Sequence[Tensor],
        states: Mapping[int, State],
        updated: Collection[int],
        names: Sequence[str],
    ) -> ValueError | None:
        """Find state that would start from zero and must not; a collective of all ranks that hold such matrices.

        It raises nothing, because ranks that hold none of the matrices that it names have other collectives to join.

        Args:
            shards: the local part of every parameter.
            states: the state of every parameter.
            updated: the positions of the parameters that are updated.
            names: the names of all parameters.
        """
        by_position = {position: shards[position] for position in self._parameters}
        wrong: dict[tuple[str, PerMatrix], list[int]] = defaultdict(list)
        for matrix_set in self.sets:
            specs = [_nonzero(class_) for class_ in matrix_set.classes]
            if not any(specs):
                continue
            observer = Observer(matrix_set, [[str(spec.initial) for spec in each] for each in specs])
            found = observer.observe(by_position, [{} for _ in specs], Recorder(), cold=False)
            for class_, each, statistics in zip(matrix_set.classes, specs, found, strict=True):
                for spec in each:
                    state = torch.cat(self._parts_of(class_, spec, states)).view(class_.count, -1)
                    statistic = statistics[str(spec.initial)].view(class_.count, -1)
                    is_zero = ((state == 0) & (statistic == 0)).any(1).tolist()  # the host waits for the device
                    wrong[class_.rule, spec] += [
                        member.position
                        for member in class_.members
                        if member.position in updated and any(is_zero[member.first : member.first + member.count])
                    ]
        for (rule, spec), positions in wrong.items():
            if positions:
                of_names = first_names([names[position] for position in sorted(set(positions))])
                where = f"rule {rule!r}: {spec.initial} of {of_names}"
                return ValueError(f"{where} must not be zero: {spec.zero_error}")
        return None

    def fill(self, inputs: StepInputs) -> None:
        """Find the state tensors of this step, and write flags and options where a captured step reads them."""
        now = [
            inputs.states[member.position][entry.spec.name]
            for set_state in self._set_states
            for entry in set_state.entries
            for member in entry.class_.members
        ]
        # State may be replaced, or moved by assigning to its `data`. The parts keep the old memory allocated, so equal
        # addresses mean the same memory.
        addresses = addresses_of(now)
        if not self._times or addresses != self.addresses:
            self.addresses, self._times = addresses, 0
            for each in self._set_states:
                each.parts = [self._parts_of(entry.class_, entry.spec, inputs.states) for entry in each.entries]
        self._times += 1
        for each in self._set_states:
            each.fill(inputs.updated)
        if self._unstarted:
            self._unstarted.difference_update(inputs.updated)
        for values in self._per_step:
            values.fill(inputs.groups)

    def _parts_of(self, class_: MatrixClass, spec: PerMatrix, states: Mapping[int, State]) -> list[Tensor]:
        """Return the parts of every parameter's state that belong to a class."""
        views = {member.position: self._parameters[member.position].matrices for member in class_.members}
        return [
            states[member.position][spec.name][spec.span(views[member.position], member.block)]
            for member in class_.members
        ]

    @property
    def is_cold(self) -> bool:
        """Return whether an iterative statistic may still lack start vectors for some matrix."""
        return self._times <= COLD_STEPS and any(each.observer.iterates for each in self._set_states)

    def observed(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the shards of observed weights, whose addresses a captured step keeps."""
        return [shards[position] for position, parameter in self._parameters.items() if parameter.is_observed]

    def begin(self, shards: Sequence[Tensor], recorder: Recorder, failures: Failures) -> None:
        """Observe the statistics of all weights, and ask the rules for factors; notes what these raise.

        Batches wait for the results when a rule reads them. Before a stage changes weights, it must call `wait`.
        """
        stream = self._stream
        if stream is None:
            self._begin(shards, recorder, failures)
            return
        # The stream waits before it allocates: memory that it frees now was used by the previous step on the current
        # stream, and is only given to tensors of the same stream.
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._begin(shards, recorder, failures)
        self._is_pending = True

    def wait(self) -> None:
        """Make the current stream wait for what `begin` computes."""
        if self._is_pending:
            assert self._stream is not None
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._is_pending = False

    def _begin(self, shards: Sequence[Tensor], recorder: Recorder, failures: Failures) -> None:
        by_position = self._shards = {position: shards[position] for position in self._parameters}
        self._now = []
        for set_state in self._set_states:
            states = set_state.read()
            observed = [of_statistics for _, of_statistics in states]
            found = set_state.observer.observe(by_position, observed, recorder, cold=self.is_cold)
            for (state, of_statistics), statistics in zip(states, found, strict=True):
                self._now.append(_ClassValues(set_state.is_alone, state, of_statistics, statistics))
        self.factors.set([self._start(index, current, failures) for index, current in enumerate(self._now)])

    def _start(self, index: int, current: _ClassValues, failures: Failures) -> Factors | None:
        """Initialize state from statistics where it is zero, make room for results, and ask the rule for factors."""
        rule, class_ = self._rules[index], self._classes[index]
        for spec in rule.matrix_state:
            if spec.initial is not None:
                value = current.state[spec.name]
                value.copy_(torch.where(value == 0, current.statistics[spec.initial], value))
        factors = None
        if rule.multiplies_weights:
            try:
                if rule.update_statistics:
                    current.before = {name: value.clone() for name, value in current.state.items()}
                    current.after = {name: value.clone() for name, value in current.state.items()}
                    factors = as_factor(1.0, class_, class_.count), as_factor(1.0, class_, class_.count)
                else:
                    factors = self._ask(index, current)
            except Exception as error:  # ranks that have no matrix of this rule do not raise it, and wait for transfers
                failures.add(rule.name, "factors", error, [member.position for member in class_.members])
                failures.rules.add(rule.name)
                current.state = {name: value.clone() for name, value in self._originals(index).items()}
                current.diagnostics = {}
        if current.is_alone:
            current.found = dict(current.state)
        else:
            current.found = {spec.name: torch.zeros_like(current.state[spec.name]) for spec in rule.matrix_state}
            for name in self._own_diagnostics(index):
                current.found[name] = torch.zeros(class_.count, dtype=class_.dtype, device=class_.device)
        return factors

    def _ask(self, index: int, current: _ClassValues) -> Factors:
        """Return the factors of a class, and keep the state and the diagnostics that `factors` leaves."""
        rule, class_ = self._rules[index], self._classes[index]
        of_class = MatrixValues(
            class_.rows,
            class_.cols,
            NamedValues(rule.name, "state", current.state),
            NamedValues(rule.name, "statistics", current.statistics),
            self._per_step[index].options(),
        )
        factors, current.state, current.diagnostics = self._answer(index, of_class, class_.count)
        return self.factors.accept(index, factors)

    def _answer(self, index: int, values: MatrixValues, count: int) -> tuple[Factors, State, dict[str, Tensor]]:
        """Call `factors` for some matrices of a class; return its factors, and the state and diagnostics it leaves."""
        rule, class_ = self._rules[index], self._classes[index]
        of_weights, of_updates = checked_factors(rule, rule.factors(values))
        check_names(rule, values.state, values.diagnostics)
        state = {}
        for spec in rule.matrix_state:  # options are float64, and may have promoted state to it
            value = _checked(rule, spec.name, values.state[spec.name], self._shape(index, spec, count))
            state[spec.name] = value.to(class_.dtype)
        diagnostics = {
            name: _checked(rule, name, value, torch.Size((count,))) for name, value in values.diagnostics.items()
        }
        return (as_factor(of_weights, class_, count), as_factor(of_updates, class_, count)), state, diagnostics

    def _originals(self, index: int) -> State:
        """Return the rule's state of a class before this step."""
        set_state = next(each for each in self._set_states if index in each.indices)
        return set_state.originals()[index - set_state.indices.start]

    def _shape(self, index: int, spec: PerMatrix, count: int) -> torch.Size:
        class_ = self._classes[index]
        return torch.Size((count, *spec.shape_of_matrix(class_.rows, class_.cols)))

    def _own_diagnostics(self, index: int) -> list[str]:
        """Return the names of the diagnostics that `direction` writes, not `factors`."""
        return [name for name in self._rules[index].diagnostics if name not in self._now[index].diagnostics]

    # -------------------------------------------------------------------------------------------- within the stages

    def complete(self, selection: Selection, batch: MatrixBatch) -> None:
        """Give a batch the state and the statistics of the matrices that were selected."""
        index, where = selection
        if isinstance(where, Tensor):
            self.wait()  # rows that are not adjacent are copied
        current, rule = self._now[index], self._rules[index]
        rows = {spec.name: _rows(current.state[spec.name], where) for spec in rule.matrix_state}
        batch.state = NamedValues(rule.name, "state", rows)
        batch.statistics = NamedValues(
            rule.name, "statistics", {name: _rows(value, where) for name, value in current.statistics.items()}
        )
        if self._is_pending:
            batch.state, batch.statistics = _Awaited(batch.state, self.wait), _Awaited(batch.statistics, self.wait)

    def take(self, stage: Stage, number: int, selection: Selection, values: BatchValues) -> None:
        """Keep what `direction` has written for a batch, if this rank is the one that contributes these matrices."""
        for name in values.diagnostics.keys() - set(self._own_diagnostics(selection[0])):
            raise ValueError(
                f"rule {stage.rule!r} writes diagnostics[{name!r}] in factors and in direction: write it in one of them"
            )
        owner = stage.units[stage.batches[number].members[0].unit].owner
        if owner is None and stage.exchange is not None and stage.exchange.ranks[0] != my_rank():
            return  # all ranks have computed the same, and the first contributes it
        index, where = selection
        rule, count = self._rules[index], values.count
        for spec in rule.matrix_state:
            value = _checked(rule, spec.name, values.state[spec.name], self._shape(index, spec, count))
            self._keep(index, spec.name, where, value)
        for name, value in values.diagnostics.items():
            self._keep(index, name, where, _checked(rule, name, value, torch.Size((count,))))

    def restore(self, stage: Stage) -> None:
        """Keep the state from before this step for the batches of a stage, because it has failed on this rank."""
        self.wait()
        for number, selection in enumerate(self._selections[stage.number]):
            index, where = selection
            state = {name: _rows(value, where) for name, value in self._originals(index).items()}
            self.take(stage, number, selection, BatchValues(stage.batches[number].count, state, {}))
        for index, where in self._stage_sums[stage.number].selections if stage.number in self._stage_sums else ():
            current = self._now[index]
            for name, value in current.after.items():
                value[where] = current.before[name][where]

    def _sums_of(self, stage: Stage) -> _StageSums:
        """Find the matrices of a stage and the parts of them that this rank holds and counts."""
        numbers: dict[int, list[int]] = defaultdict(list)  # by class
        for position in sorted(stage.positions):
            for number, (count, _, _) in enumerate(self._parameters[position].matrices.block_shapes):
                index, first = self._class_of[position, number]
                numbers[index] += range(first, first + count)
        starts, at = {}, 0
        for index, chosen in numbers.items():
            starts[index] = dict(zip(chosen, range(at, at + len(chosen)), strict=True))
            at += len(chosen)
        blocks = []
        for set_state in self._set_states:
            for block in set_state.matrix_set.blocks:
                index = set_state.indices[block.class_index]
                if block.position in stage.positions and self._classes[index].weights[block.matrices.start]:
                    start = starts[index][block.matrices.start]
                    blocks.append((block, slice(start, start + block.matrices.stop - block.matrices.start)))
        selections = tuple((index, self._indices(index, chosen)) for index, chosen in numbers.items())
        return _StageSums(selections, tuple(map(len, numbers.values())), tuple(blocks))

    def start_sums(
        self, stage: Stage, updated: Collection[int], updates: Tensor, recorder: Recorder
    ) -> tuple[Tensor, Collective | None]:
        """Sum <W, U> and ||U||^2 over this rank's parts of the matrices of a stage, and start to add up all ranks'.

        Args:
            stage: the stage.
            updated: the positions of the parameters that are updated; those of others count as zero.
            updates: (stage.update_numel,), the updates of this rank's shards.
            recorder: provides the buffer, and records the call for CUDA graphs.

        Returns:
            The sums, and the reduction that must end before they are read; None if no other rank takes part.
        """
        of_stage = self._stage_sums[stage.number]
        name, self._num_sums = f"{SUMS} {self._num_sums % SUMS_IN_FLIGHT}", self._num_sums + 1
        flat = recorder.buffer(name, 2 * sum(of_stage.counts), torch.float64, updates.device).zero_()
        sums = flat.view(2, -1)
        for block, where in of_stage.blocks:
            if block.position in updated:
                weight = block.of(self._shards[block.position])
                update = block.of(stage.shard_slots[block.position].of(updates))
                sums[0, where] += (weight * update).sum((-2, -1), dtype=torch.float64)
                sums[1, where] += torch.linalg.vector_norm(update, dim=(-2, -1), dtype=torch.float64).square()
        if stage.exchange is None:
            return flat, None
        return flat, start_sum(stage.exchange.ranks, SUMS, flat, recorder)

    def take_sums(self, stage: Stage, sums: Tensor) -> None:
        """Call `factors` for the matrices of a stage, given the sums over its updates on all ranks."""
        of_stage = self._stage_sums[stage.number]
        found = torch.split(sums.view(2, -1), list(of_stage.counts), dim=1)
        for (index, where), count, of_class in zip(of_stage.selections, of_stage.counts, found, strict=True):
            rule, class_, current = self._rules[index], self._classes[index], self._now[index]
            state = {spec.name: _rows(current.before[spec.name], where).clone() for spec in rule.matrix_state}
            statistics = {name: _rows(value, where) for name, value in current.statistics.items()}
            values = MatrixValues(
                class_.rows,
                class_.cols,
                NamedValues(rule.name, "state", state),
                NamedValues(rule.name, "statistics", statistics),
                self._per_step[index].options(where),
                UpdateStatistics(of_class[0], of_class[1]),
            )
            factors, left, diagnostics = self._answer(index, values, count)
            for factor in factors:
                if factor.shape != (count,):
                    raise ValueError(
                        f"rule {rule.name!r}: factors with update_statistics must return numbers or tensors (B,); for "
                        f"{count} matrices it returned {tuple(factor.shape)}"
                    )
            self.factors.put(index, where, factors)
            for name, value in left.items():
                current.after[name][where] = value
            for name, value in diagnostics.items():
                if name not in current.diagnostics_after:
                    current.diagnostics_after[name] = torch.zeros(
                        class_.count, dtype=class_.dtype, device=class_.device
                    )
                current.diagnostics_after[name][where] = value.to(class_.dtype)

    def factor_of_updates(self, selection: Selection) -> Tensor:
        """Return the factors of the updates of a batch."""
        index, where = selection
        self.wait()
        return self.factors.of_updates(index)[where]

    def _keep(self, index: int, name: str, where: Tensor | slice, value: Tensor) -> None:
        """Store the values of some matrices of a class; without a copy if they are in place, or all on one rank."""
        class_, current = self._classes[index], self._now[index]
        if current.is_alone and isinstance(where, slice) and len(value) == class_.count:
            current.found[name] = value.to(class_.dtype)
            return
        if name not in current.found:
            current.found[name] = torch.zeros(class_.count, dtype=class_.dtype, device=class_.device)
        target = current.found[name]
        is_there = isinstance(where, slice) and target[where].data_ptr() == value.data_ptr()
        if not is_there or target.dtype != value.dtype or not value.is_contiguous():
            target[where] = value.to(target.dtype)

    def selection(self, stage: Stage, batch_number: int, members: Sequence[Member]) -> Selection:
        """Return the class of some members of one batch, and their numbers there."""
        if len(members) == len(stage.batches[batch_number].members):
            return self._selections[stage.number][batch_number]
        return self._select(stage, members)

    def _select(self, stage: Stage, members: Sequence[Member]) -> Selection:
        ranges: list[tuple[int, int]] = []
        index = -1
        for member in members:
            unit = stage.units[member.unit]
            block, within = unit.block_of(member.block)
            index, first = self._class_of[(unit.position, block)]
            first += within
            if ranges and ranges[-1][1] == first + member.start:
                ranges[-1] = (ranges[-1][0], first + member.stop)
            else:
                ranges.append((first + member.start, first + member.stop))
        return index, self._indices(index, [number for start, stop in ranges for number in range(start, stop)])

    def _indices(self, index: int, numbers: Sequence[int]) -> Tensor | slice:
        """Return what selects some matrices of a class: a slice if they are adjacent."""
        if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
            return slice(numbers[0], numbers[-1] + 1)
        device = self._classes[index].device
        return pinned(list(numbers), torch.int64, device).to(device, non_blocking=True)

    # ---------------------------------------------------------------------------------------------- after the stages

    def finish(self, recorder: Recorder) -> None:
        """Settle: sum the contributions over ranks, and store the result for the matrices that were updated."""
        self.wait()
        if not self.sets:
            return
        for set_state in self._set_states:
            indices = set_state.indices
            found = [(index, name, value) for index in indices for name, value in self._now[index].found.items()]
            values = [value for _, _, value in found]
            if values and not set_state.is_alone:
                values = add_up(values, set_state.matrix_set.ranks, recorder)
            for (index, name, _), value in zip(found, values, strict=True):
                current = self._now[index]
                (current.state if name in current.state else current.diagnostics)[name] = value
            for index in indices:
                class_, diagnostics = self._classes[index], self._now[index].diagnostics
                for name in self._own_diagnostics(index):  # a rule need not write all of them
                    diagnostics[name] = torch.zeros(class_.count, dtype=class_.dtype, device=class_.device)
                self._now[index].take_after()
            set_state.write([(self._now[index].state, self._now[index].observed) for index in indices])
        now, self._shards = self._now, {}

        def show() -> None:  # eager steps between two replays have values of their own
            self._now = self._finished = now

        recorder.host(show)

    # ------------------------------------------------------------------------------------------------------- metrics

    def count(self, totals: dict[str, Tensor]) -> None:
        """Add the diagnostics of this step to totals by rule, one number per diagnostic, which stay on the device."""
        for set_state in self._set_states:
            by_rule: dict[Rule, list[int]] = defaultdict(list)
            for index in set_state.indices:
                if self._rules[index].diagnostics:
                    by_rule[self._rules[index]].append(index)
            for rule, of_rule in by_rule.items():
                values = [self._now[index].diagnostics[name] for name in rule.diagnostics for index in of_rule]
                updated = torch.cat([set_state.updated[index - set_state.indices.start] for index in of_rule])
                of_matrices = torch.cat(values).nan_to_num(nan=0.0).view(len(rule.diagnostics), -1)
                sums = torch.where(updated, of_matrices, 0.0).sum(-1, dtype=torch.float64)
                known = totals.get(rule.name)
                totals[rule.name] = sums if known is None else known.to(sums.device) + sums

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the rules' metrics of the last step and of all steps; none before the first step with this plan."""
        result: dict[str, float] = {}
        for rule in dict.fromkeys(self._rules if self._finished else ()):
            of_rule = [current for other, current in zip(self._rules, self._finished, strict=True) if other is rule]
            last = {
                name: torch.cat([current.diagnostics[name].double().cpu() for current in of_rule])
                for name in rule.diagnostics
            }
            sums = totals[rule.name].tolist() if rule.name in totals else [0.0] * len(rule.diagnostics)
            total = dict(zip(rule.diagnostics, sums, strict=True))
            result.update(checked_metrics(rule, rule.metrics(last, total)))
        return result


class _Entry(NamedTuple):
    """One declared state of one class; `number` counts the classes of the set."""

    number: int
    class_: MatrixClass
    spec: PerMatrix

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.class_.count, *self.spec.shape_of_matrix(self.class_.rows, self.class_.cols))

    @property
    def numel(self) -> int:
        return self.spec.numel(self.class_.count, self.class_.rows, self.class_.cols)


class _SetState:
    """The per-matrix state of all classes of one set, and which of their matrices are updated.

    Rules change the state that they declare. Statistics replace their own, the observed state, for all matrices.

    Args:
        matrix_set: the set.
        first: the number of its first class among those of all sets.
    """

    def __init__(self, matrix_set: MatrixSet, first: int) -> None:
        self.matrix_set, self._classes = matrix_set, matrix_set.classes
        self.indices = range(first, first + len(self._classes))  # of its classes among those of all sets
        self.observer = Observer(matrix_set, [RULES[class_.rule].statistics for class_ in self._classes])
        self.is_alone = len(matrix_set.ranks) == 1
        entries = [
            _Entry(number, class_, spec)
            for number, class_ in enumerate(self._classes)
            for spec in RULES[class_.rule].all_state
            if isinstance(spec, PerMatrix)
        ]
        self._of_rules = [entry for entry in entries if entry.spec in RULES[entry.class_.rule].matrix_state]
        observed = [entry for entry in entries if entry.spec not in RULES[entry.class_.rule].matrix_state]
        inputs = {name for statistic in STATISTICS.values() for name in statistic.reads}
        self._read = [entry for entry in observed if entry.spec.name in inputs]
        self._observed = self._read + [entry for entry in observed if entry.spec.name not in inputs]
        self.entries = (*self._of_rules, *self._observed)
        device, counts = self._classes[0].device, [class_.count for class_ in self._classes]
        # A captured step keeps the addresses of these tensors.
        self._updated = torch.ones(sum(counts), dtype=torch.bool, device=device)
        self.updated: list[Tensor] = list(torch.split(self._updated, counts))  # (count,) for every class
        firsts = [sum(counts[:number]) for number in range(len(counts))]
        matrices = [
            torch.arange(entry.class_.count).repeat_interleave(entry.numel // entry.class_.count) + firsts[entry.number]
            for entry in self._of_rules
        ]
        self._matrix_of = torch.cat([torch.empty(0, dtype=torch.int64), *matrices]).to(device)  # of every element
        self._elements = torch.ones(len(self._matrix_of), dtype=torch.bool, device=device)
        self._flags: tuple[bool, ...] = ()
        self.parts: list[list[Tensor]] = []  # of every entry, the parts of the parameters' state: read and written here
        self._before = self._flat = torch.empty(0)

    def fill(self, updated: Collection[int]) -> None:
        """Write which matrices are updated, given the positions of parameters, to where a captured step reads it."""
        flags = tuple([member.position in updated for class_ in self._classes for member in class_.members])
        if flags != self._flags:
            counts = [member.count for class_ in self._classes for member in class_.members]
            each = [flag for flag, count in zip(flags, counts, strict=True) for _ in range(count)]
            self._updated.copy_(pinned(each, torch.bool, self._updated.device), non_blocking=True)
            torch.index_select(self._updated, 0, self._matrix_of, out=self._elements)
        self._flags = flags

    def read(self) -> list[tuple[State, State]]:
        """Return, for every class, copies of its rule's state and of the observed state that statistics start from."""
        first, stop = len(self._of_rules), len(self._of_rules) + len(self._read)
        if self._of_rules:
            self._before = _joined(self.parts[:first])
            self._flat = self._before.clone()
        observed = _joined(self.parts[first:stop]) if self._read else torch.empty(0)
        of_rules, of_statistics = self._by_class(self._of_rules, self._flat), self._by_class(self._read, observed)
        return list(zip(of_rules, of_statistics, strict=True))

    def originals(self) -> list[State]:
        """Return, for every class, its rule's state before this step; nobody may change it."""
        return self._by_class(self._of_rules, self._before)

    def write(self, states: Sequence[tuple[State, State]]) -> None:
        """Store the rules' state of matrices that are updated, and the observed state of all matrices."""
        sources = [states[entry.number][1][entry.spec.name].reshape(-1) for entry in self._observed]
        if self._of_rules:
            values = [states[entry.number][0][entry.spec.name].reshape(-1) for entry in self._of_rules]
            found = self._flat if self._holds(values) else torch.cat(values)
            kept = torch.where(self._elements, found, self._before)
            sources = [*torch.split(kept, [entry.numel for entry in self._of_rules]), *sources]
        parts = [
            part
            for source, targets in zip(sources, self.parts, strict=True)
            for part in torch.split(source, [target.numel() for target in targets])
        ]
        if parts:
            torch._foreach_copy_([target for targets in self.parts for target in targets], parts)

    def _holds(self, values: Sequence[Tensor]) -> bool:
        """Return whether the values still lie in the buffer of `read`: rules have changed them in place, if at all."""
        address = self._flat.data_ptr()
        for value in values:
            if value.data_ptr() != address or value.dtype != self._flat.dtype or not value.is_contiguous():
                return False
            address += value.numel() * value.itemsize
        return True

    def _by_class(self, entries: Sequence[_Entry], flat: Tensor) -> list[State]:
        """Return, for every class, the tensors of state in a buffer that has these entries one after the other."""
        states: list[State] = [{} for _ in self._classes]
        for entry, part in zip(entries, torch.split(flat, [entry.numel for entry in entries]), strict=True):
            states[entry.number][entry.spec.name] = part.view(entry.shape)
        return states


def _joined(lists: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.cat([part for parts in lists for part in parts])


class _PerStepValues:
    """Values of one class that differ from step to step, in tensors whose addresses a captured step may keep."""

    def __init__(self, rule: Rule, class_: MatrixClass) -> None:
        self._class = class_
        self._groups = sorted({member.group for member in class_.members})
        self._names = rule.per_step_numbers if rule.multiplies_weights else ()
        self._table = torch.zeros(len(self._names), len(self._groups), dtype=torch.float64, device=class_.device)
        group_of = [self._groups.index(member.group) for member in class_.members for _ in range(member.count)]
        self._group_of = torch.tensor(group_of, dtype=torch.int64).to(class_.device)
        self._of_matrices = torch.zeros(len(self._names), class_.count, dtype=torch.float64, device=class_.device)
        self._values: list[list[float]] = []
        self._had_tensors = False  # whether the table holds values of tensors on the device

    def fill(self, groups: Mapping[int, Mapping[str, Any]]) -> None:
        """Write the options of this step."""
        if not self._names:
            return
        rows = [[groups[group][name] for group in self._groups] for name in self._names]
        values = [[0.0 if is_on_device(value) else float(value) for value in row] for row in rows]
        has_tensors = any(is_on_device(value) for row in rows for value in row)
        if values == self._values and not has_tensors and not self._had_tensors:
            return
        self._table.copy_(pinned(values, torch.float64, self._table.device), non_blocking=True)
        self._values, self._had_tensors = values, has_tensors
        for row, targets in zip(rows, self._table, strict=True):
            for value, target in zip(row, targets, strict=True):
                if is_on_device(value):
                    target.copy_(value.reshape(()))
        torch.index_select(self._table, 1, self._group_of, out=self._of_matrices)

    def options(self, where: Tensor | slice = slice(None)) -> Mapping[str, Any]:
        """Return the planned options, and per-step options as tensors (count,), of some matrices of the class."""
        of_matrices = self._of_matrices[:, where].unbind()
        return FactorOptions(self._class.options, dict(zip(self._names, of_matrices, strict=True)))


class _Awaited(MutableMapping[str, Any]):
    """Values that another stream may still compute: the current stream waits for them when one is read."""

    def __init__(self, values: dict[str, Any], wait: Callable[[], None]) -> None:
        self._values, self._wait = values, wait

    def __getitem__(self, name: str) -> Any:
        self._wait()
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _nonzero(class_: MatrixClass) -> list[PerMatrix]:
    """Return the state of a class that must not start from zero."""
    return [spec for spec in RULES[class_.rule].matrix_state if spec.zero_error is not None]


def _checked(rule: Rule, name: str, value: object, shape: torch.Size) -> Tensor:
    """Return a tensor that a rule wrote; raise if it is none, or its shape is wrong."""
    if not isinstance(value, Tensor):
        raise TypeError(f"rule {rule.name!r} left {shown(value)} as {name!r}: write a tensor of shape {tuple(shape)}")
    if value.shape != shape:
        raise ValueError(f"rule {rule.name!r} left {name!r} with shape {tuple(value.shape)}, expected {tuple(shape)}")
    return value


def _rows(value: Any, where: Tensor | slice) -> Any:
    """Return some rows of a tensor, or of each tensor in a named tuple: views where the rows are adjacent."""
    if not isinstance(value, Tensor):
        return type(value)(*(_rows(part, where) for part in value))
    return value[where]
