"""Create the state of a parameter as it is stored, and convert it between that form and working precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muon_fsdp.comm.dtensors import like, local
from muon_fsdp.comm.host_memory import HostArena
from muon_fsdp.declarations.encoding import Encoding
from muon_fsdp.declarations.state import PerParameter, State, StateSpec
from muon_fsdp.kernels.tables import SCALES
from muon_fsdp.parameters.records import ParameterRecord


def stored_tensors(record: ParameterRecord, state: Mapping[str, Any]) -> list[tuple[Tensor, torch.dtype]]:
    """Return the local tensors that the kernels of a parameter's rule read, with the dtypes that they must have."""
    assert record.rule.fused is not None
    specs = {spec.name: spec for spec in record.all_state}
    return [
        (local(state[name]), dtype)
        for kind in record.rule.fused.layout.states
        for name, dtype in _dtypes(specs[kind], record).items()
    ]


def is_stored(record: ParameterRecord, state: Mapping[str, Any]) -> bool:
    """Return whether a parameter has all of its state, in the form that its group asks for."""
    for spec in record.all_state:
        dtypes = _dtypes(spec, record)
        if not dtypes.keys() <= state.keys():
            return False
        if spec.is_sharded and any(state[name].dtype != dtype for name, dtype in dtypes.items()):
            return False
    return True


def host_bytes(record: ParameterRecord, spec: StateSpec) -> int:
    """Return the bytes that state of one kind takes in the memory of the host; 0 if it is kept on the device."""
    if not is_offloaded(record, spec):
        return 0
    return sum(HostArena.bytes_of(shape, dtype) for _, shape, dtype in stored_forms(record, spec))


def is_offloaded(record: ParameterRecord, spec: StateSpec) -> bool:
    """Return whether state of one kind is kept in the memory of the host, and copied to the device in a step."""
    return record.offloads_state and spec.is_moment and not record.tensor.is_meta


def stored_forms(record: ParameterRecord, spec: StateSpec) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Return the names, local shapes and dtypes of the tensors in which a moment is stored."""
    encoding, shape = record.encoding, record.part().shape
    shapes = [shape] if encoding is None or not encoding.has_scales else [shape, encoding.scales_shape(shape)]
    dtypes = _dtypes(spec, record)
    return list(zip(dtypes, shapes, dtypes.values(), strict=True))


def create_state(record: ParameterRecord, spec: StateSpec, template: Tensor, arena: HostArena) -> State:
    """Return new state of one kind, zeros: DTensors if the template is one and the state is sharded."""
    encoding = record.encoding
    if is_offloaded(record, spec):
        stored = {name: arena.zeros(shape, dtype) for name, shape, dtype in stored_forms(record, spec)}
        return {**stored, spec.name: like(template, stored[spec.name])}
    if encoding is None or not isinstance(spec, PerParameter) or not spec.is_moment:
        value = spec.create(template, record.view)
        return {spec.name: value if spec.is_sharded else value.to(record.device)}
    dtype = encoding.dtypes(spec)[spec.name]
    found = {spec.name: torch.zeros_like(template, dtype=dtype, memory_format=torch.preserve_format)}
    if encoding.has_scales:
        part = local(template)
        found[spec.name + SCALES] = part.new_zeros(encoding.scales_shape(part.shape), dtype=torch.float32)
    return found


def _encoded(record: ParameterRecord, spec: StateSpec, value: Tensor) -> State:
    """Return state of one kind in the form in which it is stored, given that in working precision."""
    if record.encoding is None or not isinstance(spec, PerParameter) or not spec.is_moment:
        dtype = spec.dtype(record.tensor)
        has_changed = spec.is_moment and value.dtype is not dtype  # it was stored in bfloat16, or somebody has cast it
        return {spec.name: like(value, local(value).to(dtype)) if has_changed else value}
    stored = record.encoding.encode(spec, local(value).float())
    return {**stored, spec.name: like(value, stored[spec.name])}


def store_state(
    record: ParameterRecord, spec: StateSpec, value: Tensor, known: Mapping[str, Any], arena: HostArena
) -> State:
    """Return state of one kind as it is stored; if it is offloaded, in the tensors that hold it already.

    Args:
        record: the parameter.
        spec: the kind of state.
        value: the state in working precision, on any device.
        known: the state that the parameter has.
        arena: where tensors that fit come from if there are none.
    """
    stored = _encoded(record, spec, value)
    forms = stored_forms(record, spec) if is_offloaded(record, spec) else []
    # State of another shape was written by a user, and the step refuses it by name.
    if not forms or any(local(stored[name]).shape != shape for name, shape, _ in forms):
        return stored
    found = {}
    for name, shape, dtype in forms:
        part = known.get(name)
        part = local(part) if isinstance(part, Tensor) else None
        if part is None or (part.shape, part.dtype, part.device.type) != (shape, dtype, "cpu"):
            part = arena.zeros(shape, dtype)
        part.copy_(local(stored[name]))
        found[name] = like(stored[name], part)
    return found


def decode_state(record: ParameterRecord, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter with working precision in the place of what is stored in another form.

    The state that is declared comes first, in that order: torch.distributed.checkpoint gathers in the order of keys,
    and other ranks may store their shards otherwise.
    """
    found = dict(state)
    for spec in record.all_state:
        encoding = encoding_of(record, spec, state)
        if encoding is not None and isinstance(spec, PerParameter):
            stored = {name: local(found.pop(name)) for name in encoding.dtypes(spec)}
            found[spec.name] = like(state[spec.name], encoding.decode(spec, stored))
    declared = [spec.name for spec in record.all_state if spec.name in found]
    return {name: found[name] for name in dict.fromkeys((*declared, *found))}


def encoding_of(record: ParameterRecord, spec: StateSpec, state: Mapping[str, Any]) -> Encoding | None:
    """Return how the present state of one kind is stored, which need not be what the group asks for by now.

    Raises:
        RuntimeError: it is stored in 8 bits, and its scales are missing.
    """
    value = state.get(spec.name)
    if not spec.is_moment or not isinstance(value, Tensor):
        return None
    if not value.is_floating_point():
        if spec.name + SCALES not in state:
            raise RuntimeError(
                f"state {spec.name!r} of parameter {record.name!r} is {value.dtype} without its scales: restore "
                f"{spec.name + SCALES!r}, or delete both from optimizer.state[parameter] to start anew"
            )
        return Encoding(torch.int8, record.first_column)
    if record.encoding is not None and value.dtype is record.encoding.dtype:
        return record.encoding
    return None


def _dtypes(spec: StateSpec, record: ParameterRecord) -> dict[str, torch.dtype]:
    """Return the dtypes of the tensors in which state of one kind is stored, by name."""
    if record.encoding is None or not isinstance(spec, PerParameter) or not spec.is_moment:
        return {spec.name: spec.dtype(record.tensor)}
    return record.encoding.dtypes(spec)
