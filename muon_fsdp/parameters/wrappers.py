"""What wrappers around a model have done to its parameters."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp.comm.agreement import twin
from muon_fsdp.parameters.routing import clean_name
from muon_fsdp.parameters.state_dict import first_names


def replicate_group_of(model: object) -> dist.ProcessGroup | None:
    """Return the process group over which DDP keeps the parameters of a model equal, if DDP has wrapped it."""
    model = getattr(model, "_orig_mod", model)  # under torch.compile
    return model.process_group if isinstance(model, DistributedDataParallel) else None


class ModelWatch:
    """Notices that a model no longer has the parameters that its optimizer was built from, or has others besides.

    Args:
        model: neither kept alive nor copied.
        tells_of_missing: whether to warn, once, of trainable parameters that the optimizer lacks.
    """

    def __init__(self, model: nn.Module, *, tells_of_missing: bool) -> None:
        self._model = weakref.ref(model)
        self._tells_of_missing = tells_of_missing
        self._seen: tuple[object, object] = (None, None)

    def model(self) -> nn.Module | None:
        """Return the model, if it is still there."""
        return self._model()

    def check(self, plan: object, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Raise if parameters of the optimizer were replaced in the model, and warn of those that it lacks.

        It looks whenever there is a new plan, or the first parameter of the model is not the one from before.
        """
        model = self.model()
        if model is None:
            return
        seen = (plan, next(iter(model.parameters()), None))
        if all(a is b for a, b in zip(self._seen, seen, strict=True)):
            return
        self._seen = seen
        current = {clean_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        present, held = set(map(id, current.values())), set(map(id, parameters))
        gone = [(name, p) for name, p in zip(names, parameters, strict=True) if id(p) not in present]
        _refuse_replaced(model, [(name, p) for name, p in gone if name in current], len(parameters))
        missing = [name for name, p in current.items() if p.requires_grad and id(p) not in held]
        if missing and not gone and self._tells_of_missing:
            self._tells_of_missing = False
            warnings.warn(
                f"{len(missing)} trainable parameters of the model are not in the optimizer and will not be trained: "
                f"{first_names(missing)}. Build the optimizer after they are there and unfrozen, or add_param_group.",
                stacklevel=5,
            )


def _refuse_replaced(model: nn.Module, replaced: Sequence[tuple[str, Tensor]], count: int) -> None:
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    # FSDP2 shows whole parameters in place of its shards at times.
    lost = [name for name, parameter in replaced if not (is_sharded and isinstance(parameter, DTensor))]
    if not lost:
        return
    before = "fully_shard" if is_sharded else "parameters of the model were replaced"
    after = "Call fully_shard first, then build the optimizer."
    if not is_sharded:
        after = (
            "parallelize_module, DDP(device_mesh=...) and load_state_dict(assign=True) do so, for example. Build the "
            "optimizer after them."
        )
    raise RuntimeError(
        f"The optimizer was built before {before}: {len(lost)} of its {count} parameters are no longer the model's "
        f"({first_names(lost)}), and training would change nothing. {after}"
    )


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
