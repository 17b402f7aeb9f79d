"""Checks and conversions of an optimizer's state dict on its way in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.comm.transfers import can_take_part, like, local, local_part
from muon_fsdp.declarations.option import canonical
from muon_fsdp.declarations.state import State, StateSpec
from muon_fsdp.declarations.views import MatrixView
from muon_fsdp.parameters.routing import Route, clean_name
from muon_fsdp.plan.options import STARTED
from muon_fsdp.rules import RULES

StateDict: TypeAlias = dict[str, Any]


@contextmanager
def own_hooks(
    optimizer: torch.optim.Optimizer,
    before: Callable[[torch.optim.Optimizer, StateDict], StateDict | None],
    after: Callable[[torch.optim.Optimizer], None],
) -> Iterator[None]:
    """Around torch's loading: users' pre-hooks run before ours, and their post-hooks see the state as it will be."""
    handles = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_and_complete(
    optimizer: torch.optim.Optimizer,
    routes: Sequence[Sequence[Route]],
    views: Sequence[Sequence[MatrixView | None]],
    state_dict: StateDict,
) -> StateDict:
    """Raise if `state_dict` does not fit, naming every mismatch; else give it with group keys it lacks filled in."""
    mismatches = _mismatches(optimizer, routes, views, state_dict)
    if mismatches:
        _forget_what_is_loaded(optimizer, state_dict)
        lines = "".join(f"\n\t{line}" for line in mismatches)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(optimizer).__name__}:{lines}")
    groups = [
        {**_options(group), STARTED: True, **saved, **canonical(_options(saved))}
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    return {**state_dict, "param_groups": groups}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def origin(saved: Mapping[str, Any]) -> str | None:
    """Return the optimizer that saved a group, as far as its options show it; None for one of ours."""
    if "rule" in saved:
        return None
    if "amsgrad" in saved:
        names = {True: "torch.optim.AdamW", False: "torch.optim.Adam"}
        return names.get(saved.get("decoupled_weight_decay"), "torch.optim.AdamW or Adam")  # type: ignore[arg-type]
    known = {"adjust_lr_fn": "torch.optim.Muon", "dampening": "torch.optim.SGD"}
    return next((name for key, name in known.items() if key in saved), "another optimizer")


def what_was_not_loaded(
    optimizer: torch.optim.Optimizer, routes: Sequence[Sequence[Route]], state_dict: StateDict
) -> list[str]:
    """Return warnings about state that a state dict, which fits, does not have."""
    states, groups = state_dict["state"], state_dict["param_groups"]
    if any(states.values()) and not any(saved[STARTED] for saved in groups):
        return [
            "The state that was loaded is zero, as before the first step. If the checkpoint was saved after it, none "
            "of its state was found: allow_partial_load leaves out what has another name."
        ]
    missing = [
        route.name
        for group, saved, members in zip(optimizer.param_groups, groups, routes, strict=True)
        for parameter, key, route in zip(group["params"], saved["params"], members, strict=True)
        if saved[STARTED] and parameter.requires_grad and not states.get(key)
    ]
    if not missing:
        return []
    return [f"The state dict has no state of {len(missing)} parameters, which start anew: {first_names(missing)}"]


def first_names(names: Sequence[str]) -> str:
    """Return some of the names, for a message."""
    return ", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else "")


def fitting_state(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> dict[Tensor, State]:
    """The saved state by parameter, copied to the parameter's device in the precision that its rule declares."""
    result = {}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            values = state_dict["state"].get(key)
            if values:
                result[parameter] = {
                    spec.name: _fit(torch.as_tensor(values[spec.name]).detach(), spec, parameter)
                    for spec in RULES[group["rule"]].all_state
                }
    return result


def _fit(value: Tensor, spec: StateSpec, parameter: Tensor) -> Tensor:
    """A copy of the value where and as the parameter lies."""
    part = local_part(value, parameter) if spec.is_sharded else value
    part = part.to(device=parameter.device, dtype=spec.dtype(parameter), copy=True)
    return like(parameter, part) if spec.is_sharded else part


def _mismatches(
    optimizer: torch.optim.Optimizer,
    routes: Sequence[Sequence[Route]],
    views: Sequence[Sequence[MatrixView | None]],
    state_dict: StateDict,
) -> list[str]:
    groups, saved_groups, states = optimizer.param_groups, state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(states, dict) or not isinstance(saved_groups, Sequence):
        return ["not an optimizer's state dict: it needs 'state' and 'param_groups'"]
    if not all(isinstance(saved, dict) and "params" in saved for saved in saved_groups):
        return ["not an optimizer's state dict: a group of it has no 'params'"]
    others = list(dict.fromkeys(filter(None, map(origin, saved_groups))))
    if others:
        return [
            f"saved by {' and '.join(others)}, not by {type(optimizer).__name__}. muon_fsdp.migrate.load_state_dict "
            "loads what of it can be used here: see docs/migration.md"
        ]
    if [len(group["params"]) for group in groups] != [len(saved["params"]) for saved in saved_groups]:
        return _group_mismatches(groups, routes, saved_groups)
    mismatches = _partial_loads(routes, state_dict)
    for group, saved, group_routes, group_views in zip(groups, saved_groups, routes, views, strict=True):
        saved_names = _saved_names(saved) if "param_names" in group else None
        for index, (parameter, route) in enumerate(zip(group["params"], group_routes, strict=True)):
            if saved_names and saved_names[index] != route.name:
                mismatches.append(f"{route.name}: the saved parameter in its place is {saved_names[index]!r}")
            elif saved["rule"] != group["rule"]:
                mismatches.append(f"{route.name}: {_other_rule(saved['rule'], group['rule'])}")
            else:
                state = states.get(saved["params"][index])
                mismatches += _state_mismatches(route, group["rule"], parameter, group_views[index], state)
    known = set(chain.from_iterable(saved["params"] for saved in saved_groups))
    mismatches += [f"state of a parameter {key!r} that is in no group" for key in states if key not in known]
    return mismatches


def _partial_loads(routes: Sequence[Sequence[Route]], state_dict: StateDict) -> list[str]:
    """Return what shows that torch.distributed.checkpoint has loaded a part of something, or nothing at all.

    It loads in place, into what `optimizer.state_dict()` gave. If the checkpoint is not ours, the options that only we
    have stay as they were, and say that there has been no step, whereas the state is no longer zero.
    """
    empty, foreign = [], []
    for saved, members in zip(state_dict["param_groups"], routes, strict=True):
        for key, route in zip(saved["params"], members, strict=True):
            state = state_dict["state"].get(key)
            if state == {}:
                empty.append(route.name)
            elif state and not saved.get(STARTED, True) and not _is_zero(state):
                foreign.append(route.name)
    lines = []
    if empty:
        lines.append(
            f"the state of {len(empty)} parameters is empty ({first_names(empty)}): torch.distributed.checkpoint loads "
            "only into state that exists. Call optimizer.state_dict() first, which creates it where there are gradients"
        )
    if foreign:
        lines.append(
            f"the state of {len(foreign)} parameters is not zero, though there has been no step "
            f"({first_names(foreign)}): a part of another optimizer's checkpoint was loaded, by allow_partial_load. "
            "Load it whole into an optimizer of its own kind and give that to muon_fsdp.migrate.load_state_dict: see "
            "docs/migration.md"
        )
    return lines


def _forget_what_is_loaded(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> None:
    """Drop state that torch.distributed.checkpoint has loaded in place before the first step: it was zero till then."""
    states = state_dict.get("state")
    by_parameter = [state for state in states.values() if isinstance(state, dict)] if isinstance(states, dict) else []
    given = {id(value) for state in by_parameter for value in state.values()}
    for group in optimizer.param_groups:
        for parameter in group["params"] if not group[STARTED] else ():
            if any(id(value) in given for value in optimizer.state.get(parameter, {}).values()):
                del optimizer.state[parameter]


def _is_zero(state: Mapping[str, Any]) -> bool:
    """Whether all of this rank's part of the state is zero."""
    return not any(local(torch.as_tensor(value)).any() for value in state.values())


def _saved_names(saved: dict[str, Any]) -> list[str] | None:
    """Names of a saved group's parameters, in the order of its keys.

    torch.distributed.checkpoint uses names as keys, in the order of this optimizer, beside `param_names` in the order
    of the one that was saved.
    """
    keys = saved["params"]
    names = saved.get("param_names") or [key for key in keys if isinstance(key, str)]
    ordered = keys if set(keys) == set(names) else names
    return [clean_name(name) for name in ordered] if len(ordered) == len(keys) else None


def _group_mismatches(
    groups: Sequence[dict[str, Any]], routes: Sequence[Sequence[Route]], saved_groups: Sequence[dict[str, Any]]
) -> list[str]:
    here = {route.name: group["rule"] for group, members in zip(groups, routes, strict=True) for route in members}
    sizes = ", ".join(str(len(group["params"])) for group in groups) or "no"
    saved_sizes = ", ".join(str(len(saved["params"])) for saved in saved_groups) or "no"
    lines = [f"groups of {saved_sizes} parameters were saved, groups of {sizes} are here: {', '.join(here)}"]
    there = {name: saved.get("rule") for saved in saved_groups for name in _saved_names(saved) or ()}
    if there:
        lines += [f"{name}: not saved" for name in here if name not in there]
        lines += [f"{name}: saved, but not here" for name in there if name not in here]
        lines += [
            f"{name}: {_other_rule(there[name], rule)}"
            for name, rule in here.items()
            if there.get(name) not in (rule, None)
        ]
    return lines


def _other_rule(saved: object, here: str) -> str:
    if saved not in RULES:
        return f"saved with rule {saved!r}, which is not registered: import the file that has it"
    return f"saved with rule {saved!r}, but takes {here!r} here"


def _state_mismatches(
    route: Route, rule: str, parameter: Tensor, view: MatrixView | None, state: dict[str, Any] | None
) -> list[str]:
    if not state:  # dropped because the parameter is frozen
        return []
    specs = {spec.name: spec for spec in RULES[rule].all_state}
    if not specs.keys() <= state.keys():
        return [f"{route.name}: saved state {sorted(state)}, but rule {rule!r} has {sorted(specs)}"]
    mismatches = []
    for name, spec in specs.items():
        value, expected = torch.as_tensor(state[name]), tuple(spec.shape(parameter, view))
        if value.shape != expected:
            mismatches.append(f"{route.name}: saved {name} of shape {tuple(value.shape)}, expected {expected}")
        elif spec.is_sharded and not can_take_part(value, parameter):
            mismatches.append(
                f"{route.name}: saved {name} is sharded otherwise than the parameter; "
                "use torch.distributed.checkpoint, which reshards"
            )
    return mismatches
