"""Running a plan: stages pass through prepare, gather, direction, scatter and apply, overlapping each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from muon_fsdp.distributed import StageExchange
from muon_fsdp.options import EngineOptions
from muon_fsdp.plan import Batch, Stage, Unit
from muon_fsdp.rules import RULES, Rule
from muon_fsdp.rules.base import State, working_dtype


@dataclass
class Work:
    """One parameter in a step, as this rank's local tensors.

    Without a gradient of its own a rank can't know in time whether another has one: it works on copies with a zero
    gradient, and `wanted` says in the end, on the device, whether they count.
    """

    parameter: Tensor
    state: State
    grad: Tensor | None  # None: zero
    divisor: int = 1  # of the gradient: how many were added up in it
    wanted: Tensor | None = None
    originals: tuple[Tensor, State] | None = None

    @classmethod
    def without_gradient(cls, parameter: Tensor, state: State, wanted: Tensor) -> Work:
        copies = {name: value.clone() for name, value in state.items()}
        return cls(parameter.clone(), copies, None, 1, wanted, (parameter, state))

    def working_gradient(self) -> Tensor:
        """The gradient in working precision; made when its stage begins, so that only a stage's worth exists."""
        dtype = working_dtype(self.parameter.dtype)
        if self.grad is None:
            return torch.zeros_like(self.parameter, dtype=dtype)
        grad = self.grad.to(dtype)
        return grad / self.divisor if self.divisor > 1 else grad

    def commit(self) -> None:
        if self.originals is None or self.wanted is None:
            return
        parameter, state = self.originals
        parameter.copy_(torch.where(self.wanted, self.parameter, parameter))
        for name, value in state.items():
            value.copy_(torch.where(self.wanted, self.state[name], value))


def run_stages(
    stages: Sequence[Stage],
    labels: Sequence[str],
    groups: Sequence[Mapping[str, Any]],
    work: Mapping[int, Work],
    engine: EngineOptions,
) -> None:
    """Run every stage. While one computes, the next is being gathered and the one before it scattered."""
    gathering: _StageRun | None = None
    scattering: _StageRun | None = None
    for stage, label in zip(stages, labels, strict=True):
        run = _StageRun(stage, label, groups, work, engine)
        if not run.active:
            continue
        run.start()
        if not run.travels:  # nothing to wait for, and nothing is gained by keeping it in memory
            run.compute()
            run.finish()
            continue
        if gathering is not None:
            gathering.compute()
        if scattering is not None:
            scattering.finish()
        gathering, scattering = run, gathering
    if gathering is not None:
        gathering.compute()
    for last in (scattering, gathering):
        if last is not None:
            last.finish()


class _StageRun:
    """One stage on its way through a step."""

    def __init__(
        self,
        stage: Stage,
        label: str,
        groups: Sequence[Mapping[str, Any]],
        work: Mapping[int, Work],
        engine: EngineOptions,
    ) -> None:
        self.stage, self.label, self.rule = stage, label, RULES[stage.rule]
        present = [
            (groups[group], [i for i in positions if i in work]) for group, positions in stage.positions_by_group
        ]
        self.active = [(group, positions) for group, positions in present if positions]
        self.work = work
        exchange = stage.exchange
        self.travels = exchange is not None and (exchange.gathers or exchange.scatters)
        self._engine = engine
        self._exchange: StageExchange | None = None
        self._updates: dict[int, Tensor] = {}

    def start(self) -> None:
        with record_function(f"muon_fsdp.prepare {self.label}"):
            for group, positions in self.active:
                works = [self.work[i] for i in positions]
                prepared = self.rule.prepare(group, [w.working_gradient() for w in works], [w.state for w in works])
                self._updates.update(zip(positions, prepared, strict=True))
        if self.stage.exchange is not None:
            first = next(iter(self._updates.values()))
            wire = self._engine.wire_dtype(first.device.type, first.dtype)
            with record_function(f"muon_fsdp.gather {self.label}"):
                self._exchange = StageExchange(self.stage, self._updates, wire)
            self._updates = {}

    def compute(self) -> None:
        if not self.rule.orthogonalizes:
            return
        if self._exchange is not None:
            with record_function(f"muon_fsdp.gathered {self.label}"):
                whole = self._exchange.finish_gather()
        else:
            whole = {
                number: self._updates[unit.position]
                for number, unit in enumerate(self.stage.units)
                if unit.position in self._updates
            }
        with record_function(f"muon_fsdp.orthogonalize {self.label}"):
            results = _directions(self.rule, self.stage.batches, self.stage.units, whole)
        if self._exchange is not None:
            with record_function(f"muon_fsdp.scatter {self.label}"):
                self._exchange.start_scatter(results)
        else:
            self._updates = {self.stage.units[number].position: result for number, result in results.items()}

    def finish(self) -> None:
        if self._exchange is not None:
            with record_function(f"muon_fsdp.scattered {self.label}"):
                self._updates = self._exchange.finish_scatter()
            self._exchange = None
        with record_function(f"muon_fsdp.apply {self.label}"):
            for group, positions in self.active:
                works = [self.work[i] for i in positions]
                self.rule.apply(group, [w.parameter for w in works], [self._updates[i] for i in positions])
                for each in works:
                    each.commit()
        self._updates = {}


def _directions(
    rule: Rule, batches: Sequence[Batch], units: Sequence[Unit], whole: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Pass whole units through `rule.direction`, batch by batch; units that are not there are left out.

    `whole` is emptied on the way, so that what has been copied into a batch can be freed.
    """
    blocks = {number: units[number].view.split(whole.pop(number)) for number in list(whole)}
    results: dict[int, list[list[Tensor]]] = {number: [[] for _ in parts] for number, parts in blocks.items()}
    left = Counter(member.unit for batch in batches for member in batch.members)
    for batch in batches:
        members = [member for member in batch.members if member.unit in blocks]
        if not members:
            continue
        matrices = [blocks[m.unit][m.block][m.start : m.stop] for m in members]
        together = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
        del matrices
        left.subtract(member.unit for member in members)
        for number in {member.unit for member in members if left[member.unit] == 0}:
            del blocks[number]
        directions = rule.direction(batch.key, together)
        sizes = [m.stop - m.start for m in members]
        for member, piece in zip(members, torch.split(directions, sizes), strict=True):
            results[member.unit][member.block].append(piece)
    return {
        number: units[number].view.join([torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in parts])
        for number, parts in results.items()
    }


def stage_label(number: int, stage: Stage) -> str:
    """What a profiler shows: the stage's number, its rule, and the shapes that it orthogonalizes on this rank."""
    shapes = ", ".join(f"{batch.count}x{batch.rows}x{batch.cols}" for batch in stage.batches)
    return f"stage {number} {stage.rule} [{shapes}]"
