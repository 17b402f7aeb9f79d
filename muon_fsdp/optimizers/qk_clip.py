"""Bound the logits of attention by scaling the weights of queries and keys, on shards of any layout (QK-clip)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from muon_fsdp.comm.agreement import fingerprint
from muon_fsdp.comm.dtensors import local
from muon_fsdp.comm.process_groups import Ranks, is_pretended, make_group, my_rank, num_ranks
from muon_fsdp.comm.transfers import largest_of, texts_of_all
from muon_fsdp.declarations.state import working_dtype
from muon_fsdp.kernels.tables import REMAINDER
from muon_fsdp.linalg.rounding import remainder_of, with_remainder
from muon_fsdp.optimizers.grouped import GroupedOptimizer
from muon_fsdp.parameters.attention import Attention, Projection, has_qk_norm, path_to, read_attention
from muon_fsdp.parameters.names import clean_name
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.parameters.wrappers import reshard
from muon_fsdp.text import first_names

Logits: TypeAlias = Tensor | Sequence[float]
# Numbers of the first reduction. Its size must not depend on what a rank was given: ranks with different modules would
# send different sizes. 61 layers of 128 heads fit; the logits of larger models need a second reduction.
_FIRST_NUMBERS = 8192
_HEADER = 3  # whether a rank has failed, and the hash of what it was given, twice


@dataclass(frozen=True)
class _Module:
    """A module whose logits were given, with the records of its projections."""

    name: str
    attention: Attention
    records: tuple[tuple[Projection, ParameterRecord], ...]
    logits: Tensor  # (num_heads,), float64


@torch.no_grad()
def qk_clip(
    optimizer: torch.optim.Optimizer,
    max_logits: Mapping[str, Logits],
    threshold: float = 100.0,
    group: dist.ProcessGroup | None = None,
) -> dict[str, list[float]]:
    """Scale the weights of queries and keys of every head whose largest logit exceeds a threshold (arXiv 2507.20534).

    With S the largest logit of a head and gamma = threshold / S, its weights and biases of Q and K are multiplied by
    the square root of gamma. In latent attention (DeepSeek), that holds for the parts without position; the rotary part
    of Q is multiplied by gamma, and the rotary K, which all heads share, stays as it is. Query heads that share a key
    head share the gamma of the largest of them. Values, momentum and all other state stay as they are.

    Call this on all ranks after `step()`. Every rank scales its own shards, and no weight is assembled. The host waits
    for the logits.

    Args:
        optimizer: an optimizer of this package that was built from a model.
        max_logits: {name of a module of attention: the largest logit of each of the model's query heads that this rank
            has seen since the last call, after scaling by 1 / sqrt(head size)}; -inf for a head that it has not
            computed, as under tensor parallelism. All ranks must pass the same modules.
        threshold: the largest logit that is allowed.
        group: the ranks whose logits are compared; the default is all ranks. With pipeline stages, pass the ranks of a
            stage.

    Returns:
        By name of the module, the gamma of each query head; 1 where nothing was scaled.

    Raises:
        ValueError: a module or a size is not known, or scaling would have no lasting effect: the module normalizes
            queries and keys, or the rule of a weight decides its size.
        FloatingPointError: a logit is NaN or infinite. All ranks raise the same errors, and nothing is changed.
    """
    if not isinstance(optimizer, GroupedOptimizer):
        inner = " Pass the optimizer that it wraps, often its attribute `optimizer`." * hasattr(optimizer, "optimizer")
        raise TypeError(f"qk_clip needs an optimizer of muon_fsdp, got {type(optimizer).__name__}.{inner}")
    ranks = _ranks_of(group)
    modules: list[_Module] = []
    error: Exception | None = None
    try:
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < math.inf:
            raise ValueError(f"qk_clip: threshold must be a positive number, got {threshold!r}")
        modules = _read(optimizer, max_logits)
        _require_holders(modules, ranks)
    except Exception as caught:  # all ranks must raise it: the others wait for this one
        error = caught
    if error is not None and (len(ranks) == 1 or is_pretended()):
        raise error
    device = next((local(p).device for g in optimizer.param_groups for p in g["params"]), torch.device("cpu"))
    largest = _reduce(modules, float(threshold) if error is None else 0.0, error, ranks, device, group)
    gammas = _gammas(modules, largest, float(threshold))
    _scale(modules, gammas, optimizer.state)
    return gammas


def _ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """Return the ranks whose logits are compared, in ascending order."""
    if num_ranks() == 1:
        return (my_rank(),)
    if group is not None and not isinstance(group, dist.ProcessGroup):  # what `new_group` returns to other ranks
        raise ValueError("qk_clip: this rank is not in group: pass it a group that it belongs to")
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _require_holders(modules: Iterable[_Module], ranks: Ranks) -> None:
    """Raise if ranks outside of the group hold parts of a weight: they would scale it differently."""
    for module in modules:
        for projection, record in module.records:
            outside = sorted(set(record.layout.ranks) - set(ranks))
            if outside:
                raise ValueError(
                    f"qk_clip: rank {outside[0]} holds a part of parameter {module.name + '.' + projection.name!r} and "
                    "is not in group: pass a group with all ranks that hold it"
                )


def _read(optimizer: GroupedOptimizer, max_logits: Mapping[str, Logits]) -> list[_Module]:
    """Return the modules whose logits were given, sorted by name."""
    model = optimizer._known_model()
    if model is None:
        raise ValueError(
            "qk_clip: the optimizer does not know the model, whose modules tell the sizes of heads: build it from the "
            "model, as MuonOptimizer(model) or FSDPMuonOptimizer(model, params), and keep the model alive"
        )
    if not isinstance(max_logits, Mapping):
        raise TypeError(f"qk_clip: max_logits must be a dict by name of module, got {type(max_logits).__name__}")
    # After a forward without backward FSDP2 has whole copies in the place of shards, and would use them once more.
    reshard(model.modules())
    names = {clean_name(name): name for name, _ in model.named_modules(remove_duplicate=False)}
    records = {id(record.tensor): record for record in optimizer._records()}
    modules = []
    for name, given in sorted((clean_name(str(given)), given) for given in max_logits):
        if name not in names:
            similar = [each for each in names if each.rpartition(".")[2] == name.rpartition(".")[2]]
            hint = f"; modules with such a name are {first_names(similar)}" if similar else ""
            raise ValueError(f"qk_clip: the model has no module {given!r}{hint}")
        path = path_to(model, names[name])
        if has_qk_norm(path):
            raise ValueError(
                f"qk_clip: module {name!r} normalizes queries or keys, so scaling their weights would not change its "
                "logits: leave it out"
            )
        try:
            attention = read_attention(path)
        except ValueError as error:
            raise ValueError(f"qk_clip: can't read the heads of module {name!r}: {error}") from None
        found = tuple((each, _record(name, each, records)) for each in attention.projections)
        modules.append(_Module(name, attention, found, _as_numbers(name, max_logits[given], attention.num_heads)))
    _refuse_shared(modules)
    return modules


def _record(module: str, projection: Projection, records: Mapping[int, ParameterRecord]) -> ParameterRecord:
    record = records.get(id(projection.tensor))
    name = f"{module}.{projection.name}"
    if record is None:
        raise ValueError(f"qk_clip: parameter {name!r} is not in the optimizer, so it can't be scaled")
    if record.rule.multiplies_weights:
        raise ValueError(
            f"qk_clip: rule {record.rule.name!r} of parameter {name!r} itself decides the size of weights, and the "
            "next step would undo the clipping: give these weights another rule, or leave out the module"
        )
    return record


def _as_numbers(name: str, logits: Logits, num_heads: int) -> Tensor:
    """Return the logits of a module as float64. NaN becomes infinity, which no reduction loses."""
    numbers, got = None, f"{logits!r}"
    with suppress(TypeError, ValueError, RuntimeError):  # of torch, about what are no numbers
        given = logits.detach() if isinstance(logits, Tensor) else torch.as_tensor(logits, dtype=torch.float64)
        got = f"numbers of shape {tuple(given.shape)}"
        numbers = None if given.is_complex() else local(given).to(torch.float64)
    if numbers is None or tuple(numbers.shape) != (num_heads,):
        raise ValueError(
            f"qk_clip: module {name!r} has {num_heads} query heads, and max_logits has {got}: pass one real number per "
            "head of the whole model, not of a tensor-parallel shard, and -inf for heads of other ranks"
        )
    return torch.where(numbers.isnan(), torch.inf, numbers)


def _refuse_shared(modules: Sequence[_Module]) -> None:
    """Raise if two projections share a weight, which would be scaled twice."""
    owners: dict[int, tuple[str, str]] = {}  # by parameter the names of a module and of a projection in it
    for module in modules:
        for projection, record in module.records:
            owner, name = owners.setdefault(id(record.tensor), (module.name, projection.name))
            if (owner, name) == (module.name, projection.name):
                continue
            if owner == module.name:
                raise ValueError(
                    f"qk_clip: {name} and {projection.name} of module {owner!r} are one weight, which would be scaled "
                    "twice: leave it out"
                )
            raise ValueError(
                f"qk_clip: {module.name}.{projection.name} is the weight of module {owner!r} too: pass the logits of "
                "one of the two, each the larger one of both"
            )


def _reduce(
    modules: Sequence[_Module],
    threshold: float,
    error: Exception | None,
    ranks: Ranks,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> list[float]:
    """Return the largest logit of every head over all ranks; raise on all of them if one has failed or they differ."""
    own = torch.cat([module.logits.to(device) for module in modules]) if modules else torch.zeros(0, device=device)
    if len(ranks) == 1 or is_pretended():
        return own.tolist()
    make_group(ranks, device, group)
    lines = [f"threshold {threshold}", *(f"{module.name} ({len(module.logits)} heads)" for module in modules)]
    number = float(fingerprint(lines))
    first = torch.full((_FIRST_NUMBERS,), -torch.inf, dtype=torch.float64, device=device)
    first[:_HEADER] = first.new_tensor([error is not None, number, -number])
    room = _FIRST_NUMBERS - _HEADER
    first[_HEADER : _HEADER + min(room, len(own))] = own[:room]
    has_failed, most, least, *numbers = largest_of(first, ranks).tolist()
    if has_failed or most != -least:
        texts = texts_of_all([str(error) if error is not None else "", *lines], ranks, device)
        raise _disagreement(ranks, texts) from error
    if len(own) > room:
        numbers += largest_of(own[room:], ranks).tolist()
    return numbers[: len(own)]


def _disagreement(ranks: Ranks, texts: Sequence[Sequence[str]]) -> ValueError:
    """Return the error of a rank that has failed, or one that says what two ranks were given differently."""
    for rank, (error, *_) in zip(ranks, texts, strict=True):
        if error:
            return ValueError(f"{error} (on rank {rank})")
    expected = texts[0][1:]
    rank, lines = next((rank, own[1:]) for rank, own in zip(ranks, texts, strict=True) if own[1:] != expected)
    here, there = (first_names([x for x in a if x not in b]) for a, b in ((expected, lines), (lines, expected)))
    return ValueError(
        f"qk_clip: ranks were given different modules or thresholds: rank {ranks[0]} alone has {here or 'none'}, rank "
        f"{rank} alone has {there or 'none'}. Pass every module on all ranks, with -inf for heads that a rank has not "
        "computed; with pipeline stages, pass group="
    )


def _gammas(modules: Sequence[_Module], largest: Sequence[float], threshold: float) -> dict[str, list[float]]:
    """Return the gamma of every query head, by name of the module; raise if a logit is not finite."""
    gammas = {}
    numbers = iter(largest)
    for module in modules:
        tops, shared = list(islice(numbers, module.attention.num_heads)), module.attention.heads_per_key
        if math.inf in tops:
            raise FloatingPointError(
                f"qk_clip: the largest logit of head {tops.index(math.inf)} of module {module.name!r} is NaN or "
                "infinite on a rank. Nothing was scaled; lower the learning rate, or go back to a checkpoint"
            )
        of_keys = [max(tops[first : first + shared]) for first in range(0, len(tops), shared)]
        gammas[module.name] = [threshold / top if top > threshold else 1.0 for top in of_keys for _ in range(shared)]
    return gammas


def _scale(
    modules: Iterable[_Module], gammas: Mapping[str, Sequence[float]], states: Mapping[Tensor, Mapping[str, Any]]
) -> None:
    """Multiply this rank's part of the rows of every head that is clipped, in place and rounded once."""
    parts: dict[torch.device, list[tuple[Tensor, Tensor | None, float]]] = defaultdict(list)
    for module in modules:
        for projection, record in module.records:
            shard, axis = local(record.tensor), projection.axis
            held = record.layout.box_on(my_rank(), record.shape)
            remainder = states.get(record.tensor, {}).get(REMAINDER) if record.rounding == "remainder" else None
            if record.shards_state:
                remainder = None  # it has other rows, and is less than half an ulp
            for rows in projection.rows:
                gamma = gammas[module.name][rows.head]
                start = max(rows.start - held.offset[axis], 0)  # in the shard
                count = min(rows.stop - held.offset[axis], held.shape[axis]) - start
                if gamma < 1 and count > 0 and held.numel:
                    dropped = local(remainder).narrow(axis, start, count) if remainder is not None else None
                    parts[shard.device].append((shard.narrow(axis, start, count), dropped, gamma**rows.power))
    for pairs in parts.values():
        # A product in half precision would round the factor too. For other dtypes `wide` is the shard itself.
        wide = [
            part.to(working_dtype(part.dtype)) if dropped is None else with_remainder(part, dropped)
            for part, dropped, _ in pairs
        ]
        torch._foreach_mul_(wide, [factor for *_, factor in pairs])
        for product, (part, dropped, _) in zip(wide, pairs, strict=True):
            if product is not part:
                part.copy_(product)
            if dropped is not None:
                dropped.copy_(remainder_of(product, part))
