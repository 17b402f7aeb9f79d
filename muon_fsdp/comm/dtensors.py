"""Read layouts and local tensors of DTensors and plain tensors, and make DTensors of local tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from muon_fsdp.comm.process_groups import Ranks, my_rank
from muon_fsdp.declarations.state import working_dtype
from muon_fsdp.plan.layout import Box, Layout, box_of, local_layout


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, which shares its memory; return a plain tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    # `to_local` makes a new view of a parameter, which takes microseconds. A step asks for thousands of parameters.
    return tensor.to_local() if torch.is_grad_enabled() else tensor._local_tensor


def device_of(parameter: Tensor) -> torch.device:
    """Return the device that updates a parameter: its own, or its mesh's if FSDP2 keeps its shards on the host."""
    if isinstance(parameter, DTensor) and parameter.device.type == "cpu":
        mesh_type = parameter.device_mesh.device_type
        if mesh_type != "cpu":
            return torch.device(mesh_type, torch.get_device_module(mesh_type).current_device())
    return parameter.device


def layout_of(parameter: Tensor, replica_ranks: Ranks | None) -> Layout:
    """Return the layout of a parameter: its ranks, the shape of its mesh, and its placements.

    A plain tensor is replicated over `replica_ranks`. Without these, or if DDP was told to ignore the parameter, it
    belongs to this rank alone.
    """
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh.mesh  # torch computes this tensor at every access
        return Layout(tuple(mesh.flatten().tolist()), tuple(mesh.shape), tuple(parameter.placements))
    if replica_ranks is not None and is_replica(parameter):
        return Layout(replica_ranks, (len(replica_ranks),), local_layout(0).placements)
    return local_layout(my_rank())


def is_replica(parameter: Tensor) -> bool:
    """Return whether a replicate group, if there is one, holds replicas of a parameter."""
    return not isinstance(parameter, DTensor) and not is_ignored_by_ddp(parameter)


def is_ignored_by_ddp(parameter: Tensor) -> bool:
    """Return whether DistributedDataParallel was told to ignore a parameter, which then belongs to this rank alone."""
    return bool(getattr(parameter, "_ddp_ignored", False))


def layouts_of(parameters: Sequence[Tensor], replica_ranks: Ranks | None) -> list[Layout]:
    """Return the layout of every parameter. Equal layouts are the same object, which makes planning fast."""
    known: dict[object, Layout] = {}  # by mesh and placements, and by itself

    def find(parameter: Tensor) -> Layout:
        if not isinstance(parameter, DTensor):
            layout = layout_of(parameter, replica_ranks)
            return known.setdefault(layout, layout)
        key = id(parameter.device_mesh), tuple(parameter.placements)  # to make a layout takes a millisecond
        if key not in known:
            layout = layout_of(parameter, replica_ranks)
            known[key] = known.setdefault(layout, layout)
        return known[key]

    return list(map(find, parameters))


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a tensor with the parameter's layout whose local tensor is `part`, without communication.

    Args:
        parameter: a DTensor or a plain tensor.
        part: a tensor of the shape of the parameter's local tensor.

    Returns:
        A DTensor that shares the memory of `part`; `part` itself if the parameter is a plain tensor.
    """
    if not isinstance(parameter, DTensor):
        return part
    return from_local(part, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def from_local(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """Return a DTensor whose local tensor is `part`, without communication.

    Unlike `DTensor.from_local`, this leaves `part` where it is: what a mesh of GPUs keeps on the host stays there.
    """
    if part.device.type == mesh.device_type:
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
    described = DTensor.from_local(part.to("meta"), mesh, placements, run_check=False, shape=shape, stride=stride)
    return DTensor(part, described._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def can_take_part(value: Tensor, parameter: Tensor) -> bool:
    """Return whether `local_part` can return this rank's shard of `value` without communication."""
    if not isinstance(value, DTensor):
        return True
    if isinstance(parameter, DTensor):
        return layout_of(value, None) == layout_of(parameter, None)
    return value.device_mesh.size() == 1


def local_part(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of `value` that belongs to this rank's shard of the parameter, without communication.

    Args:
        value: of the parameter's whole shape: a plain tensor, or a DTensor with the parameter's layout.
        parameter: a DTensor or a plain tensor.
    """
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return local(value)
    return value[own_box(parameter).within(Box((0,) * parameter.ndim, tuple(parameter.shape)))]


def local_gradient(parameter: Tensor, grad: Tensor) -> Tensor:
    """Return this rank's part of a gradient in the layout of its parameter; redistributes it if its layout differs."""
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
        # For example partial sums under tensor parallelism, whose sum may overflow in half precision.
        precise: DTensor = grad.to(working_dtype(grad.dtype))  # type: ignore[assignment]
        grad = precise.redistribute(placements=parameter.placements)
    return local_values(grad)


def local_values(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor. If it is an AsyncCollectiveTensor, wait for its collective."""
    part = local(tensor)
    # An AsyncCollectiveTensor has no data pointer for kernels; cloning it waits for its collective.
    return part if type(part) in (Tensor, nn.Parameter) else part.clone()


def own_box(tensor: DTensor) -> Box:
    """Return the box of the whole tensor that this rank holds, also after the process group was destroyed."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return box_of(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tensor.placements, coordinate)
