"""Clip gradients by their norm, over all parameters or per rule or group, without waiting for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from muon_fsdp.comm.process_groups import Ranks, make_group, my_rank
from muon_fsdp.comm.transfers import add_up, local, local_gradient
from muon_fsdp.declarations.state import working_dtype
from muon_fsdp.kernels.recorder import Recorder
from muon_fsdp.parameters.records import ParameterRecord

Part: TypeAlias = str | int  # what is clipped together: "all", the name of a rule, or the number of a group
EPS = 1e-6  # added to the norm, as torch.nn.utils.clip_grad_norm_ does


def parts_to_clip(
    records: Sequence[ParameterRecord], rules: str | Sequence[str] | None, groups: int | Sequence[int] | None
) -> dict[Part, list[ParameterRecord]]:
    """Return the parameters of each rule or group, or all of them if both are None."""
    if rules is not None and groups is not None:
        raise ValueError("clip_grad_norm_: pass rules or groups, not both")
    given = rules if rules is not None else groups
    if given is None:
        return {"all": list(records)}
    names: Sequence[Part] = (given,) if isinstance(given, (str, int)) else given
    parts: dict[Part, list[ParameterRecord]] = {name: [] for name in names}
    for record in records:
        part: Part = record.group_index if rules is None else record.rule.name
        if part in parts:
            parts[part].append(record)
    empty = [part for part, members in parts.items() if not members]
    if empty:
        used = ", ".join(sorted({repr(record.rule.name) for record in records}))
        raise ValueError(
            f"clip_grad_norm_: no parameter has {'group' if rules is None else 'rule'} {empty[0]!r}; pass one of the "
            f"rules in use, {used}, or the number of a group with parameters"
        )
    return parts


def clip_gradients(
    parts: Mapping[Part, Sequence[ParameterRecord]],
    max_norm: float,
    like: Callable[[Ranks], dist.ProcessGroup | None],
) -> dict[Part, Tensor]:
    """Scale the gradients of each part in place so that their norm is at most `max_norm`.

    The norm is that of whole gradients: every element counts once, on whatever ranks it lies. A missing gradient counts
    as zero, but one of partial sums must exist on all ranks of its parameter. All ranks must call this.

    Args:
        parts: the parameters that are clipped together.
        max_norm: the largest norm of a part.
        like: returns a process group whose backend serves the parameters of a set of ranks.

    Returns:
        The norm of every part before clipping, a float32 scalar on the device of its gradients.
    """
    records = [record for members in parts.values() for record in members]
    device = next(
        (record.tensor.device for record in records if record.tensor.device.type != "cpu"), torch.device("cpu")
    )
    by_ranks: dict[Ranks, Tensor] = {}  # a sum of squares per part
    whole = torch.zeros(len(parts), dtype=torch.float64, device=device)  # sums that need no reduction
    for number, members in enumerate(parts.values()):
        for ranks, squares in _sums_of_squares(members, device).items():
            sums = by_ranks.setdefault(ranks, torch.zeros_like(whole)) if len(ranks) > 1 else whole
            sums[number] += squares
    for ranks in sorted(by_ranks):
        make_group(ranks, device, like(ranks))
    for ranks in sorted(by_ranks):
        whole += add_up([by_ranks[ranks]], ranks, Recorder())[0]
    norms = whole.sqrt()
    for norm, members in zip(norms, parts.values(), strict=True):
        _scale(members, (max_norm / (norm + EPS)).clamp(max=1.0))
    return dict(zip(parts, norms.float().unbind(), strict=True))


def _sums_of_squares(records: Sequence[ParameterRecord], device: torch.device) -> dict[Ranks, Tensor]:
    """Return the sums of squares of this rank's gradients, by the ranks over which they must be summed.

    Gradients that every rank holds whole need no sum and come under an empty tuple. Of the others, only the first
    replica counts. Both follow from the layout alone, so all ranks take part in the same sums.
    """
    gradients: dict[tuple[Ranks, torch.dtype], list[Tensor]] = defaultdict(list)
    sums: dict[Ranks, Tensor] = {}
    for record in records:
        layout = record.layout
        is_whole = layout.num_replicas == len(layout.ranks)
        ranks: Ranks = () if is_whole else tuple(sorted(layout.ranks))
        sums.setdefault(ranks, torch.zeros((), dtype=torch.float64, device=device))
        if record.tensor.grad is not None:
            part = _values(record.tensor, record.tensor.grad)
            if part.numel() > 0 and (is_whole or layout.replica_of[layout.index_of[my_rank()]] == 0):
                gradients[(ranks, part.dtype)].append(part)
    for (ranks, dtype), parts in gradients.items():
        norms = torch._foreach_norm(parts, 2, dtype=working_dtype(dtype))
        sums[ranks] += torch.stack([norm.to(device) for norm in norms]).double().square().sum()
    return sums


def _values(parameter: Tensor, grad: Tensor) -> Tensor:
    """Return the local values whose norm counts; sums partial sums first, and repeated indices of a sparse gradient."""
    return grad.coalesce().values() if grad.is_sparse else local_gradient(parameter, grad)


def _scale(records: Sequence[ParameterRecord], factor: Tensor) -> None:
    """Multiply the gradients of some parameters by a factor, in place."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for record in records:
        if record.tensor.grad is not None:
            grad = record.tensor.grad
            part = grad._values() if grad.is_sparse else local(grad)
            by_kind[(part.device, part.dtype)].append(part)
    for (device, dtype), parts in by_kind.items():
        torch._foreach_mul_(parts, factor.to(device=device, dtype=dtype))
