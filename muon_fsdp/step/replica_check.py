"""Check that replicas are equal before the first update relies on it, and after state was loaded.

A matrix is computed from the gradients of one replica, and all replicas get that update; with `shard_state=True` that
holds for every parameter. Replicas that differ would be trained with the gradients of another weight, without an error.
Where each replica computes its own update, replicas whose gradients nobody reduced drift apart.

Weights and per-matrix state must be equal bit for bit where one rank's update reaches all replicas, which a hash shows.
Other weights may have drifted apart by rounding, and so may gradients that each replica computes or reduces on its own.
A few random sums show whether they differ by more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from muon_fsdp.comm.dtensors import local
from muon_fsdp.comm.process_groups import Ranks, is_pretended, make_group
from muon_fsdp.comm.transfers import largest_of, of_all
from muon_fsdp.declarations.state import PerMatrix, working_dtype
from muon_fsdp.linalg.fingerprints import NUM_SUMS, hash_of, random_sums
from muon_fsdp.parameters.records import ParameterRecord

States: TypeAlias = Mapping[Tensor, Mapping[str, Any]]

# Of random sums, relative to the largest norm among the replicas.
WEIGHT_DIFFERENCE = 1e-3
# 1,024 random terms that are added in bfloat16 in two orders differ by 0.07. Of pairs of independent gradients, fewer
# than one in a hundred million differ by less than this.
GRADIENT_DIFFERENCE = 0.1
_NAMED_RANKS = 8  # ranks that a message names


class _Fact(NamedTuple):
    """A fingerprint that must be equal on all replicas of a parameter."""

    record: ParameterRecord
    what: str  # "values", "gradients", or the state by name
    # Of this rank, float64: one hash; or random sums and a norm; -inf if there is nothing to compare.
    fingerprint: Tensor
    tolerance: float  # 0 for a hash

    @property
    def order(self) -> tuple[int, int]:
        """Return a key that sorts causes before effects: weights that differ give gradients that differ."""
        return (self.what != "values") + (self.what == "gradients"), self.record.position

    def differs(self, largest: Tensor, smallest: Tensor) -> bool:
        """Return whether replicas with these largest and smallest fingerprints differ."""
        if not self.tolerance:
            return bool(largest != smallest)
        distance = (largest - smallest)[:-1].clamp(min=0).norm()
        return bool(distance > self.tolerance * largest[-1].clamp(min=0))

    def differing(self, of_ranks: Tensor) -> tuple[int, list[int]]:
        """Return the index of the first rank that has a fingerprint, and of those that differ from it.

        Args:
            of_ranks: (ranks, numbers of the fingerprint).
        """
        first = int(of_ranks[:, 0].isfinite().nonzero()[0])
        compared = slice(None) if not self.tolerance else slice(-1)
        distances = (of_ranks - of_ranks[first])[:, compared].norm(dim=1).nan_to_num(nan=0.0, posinf=0.0)
        far = distances > self.tolerance * of_ranks[:, -1].max() if self.tolerance else distances > 0
        # The largest differences of several ranks may add up to more than that of any one.
        far |= distances == distances.max()
        return first, far.nonzero().flatten().tolist()


def compare_replicas(
    records: Sequence[ParameterRecord],
    states: States,
    gradients: Mapping[int, Tensor],
    like: Callable[[Ranks], dist.ProcessGroup | None],
) -> None:
    """Raise if replicas of a parameter differ; a collective of all ranks that hold replicas.

    The ranks that hold the same shards reduce the largest and the smallest of a few numbers per parameter, all
    parameters at once. Only if these differ, they find out which ranks differ.

    Args:
        records: one per parameter.
        states: the state of the optimizer.
        gradients: by position, the gradients that this rank has, in the layouts of their parameters.
        like: returns a process group whose backend serves the parameters of a set of ranks.

    Raises:
        RuntimeError: the values, the per-matrix state or the gradients of a parameter differ. All ranks that hold the
            same shards raise it.
    """
    by_peers: dict[tuple[Ranks, str, str], list[ParameterRecord]] = defaultdict(list)
    for record in records:
        layout = record.layout
        if layout.num_replicas > 1 and not is_pretended():
            peers = tuple(layout.ranks[index] for index in layout.peers[record.number_in_layout])
            # The process group that forwards updates to the peers.
            purpose = "" if len(peers) == len(layout.ranks) else "peers"
            by_peers[(peers, record.device.type, purpose)].append(record)
    sets = sorted(by_peers.items(), key=lambda item: item[0])
    for (peers, _, purpose), members in sets:
        make_group(peers, members[0].device, like(tuple(sorted(members[0].layout.ranks))), purpose)
    errors: list[tuple[tuple[int, int], str]] = []
    for (peers, _, purpose), members in sets:
        # Ranks agree on the order of the parameters of every set of ranks, and of no others.
        members.sort(key=lambda record: (sorted(record.layout.ranks), record.position))
        facts = [
            fact
            for record in members
            for fact in _facts(record, states.get(record.tensor, {}), gradients.get(record.position))
        ]
        different = _different(facts, peers, purpose)
        if different:
            fact = min(different, key=lambda fact: fact.order)
            first, others = fact.differing(of_all(fact.fingerprint.to(fact.record.device), peers, purpose).cpu())
            errors.append((fact.order, _message(fact, peers[first], [peers[i] for i in others])))
            errors += [(other.order, "") for other in different if other is not fact]
    if errors:
        text = next(text for _, text in sorted(errors, key=lambda error: (not error[1], error[0])))
        num_more = len({position for (_, position), _ in errors}) - 1
        raise RuntimeError(text + (f" ({num_more} more parameters differ)" if num_more else ""))


def _different(facts: Sequence[_Fact], peers: Ranks, purpose: str) -> list[_Fact]:
    """Return the facts that are not the same on all peers; one reduction."""
    device = facts[0].record.device  # of several of one type
    fingerprint = torch.cat([fact.fingerprint.to(device) for fact in facts])
    # One maximum finds the smallest numbers too; -inf on a rank leaves both to the others.
    both = torch.stack([fingerprint, torch.where(fingerprint.isfinite(), -fingerprint, fingerprint)])
    largest, negative = largest_of(both, peers, purpose).cpu().unbind()
    sizes = [len(fact.fingerprint) for fact in facts]
    parts = zip(facts, torch.split(largest, sizes), torch.split(-negative, sizes), strict=True)
    return [fact for fact, high, low in parts if fact.differs(high, low)]


def _facts(record: ParameterRecord, state: Mapping[str, Any], grad: Tensor | None) -> list[_Fact]:
    """Return what must be the same on all replicas of a parameter."""
    shard = local(record.tensor).detach()
    none = torch.full((NUM_SUMS + 1,), -torch.inf, dtype=torch.float64, device=shard.device)
    if record.view is not None or record.shards_state or not shard.is_floating_point():
        values = _Fact(record, "values", hash_of(shard).double().view(1), 0.0)
    else:
        values = _Fact(record, "values", _sums(shard, none), WEIGHT_DIFFERENCE)
    names = [spec.name for spec in record.rule.all_state if isinstance(spec, PerMatrix)]
    hashes = [hash_of(local(state[name])) if name in state else shard.new_zeros(()) for name in names]
    gradients = _Fact(record, "gradients", none if grad is None else _sums(grad, none), GRADIENT_DIFFERENCE)
    per_matrix = [
        _Fact(record, f"state {name!r}", number.double().view(1), 0.0)
        for name, number in zip(names, hashes, strict=True)
    ]
    return [values, *per_matrix, gradients]


def _sums(tensor: Tensor, none: Tensor) -> Tensor:
    """Return random sums and the norm; `none` if one is not finite, because `nonfinite` decides about such values."""
    norm = torch.linalg.vector_norm(tensor, dtype=working_dtype(tensor.dtype)).double()
    fingerprint = torch.cat([random_sums(tensor), norm.view(1)])
    return torch.where(fingerprint.isfinite().all(), fingerprint, none)


def _message(fact: _Fact, first: int, others: Sequence[int]) -> str:
    record, what = fact.record, fact.what
    origin = "DDP or replicate_group" if record.is_plain else f"placements {record.layout.placements}"
    remedy = "Load the same state on all ranks"
    if what == "values":
        remedy = "Broadcast the weights from one rank before the first step, or load the same checkpoint on all ranks"
        remedy += "" if record.is_plain else ": fully_shard does not make replicas equal"
    elif what == "gradients":
        remedy = "All-reduce the gradients over these ranks before step()"
        remedy += "; under DDP, run the last backward outside no_sync()" if record.is_plain else ""
    if record.repeated_over is not None:
        origin = "replicate_mesh"
        remedy += f". If they are meant to differ (experts), pass replicate_mesh={{{record.name!r}: None, '*': mesh}}"
    more = ", ..." if len(others) > _NAMED_RANKS else ""
    return (
        f"Ranks {first} and {', '.join(map(str, others[:_NAMED_RANKS]))}{more} hold the same parameter {record.name!r} "
        f"of shape {record.shape} by {origin}, but they differ in its {what}. Nothing was changed. {remedy}"
    )
