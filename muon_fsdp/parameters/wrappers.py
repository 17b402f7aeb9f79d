"""Find out what FSDP2 and DDP have done to the parameters of a model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp.comm.agreement import twin
from muon_fsdp.comm.process_groups import my_rank
from muon_fsdp.parameters.names import clean_name
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.text import first_names, warn_user


def replicate_group_of(model: object) -> dist.ProcessGroup | None:
    """Return the process group of DDP if it wraps the model, else None."""
    model = getattr(model, "_orig_mod", model)  # under torch.compile
    return model.process_group if isinstance(model, DistributedDataParallel) else None


def reshard(modules: Iterable[nn.Module]) -> set[int]:
    """Let FSDP2 reshard modules: after a forward without backward, some hold whole parameters.

    FSDP2 does the same after the next backward. It takes no communication, and a backward may still follow.

    Returns:
        The `id` of the tensors in whose place the shards are now.
    """
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    before = {id(parameter) for module in sharded for parameter in module.parameters()}
    for module in sharded:
        module.reshard()
    return before - {id(parameter) for module in sharded for parameter in module.parameters()}


def refuse_copies(names: Sequence[str], parameters: Sequence[Tensor], replaced: Set[int] = frozenset()) -> None:
    """Raise if parameters are whole copies that FSDP2 has made for a forward, and frees after the next backward.

    Args:
        names: one per parameter.
        parameters: as a user has passed them.
        replaced: the `id` of such copies, as far as they are known.
    """
    if dist.is_available() and dist.is_initialized():
        held = set(map(id, parameters))
        modules = [module for module in gc.get_objects() if issubclass(type(module), FSDPModule)]
        replaced |= reshard(module for module in modules if any(id(p) in held for p in module.parameters()))
    copies = [name for name, p in zip(names, parameters, strict=True) if id(p) in replaced or _has_no_memory(p)]
    if copies:
        raise RuntimeError(
            f"{len(copies)} of {len(names)} parameters are whole copies that FSDP2 made for a forward pass, and are "
            f"freed ({first_names(copies)}): after a forward without backward, call reshard() on every FSDPModule "
            "before you list the parameters of the model, or pass the model itself"
        )


def _has_no_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has elements whose memory was freed."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


class ModelWatch:
    """Checks that a model still has the parameters that its optimizer was built from, and no others.

    Args:
        model: held by a weak reference.
        warns_about_missing: whether to warn, once, about trainable parameters that the optimizer lacks.
    """

    def __init__(self, model: nn.Module, *, warns_about_missing: bool) -> None:
        self._model = weakref.ref(model)
        self._warns_about_missing = warns_about_missing
        self._seen: tuple[object, object] = (None, None)

    def model(self) -> nn.Module | None:
        """Return the model; None if it no longer exists."""
        return self._model()

    def check(self, records: Sequence[ParameterRecord]) -> None:
        """Raise if parameters of the optimizer were replaced in the model, and warn about those that it lacks.

        The check runs when the records are new or the first parameter of the model is another one than before.
        """
        model = self.model()
        if model is None:
            return
        seen = (records, next(iter(model.parameters()), None))
        if all(a is b for a, b in zip(self._seen, seen, strict=True)):
            return
        self._seen = seen
        current = {clean_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
        present, held = set(map(id, current.values())), {id(record.tensor) for record in records}
        gone = [record for record in records if id(record.tensor) not in present]
        _refuse_replaced(model, [record for record in gone if record.name in current], len(records))
        missing = [name for name, p in current.items() if p.requires_grad and id(p) not in held]
        if missing and not gone and self._warns_about_missing:
            self._warns_about_missing = False
            warn_user(
                f"{len(missing)} trainable parameters of the model are not in the optimizer and will not be trained: "
                f"{first_names(missing)}. Build the optimizer after they exist and are unfrozen, or add them with "
                "add_param_group."
            )


def _refuse_replaced(model: nn.Module, replaced: Sequence[ParameterRecord], count: int) -> None:
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    # FSDP2 itself puts whole parameters in the place of its shards, between forward and backward.
    lost = [record.name for record in replaced if record.is_plain or not is_sharded]
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


def warn_about_twin(records: Sequence[ParameterRecord], *, has_sharded: bool) -> None:
    """Warn if another rank trains the same parameters, and nothing is known to keep them equal.

    Args:
        records: one per parameter of the optimizer.
        has_sharded: whether other ranks hold parts of some of its parameters.
    """
    alone = [record for record in records if len(record.layout.ranks) == 1 and record.is_plain]
    if not alone or ddp_wrappers(record.tensor for record in alone):
        return
    described = [(record.name, record.shape, _first_values(record.tensor)) for record in alone]
    found = twin(described, [_first_values(record.tensor.grad) for record in alone])
    # Tensor parallelism repeats some parameters on every rank. Equal gradients keep them equal, so no warning is due.
    if found is None or (has_sharded and found[1]):
        return
    which = "the same parameters" if len(alone) == len(records) else first_names([alone[0].name])
    warn_user(
        f"Ranks {found[0]} and {my_rank()} train {which}, which nothing shards or replicates: they will drift "
        "apart. Call fully_shard on the whole model or wrap it in DDP; if something else averages gradients, pass "
        "replicate_group=, which also splits the work. If ranks are pipeline stages, pass agreement_group=."
    )


def ddp_wrappers(parameters: Iterable[Tensor]) -> list[tuple[DistributedDataParallel, set[int]]]:
    """Find the DDP wrappers of some parameters. DDP leaves no mark on parameters, so we look for all its wrappers.

    Returns:
        Every wrapper that holds some of them, with the `id` of those.
    """
    held = {id(parameter) for parameter in parameters}
    wrappers = [module for module in gc.get_objects() if issubclass(type(module), DistributedDataParallel)]
    found = [(wrapper, held & {id(parameter) for parameter in wrapper.parameters()}) for wrapper in wrappers]
    return [(wrapper, ids) for wrapper, ids in found if ids]


def _first_values(tensor: Tensor | None) -> list[float] | None:
    """Return some entries of a tensor; waits for its device."""
    if tensor is None or tensor.is_meta or tensor.layout != torch.strided:
        return None
    return tensor.detach().reshape(-1)[:8].tolist()
