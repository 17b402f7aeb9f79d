"""Which parameters a rank shares with which others, and what all of them must have alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muon_fsdp.comm.agreement import Line, fingerprint
from muon_fsdp.comm.process_groups import Ranks, group_like
from muon_fsdp.kernels.tables import is_on_device
from muon_fsdp.parameters.routing import Route
from muon_fsdp.plan.layout import Layout
from muon_fsdp.plan.options import Settings
from muon_fsdp.rules import RULES

Group = Mapping[str, Any]


class SharedSets:
    """The parameters of a plan by the ranks that hold them, where these are several.

    Args:
        groups: parameter groups.
        routes: of their parameters.
        layouts: of all parameters, one after another.
        settings: options of the whole optimizer.
        accumulation_steps: calls of `step()` per update.
        replicate_group: over which plain parameters are replicas.
        agreement_group: more ranks that decide about a step together, though they need not share a parameter.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        routes: Sequence[Sequence[Route]],
        layouts: Sequence[Layout],
        settings: Settings,
        accumulation_steps: int,
        replicate_group: dist.ProcessGroup | None,
        agreement_group: dist.ProcessGroup | None,
    ) -> None:
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._group_of = [number for number, group in enumerate(groups) for _ in group["params"]]
        members: dict[Ranks, list[int]] = defaultdict(list)
        for position, layout in enumerate(layouts):
            if len(layout.ranks) > 1:
                members[tuple(sorted(layout.ranks))].append(position)
        self._likes: dict[Ranks, dist.ProcessGroup | None] = {
            ranks: group_like(parameters[positions[0]], replicate_group) for ranks, positions in members.items()
        }
        if agreement_group is not None and dist.get_world_size(agreement_group) > 1:
            ranks = tuple(sorted(dist.get_process_group_ranks(agreement_group)))
            members.setdefault(ranks, [])
            self._likes.setdefault(ranks, agreement_group)
        self.positions: dict[Ranks, list[int]] = dict(sorted(members.items()))
        options = asdict(settings) | {"gradient_accumulation_steps": accumulation_steps}
        whole: Line = ("the optimizer", {name: repr(value) for name, value in options.items()})
        flat = [route for names in routes for route in names]
        self._lines = {
            ranks: [whole, *(_line(flat[i], parameters[i], layouts[i]) for i in positions)]
            for ranks, positions in self.positions.items()
        }
        self._prints = {ranks: fingerprint(lines) for ranks, lines in self._lines.items()}
        self._groups_of = {
            ranks: list(dict.fromkeys(self._group_of[i] for i in positions))
            for ranks, positions in self.positions.items()
        }
        self._options: list[tuple[object, ...]] = []  # of groups, when they were last looked at
        self._with_options: dict[Ranks, int] = {}
        self.counts = {ranks: len(positions) for ranks, positions in self.positions.items()}
        shared = [parameters[i].device for positions in self.positions.values() for i in positions]
        devices = [device for device in shared or [p.device for p in parameters] if device.type != "cpu"]
        self.device = devices[0] if devices else torch.device("cpu")  # where numbers are reduced

    def __bool__(self) -> bool:
        return bool(self.positions)

    def like(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """Return a process group whose backend serves the parameters of these ranks."""
        return self._likes.get(ranks)

    def prints(self, groups: Sequence[Group]) -> dict[Ranks, int]:
        """Return a hash per set of its parameters and of their options as they are now; without a wait for a device."""
        options = [_options(group) for group in groups]
        if options != self._options:
            self._options = options
            self._with_options = {ranks: self._print(ranks, options) for ranks in self.positions}
        return self._with_options

    def _print(self, ranks: Ranks, options: Sequence[tuple[object, ...]]) -> int:
        """Return the hash of a set: of its parameters, of the options they have, and of which has which."""
        numbers: dict[str, int] = {}  # groups with equal options are as one; by text, since a user may write a list
        of_group = {group: numbers.setdefault(repr(options[group]), len(numbers)) for group in self._groups_of[ranks]}
        members = [of_group[self._group_of[position]] for position in self.positions[ranks]]
        return fingerprint(self._prints[ranks], list(numbers), members)

    def describe(self, ranks: Ranks, groups: Sequence[Group]) -> list[Line]:
        """Return what the hash of a set stands for."""
        whole, *lines = self._lines[ranks]
        described = [whole]
        for position, (title, properties) in zip(self.positions[ranks], lines, strict=True):
            group = groups[self._group_of[position]]
            names = sorted(RULES[group["rule"]].all_options)
            values = dict(zip(names, map(repr, _options(group)[1:]), strict=True))
            described.append((title, {**properties, "rule": repr(group["rule"]), **values}))
        return described


def _options(group: Group) -> tuple[object, ...]:
    """Return the rule of a group and the values of its options."""
    return group["rule"], *(_value(group.get(name)) for name in sorted(RULES[group["rule"]].all_options))


def _value(option: object) -> object:
    """Return an option as it can be compared: of one that lies on a device only that it does, without a wait for it."""
    if isinstance(option, Tensor):
        return "on a device" if is_on_device(option) else float(option)
    return option


def _line(route: Route, parameter: Tensor, layout: Layout) -> Line:
    # Where nobody gave names, a parameter may have another number on another rank.
    which = "an unnamed parameter" if route.place is not None else f"parameter {route.name!r}"
    title = f"{which} of shape {tuple(parameter.shape)}"
    return title, {"dtype": str(parameter.dtype), "placements": str(layout.placements)}
