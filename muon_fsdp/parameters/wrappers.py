"""What wrappers around a model have done to its parameters."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp.comm.agreement import twin


def replicate_group_of(model: object) -> dist.ProcessGroup | None:
    """Return the process group over which DDP keeps the parameters of a model equal, if DDP has wrapped it."""
    model = getattr(model, "_orig_mod", model)  # under torch.compile
    return model.process_group if isinstance(model, DistributedDataParallel) else None


def drifting_twin(names: Sequence[str], parameters: Sequence[Tensor]) -> tuple[int, bool] | None:
    """Return another rank that has the same parameters, if nothing is known to keep them equal.

    Returns: the rank, and whether its gradients are the same too; or None.
    """
    held = {id(parameter) for parameter in parameters}
    # DDP leaves no mark on parameters: this looks for it once, where the alternative is a wrong warning.
    wrappers = [module for module in gc.get_objects() if issubclass(type(module), DistributedDataParallel)]
    if any(id(parameter) in held for wrapper in wrappers for parameter in wrapper.parameters()):
        return None
    described = [
        (name, tuple(parameter.shape), _first_values(parameter))
        for name, parameter in zip(names, parameters, strict=True)
    ]
    return twin(described, [_first_values(parameter.grad) for parameter in parameters])


def _first_values(tensor: Tensor | None) -> list[float] | None:
    """Return some entries of a tensor; waits for its device."""
    if tensor is None or tensor.is_meta or tensor.layout != torch.strided:
        return None
    return tensor.detach().reshape(-1)[:8].tolist()
