"""Create the state of parameters, and check and convert a state dict that is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.dtensors import can_take_part, like, local, local_part, own_box
from muon_fsdp.comm.host_memory import HostArena
from muon_fsdp.declarations.encoding import STORAGE_OPTIONS
from muon_fsdp.declarations.option import canonical
from muon_fsdp.declarations.settings import STARTED
from muon_fsdp.declarations.state import PerParameter, State, StateSpec
from muon_fsdp.kernels.tables import REMAINDER
from muon_fsdp.parameters.groups import Group, keys_of_others
from muon_fsdp.parameters.names import clean_name
from muon_fsdp.parameters.records import ParameterRecord, is_cut_by_model
from muon_fsdp.parameters.stored_state import (
    create_state,
    decode_state,
    host_bytes,
    is_offloaded,
    is_stored,
    store_state,
)
from muon_fsdp.plan.layout import LayoutError
from muon_fsdp.rules import RULES
from muon_fsdp.text import first_names, format_shape, warn_user

StateDict: TypeAlias = dict[str, Any]
BOXES = "boxes"  # a key of a state dict: for every parameter, which box of it this rank's state belongs to


@contextmanager
def loading_hooks(
    optimizer: torch.optim.Optimizer,
    before: Callable[[torch.optim.Optimizer, StateDict], StateDict | None],
    after: Callable[[torch.optim.Optimizer], None],
) -> Iterator[None]:
    """Wrap torch's loading: users' pre-hooks run before ours, and their post-hooks see the final state."""
    handles = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def create_missing(records: Sequence[ParameterRecord], states: MutableMapping[Tensor, State]) -> None:
    """Create the state that parameters lack, with or without a gradient; no communication.

    State that no longer fits, because the rule, view or shape of its parameter was changed, is replaced with a warning.
    State that is stored in another form than its group asks for is converted.
    """
    arena = _arena(records, states)
    for record in records:
        state, parameter = states[record.tensor], record.tensor
        template: Tensor | None = None
        if record.rounding != "remainder":
            state.pop(REMAINDER, None)  # it would not fit the weights if their group asks for it again
        for spec in record.all_state:
            if spec.name in state and state[spec.name].shape != spec.shape(parameter, record.view):
                warn_user(
                    f"state {spec.name!r} of parameter {record.name!r} starts anew: its rule, view or shape was "
                    "changed, and it no longer fits"
                )
                del state[spec.name]
            # State created on the meta device does not follow a parameter that was materialised since.
            if spec.name not in state or state[spec.name].is_meta != parameter.is_meta:
                template = record.state_template() if template is None else template
                state.update(create_state(record, spec, template, arena))
        if not is_stored(record, state):
            working = decode_state(record, state)
            for name in [name for name in state if name not in working]:
                del state[name]  # scales
            for spec in record.all_state:
                state.update(store_state(record, spec, working[spec.name], {}, arena))


def _arena(records: Sequence[ParameterRecord], present: Mapping[Any, State]) -> HostArena:
    """Return memory of the host for the state that is kept there, and that parameters lack at present."""
    size = sum(
        host_bytes(record, spec)
        for record in records
        for spec in record.all_state
        if spec.name not in present.get(record.tensor, {})
    )
    devices = (record.device for record in records)
    return HostArena(size, next((device for device in devices if device.type != "cpu"), torch.device("cpu")))


def boxes_of(groups: Sequence[Group], states: Mapping[Tensor, State]) -> dict[str, Any]:
    """Return the key of a state dict that says which box of every sharded parameter its state belongs to.

    torch.save keeps this key, so a file of another rank is noticed. torch.distributed.checkpoint leaves it out. A tuple
    counts there as one value, of which it makes no keys that depend on the number of parameters.

    Returns:
        For every parameter, the offset and shape of the box, or None if its state is no DTensor; {} if all are None.
    """
    boxes = []
    for group in groups:
        names = [spec.name for spec in RULES[group["rule"]].all_state if spec.is_sharded]
        for parameter in group["params"]:
            values = [states.get(parameter, {}).get(name) for name in names]
            boxes.append(next((_box(value) for value in values if isinstance(value, DTensor)), None))
    return {BOXES: tuple(boxes)} if any(boxes) else {}


class GivenState:
    """The tensors that `state_dict()` has made because state is stored in another form, as long as they exist."""

    def __init__(self) -> None:
        self._made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def in_working_precision(
        self, records: Sequence[ParameterRecord], states: Mapping[Any, State]
    ) -> dict[Any, dict[str, Any]]:
        """Return the state of a state dict, whose keys are the positions of parameters, in working precision."""
        found: dict[Any, dict[str, Any]] = dict(states)
        for record in records:
            state = states.get(record.position)
            if state is not None:
                found[record.position] = working = decode_state(record, state)
                made = [value for name, value in working.items() if value is not state.get(name)]
                self._made.update((id(value), value) for value in made)
        return found

    def __reduce__(self) -> tuple[type[GivenState], tuple[()]]:
        return GivenState, ()  # a copy of the optimizer has returned nothing yet

    def ids(self) -> set[int]:
        """Return the `id` of these tensors."""
        return set(self._made)


def saved_boxes(state_dict: StateDict) -> Sequence[Any]:
    """Return the box of every saved parameter; Nones if there are no boxes, or parameters were taken out since."""
    boxes: Sequence[Any] = state_dict.get(BOXES, ())
    count = sum(len(saved["params"]) for saved in state_dict["param_groups"])
    return boxes if len(boxes) == count else [None] * count


def _box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the offset and shape of this rank's box; None if it holds several ranges, as element-wise rules allow."""
    try:
        box = own_box(tensor)
    except LayoutError:
        return None
    return box.offset, box.shape


def check_and_complete(
    optimizer: torch.optim.Optimizer,
    records: Sequence[ParameterRecord],
    state_dict: StateDict,
    given: Set[int],
) -> StateDict:
    """Raise if `state_dict` does not fit, naming every mismatch; else return it with missing group keys filled in.

    `given` is that of `_shards_of_others`.
    """
    mismatches = _mismatches(optimizer, records, state_dict, given)
    if mismatches:
        _forget_what_is_loaded(optimizer, state_dict)
        lines = "".join(f"\n\t{line}" for line in mismatches)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(optimizer).__name__}:{lines}")
    # How state is stored is decided here, not by who saved it.
    kept = [option.name for option in STORAGE_OPTIONS if not option.per_step]
    groups = []
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        ours = {name: group[name] for name in kept if name in group}
        theirs = {**saved, **canonical(_options(saved)), **keys_of_others(saved)}
        groups.append({**_options(group), STARTED: True, **theirs, **ours})
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


def what_was_not_loaded(records: Sequence[ParameterRecord], state_dict: StateDict) -> list[str]:
    """Return warnings about state that is missing in a state dict that fits otherwise."""
    states, groups = state_dict["state"], state_dict["param_groups"]
    is_empty = not any(states.get(key) for _, key, _ in _with_saved(records, groups))
    if not is_empty and not any(saved[STARTED] for saved in groups):
        return [
            "The state that was loaded is zero, as before the first step. If the checkpoint was saved later, none "
            "of its state was loaded: allow_partial_load skips entries that have other names."
        ]
    missing = [
        record.name
        for record, key, saved in _with_saved(records, groups)
        if saved[STARTED] and record.tensor.requires_grad and record.rule.all_state and not states.get(key)
    ]
    if not missing:
        return []
    return [f"The state dict has no state of {len(missing)} parameters, which start anew: {first_names(missing)}"]


def _with_saved(
    records: Sequence[ParameterRecord], saved_groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[ParameterRecord, Any, Mapping[str, Any]]]:
    """Yield every record with the key and the group of the saved parameter at the same position."""
    saved = [(key, group) for group in saved_groups for key in group["params"]]
    for record, (key, group) in zip(records, saved, strict=True):
        yield record, key, group


def fitting_state(
    records: Sequence[ParameterRecord], state_dict: StateDict, present: Mapping[Any, State]
) -> dict[Any, Any]:
    """Return the saved state by parameter, copied to where it is kept in the precision its rule declares.

    State in the memory of the host is copied to the tensors of the `present` state, because there may be no room for
    both. What other programs keep there is copied too, under the parameter or under a key of its own.
    """
    saved = dict(state_dict["state"])
    result: dict[Any, Any] = {}
    arena = _arena(records, present)
    for record, key, _ in _with_saved(records, state_dict["param_groups"]):
        values = saved.pop(key, None)
        if values:
            template = record.state_template()
            own: State = {}
            for spec in record.all_state:
                if spec.name in values:
                    device = record.tensor.device if spec.is_sharded else record.device
                    device = torch.device("cpu") if is_offloaded(record, spec) else device
                    value = fit_state(torch.as_tensor(values[spec.name]).detach(), spec, template, device)
                    own |= store_state(record, spec, value, present.get(record.tensor, {}), arena)
                else:  # the remainder of weights that were rounded otherwise when they were saved
                    own |= create_state(record, spec, template, arena)
            known = {*own, REMAINDER}
            others = {name: _copy(value, record.tensor.device) for name, value in values.items() if name not in known}
            result[record.tensor] = {**own, **others}
    return result | deepcopy(saved)


def _copy(value: Any, device: torch.device) -> Any:
    """Return a copy of what another program keeps in the state; tensors go to the device of the parameter, as torch's.

    Schedule-free optimizers and Lookahead keep weights there. Unlike torch, this keeps their precision.
    """
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _copy(each, device) for key, each in value.items()}
    return type(value)(_copy(each, device) for each in value) if type(value) in (list, tuple) else deepcopy(value)


def fit_state(value: Tensor, spec: StateSpec, parameter: Tensor, device: torch.device) -> Tensor:
    """Return a copy of the value on a device, in the layout of the parameter or of a template of its state."""
    part = local_part(value, parameter) if spec.is_sharded else value
    part = part.to(device=device, dtype=spec.dtype(parameter), copy=True)
    return like(parameter, part) if spec.is_sharded else part


def _mismatches(
    optimizer: torch.optim.Optimizer,
    records: Sequence[ParameterRecord],
    state_dict: StateDict,
    given: Set[int],
) -> list[str]:
    """Return a line for everything in a state dict that does not fit the optimizer."""
    groups, saved_groups, states = optimizer.param_groups, state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(states, dict) or not isinstance(saved_groups, Sequence):
        return ["not an optimizer's state dict: it needs 'state' and 'param_groups'"]
    if not all(isinstance(saved, dict) and "params" in saved for saved in saved_groups):
        return ["not an optimizer's state dict: a group of it has no 'params'"]
    others = list(dict.fromkeys(filter(None, map(origin, saved_groups))))
    if others:
        return [
            f"saved by {' and '.join(others)}, not by {type(optimizer).__name__}. muon_fsdp.migrate.load_state_dict "
            "loads the parts that can be used here: see docs/migration.md"
        ]
    if [len(group["params"]) for group in groups] != [len(saved["params"]) for saved in saved_groups]:
        return _group_mismatches(groups, records, saved_groups)
    mismatches, rule_changes = _partial_loads(records, state_dict), []
    mismatches += _shards_of_others(records, state_dict, given)
    saved_names: list[str | None] = []
    for group, saved in zip(groups, saved_groups, strict=True):
        names = _saved_names(saved) if "param_names" in group else None
        saved_names += names or [None] * len(saved["params"])
    for (record, key, saved), saved_name in zip(_with_saved(records, saved_groups), saved_names, strict=True):
        if saved_name is not None and saved_name != record.name:
            mismatches.append(f"{record.name}: the saved parameter in its place is {saved_name!r}")
        elif saved["rule"] != record.rule.name:
            rule_changes.append(f"{record.name}: {_other_rule(saved['rule'], record.rule.name)}")
        else:
            mismatches += _state_mismatches(record, states.get(key))
    known = set(chain.from_iterable(saved["params"] for saved in saved_groups))
    kinds = {type(key) for key in known}  # another kind of key is no parameter's: torch keeps such state, and so do we
    mismatches += [
        f"state of a parameter {key!r} that is in no group" for key in states if key not in known and type(key) in kinds
    ]
    return [*mismatches, *_with_remedy(rule_changes)]


def _partial_loads(records: Sequence[ParameterRecord], state_dict: StateDict) -> list[str]:
    """Return lines about state that torch.distributed.checkpoint has loaded in part, or not at all.

    It loads into the tensors that `optimizer.state_dict()` returned. A checkpoint of another optimizer does not have
    our key "started", which therefore stays False although the state is no longer zero.
    """
    empty, foreign = [], []
    for record, key, saved in _with_saved(records, state_dict["param_groups"]):
        state = state_dict["state"].get(key)
        if state == {} and record.rule.all_state:
            empty.append(record.name)
        elif state and not saved.get(STARTED, True) and not _is_zero(record, state):
            foreign.append(record.name)
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
            "Load it whole into an optimizer of the class that saved it, and pass the state dict of that optimizer to "
            "muon_fsdp.migrate.load_state_dict: see docs/migration.md"
        )
    return lines


def _shards_of_others(records: Sequence[ParameterRecord], state_dict: StateDict, given: Set[int]) -> list[str]:
    """Return a line about state that another rank has saved. It looks like this rank's: a DTensor has no other mark.

    Args:
        records: one per parameter.
        state_dict: what is loaded. Without boxes, only a shard of another shape is noticed.
        given: the `id` of the tensors that `state_dict()` has returned here. torch.distributed.checkpoint may have
            loaded into them, while it gives all ranks the boxes of one rank.
    """
    boxes = saved_boxes(state_dict)
    found: dict[str, str] = {}  # by the name of the parameter
    for record, key, _ in _with_saved(records, state_dict["param_groups"]):
        template, saved = record.state_template(), state_dict["state"].get(key) or {}
        values = {spec.name: saved.get(spec.name) for spec in record.all_state if spec.is_sharded}
        for value in values.values():
            if not (isinstance(value, DTensor) and isinstance(template, DTensor)):
                continue
            if id(value) in given or not can_take_part(value, template):
                continue
            own, box = _box(template), boxes[record.position]
            if own is None:
                continue
            saved_box = (tuple(box[0]), tuple(box[1])) if box is not None else (own[0], tuple(local(value).shape))
            if saved_box != own:
                found[record.name] = " instead of ".join(
                    f"{format_shape(shape)} at {offset}" for offset, shape in (saved_box, own)
                )
    if not found:
        return []
    names = list(found)
    return [
        f"the state of {len(names)} parameters is the shard of another rank ({first_names(names)}): of {names[0]!r} it "
        f"is {found[names[0]]}. Load it on the rank that saved it, or use torch.distributed.checkpoint, which saves "
        "and loads the shards of all ranks"
    ]


def _forget_what_is_loaded(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> None:
    """Drop state that torch.distributed.checkpoint has loaded in place before the first step: it was zero till then."""
    states = state_dict.get("state")
    by_parameter = [state for state in states.values() if isinstance(state, dict)] if isinstance(states, dict) else []
    given = {id(value) for state in by_parameter for value in state.values()}
    for group in optimizer.param_groups:
        for parameter in group["params"] if not group[STARTED] else ():
            if any(id(value) in given for value in optimizer.state.get(parameter, {}).values()):
                del optimizer.state[parameter]


def _is_zero(record: ParameterRecord, state: Mapping[str, Any]) -> bool:
    """Return whether all of this rank's part of a parameter's state is zero, apart from what others may have set.

    Other programs keep state there. Users set per-matrix state before the first step; no other optimizer has any.
    """
    own = [state[s.name] for s in record.rule.all_state if isinstance(s, PerParameter) and s.name in state]
    return not any(local(torch.as_tensor(value)).any() for value in own)


def _saved_names(saved: dict[str, Any]) -> list[str] | None:
    """Return the names of a saved group's parameters, in the order of its keys; None if there are none.

    torch.distributed.checkpoint uses names as keys, in the order of this optimizer, beside `param_names` in the order
    of the one that was saved.
    """
    keys = saved["params"]
    names = saved.get("param_names") or [key for key in keys if isinstance(key, str)]
    ordered = keys if set(keys) == set(names) else names
    return [clean_name(name) for name in ordered] if len(ordered) == len(keys) else None


def _group_mismatches(
    groups: Sequence[dict[str, Any]], records: Sequence[ParameterRecord], saved_groups: Sequence[dict[str, Any]]
) -> list[str]:
    here = {record.name: record.rule.name for record in records}
    sizes = ", ".join(str(len(group["params"])) for group in groups) or "no"
    saved_sizes = ", ".join(str(len(saved["params"])) for saved in saved_groups) or "no"
    lines = [f"groups of {saved_sizes} parameters were saved, groups of {sizes} are here: {', '.join(here)}"]
    there = {name: saved.get("rule") for saved in saved_groups for name in _saved_names(saved) or ()}
    if there:
        lines += [f"{name}: not saved" for name in here if name not in there]
        lines += [f"{name}: saved, but not here" for name in there if name not in here]
        changed = {name: rule for name, rule in here.items() if there.get(name) not in (rule, None)}
        lines += _with_remedy([f"{name}: {_other_rule(there[name], rule)}" for name, rule in changed.items()])
    return lines


def _with_remedy(rule_changes: Sequence[str]) -> list[str]:
    """Return lines about rules that have changed, followed by what to do about them."""
    remedy = "to change rules in a run, call muon_fsdp.migrate.load_state_dict, which loads what both rules keep"
    return [*rule_changes, remedy] if rule_changes else []


def _other_rule(saved: object, here: str) -> str:
    if saved not in RULES:
        return f"saved with rule {saved!r}, which is not registered: import the file that has it"
    return f"saved with rule {saved!r}, but takes {here!r} here"


def _state_mismatches(record: ParameterRecord, state: dict[str, Any] | None) -> list[str]:
    if not state:  # dropped because the parameter is frozen
        return []
    specs = {spec.name: spec for spec in record.all_state}
    specs = {name: spec for name, spec in specs.items() if name != REMAINDER or name in state}
    if not specs.keys() <= state.keys():
        return [f"{record.name}: saved state {sorted(state)}, but rule {record.rule.name!r} has {sorted(specs)}"]
    mismatches = []
    for name, spec in specs.items():
        value, expected = torch.as_tensor(state[name]), tuple(spec.shape(record.tensor, record.view))
        if value.shape != expected:
            is_cut = not spec.is_sharded and is_cut_by_model(record.group, record.route)
            remedy = " If it was saved before the weight was split, pass attention='whole'" if is_cut else ""
            shapes = f"saved {name} of shape {tuple(value.shape)}, expected {expected}"
            mismatches.append(f"{record.name}: {shapes}{'.' if remedy else ''}{remedy}")
        elif spec.is_moment and not value.is_floating_point():
            mismatches.append(
                f"{record.name}: saved {name} has dtype {value.dtype}, as optimizer.state stores it: save "
                "optimizer.state_dict(), which has it in working precision"
            )
        elif spec.is_sharded and not can_take_part(value, record.state_template()):
            mismatches.append(
                f"{record.name}: saved {name} is sharded otherwise than the parameter; "
                "use torch.distributed.checkpoint, which reshards"
            )
    return mismatches
