"""Keep what belongs to whole matrices in a step: statistics of W, per-matrix state and factors of weights.

Before the stages, `begin` observes statistics and asks rules for factors. Within them, `batch` and `take` serve
`direction`. After them, `finish` settles: state that one rank has changed reaches all ranks that need it, in one
reduction per set of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.comm.process_groups import my_rank
from muon_fsdp.comm.transfers import add_up
from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.declarations.state import PerMatrix, State
from muon_fsdp.kernels.recorder import Recorder
from muon_fsdp.kernels.tables import is_on_device, pinned
from muon_fsdp.plan.matrix_sets import MatrixClass, MatrixSet, make_sets
from muon_fsdp.plan.outline import ParameterSpec
from muon_fsdp.plan.stages import Member, Stage
from muon_fsdp.rules import RULES, MatrixBatch, MatrixNumbers, Rule
from muon_fsdp.statistics.observer import Observer
from muon_fsdp.step.inputs import StepInputs
from muon_fsdp.step.weight_factors import FactorOptions, Factors, WeightFactors, as_factor

# The first steps, in which an iterative statistic may have no vector to start from. They are two, because a matrix of
# zeros gets its first direction in the first step.
COLD_STEPS = 2

BatchPlace: TypeAlias = tuple[int, Tensor | slice]  # a class, and the indices of the matrices in it


@dataclass
class _ClassNumbers:
    """The numbers of one class in one step; every tensor is (count, ...)."""

    before: State  # what `direction` may change, as it was before the step
    state: State  # the same, after statistics and factors
    statistics: dict[str, Any]
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    found: dict[str, Tensor] = field(
        default_factory=dict
    )  # what this rank contributes to the reduction; zero for matrices of other ranks


class MatrixStates:
    """All matrices of an optimizer whose rules have statistics, per-matrix state or factors."""

    def __init__(self, parameters: Sequence[ParameterSpec], stages: Sequence[Stage]) -> None:
        rank = my_rank()
        self._parameters = {parameter.position: parameter for parameter in parameters}
        self.sets: list[MatrixSet] = make_sets(parameters, rank)
        self._classes: list[MatrixClass] = [kind for own in self.sets for kind in own.classes]
        self._rules: list[Rule] = [RULES[kind.rule] for kind in self._classes]
        self._specs = [tuple(s for s in rule.all_state if isinstance(s, PerMatrix)) for rule in self._rules]
        self._observers = [Observer(own, [RULES[kind.rule].statistics for kind in own.classes]) for own in self.sets]
        self._class_of = {  # (position, block of its view): its class, and its first matrix there
            (place.position, place.block): (index, place.first)
            for index, kind in enumerate(self._classes)
            for place in kind.places
        }
        boxes = {p.position: p.layout.box_on(rank, p.shape) for p in parameters}
        self.factors = WeightFactors(parameters, boxes, self._classes, self._class_of)
        self._per_step = [_PerStepValues(rule, kind) for rule, kind in zip(self._rules, self._classes, strict=True)]
        # The place of every batch, made once: a captured step keeps the addresses of these tensors.
        self._places = [
            [self._place(stage, b.members) for b in stage.batches] if RULES[stage.rule].has_matrix_numbers else []
            for stage in stages
        ]
        self._states: list[Tensor] = []  # all per-matrix state at the last step
        self._slices: list[dict[str, list[Tensor]]] = []
        self._times = 0  # steps with these tensors
        self._now: list[_ClassNumbers] = []

    # -------------------------------------------------------------------------------------------- before the stages

    def fill(self, inputs: StepInputs) -> None:
        """Find the state tensors of this step, and write flags and options where a captured step reads them."""
        now = [
            inputs.states[place.position][spec.name]
            for kind, specs in zip(self._classes, self._specs, strict=True)
            for spec in specs
            for place in kind.places
        ]
        if not self._slices or any(a is not b for a, b in zip(now, self._states, strict=True)):
            self._states, self._times = now, 0
            self._slices = [
                {spec.name: self._slices_of(kind, spec, inputs.states) for spec in specs}
                for kind, specs in zip(self._classes, self._specs, strict=True)
            ]
        self._times += 1
        for values in self._per_step:
            values.fill(inputs.groups, inputs.updated)

    def _slices_of(self, kind: MatrixClass, spec: PerMatrix, states: Sequence[State]) -> list[Tensor]:
        """Return the parts of every parameter's state that belong to a class."""
        slices = []
        for place in kind.places:
            numels = [spec.numel(*shape) for shape in self._parameters[place.position].matrices.block_shapes]
            start = sum(numels[: place.block])
            slices.append(states[place.position][spec.name][start : start + numels[place.block]])
        return slices

    @property
    def is_cold(self) -> bool:
        """Return whether an iterative statistic may still lack start vectors for some matrix."""
        return self._times <= COLD_STEPS and any(observer.iterates for observer in self._observers)

    def variant(self, shards: Sequence[Tensor]) -> object:
        """Return what a captured step depends on: the addresses of weights. A cold step is never captured."""
        observed = [position for position, parameter in self._parameters.items() if parameter.is_observed]
        return tuple([shards[position].data_ptr() for position in observed]), object() if self.is_cold else None

    def begin(self, shards: Sequence[Tensor], recorder: Recorder) -> None:
        """Observe the statistics of all weights, and ask the rules for factors."""
        by_position = {position: shards[position] for position in self._parameters}
        self._now = []
        first = 0
        for own, observer in zip(self.sets, self._observers, strict=True):
            states = [self._read(first + index) for index in range(len(own.classes))]
            before = [
                {spec.name: state[spec.name] for spec in RULES[kind.rule].matrix_state}
                for kind, state in zip(own.classes, states, strict=True)
            ]
            found = observer.observe(by_position, states, recorder, cold=self.is_cold)
            for old, state, statistics in zip(before, states, found, strict=True):
                self._now.append(_ClassNumbers(old, state, statistics))
            first += len(own.classes)
        self.factors.set([self._start(index, numbers) for index, numbers in enumerate(self._now)])

    def _read(self, index: int) -> State:
        kind = self._classes[index]
        return {
            spec.name: torch.cat(self._slices[index][spec.name]).view(
                kind.count, *spec.shape_of_matrix(kind.rows, kind.cols)
            )
            for spec in self._specs[index]
        }

    def _start(self, index: int, numbers: _ClassNumbers) -> Factors | None:
        """Initialize state from statistics where it is zero, clear the contributions, and ask the rule for factors."""
        rule, kind = self._rules[index], self._classes[index]
        for spec in rule.matrix_state:
            if spec.initial is not None:
                value = numbers.state[spec.name]
                numbers.state[spec.name] = torch.where(value == 0, numbers.statistics[spec.initial], value)
        factors = None
        if rule.multiplies_weights:
            # Copies, because matrices that are not updated keep their state.
            state = {spec.name: numbers.state[spec.name].clone() for spec in rule.matrix_state}
            options = self._per_step[index].options
            of_class = MatrixNumbers(kind.rows, kind.cols, state, numbers.statistics, options)
            of_weights, of_updates = rule.factors(of_class)
            factors = as_factor(of_weights, kind), as_factor(of_updates, kind)
            for spec in rule.matrix_state:  # options are float64, and may have promoted state to it
                value = _checked(rule, spec.name, state[spec.name], numbers.state[spec.name].shape)
                numbers.state[spec.name] = value.to(kind.dtype)
            numbers.diagnostics = {
                name: _checked(rule, name, value, torch.Size((kind.count,)), rule.diagnostics)
                for name, value in of_class.diagnostics.items()
            }
        names = [name for name in rule.diagnostics if name not in numbers.diagnostics]
        numbers.found = {spec.name: torch.zeros_like(numbers.state[spec.name]) for spec in rule.matrix_state}
        numbers.found |= {name: torch.zeros(kind.count, dtype=kind.dtype, device=kind.device) for name in names}
        return factors

    # -------------------------------------------------------------------------------------------- within the stages

    def batch(
        self,
        options: PlannedOptions,
        place: BatchPlace,
        matrices: Tensor,
        update: Tensor,
        inverse_norms: Tensor | None,
    ) -> MatrixBatch:
        """Return the batch that `direction` gets for the matrices at a place."""
        index, where = place
        numbers, rule = self._now[index], self._rules[index]
        state = {spec.name: _rows(numbers.state[spec.name], where) for spec in rule.matrix_state}
        statistics = {name: _rows(value, where) for name, value in numbers.statistics.items()}
        return MatrixBatch(matrices, update, options, state, statistics, inverse_norms)

    def take(self, stage: Stage, owner: int | None, place: BatchPlace, batch: MatrixBatch) -> None:
        """Keep what `direction` has changed, if this rank is the one that contributes these matrices."""
        if owner is None and stage.exchange is not None and stage.exchange.ranks[0] != my_rank():
            return  # all ranks have computed the same, and the first contributes it
        index, where = place
        found, rule = self._now[index].found, self._rules[index]
        for spec in rule.matrix_state:
            target = found[spec.name]
            target[where] = _checked(rule, spec.name, batch.state[spec.name], target[where].shape).to(target.dtype)
        for name, value in batch.diagnostics.items():
            declared = [diagnostic for diagnostic in rule.diagnostics if diagnostic in found]
            value = _checked(rule, name, value, torch.Size(batch.matrices.shape[:1]), declared)
            found[name][where] = value.to(found[name].dtype)

    def place(self, stage: Stage, batch_number: int, members: Sequence[Member]) -> BatchPlace:
        """Return the class of some members of one batch, and their numbers there."""
        if len(members) == len(stage.batches[batch_number].members):
            return self._places[stage.number][batch_number]
        return self._place(stage, members)

    def _place(self, stage: Stage, members: Sequence[Member]) -> BatchPlace:
        ranges: list[tuple[int, int]] = []
        index = -1
        for member in members:
            unit = stage.units[member.unit]
            index, first = self._class_of[(unit.position, member.block)]
            first += unit.first_matrix(self._parameters[unit.position].matrices, member.block)
            if ranges and ranges[-1][1] == first + member.start:
                ranges[-1] = (ranges[-1][0], first + member.stop)
            else:
                ranges.append((first + member.start, first + member.stop))
        if len(ranges) == 1:
            return index, slice(*ranges[0])
        numbers = [number for start, stop in ranges for number in range(start, stop)]
        device = self._classes[index].device
        return index, pinned(numbers, torch.int64, device).to(device, non_blocking=True)

    # ---------------------------------------------------------------------------------------------- after the stages

    def finish(self, recorder: Recorder) -> None:
        """Settle: sum the contributions over ranks, and store the result for the matrices that were updated."""
        first = 0
        for own in self.sets:
            indices = range(first, first + len(own.classes))
            first += len(own.classes)
            found = [(index, name, value) for index in indices for name, value in self._now[index].found.items()]
            values = [value for _, _, value in found]
            if values and len(own.ranks) > 1:
                values = add_up(values, own.ranks, recorder)
            for (index, name, _), value in zip(found, values, strict=True):
                numbers = self._now[index]
                if name in numbers.state:
                    numbers.state[name] = self._where_updated(index, value, numbers.before[name])
                else:
                    numbers.diagnostics[name] = value
            for index in indices:
                self._write(index)

    def _where_updated(self, index: int, value: Tensor, otherwise: Tensor) -> Tensor:
        updated = self._per_step[index].updated
        return torch.where(updated.view(-1, *[1] * (value.ndim - 1)), value, otherwise)

    def _write(self, index: int) -> None:
        for name, slices in self._slices[index].items():
            parts = torch.split(self._now[index].state[name].reshape(-1), [part.numel() for part in slices])
            torch._foreach_copy_(slices, list(parts))

    # ------------------------------------------------------------------------------------------------------- metrics

    def count(self, totals: dict[tuple[str, str], Tensor]) -> None:
        """Add the diagnostics of this step to totals by rule and name, which stay on the device."""
        for index, (rule, numbers) in enumerate(zip(self._rules, self._now, strict=True)):
            if not rule.diagnostics:
                continue
            values = torch.stack([numbers.diagnostics[name] for name in rule.diagnostics]).nan_to_num(nan=0.0)
            sums = torch.where(self._per_step[index].updated, values, 0.0).double().sum(-1)
            for name, number in zip(rule.diagnostics, sums.unbind(), strict=True):
                known = totals.get((rule.name, name))
                totals[(rule.name, name)] = number if known is None else known.to(number.device) + number

    def metrics(self, totals: Mapping[tuple[str, str], Tensor]) -> dict[str, float]:
        """Return the rules' metrics of the last step and of all steps."""
        result: dict[str, float] = {}
        for rule in dict.fromkeys(self._rules):
            of_rule = [numbers for other, numbers in zip(self._rules, self._now, strict=False) if other is rule]
            last = {
                name: torch.cat([torch.empty(0), *(numbers.diagnostics[name].double().cpu() for numbers in of_rule)])
                for name in rule.diagnostics
            }
            total = {name: float(totals.get((rule.name, name), 0.0)) for name in rule.diagnostics}
            result.update(rule.metrics(last, total))
        return result


class _PerStepValues:
    """Values of one class that differ from step to step, in tensors whose addresses a captured step may keep."""

    def __init__(self, rule: Rule, kind: MatrixClass) -> None:
        self._kind = kind
        self._counts = [place.count for place in kind.places]
        self._flags: tuple[bool, ...] = ()
        self.updated = torch.ones(kind.count, dtype=torch.bool, device=kind.device)
        self._groups = sorted({place.group for place in kind.places})
        self._names = rule.per_step_numbers if rule.multiplies_weights else ()
        self._table = torch.zeros(len(self._names), len(self._groups), dtype=torch.float64, device=kind.device)
        group_of = [self._groups.index(place.group) for place in kind.places for _ in range(place.count)]
        self._group_of = torch.tensor(group_of, dtype=torch.int64).to(kind.device)
        self._values: list[list[float]] = []
        self._had_tensors = False  # whether the table holds values of tensors on the device

    def fill(self, groups: Sequence[Mapping[str, Any]], updated: Collection[int]) -> None:
        flags = tuple([place.position in updated for place in self._kind.places])
        if flags != self._flags:
            each = [flag for flag, count in zip(flags, self._counts, strict=True) for _ in range(count)]
            self.updated.copy_(pinned(each, torch.bool, self._kind.device), non_blocking=True)
            self._flags = flags
        if self._names:
            self._fill_options(groups)

    def _fill_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        rows = [[groups[group][name] for group in self._groups] for name in self._names]
        values = [[0.0 if is_on_device(value) else float(value) for value in row] for row in rows]
        has_tensors = any(is_on_device(value) for row in rows for value in row)
        if values != self._values or has_tensors or self._had_tensors:
            self._table.copy_(pinned(values, torch.float64, self._table.device), non_blocking=True)
            self._values, self._had_tensors = values, has_tensors
        for row, places in zip(rows, self._table, strict=True):
            for value, place in zip(row, places, strict=True):
                if is_on_device(value):
                    place.copy_(value.reshape(()))

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the planned options, and per-step options as tensors (count,)."""
        per_step = self._table[:, self._group_of].unbind()
        return FactorOptions(self._kind.options, dict(zip(self._names, per_step, strict=True)))


def _checked(rule: Rule, name: str, value: Tensor, shape: torch.Size, declared: Sequence[str] | None = None) -> Tensor:
    """Return a tensor that a rule wrote; raise if its shape is wrong or the rule does not declare it."""
    if declared is not None and name not in declared:
        raise ValueError(f"rule {rule.name!r} writes diagnostics[{name!r}], which it does not declare")
    if value.shape != shape:
        raise ValueError(f"rule {rule.name!r} left {name!r} with shape {tuple(value.shape)}, expected {tuple(shape)}")
    return value


def _rows(value: Any, where: Tensor | slice) -> Any:
    """Return copies of some rows of a tensor, or of each tensor in a named tuple."""
    if not isinstance(value, Tensor):
        return type(value)(*(_rows(part, where) for part in value))
    return value[where].clone() if isinstance(where, slice) else value[where]
