"""Find parameters that other ranks may hold too, though neither their tensors nor the user say so.

Under tensor parallelism, ranks hold the same normalization weights as plain tensors, or the same matrices on slices of
a mesh. Local experts look just like these and are not the same. Only gradients tell them apart.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from muon_fsdp.comm.dtensors import is_replica
from muon_fsdp.comm.process_groups import Ranks, is_pretended
from muon_fsdp.comm.transfers import largest_of, of_all
from muon_fsdp.parameters.records import ParameterRecord


@dataclass(frozen=True)
class Siblings:
    """The parameters of this rank that look like those of other ranks.

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
        _key(record): record
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


def _key(record: ParameterRecord) -> int:
    """Return a number that siblings have in common, and no other parameter."""
    layout = record.layout
    text = repr((record.name, record.shape, layout.mesh_shape, layout.placements))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
