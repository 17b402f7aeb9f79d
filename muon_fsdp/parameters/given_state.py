"""Read the numbers that a user passes for the per-matrix state of one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.declarations.option import suggestion
from muon_fsdp.declarations.state import PerMatrix, PerParameter
from muon_fsdp.parameters.names import clean_name
from muon_fsdp.parameters.records import ParameterRecord


def find_state(records: Sequence[ParameterRecord], name: str, state: str) -> tuple[ParameterRecord, PerMatrix]:
    """Return the record of a parameter and the declaration of its per-matrix state; raise if there is no such state."""
    by_name = {record.name: record for record in records}
    record = by_name.get(name) or by_name.get(clean_name(name))
    if record is None:
        raise ValueError(
            f"set_per_matrix: no parameter is called {name!r}{suggestion(name, by_name)}. routing_report(full=True) "
            "lists the names"
        )
    specs = {spec.name: spec for spec in record.rule.matrix_state}
    if state in specs:
        return record, specs[state]
    other = next((spec for spec in record.rule.all_state if spec.name == state), None)
    where = f"rule {record.rule.name!r} of parameter {record.name!r}"
    if isinstance(other, PerParameter):
        problem = f"{state!r} is PerParameter state of {where}, not of whole matrices"
    elif other is not None:
        problem = f"{state!r} belongs to a statistic of W that {where} reads, and every step computes it"
    else:
        problem = f"{where} has no per-matrix state {state!r}{suggestion(state, specs)}"
    raise ValueError(f"set_per_matrix: {problem}. Valid names are {', '.join(map(repr, specs)) or 'none'}")


def values_of_matrices(record: ParameterRecord, spec: PerMatrix, values: Any) -> list[Tensor]:
    """Return copies of values of state, one per matrix, on the CPU in the shape and precision of the state.

    Args:
        record: the parameter.
        spec: the state.
        values: as in `MuonOptimizer.set_per_matrix`.
    """
    assert record.view is not None
    where = f"set_per_matrix: {spec.name!r} of parameter {record.name!r}"
    shapes = [spec.shape_of_matrix(rows, cols) for count, rows, cols in record.view.block_shapes for _ in range(count)]
    if isinstance(values, DTensor):
        raise TypeError(f"{where} is whole on every rank: pass plain numbers, not a DTensor")
    shown = " or ".join(dict.fromkeys(map(str, shapes)))
    expected = f"one value per matrix, {len(shapes)} in all, each a number or a tensor of shape {shown}"
    try:
        parts = _parts(values, shapes)
    except (TypeError, ValueError, RuntimeError):  # of torch, about a value that is no number
        raise ValueError(f"{where} needs {expected}; got {values!r}") from None
    if len(parts) != len(shapes):
        raise ValueError(f"{where} needs {expected}; got {len(parts)} value(s)")
    for number, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        if part.ndim and part.shape != shape:
            raise ValueError(f"{where} needs {expected}; that of matrix {number} has shape {tuple(part.shape)}")
        if part.is_complex() or not bool(part.to(spec.dtype(record.tensor)).isfinite().all()):
            raise ValueError(f"{where} must be real and finite; the value of matrix {number} is not")
    dtype = spec.dtype(record.tensor)
    return [part.to("cpu", dtype).expand(shape).clone() for part, shape in zip(parts, shapes, strict=True)]


def _parts(values: Any, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the values of the matrices one by one."""
    parts = None
    if isinstance(values, Sequence):
        parts = [_tensor(value) for value in values]
        if len(shapes) > 1 or len(parts) == 1 or any(part.ndim for part in parts):
            return parts
    whole = torch.stack(parts) if parts else _tensor(values)
    if whole.ndim == 0:
        return [whole] * len(shapes)
    return [whole] if len(shapes) == 1 and whole.shape == shapes[0] else list(whole)


def _tensor(value: Any) -> Tensor:
    """Return a value as a tensor; Python's numbers in float64, which torch would round to float32."""
    return value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
