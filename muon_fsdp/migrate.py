"""Load the state of another optimizer or of another rule, to switch to one of ours in the middle of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from muon_fsdp.comm.dtensors import local
from muon_fsdp.declarations.settings import STARTED
from muon_fsdp.declarations.state import PerParameter
from muon_fsdp.optimizers.muon import MuonOptimizer
from muon_fsdp.parameters.groups import Params, as_torch_params, names_and_parameters, with_lists
from muon_fsdp.parameters.names import clean_name
from muon_fsdp.parameters.state_dict import BOXES, StateDict, origin, saved_boxes
from muon_fsdp.rules import Rule, rule_named

__all__ = ["load_state_dict"]

Saved: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any], Any]  # of one parameter: state, group and box


def load_state_dict(optimizer: MuonOptimizer, state_dict: StateDict, params: Params | None = None) -> list[str]:
    """Load the parts of another optimizer's state that our rules can use.

        optimizer = MuonOptimizer(model, adamw_lr=3e-4)
        migrate.load_state_dict(optimizer, torch.load("adamw.pt"), model.parameters())

    Parameters with rule "adamw" load both moments and the step count of torch.optim.AdamW or Adam, and continue as
    that optimizer would. Matrices load the momentum of torch.optim.Muon, rescaled to our definition. Other saved state
    is ignored, such as AdamW's moments of matrices: these parameters keep their current state, which is zero momentum
    in a new optimizer. Options do not change. Call this function once for each optimizer that was used before.

    If one of our optimizers has saved the state, parameters whose rule has changed load what both rules keep with the
    same meaning: from "muon" to "normuon", the momentum. Parameters with the same rule as before load all of it.

    Args:
        optimizer: one of our optimizers, new or already in use.
        state_dict: the result of the other optimizer's `state_dict()`, or of `get_optimizer_state_dict` of
            torch.distributed.checkpoint without flattening. Tensors may be whole, or sharded like the parameters.
        params: what the other optimizer was built from, in the same order: `model.parameters()`, a list of groups, or
            the model. Not needed if the state dict has names, or if one of our optimizers has saved it.

    Returns:
        The names of the parameters whose state was loaded.

    Raises:
        RuntimeError: some saved state does not fit. The message names every such parameter, and nothing was changed.
        ValueError: the state dict has no names and `params` is missing, or `params` has another number of parameters.
    """
    saved = _saved_by_name(optimizer, state_dict, params)
    loaded: dict[Tensor, dict[str, Any]] = {}
    boxes: dict[Tensor, Any] = {}
    names, problems = [], []
    for record in optimizer._records():
        if record.name not in saved:
            continue
        state, saved_group, boxes[record.tensor] = saved.pop(record.name)
        if not state:
            continue
        try:
            is_ours, rule = "rule" in saved_group, record.rule
            values = _shared_state(rule, state, saved_group) if is_ours else rule.take_over(state, saved_group)
        except ValueError as error:
            problems.append(f"{record.name}: {error}")
            continue
        if values:
            names.append(record.name)
            scalars = {spec.name for spec in record.rule.all_state if spec == PerParameter(spec.name, "scalar")}
            loaded[record.tensor] = {name: _number(v) if name in scalars else v for name, v in values.items()}
    frozen = {row.name for row in optimizer._frozen_rows}
    problems += [
        f"{name}: saved, but not in this optimizer"
        for name, (state, _, _) in saved.items()
        if state and name not in frozen
    ]
    if not problems and not names:
        groups = state_dict["param_groups"]
        others = dict.fromkeys(origin(group) or f"rule {group['rule']!r} of muon_fsdp" for group in groups)
        problems.append(
            f"saved by {' and '.join(others)}: no rule in use can load any of its state, so load only the weights"
        )
    if problems:
        lines = "".join(f"\n\t{line}" for line in problems)
        raise RuntimeError(f"Error(s) in migrating to {type(optimizer).__name__}:{lines}")
    _load(optimizer, loaded, boxes)
    return names


def _shared_state(rule: Rule, saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that one of our rules has saved and that another keeps with the same meaning.

    This is what a common `prepare` computes, shard by shard; state per matrix belongs to the rest of a rule.
    """
    other = rule_named(group["rule"])
    if other is rule:
        kept = rule.all_state
    elif type(other).prepare is type(rule).prepare:
        kept = tuple(spec for spec in rule.state if spec in other.state and isinstance(spec, PerParameter))
    else:
        return {}
    return {spec.name: saved[spec.name] for spec in kept if spec.name in saved}


def _load(optimizer: MuonOptimizer, loaded: Mapping[Tensor, Mapping[str, Any]], boxes: Mapping[Tensor, Any]) -> None:
    """Merge new values into the state that the optimizer has, and load the result with all checks of a state dict."""
    optimizer._create_state()
    own = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {key: {**own["state"][key], **loaded.get(p, {})} for key, p in enumerate(parameters)}
    groups = [{**group, STARTED: True} for group in own["param_groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups, BOXES: [boxes.get(p) for p in parameters]})


def _number(value: Any) -> Any:
    """Return a step count as a scalar tensor; it may be saved as a number, a tensor of one element or a DTensor."""
    tensor = local(torch.as_tensor(value))
    return tensor.reshape(()) if tensor.numel() == 1 else tensor


def _saved_by_name(optimizer: MuonOptimizer, state_dict: StateDict, params: Params | None) -> dict[str, Saved]:
    """Return the saved state and group of every parameter, by its name in `optimizer`."""
    states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(states, dict) or not groups or not all("params" in group for group in groups):
        raise ValueError("not an optimizer's state dict: pass one with 'state' and 'param_groups', not a flattened one")
    keys = [key for group in groups for key in group["params"]]
    has_names, is_ours = (all(key in group for group in groups) for key in ("param_names", "rule"))
    if all(isinstance(key, str) for key in keys):
        names = [clean_name(key) for key in keys]
    elif has_names and (is_ours or params is None):  # ours has divided the groups, so `params` is in another order
        names = [clean_name(name) for group in groups for name in group["param_names"]]
    elif is_ours:
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
            raise ValueError(
                "the state dict has no names, and its groups have other sizes than those of this optimizer: build both "
                "optimizers from the model, or from model.named_parameters()"
            )
        names = [record.name for record in optimizer._records()]
    elif params is not None:
        names = _names_here(optimizer, params)
        if len(names) != len(keys):
            raise ValueError(
                f"the state dict has {len(keys)} parameters and params has {len(names)}: pass the same parameters"
            )
    else:
        raise ValueError(
            "the state dict has no names: pass the params that the other optimizer was built from, such as "
            "model.parameters()"
        )
    group_of = [group for group in groups for _ in group["params"]]
    return {
        name: (states.get(key) or {}, group, box)
        for name, key, group, box in zip(names, keys, group_of, saved_boxes(state_dict), strict=True)
        if name
    }


def _names_here(optimizer: MuonOptimizer, params: Params) -> list[str]:
    """Return the names that parameters have in the optimizer; a frozen parameter that is not in it gets ""."""
    listed: Any = list(params.parameters()) if isinstance(params, nn.Module) else with_lists(as_torch_params(params))
    groups: Iterable[Any] = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    parameters = [parameter for group in groups for parameter in names_and_parameters(group)[1]]
    here = {id(record.tensor): record.name for record in optimizer._records()}
    return [
        here.get(id(parameter), f"params[{index}]" if parameter.requires_grad else "")
        for index, parameter in enumerate(parameters)
    ]
