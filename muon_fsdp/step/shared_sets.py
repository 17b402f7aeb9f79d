"""Find the ranks that share parameters with this one, and agree with them about every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from muon_fsdp.comm.agreement import (
    DECLARED,
    FLOPS,
    NO_GRADIENT,
    PRECISION,
    SCRATCH,
    STATE,
    Agreed,
    Agreement,
    Line,
    fingerprint,
)
from muon_fsdp.comm.device_memory import total_memory
from muon_fsdp.comm.process_groups import Ranks, group_like, is_destroyed, my_rank
from muon_fsdp.declarations.settings import NUM_UPDATES, Settings
from muon_fsdp.kernels.tables import is_on_device
from muon_fsdp.parameters.groups import Group
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.parameters.replicas import Replicas
from muon_fsdp.plan.layout import Layout
from muon_fsdp.plan.units import ParameterSpec
from muon_fsdp.rules import RULES

# What to do if the process group of some parameters was destroyed, by where it came from.
_DESTROYED = {
    "mesh": "The process group of the parameters' mesh was destroyed: after init_process_group, make a new mesh, build "
    "the model and call fully_shard again, and build the optimizer anew",
    "replicas": "The process group of replicated parameters was destroyed: wrap the model in DistributedDataParallel "
    "again, or make a new group for replicate_group=, and build the optimizer anew",
    "agreement": "agreement_group was destroyed: make a new process group, and build the optimizer anew",
}
Written: TypeAlias = Mapping[int, Mapping[str, str]]  # by position and name: per-matrix state as text


class SharedSets:
    """The parameters that this rank shares with other ranks, by the set of ranks that share them.

    Args:
        records: one per parameter.
        specs: what the plan knows of every parameter.
        settings: the settings of the whole optimizer.
        accumulation_steps: calls of `step()` per update.
        replicate_group: the process group over which plain parameters are replicas.
        agreement_group: further ranks that decide about a step together, though they need not share a parameter.
        own_memory: for every set of ranks, the total bytes of this rank's smallest device.
        agreed_memory: for sets of ranks that have agreed on it, the total bytes of their smallest device.
    """

    def __init__(
        self,
        records: Sequence[ParameterRecord],
        specs: Sequence[ParameterSpec],
        settings: Settings,
        accumulation_steps: int,
        replicate_group: dist.ProcessGroup | None,
        agreement_group: dist.ProcessGroup | None,
        own_memory: Mapping[Ranks, int],
        agreed_memory: Mapping[Ranks, int],
    ) -> None:
        self._group_of = [record.group_index for record in records]
        members = _positions(records)
        # Until ranks have met, a rank knows its own devices alone. It can then plan for a report, but not for a step.
        self.own_memory = own_memory
        self.device_memory = {ranks: agreed_memory.get(ranks, own) for ranks, own in self.own_memory.items()}
        self._likes: dict[Ranks, dist.ProcessGroup | None] = {
            ranks: group_like(records[positions[0]].tensor, replicate_group) for ranks, positions in members.items()
        }
        self._reasons = {
            ranks: "replicas" if records[positions[0]].is_plain else "mesh" for ranks, positions in members.items()
        }
        ranks = ranks_of_agreement(agreement_group)
        if len(ranks) > 1:
            members.setdefault(ranks, [])
            self._likes.setdefault(ranks, agreement_group)
            self._reasons.setdefault(ranks, "agreement")
        self.positions: dict[Ranks, list[int]] = dict(sorted(members.items()))
        options = asdict(settings) | {"gradient_accumulation_steps": accumulation_steps}
        whole: Line = ("the optimizer", {name: repr(value) for name, value in options.items()})
        self._lines = {
            ranks: [whole, *(_line(records[i], specs[i]) for i in positions)]
            for ranks, positions in self.positions.items()
        }
        self._hashes = {ranks: fingerprint(lines) for ranks, lines in self._lines.items()}
        self._groups_of = {
            ranks: list(dict.fromkeys(self._group_of[i] for i in positions))
            for ranks, positions in self.positions.items()
        }
        self._options: list[tuple[object, ...]] = []  # the options of all groups at the last call of `hashes`
        self._with_options: dict[Ranks, int] = {}
        self.counts = {ranks: len(positions) for ranks, positions in self.positions.items()}
        shared = [records[i].device for positions in self.positions.values() for i in positions]
        devices = [device for device in shared or [r.device for r in records] if device.type != "cpu"]
        self.device = devices[0] if devices else torch.device("cpu")  # where numbers are reduced

    def __bool__(self) -> bool:
        return bool(self.positions)

    def like(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """Return a process group whose backend serves the parameters of these ranks; raise if it was destroyed."""
        group = self._likes.get(ranks)
        if group is not None and is_destroyed(group):
            raise RuntimeError(_DESTROYED[self._reasons[ranks]])
        return group

    def by_position(self, of_sets: Mapping[Ranks, Sequence[int]]) -> dict[int, int]:
        """Return what ranks have agreed on, one number per parameter of every set, by the position of the parameter."""
        return {
            position: number
            for ranks, positions in self.positions.items()
            for position, number in zip(positions, of_sets[ranks], strict=True)
        }

    def is_planned_for(self, agreed_memory: Mapping[Ranks, int]) -> bool:
        """Return whether all that ranks have agreed on is what `device_memory` has."""
        return all(agreed_memory.get(ranks, memory) == memory for ranks, memory in self.device_memory.items())

    def hashes(self, groups: Sequence[Group], written: Written | None = None) -> dict[Ranks, int]:
        """Return, per set, a hash of its parameters, their present options and the memory that the plan is made for.

        It never waits for a device.

        Args:
            groups: the parameter groups.
            written: by position, per-matrix state as text, if the hash should cover it.
        """
        options = [_options(group) for group in groups]
        if options != self._options:
            self._options = options
            self._with_options = {
                ranks: self._hash(ranks, options, self.device_memory.get(ranks)) for ranks in self.positions
            }
        if written is None:
            return self._with_options
        return {
            ranks: fingerprint(self._with_options[ranks], [written.get(position) for position in positions])
            for ranks, positions in self.positions.items()
        }

    def first_hashes(self, groups: Sequence[Group]) -> dict[Ranks, int]:
        """Return the same without the memory, for ranks that have not met."""
        options = [_options(group) for group in groups]
        return {ranks: self._hash(ranks, options, None) for ranks in self.positions}

    def _hash(self, ranks: Ranks, options: Sequence[tuple[object, ...]], memory: int | None) -> int:
        """Return the hash of a set, from its parameters, their options, and which parameter has which options."""
        # Groups with equal options count as one. They are compared by text, since a user may write a list.
        numbers: dict[str, int] = {}
        of_group = {group: numbers.setdefault(repr(options[group]), len(numbers)) for group in self._groups_of[ranks]}
        members = [of_group[self._group_of[position]] for position in self.positions[ranks]]
        return fingerprint(self._hashes[ranks], list(numbers), members, memory)

    def describe(
        self, ranks: Ranks, groups: Sequence[Group], *, have_met: bool, written: Written | None = None
    ) -> list[Line]:
        """Return what the hash of a set covers, line by line, for an error."""
        (title, settings), *lines = self._lines[ranks]
        memory = {"device_memory": repr(self.device_memory.get(ranks))} if have_met else {}
        described = [(title, settings | memory)]
        for position, (title, properties) in zip(self.positions[ranks], lines, strict=True):
            group = groups[self._group_of[position]]
            rule = RULES[group["rule"]]
            values = dict(zip(sorted(rule.all_options), map(repr, _options(group)[2:]), strict=True))
            declared = {f"{DECLARED} {name}": text for name, text in rule.declarations.items()}
            state = {f"{STATE} {name!r}": text for name, text in (written or {}).get(position, {}).items()}
            described.append((title, {**properties, "rule": repr(rule.name), **declared, **values, **state}))
        return described


class StepAgreement:
    """The agreement of one optimizer with other ranks, kept from step to step while they share the same parameters."""

    def __init__(self) -> None:
        self._agreement: Agreement | None = None

    @property
    def _alive(self) -> Agreement | None:
        """Return the agreement, unless its process groups were destroyed."""
        return self._agreement if self._agreement is not None and self._agreement.is_alive else None

    @property
    def device_memory(self) -> Mapping[Ranks, int]:
        """Return, for sets of this rank that have met, the total bytes of their smallest device."""
        return self._alive.device_memory if self._alive is not None else {}

    @property
    def ranks(self) -> Ranks:
        """Return the ranks that a step connects, in ascending order; this rank alone if it shares nothing."""
        return self._agreement.ranks if self._agreement is not None else (my_rank(),)

    @property
    def device(self) -> torch.device | None:
        """Return where these ranks reduce numbers; None if there are no other ranks."""
        return self._agreement.device if self._agreement is not None else None

    def meet(self, shared: SharedSets, groups: Sequence[Group]) -> None:
        """Find the ranks that a step connects, unless they are known and share the same parameters as before.

        Args:
            shared: the parameters that other ranks hold too.
            groups: the parameter groups, whose options must be equal.
        """
        self._agreement = self._alive
        if self._agreement is not None and self._agreement.counts != shared.counts:
            self._agreement.leave()
            self._agreement = None
        if self._agreement is None and shared:
            self._agreement = Agreement(
                shared.counts,
                shared.first_hashes(groups),
                shared.own_memory,
                lambda ranks: shared.describe(ranks, groups, have_met=False),
                shared.device,
                shared.like(max(shared.positions, key=len)),
            )

    def before_step(
        self,
        shared: SharedSets,
        groups: Sequence[Group],
        codes: Mapping[int, int],
        early: Mapping[int, int],
        *,
        inert: bool,
        not_finite: bool,
        compares: int,
        written: Written | None = None,
        measures: bool = False,
        starts: bool = False,
        has_loaded: bool = False,
        changed: Collection[int] = (),
    ) -> Agreed | None:
        """Tell the other ranks about this rank's gradients, and find out about theirs. Call `meet` first.

        Args:
            shared: the parameters that other ranks hold too.
            groups: the parameter groups, whose options must be equal.
            codes: by position, the code of every gradient that this rank has.
            early: by position, what speaks against starting the stage of a parameter in backward.
            inert: whether the step only creates state.
            not_finite: whether some gradient of this rank is not finite.
            compares: what is still to be compared: `WRITTEN`, `REPLICAS`, or 0 for nothing.
            written: by position, per-matrix state as text, which must be equal; None if it is not compared.
            measures: whether this rank wants the step to be measured for `metrics()`.
            starts: whether a matrix of this rank takes part for the first time, with state that must not start from
                zero.
            has_loaded: whether this rank has loaded optimizer state since the last step.
            changed: positions of the sharded parameters whose weights were written to before the first step.

        Returns:
            What all ranks know now; None if another rank has other parameters than before, so that all must meet again.
        """
        num_updates = max((group.get(NUM_UPDATES, 0) for group in groups), default=0)
        found = my_rank() if not_finite else None
        proposal = Agreed(inert, found, num_updates=num_updates, measures=measures, starts=starts)
        if self._agreement is None:
            return proposal
        by_ranks, early_by_ranks = (
            {
                ranks: [numbers.get(position, NO_GRADIENT) for position in positions]
                for ranks, positions in shared.positions.items()
            }
            for numbers in (codes, early)
        )
        # Ranks that share no parameter, such as those of two pipeline stages, may load different things.
        loaded = {
            ranks: (has_loaded, any(position in changed for position in positions))
            for ranks, positions in shared.positions.items()
            if positions
        }
        agreed = self._agreement.before_step(
            shared.hashes(groups, written),
            replace(proposal, codes=by_ranks, early=early_by_ranks, compares=compares),
            lambda ranks: shared.describe(ranks, groups, have_met=True, written=written),
            loaded,
        )
        if agreed is None:
            self._agreement = None
        return agreed

    def fail(self, error: Exception) -> bool:
        """Report to the other ranks, which wait for this one, that it can't take the step.

        Returns:
            Whether it was reported; False if there is no agreement to report it through.
        """
        alive = self._alive
        if alive is not None:
            alive.fail(error)
        return alive is not None

    def report(self, text: str) -> None:
        """Report to the other ranks, at their next agreement, that this rank has not taken the last step as they have.

        This does not wait for them: they may need this rank before they call `step()` again.
        """
        if self._alive is not None:
            self._alive.report(text)

    def finish_report(self) -> None:
        """Raise if the other ranks are about to hear of a report of this rank, or have heard of it."""
        if self._alive is not None:
            self._alive.finish_report()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error of the block to the other ranks, which wait for this one, and raise it here."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise


def own_memory(records: Sequence[ParameterRecord]) -> dict[Ranks, int]:
    """Return, for every set of ranks that shares parameters, the total bytes of this rank's smallest device."""
    return {
        ranks: min(total_memory(device) for device in {records[i].device for i in positions})
        for ranks, positions in _positions(records).items()
    }


def shared_ranks(
    layouts: Iterable[tuple[Layout, object]], replicas: Replicas, agreement_group: dist.ProcessGroup | None
) -> set[Ranks]:
    """Return the sets of ranks that share parameters with this one, or decide about steps with it.

    `layouts` are those of `Replicas.layouts`.
    """
    ranks = replicas.mesh_ranks | {tuple(sorted(layout.ranks)) for layout, _ in layouts}
    ranks.add(ranks_of_agreement(agreement_group))
    return {each for each in ranks if len(each) > 1}


def _positions(records: Sequence[ParameterRecord]) -> dict[Ranks, list[int]]:
    """Return the positions of the parameters of every set of several ranks."""
    members: dict[Ranks, list[int]] = defaultdict(list)
    for record in records:
        if len(record.layout.ranks) > 1:
            members[tuple(sorted(record.layout.ranks))].append(record.position)
    return members


def ranks_of_agreement(group: dist.ProcessGroup | None) -> Ranks:
    """Return the ranks of `agreement_group`, () if there is none; raise if it was destroyed or lacks this rank."""
    if group is None:
        return ()
    if is_destroyed(group):
        raise RuntimeError(_DESTROYED["agreement"])
    if dist.get_rank(group) < 0:
        raise ValueError("agreement_group must contain this rank: pass a process group that it belongs to")
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _options(group: Group) -> tuple[object, ...]:
    """Return the rule of a group, what the rule declares, and the values of its options."""
    rule = RULES[group["rule"]]
    return rule.name, rule.declarations, *(_value(group.get(name)) for name in sorted(rule.all_options))


def _value(option: object) -> object:
    """Return the value of an option for comparing ranks. A tensor on a device is not read: the host would wait."""
    if isinstance(option, Tensor):
        return "on a device" if is_on_device(option) else float(option)
    return option


def _line(record: ParameterRecord, spec: ParameterSpec) -> Line:
    # Where nobody gave names, a parameter may have another number on another rank.
    which = "an unnamed parameter" if record.route.unnamed_position is not None else f"parameter {record.name!r}"
    title = f"{which} of shape {record.shape}"
    layout = record.layout
    return title, {
        "dtype": str(record.tensor.dtype),
        "mesh": str(layout.mesh_shape),
        "placements": str(layout.placements),
        "effective view": repr(str(record.view)),
        FLOPS: f"{sum(spec.block_flops):.6g}",
        SCRATCH: str(sum(spec.block_scratch)),
        PRECISION: str(spec.update_dtype),
    }
