"""Clip gradients by their norm, over all parameters or per rule or group, without waiting for the device."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from muon_fsdp.comm.dtensors import is_replica, local
from muon_fsdp.comm.process_groups import Ranks, is_pretended, make_group, my_rank
from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.comm.transfers import add_up, largest_of, of_all
from muon_fsdp.declarations.state import working_dtype
from muon_fsdp.linalg.fingerprints import NUM_SUMS, random_sums
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.step.replica_check import GRADIENT_DIFFERENCE

Part: TypeAlias = str | int  # what is clipped together: "all", the name of a rule, or the number of a group
EPS = 1e-6  # added to the norm, as torch.nn.utils.clip_grad_norm_ does


@dataclass(frozen=True)
class Siblings:
    """The parameters of this rank that look like those of other ranks, though neither tensors nor the user say so.

    Under tensor parallelism, ranks hold the same normalization weights as plain tensors, or the same matrices on
    submeshes. Local experts look just like these and are not the same. Only gradients tell them apart.

    Args:
        ranks: the ranks that one step connects, in ascending order.
        number_of: by position, the number of the parameter among all of these ranks' parameters with siblings.
        count: how many such parameters there are on all of these ranks.
    """

    ranks: Ranks
    number_of: Mapping[int, int] = field(default_factory=dict)
    count: int = 0


def find_siblings(records: Sequence[ParameterRecord], ranks: Ranks, device: torch.device) -> Siblings:
    """Find out which parameters have siblings on other ranks; all of the ranks must call this.

    Args:
        records: one per parameter.
        ranks: the ranks that one step connects.
        device: where the process group of these ranks reduces numbers.
    """
    if len(ranks) == 1 or is_pretended():
        return Siblings(ranks)
    own = {
        _sibling_key(record): record
        for record in records
        # All ranks know what DDP ignores to be each rank's own.
        if len(record.layout.ranks) < len(ranks) and (is_replica(record.tensor) or not record.is_plain)
    }
    longest = int(largest_of(torch.tensor([len(own)], device=device), ranks))
    table = torch.full((longest, 2), -1, dtype=torch.int64)
    for row, (key, record) in enumerate(own.items()):
        table[row] = torch.tensor([key, len(record.layout.ranks)])
    found: list[list[int]] = of_all(table.to(device), ranks).view(-1, 2).tolist() if longest else []
    num_holders = Counter(key for key, _ in found)
    sizes = {key: size for key, size in found if size > 0}
    numbers = {key: number for number, key in enumerate(k for k in sorted(sizes) if num_holders[k] > sizes[k])}
    number_of = {record.position: numbers[key] for key, record in own.items() if key in numbers}
    return Siblings(ranks, number_of, len(numbers))


def _sibling_key(record: ParameterRecord) -> int:
    """Return a number that siblings have in common, and no other parameter."""
    layout = record.layout
    text = repr((record.name, record.shape, layout.mesh_shape, layout.placements))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


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
    gradients: Mapping[int, Tensor],
    siblings: Siblings,
    device: torch.device,
    like: Callable[[Ranks], dist.ProcessGroup | None],
) -> dict[Part, Tensor]:
    """Scale the gradients of each part in place so that their norm is at most `max_norm`.

    The norm is that of whole gradients on all ranks that one step connects: every element counts once, on whatever
    ranks it lies. A missing gradient counts as zero. All ranks must call this.

    Args:
        parts: the parameters that are clipped together.
        max_norm: the largest norm of a part.
        gradients: by position, the gradients that this rank has, in the layouts of their parameters.
        siblings: the ranks, and the parameters that look like those of other ranks.
        device: where these ranks reduce numbers.
        like: returns a process group whose backend serves the parameters of a set of ranks.

    Returns:
        The norm of every part before clipping, a float32 scalar on the device of its gradients.
    """
    records = [record for members in parts.values() for record in members]
    squares = _squares(records, gradients, device)
    number_of_part = {r.position: number for number, members in enumerate(parts.values()) for r in members}
    whole = torch.zeros(len(parts), dtype=torch.float64, device=device)
    for number, members in enumerate(parts.values()):
        own = [squares[r.position] for r in members if r.position in squares and r.position not in siblings.number_of]
        if own:
            whole[number] = torch.stack(own).sum()
    if siblings.count:
        looking_alike = [record for record in records if record.position in siblings.number_of]
        for members, counted in _of_siblings(looking_alike, squares, gradients, siblings, device, like):
            whole.index_add_(0, _index(tuple(number_of_part[r.position] for r in members), device), counted)
    if len(siblings.ranks) > 1:
        (whole,) = add_up([whole], siblings.ranks, Recorder())
    own_devices = [record.device for record in records if record.device.type != "cpu"]
    norms = whole.sqrt().to(own_devices[0] if own_devices else "cpu")
    for norm, members in zip(norms, parts.values(), strict=True):
        _scale(members, (max_norm / (norm + EPS)).clamp(max=1.0))
    return dict(zip(parts, norms.float().unbind(), strict=True))


def _squares(
    records: Sequence[ParameterRecord], gradients: Mapping[int, Tensor], device: torch.device
) -> dict[int, Tensor]:
    """Return the sums of squares of this rank's gradients, by position; of replicas, only the first counts."""
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for record in records:
        grad = gradients.get(record.position)
        if grad is not None and grad.numel() > 0 and record.layout.replica_of[record.number_in_layout] == 0:
            by_dtype[grad.dtype].append(record.position)
    squares: dict[int, Tensor] = {}
    for dtype, positions in by_dtype.items():
        norms = torch._foreach_norm([gradients[i] for i in positions], 2, dtype=working_dtype(dtype))
        sums = torch.stack([norm.to(device) for norm in norms]).double().square()
        squares |= dict(zip(positions, sums.unbind(), strict=True))
    return squares


def _of_siblings(
    records: Sequence[ParameterRecord],
    squares: Mapping[int, Tensor],
    gradients: Mapping[int, Tensor],
    siblings: Siblings,
    device: torch.device,
    like: Callable[[Ranks], dist.ProcessGroup | None],
) -> Iterator[tuple[list[ParameterRecord], Tensor]]:
    """Yield the sums of squares that this rank adds to the norms, (parameters,), with their parameters.

    If the gradients of siblings are equal up to rounding, they are one parameter, and the first set of ranks counts it.
    Else they are different parameters, such as local experts, and every set counts its own.

    Args:
        records: the parameters of this rank that look like those of other ranks.
        squares: by position, what `_squares` returned.
        gradients: by position, the gradients that this rank has.
        siblings: the ranks, and the numbers of such parameters.
        device: where these ranks reduce numbers.
        like: returns a process group whose backend serves the parameters of a set of ranks.
    """
    by_ranks: dict[Ranks, list[ParameterRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: siblings.number_of[record.position]):
        by_ranks[tuple(sorted(record.layout.ranks))].append(record)
    for ranks in sorted(by_ranks):
        if len(ranks) > 1:
            make_group(ranks, device, like(ranks))
    # Of each parameter: random sums, their negatives, the norm, and minus the first of its ranks; -inf without one.
    table = torch.full((siblings.count, 2 * NUM_SUMS + 2), -torch.inf, dtype=torch.float64, device=device)
    found: list[tuple[Ranks, Tensor, Tensor]] = []
    for ranks, members in sorted(by_ranks.items()):
        rows = torch.stack([_row(r, squares.get(r.position), gradients.get(r.position), device) for r in members])
        if len(ranks) > 1:
            (rows,) = add_up([rows], ranks, Recorder())
        is_there, square, sums = rows[:, :1] > 0, rows[:, 1:2], rows[:, 2:]
        numbers = torch.cat([sums, -sums, square.sqrt(), torch.full_like(square, -ranks[0])], dim=1)
        usable = is_there & numbers.isfinite().all(dim=1, keepdim=True)
        index = _index(tuple(siblings.number_of[record.position] for record in members), device)
        table[index] = torch.where(usable, numbers, -torch.inf)
        found.append((ranks, index, square.flatten()))
    largest = largest_of(table, siblings.ranks)
    distances = (largest[:, :NUM_SUMS] + largest[:, NUM_SUMS:-2]).clamp(min=0).norm(dim=1)
    are_equal = distances <= GRADIENT_DIFFERENCE * largest[:, -2].clamp(min=0)
    for ranks, index, square in found:
        if ranks[0] == my_rank():
            counts_elsewhere = are_equal[index] & (largest[index, -1] != -ranks[0]) & square.isfinite()
            yield by_ranks[ranks], torch.where(counts_elsewhere, 0.0, square)


@lru_cache
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers on a device, copied there once: the host would wait for the device at every call."""
    return torch.tensor(numbers, device=device)


def _row(record: ParameterRecord, square: Tensor | None, grad: Tensor | None, device: torch.device) -> Tensor:
    """Return whether this rank has a gradient, its sum of squares, and random sums; their sums over ranks are whole."""
    row = torch.zeros(2 + NUM_SUMS, dtype=torch.float64, device=device)
    if square is not None and grad is not None:
        row[0], row[1] = 1.0, square
        row[2:] = random_sums(grad, seed=record.layout.shard_of[record.number_in_layout])
    return row


def _scale(records: Sequence[ParameterRecord], factor: Tensor) -> None:
    """Multiply the gradients of some parameters by a factor, in place."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for record in records:
        if record.tensor.grad is not None:
            grad = record.tensor.grad
            part = grad._values() if grad.is_sparse else local(grad)
            alike[(part.device, part.dtype)].append(part)
    for (device, dtype), parts in alike.items():
        torch._foreach_mul_(parts, factor.to(device=device, dtype=dtype))
