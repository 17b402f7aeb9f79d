"""Check that the ranks of `replicate_mesh` hold equal matrices, before the first update relies on it.

A matrix that `replicate_mesh` repeats is computed from the values of one replica, and all replicas get that update. If
replicas differed, all but one would be trained with the gradients of another matrix, without an error. So weights and
state of whole matrices must be equal bit for bit, which a hash shows. Gradients of equal matrices may differ by
rounding, because each replica reduces its own. A few random sums show whether they differ by more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from muon_fsdp.comm.process_groups import Ranks, is_pretended, make_group, my_rank
from muon_fsdp.comm.transfers import add_up, local
from muon_fsdp.declarations.state import PerMatrix
from muon_fsdp.kernels.recorder import Recorder
from muon_fsdp.parameters.records import ParameterRecord

States: TypeAlias = Mapping[Tensor, Mapping[str, Any]]

NUM_SUMS = 8  # random sums of a gradient
# Of these sums, relative to their norm. 1,024 random terms that are added in bfloat16 in two orders differ by 0.07.
# Of independent gradients, one in a million differs by less than this.
LARGEST_DIFFERENCE = 0.25
_CHUNK = 2**22  # elements that are hashed at once, which bounds the memory
_MULTIPLIER, _OTHER_MULTIPLIER = -7046029254386353131, -4658895280553007687  # odd, of 64 bits, from splitmix64
_LARGEST_HASH = 2**31 - 1  # sums over a million ranks are still exact in float64


def compare_replicas(
    records: Sequence[ParameterRecord],
    states: States,
    gradients: Mapping[int, Tensor],
    like: Callable[[Ranks], dist.ProcessGroup | None],
) -> None:
    """Raise if replicas of a matrix differ; a collective of all ranks of `replicate_mesh`, with one reduction.

    Args:
        records: one per parameter.
        states: the state of the optimizer.
        gradients: by position, this rank's part of every gradient that it has.
        like: returns a process group whose backend serves the parameters of a set of ranks.

    Raises:
        RuntimeError: the values, the per-matrix state or the gradients of a matrix differ. All ranks that hold the
            matrix raise it.
    """
    by_ranks: dict[tuple[Ranks, str], list[ParameterRecord]] = defaultdict(list)
    for record in records:
        if record.repeated_over is not None and not is_pretended():
            by_ranks[(tuple(sorted(record.layout.ranks)), record.tensor.device.type)].append(record)
    for (ranks, _), members in sorted(by_ranks.items(), key=lambda item: item[0]):
        make_group(ranks, members[0].tensor.device, like(ranks))
    errors: list[str] = []
    for (ranks, _), members in sorted(by_ranks.items(), key=lambda item: item[0]):
        tables = [_table(record, states.get(record.tensor, {}), gradients.get(record.position)) for record in members]
        whole = add_up([table.to(members[0].tensor.device) for table in tables], ranks, Recorder())
        for record, table in zip(members, whole, strict=True):
            errors += _difference(record, table.cpu())
    if errors:
        more = f" ({len(errors) - 1} more parameters differ)" if len(errors) > 1 else ""
        raise RuntimeError(errors[0] + more)


def _table(record: ParameterRecord, state: Mapping[str, Any], grad: Tensor | None) -> Tensor:
    """Return what this rank adds to the numbers of every replica.

    Returns:
        (rows, replicas): a hash of the values, a hash of each per-matrix state, and `NUM_SUMS` sums of the gradient;
        zeros for replicas that this rank is no part of.
    """
    layout = record.layout
    shard = local(record.tensor).detach()
    numbers = [
        _hash(shard),
        *(_hash(local(state[name])) if name in state else _no_hash(shard) for name in _names(record)),
    ]
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=shard.device) if grad is None else _random_sums(grad)
    column = torch.cat([torch.stack(numbers).to(sums), sums])
    table = torch.zeros(len(column), layout.num_replicas, dtype=torch.float64, device=shard.device)
    table[:, layout.replica_of[layout.index_of[my_rank()]]] = column
    return table


def _names(record: ParameterRecord) -> list[str]:
    return [spec.name for spec in record.rule.all_state if isinstance(spec, PerMatrix)]


def _difference(record: ParameterRecord, table: Tensor) -> list[str]:
    """Return the error for a matrix whose replicas differ, as a list of one text; an empty list if they are equal.

    Args:
        record: the parameter.
        table: (rows, replicas), the sums of what all ranks have added.
    """
    names = ["values", *(f"state {name!r}" for name in _names(record))]
    hashes, sums = table[: len(names)], table[len(names) :]
    for name, row in zip(names, hashes.tolist(), strict=True):
        other = next((replica for replica, value in enumerate(row) if value != row[0]), None)
        if other is not None:
            remedy = "broadcast the weights over the mesh before the first step"
            if name != names[0]:
                remedy = "load the same state on all ranks"
            return [_message(record, name, other, remedy)]
    distances = (sums - sums[:, :1]).norm(dim=0)
    # A sum that is not finite compares as False: `nonfinite` decides about such gradients.
    differ = distances > LARGEST_DIFFERENCE * torch.maximum(sums.norm(dim=0), sums[:, :1].norm(dim=0))
    if bool(differ.any()):
        other = int(differ.nonzero()[0])
        return [_message(record, "gradients", other, "sum the gradients over the mesh before step()")]
    return []


def _message(record: ParameterRecord, what: str, replica: int, remedy: str) -> str:
    layout = record.layout
    first, other = (
        [rank for rank, number in zip(layout.ranks, layout.replica_of, strict=True) if number == wanted]
        for wanted in (0, replica)
    )
    return (
        f"replicate_mesh says that ranks {first} and {other} hold the same parameter {record.name!r} of shape "
        f"{record.shape}, but they differ in its {what}. Nothing was changed. If these should be equal, {remedy}; if "
        f"not (local experts), pass replicate_mesh={{{record.name!r}: None, '*': mesh}}"
    )


def _no_hash(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=like.device)


def _hash(tensor: Tensor) -> Tensor:
    """Return a hash of 31 bits of the bits of a tensor, on its device; integers, so the order of sums is no matter."""
    flat = tensor.reshape(-1)
    total = _no_hash(tensor)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        bits = chunk.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[chunk.itemsize])
        # An odd factor can be divided by modulo 2^64, so one changed element always changes the sum.
        total += (bits.to(torch.int64) * (_mixed(start, chunk) | 1)).sum()
    return ((total ^ (total >> 32)) * _MULTIPLIER >> 32) & _LARGEST_HASH


def _random_sums(grad: Tensor) -> Tensor:
    """Return `NUM_SUMS` sums of a gradient with random signs, (NUM_SUMS,) in float64.

    Without signs they would be rounding errors only where rows of gradients sum to zero.
    """
    flat = grad.reshape(-1)
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=grad.device)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        signed = chunk.double() * (1 - 2 * (_mixed(start, chunk) >> 40 & 1))
        sums += pad(signed, (0, -len(chunk) % NUM_SUMS)).view(-1, NUM_SUMS).sum(0)
    return sums


def _mixed(start: int, chunk: Tensor) -> Tensor:
    """Return a pseudo-random int64 for every element, by its index in the shard."""
    index = torch.arange(start + 1, start + 1 + len(chunk), dtype=torch.int64, device=chunk.device)
    mixed = index * _MULTIPLIER  # wraps around
    return (mixed ^ (mixed >> 29)) * _OTHER_MULTIPLIER
