"""Checks and conversions of an optimizer's state dict on its way in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.routing import Route, clean_name
from muon_fsdp.rules import RULES
from muon_fsdp.rules.base import State

StateDict: TypeAlias = dict[str, Any]


def check_and_complete(
    optimizer: torch.optim.Optimizer, routes: Sequence[Sequence[Route]], state_dict: StateDict
) -> StateDict:
    """Raise if `state_dict` does not fit, naming every mismatch; else give it with group keys it lacks filled in."""
    mismatches = _mismatches(optimizer, routes, state_dict)
    if mismatches:
        lines = "".join(f"\n\t{line}" for line in mismatches)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(optimizer).__name__}:{lines}")
    groups = [
        {**{key: value for key, value in group.items() if key not in ("params", "param_names")}, **saved}
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    return {**state_dict, "param_groups": groups}


def fitting_state(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> dict[Tensor, State]:
    """The saved state by parameter, copied to the parameter's device in the precision that its rule declares."""
    result = {}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            values = state_dict["state"].get(key)
            if values:
                result[parameter] = {
                    spec.name: torch.as_tensor(values[spec.name])
                    .detach()
                    .to(device=parameter.device, dtype=spec.dtype(parameter), copy=True)
                    for spec in RULES[group["rule"]].state
                }
    return result


def _mismatches(
    optimizer: torch.optim.Optimizer, routes: Sequence[Sequence[Route]], state_dict: StateDict
) -> list[str]:
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        return ["not an optimizer's state dict: it needs 'state' and 'param_groups'"]
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(saved["params"]) for saved in saved_groups]:
        return _group_mismatches(routes, saved_groups)
    mismatches = []
    states = state_dict["state"]
    for group, saved, group_routes in zip(groups, saved_groups, routes, strict=True):
        saved_names = saved.get("param_names")
        for index, (parameter, route) in enumerate(zip(group["params"], group_routes, strict=True)):
            if saved_names and "param_names" in group and clean_name(saved_names[index]) != route.name:
                mismatches.append(f"{route.name}: the saved parameter in its place is {saved_names[index]!r}")
            elif saved.get("rule", group["rule"]) != group["rule"]:
                mismatches.append(f"{route.name}: saved with rule {saved['rule']!r}, but takes {group['rule']!r} here")
            elif states:
                mismatches += _state_mismatches(route, group["rule"], parameter, states.get(saved["params"][index]))
    known = set(chain.from_iterable(saved["params"] for saved in saved_groups))
    mismatches += [f"state of a parameter {key!r} that is in no group" for key in states if key not in known]
    return mismatches


def _group_mismatches(routes: Sequence[Sequence[Route]], saved_groups: Sequence[dict[str, Any]]) -> list[str]:
    here = [
        f"{len(group)} ({', '.join(route.name for route in group[:3])}{', ...' * (len(group) > 3)})" for group in routes
    ]
    lines = [
        f"groups of {', '.join(str(len(saved['params'])) for saved in saved_groups)} parameters were saved, "
        f"groups of {', '.join(here)} are here"
    ]
    saved_names = {clean_name(name) for saved in saved_groups for name in saved.get("param_names") or ()}
    if saved_names:
        names = {route.name for group in routes for route in group}
        lines += [f"{name}: not saved" for name in sorted(names - saved_names)]
        lines += [f"{name}: saved, but not here" for name in sorted(saved_names - names)]
    return lines


def _state_mismatches(route: Route, rule: str, parameter: Tensor, state: dict[str, Any] | None) -> list[str]:
    if not state:
        return [f"{route.name}: no state was saved"]
    specs = {spec.name: spec for spec in RULES[rule].state}
    if state.keys() != specs.keys():
        return [f"{route.name}: saved state {sorted(state)}, but rule {rule!r} has {sorted(specs)}"]
    return [
        f"{route.name}: saved {name} of shape {tuple(shape)}, expected {tuple(specs[name].shape(parameter))}"
        for name, value in state.items()
        if (shape := torch.as_tensor(value).shape) != specs[name].shape(parameter)
    ]
