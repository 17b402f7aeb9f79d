"""What wrappers around a model have done to its parameters."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp.comm.agreement import twin


def replicate_group_of(model: object) -> dist.ProcessGroup | None:
    """Return the process group over which DDP keeps the parameters of a model equal, if DDP has wrapped it."""
    model = getattr(model, "_orig_mod", model)  # under torch.compile
    return model.process_group if isinstance(model, DistributedDataParallel) else None


def drifting_twin(names: Sequence[str], parameters: Sequence[Tensor]) -> int | None:
    """Return another rank that has the same parameters, if nothing is known to keep them equal."""
    held = {id(parameter) for parameter in parameters}
    # DDP leaves no mark on parameters: this looks for it once, where the alternative is a wrong warning.
    wrappers = [module for module in gc.get_objects() if issubclass(type(module), DistributedDataParallel)]
    if any(id(parameter) in held for wrapper in wrappers for parameter in wrapper.parameters()):
        return None
    return twin([(name, tuple(parameter.shape)) for name, parameter in zip(names, parameters, strict=True)])
