"""Report which rule updates each parameter, why, and with which options."""

from __future__ import annotations

import math
import reprlib
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from muon_fsdp.declarations.encoding import STORAGE_OPTIONS
from muon_fsdp.parameters.groups import keys_of_others
from muon_fsdp.parameters.names import clean_name, common_pattern, without_numbers
from muon_fsdp.rules import Rule
from muon_fsdp.text import format_count, format_shape, plain_table

_WIDTH = 100  # columns of a line with options
_LONG = 6  # elements of a tuple that is printed as it is
_FUSED_NOTE = (
    "looks fused: updated as one matrix. overrides={name: {option: value}} splits it into parts that follow each\n"
    "    other; overrides={name: rule} says that it is one matrix."
)
_FROZEN = "frozen (requires_grad is False)"
_SPACE = "\u00a0"  # stands for a space at which such a line is not broken


@dataclass(frozen=True)
class RoutingRow:
    """One parameter in a routing report.

    Args:
        name: its name in the model, or "param[3]" if it has none.
        shape: its whole shape, sharded or not.
        rule: its rule; "none" if it is frozen.
        reason: why.
        scale: the size of an update, one number per shape of logical matrix; empty for element-wise rules.
        group: the index of its group in `optimizer.param_groups`; None if it is frozen.
        overridden: the options that an override sets for this parameter, with the values in force.
        fused: what it seems to consist of, for example "Q, K, V", although it is orthogonalized as one matrix; "" if it
            looks like one, or if you have decided.
        split_by: the options that split such a weight, if the model tells the sizes of its parts.
        matrices: the logical matrices that it is read as, for example "3 of 32x32"; empty for element-wise rules.
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str
    scale: str
    group: int | None = None
    overridden: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fused: str = ""
    split_by: Mapping[str, Any] = field(default_factory=dict, hash=False)
    matrices: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of this parameter in the table."""
        reason = f"{self.reason}; override: {_listed(self.overridden)}" if self.overridden else self.reason
        if self.fused:
            reason += f"; looks fused ({self.fused}), to split it: {_listed(self.split_by) or 'split_sizes=(...)'}"
        group = "" if self.group is None else str(self.group)
        return self.name, format_shape(self.shape), self.matrices, self.rule, group, self.scale, reason


@dataclass(frozen=True)
class RoutingGroup:
    """The options in force for the parameters of one group.

    Args:
        index: its index in `optimizer.param_groups`.
        rule: its rule.
        num_parameters: how many parameters it has.
        options: the value that each option of the rule has now, after schedulers, for example, have changed `lr`. How
            state is stored and weights are rounded is left out where it is the default.
        lr_origin: where `lr` came from when the group was made, such as "0.15 x lr=0.02"; empty for matrices.
        not_ours: what other programs keep in the group, such as timm's `lr_scale`.
    """

    index: int
    rule: str
    num_parameters: int
    options: Mapping[str, Any] = field(hash=False)
    lr_origin: str = ""
    not_ours: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, index: int, rule: Rule, group: Mapping[str, Any], lr_origin: str) -> RoutingGroup:
        """Return the entry of a parameter group; values that are tensors of one element become numbers."""
        values = {name: group.get(name, option.default) for name, option in rule.all_options.items()}
        options = {
            name: value.item() if isinstance(value, Tensor) and not value.is_meta else value
            for name, value in values.items()
            if rule.all_options[name] not in STORAGE_OPTIONS or value != rule.all_options[name].default
        }
        return cls(index, rule.name, len(group["params"]), options, lr_origin, keys_of_others(group))

    def __str__(self) -> str:
        counted = "1 parameter" if self.num_parameters == 1 else f"{self.num_parameters} parameters"
        origin = f"; lr began as {self.lr_origin}" if self.lr_origin else ""
        kept = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in self.not_ours.items())
        others = f"; not ours: {kept}" if kept else ""
        text = f"group {self.index} ({self.rule}, {counted}): {_listed(self.options, between=_SPACE)}{origin}{others}"
        lines = textwrap.fill(text, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        return lines.replace(_SPACE, " ")


@dataclass(frozen=True)
class RoutingReport:
    """The result of `optimizer.routing_report()`; `print` shows a table, and the options in force below it.

    Args:
        rows: one per parameter, in the order of the groups; frozen ones last.
        warnings: decisions that the user may not have intended.
        groups: one per parameter group, with the options in force.
        full: whether `print` shows every parameter. Otherwise parameters of repeated layers that differ only in the
            number of their layer share a row, `layers.*.mlp.up_proj.weight x 32`, and so do all frozen parameters.
    """

    rows: tuple[RoutingRow, ...]
    warnings: tuple[str, ...]
    groups: tuple[RoutingGroup, ...] = ()
    full: bool = False

    def __str__(self) -> str:
        header = ("name", "shape", "matrices", "rule", "group", "scale", "reason")
        cells = [row.cells() for row in self.rows] if self.full else _short(self.rows)
        table = plain_table(header, cells, left=len(header))
        notes = [_FUSED_NOTE] if any(row.fused for row in self.rows) else []
        warnings = [f"warning: {text}" for text in self.warnings]
        return "\n".join([table, "", *notes, *map(str, self.groups), *warnings])


def _short(rows: Sequence[RoutingRow]) -> list[tuple[str, ...]]:
    """Return the cells of a table with one row for the same parameter of all layers, and one for all frozen ones."""
    alike: dict[tuple[str, ...], list[RoutingRow]] = defaultdict(list)
    for row in rows:
        name, *cells = row.cells()
        alike[(_FROZEN,) if row.reason == _FROZEN else (without_numbers(name), *cells)].append(row)
    table = []
    for same in alike.values():
        name, shape, *cells = same[0].cells()
        if len(same) > 1 and same[0].reason == _FROZEN:
            elements = format_count(sum(math.prod(row.shape) for row in same))
            name, shape, cells[-1] = f"{len(same)} parameters", "", f"{_FROZEN}, {elements} elements"
        elif len(same) > 1:
            name = f"{common_pattern([row.name for row in same])} x {len(same)}"
        table.append((name, shape, *cells))
    return table


def frozen_rows(model: nn.Module) -> tuple[RoutingRow, ...]:
    """Return the rows of a report for the frozen parameters of a model."""
    return tuple(
        RoutingRow(clean_name(name), tuple(parameter.shape), "none", _FROZEN, "")
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    )


def _listed(options: Mapping[str, Any], between: str = " ") -> str:
    """Return options as a list such as "lr=0.02, nesterov=True", without those that are not set (None).

    Args:
        options: the options with their values.
        between: what stands for a space within a value.
    """
    pieces = [f"{name}={shown(value)}" for name, value in options.items() if value is not None]
    return ", ".join(piece.replace(" ", between) for piece in pieces)


def shown(value: object) -> str:
    """Return a value as it is printed: floats with at most six digits, repetitions in a long tuple once."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {shown(each)}' for key, each in value.items())}}}"
    if isinstance(value, tuple):
        period = next(n for n in range(1, len(value) + 1) if value == value[:n] * (len(value) // n)) if value else 0
        if len(value) > _LONG and period < len(value):
            return f"{shown(value[:period])} * {len(value) // period}"
        return f"({', '.join(map(shown, value))}{',' if len(value) == 1 else ''})"
    return f"{value:g}" if isinstance(value, float) else repr(value)
