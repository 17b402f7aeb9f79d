"""Read the gradients of a step: their placements, and their local parts in the layouts of their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from muon_fsdp.comm.dtensors import layout_of, local, local_gradient, local_values
from muon_fsdp.comm.process_groups import my_rank
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.plan.layout import Layout
from muon_fsdp.text import first_names

LIKE_PARAMETER = 1  # code of a gradient with its parameter's placements; larger codes encode its own
_FIRST_CODE = 2
_BASE = 16  # digits of a code, one per axis of the mesh: Replicate, kinds of Partial, then Shard by dimension
_REDUCTIONS = ("sum", "avg", "max", "min", "product")
_FIRST_SHARD = 1 + len(_REDUCTIONS)
_PLACEMENTS = (Replicate(), *map(Partial, _REDUCTIONS), *map(Shard, range(_BASE - _FIRST_SHARD)))  # by digit


class Gradients:
    """The gradients that this rank has, by the position of their parameter.

    Args:
        records: one per parameter.
        other_rule: the name of an element-wise rule, for a message.
    """

    def __init__(self, records: Sequence[ParameterRecord], other_rule: str) -> None:
        self._records = records
        self._found: dict[int, Tensor] = {}
        self.codes: dict[int, int] = {}  # how each lies on the mesh, as a number that ranks can compare
        for record in records:
            grad = record.tensor.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                if record.rule.needs_matrices:
                    raise RuntimeError(
                        f"Sparse gradients are not supported by Muon optimizer: parameter {record.name!r} has one. "
                        "Give it an element-wise rule: create_hybrid_optimizer(model) does so for embeddings; or give "
                        f"it a group with rule={other_rule!r}."
                    )
                grad = grad.to_dense()
            self._found[record.position] = grad
            self.codes[record.position] = _code(record.name, record.tensor, grad)

    def here(self) -> dict[int, Tensor]:
        """Return the local tensors of the gradients, partial sums included."""
        return {position: local(grad) for position, grad in self._found.items()}

    def in_layout(self, codes: Mapping[int, int]) -> dict[int, Tensor]:
        """Return the local gradients in the layouts of their parameters; redistribute those with other placements.

        Args:
            codes: by position, the code that ranks agreed on for the gradient of every shared parameter.
        """
        for position, code in codes.items():
            if code > LIKE_PARAMETER and position not in self._found:
                self._found[position] = _zeros(self._records[position].tensor, code)
        return {
            # Comparing placements takes time, so it is left out where the code tells about them.
            i: local_values(self._found[i])
            if self.codes.get(i) == LIKE_PARAMETER
            else local_gradient(self._records[i].tensor, self._found[i])
            for i in sorted(self._found)
        }

    def not_finite_message(self, rank: int) -> str:
        """Return the error for gradients that are not finite: their names, or the `rank` that has them."""
        bad = [self._records[position].name for position, grad in self.here().items() if not are_finite([grad])]
        where = f"of {len(bad)} parameter(s) is not finite: {first_names(bad)}"
        if not bad:
            where = f"on another rank ({rank}) is not finite"
        return f"The gradient {where}. Nothing was changed. Pass nonfinite='skip' to skip such steps."


def are_finite(gradients: Iterable[Tensor]) -> bool:
    """Return whether all gradients are finite; this waits for the device."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in gradients:
        if grad.numel() > 0:
            by_device[grad.device].append(grad)
    largest = [torch.stack(torch._foreach_norm(many, ord=torch.inf)) for many in by_device.values()]
    return all(bool(values.isfinite().all()) for values in largest)


def _code(name: str, parameter: Tensor, grad: Tensor) -> int:
    """Encode the placements of a gradient as a number; raise if it is a plain tensor of another shape."""
    if not isinstance(parameter, DTensor):
        if grad.shape != parameter.shape:  # after an assignment to `parameter.data`
            raise RuntimeError(
                f"The gradient of parameter {name!r} has shape {tuple(grad.shape)}, and the parameter "
                f"{tuple(parameter.shape)}: clear gradients when you give a parameter another shape"
            )
        return LIKE_PARAMETER
    if not isinstance(grad, DTensor):
        if grad.shape != local(parameter).shape:
            raise RuntimeError(
                f"The gradient of parameter {name!r} is a plain tensor of shape {tuple(grad.shape)}, but the parameter "
                "is a DTensor: use distribute_tensor(grad, parameter.device_mesh, parameter.placements)"
            )
        return LIKE_PARAMETER
    placements = grad.placements
    # FSDP2 gives both the same object, and comparing two takes longer than all else here.
    if placements is parameter.placements or placements == parameter.placements:
        return LIKE_PARAMETER
    digits = [_digit(name, placement) for placement in grad.placements]
    return _FIRST_CODE + sum(digit * int(_BASE**axis) for axis, digit in enumerate(digits))


def _digit(name: str, placement: Placement) -> int:
    if isinstance(placement, Replicate):
        return 0
    if isinstance(placement, Partial) and placement.reduce_op in _REDUCTIONS:
        return 1 + _REDUCTIONS.index(placement.reduce_op)
    if type(placement) is Shard and _FIRST_SHARD + placement.dim < _BASE:  # a _StridedShard has a factor too
        return _FIRST_SHARD + int(placement.dim)
    raise RuntimeError(
        f"The gradient of parameter {name!r} has placement {placement}, which can't be redistributed: give it the "
        "placements of the parameter"
    )


def _placements(code: int, num_axes: int) -> tuple[Placement, ...]:
    """Decode the placements of a gradient."""
    return tuple(_PLACEMENTS[(code - _FIRST_CODE) // _BASE**axis % _BASE] for axis in range(num_axes))


def _zeros(parameter: Tensor, code: int) -> DTensor:
    """Return a gradient of zeros with the placements that it has on the other ranks."""
    assert isinstance(parameter, DTensor)
    placements = _placements(code, parameter.device_mesh.ndim)
    layout = layout_of(parameter, None)
    whole = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    box = Layout(layout.ranks, layout.mesh_shape, whole).box_on(my_rank(), tuple(parameter.shape))
    part = torch.zeros(box.shape, dtype=parameter.dtype, device=parameter.device)
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
