"""Recognize mixtures of experts: routers by the number of experts beside them, and how stacked experts are stored."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from muon_fsdp.parameters.facts import Layer, Layers, Path

_ROUTER_NAME = re.compile(r".*(router|routing|gating).*")
_GATE_NAME = re.compile(r"((moe|experts?|top_?k|noisy)_)?gate(_(linear|layer|net|network|logits|fc|score))?|wg|switch")
# Names of an MLP's or attention's matrices, whose outputs are no scores of experts even if there are as many.
_PROJECTION_NAME = re.compile(r".*proj(_.*)?|w_?gate|gate_(up|and_up).*|(w|fc|wi|v)_?\d+|w[qkvo]|to_(q|k|v|qkv|kv|out)")
_EXPERTS_NAME = re.compile(r".*expert.*", re.IGNORECASE)
_MIXTURE_CLASS = re.compile(r".*(moe|mixture(ofexperts)?|switch)(layer|block|mlp|ffn|feedforward)?", re.IGNORECASE)
_ROUTER_CLASS = re.compile(r"Router|Gating")
_NUMBERED = re.compile(r"(expert_?)?\d+")  # a place in a ModuleList, or in a ModuleDict of "expert_0", "expert_1", ...
_DOWN_NAME = re.compile(r"(.*_)?(down|w2|fc2|wo|out|output)(_.*)?|c_proj|dense_4h_to_h|linear2")
_UP_NAME = re.compile(r"(.*_)?(gate|up|w1|w3|w13|fc1|wi|in|input)(_.*)?|c_fc|dense_h_to_4h|linear1|v1")
# What a module of experts calls their number, and the rows of each.
_COUNTS = ("num_experts", "moe_num_experts", "num_local_experts", "n_experts")
_SIZES = ("moe_ffn_hidden_size", "ffn_hidden_size", "moe_intermediate_size", "intermediate_size", "intermediate_dim")


@dataclass(frozen=True)
class _Experts:
    """The experts of one mixture.

    Args:
        path: the place of their ModuleList, or of the module that holds the stacked weights.
        counts: how many there are; two numbers if this rank has only some of them.
        layers: their weights.
        stacked: whether each weight holds the matrices of all experts.
        named: whether names or classes say that these are experts: a ModuleList may also hold blocks.
    """

    path: Path
    counts: frozenset[int]
    layers: list[Layer]
    stacked: bool
    named: bool

    @property
    def widths(self) -> set[int]:
        """Return the sizes of inputs and outputs of their matrices."""
        return {size for layer in self.layers for size in layer.facts.logical_shape}


def find_experts(layers: Layers) -> None:
    """Mark weights of experts that are stored (experts, in, out), and guess which weights are routers."""
    for experts in _all_experts(layers):
        routers = _routers(layers, experts)
        for layer, count in routers:
            _guess(layer, f"router of {count} experts")
        if experts.stacked:
            inputs = [layer.cols if layer.rows == count else layer.rows for layer, count in routers]
            if _is_transposed(experts, inputs):
                for layer in experts.layers:
                    layer.facts.transposed = True
            for layer in _biases(layers, experts):
                _guess(layer, "one vector per stacked matrix")


def _guess(layer: Layer, reason: str) -> None:
    """Note why a weight is probably not a matrix, unless a reason is known."""
    if layer.facts.other_reason is None:
        layer.facts.other_reason, layer.facts.guessed = reason, True


def _all_experts(layers: Layers) -> Iterator[_Experts]:
    """Yield stacks of matrices by the module that holds them, and lists of modules."""
    stacks: dict[tuple[Path, int], list[Layer]] = defaultdict(list)
    lists: dict[Path, dict[str, list[Layer]]] = defaultdict(lambda: defaultdict(list))
    for layer in layers.all:
        if layer.is_stack:
            stacks[(layer.parent, layer.facts.shape[0])].append(layer)
        elif len(layer.facts.shape) == 2:
            for length, part in enumerate(layer.path[:-1]):
                if length > 0 and _NUMBERED.fullmatch(part):
                    lists[layer.path[:length]][part].append(layer)
    around = {path[:length] for path, _ in stacks for length in range(len(path))}
    for path, (count, members) in _in_rows(layers).items():
        for layer in members:
            layer.facts.num_heads = count
        yield _Experts(path, frozenset({count}), members, stacked=False, named=True)
    for (path, count), members in stacks.items():
        of_all_ranks = getattr(layers.module(path), "num_experts", count)
        counts = frozenset({count, of_all_ranks if isinstance(of_all_ranks, int) else count})
        yield _Experts(path, counts, members, stacked=True, named=True)
    lists = {path: items for path, items in lists.items() if len(items) > 1}
    around |= {path[:length] for path in lists if _EXPERTS_NAME.fullmatch(path[-1]) for length in range(len(path))}
    for path, items in lists.items():
        if path not in around:  # a list of blocks that have experts
            of_items = layers.class_names((*path, next(iter(items))))
            named = any(map(_EXPERTS_NAME.fullmatch, (*path[-2:], *of_items))) or any(
                _MIXTURE_CLASS.fullmatch(name) for name in layers.class_names(path[:-1])
            )
            members = [layer for item in items.values() for layer in item]
            yield _Experts(path, frozenset({len(items)}), members, stacked=False, named=named)


def _in_rows(layers: Layers) -> dict[Path, tuple[int, list[Layer]]]:
    """Return the bare weights whose rows are those of all experts one after the other, as in MegaBlocks and DBRX.

    Returns:
        By module the number of experts and the weights, if the module itself tells the number and the rows of each.
    """
    found: dict[Path, tuple[int, list[Layer]]] = {}
    for layer in layers.all:
        if layer.is_bare and len(layer.facts.shape) == 2 and not layer.facts.labelled:
            count, size = layer.own_number(*_COUNTS), layer.own_number(*_SIZES)
            if count is not None and size is not None and layer.rows == count * size > size:
                found.setdefault(layer.parent, (count, []))[1].append(layer)
    return found


def _routers(layers: Layers, experts: _Experts) -> list[tuple[Layer, int]]:
    """Return the weights that score experts, in the nearest module around the experts that has some.

    A weight with one row per expert that is named like a router may lie deeper (`router.gate.weight`). Without such a
    name it must lie beside the experts, read what they read, and no other layer may read its outputs.

    Returns:
        The weights, each with the number of experts that it scores.
    """
    path = experts.path
    places = [*([path] if experts.stacked else []), *dict.fromkeys((path[:-1], path[:-2]))]
    for place in places if path else [path]:
        candidates = [
            (layer, count)
            for layer in layers.below(place)
            for count in [_scored(layer, experts)]
            if count is not None and (place == path or layer.path[: len(path)] != path)
        ]
        named = [(layer, count) for layer, count in candidates if _is_named_router(layer, experts, len(place))]
        if named:
            least = min(len(layer.path) for layer, _ in named)
            return [(layer, count) for layer, count in named if len(layer.path) == least]
        beside = [
            (layer, count)
            for layer, count in candidates
            if experts.named and place in (path, path[:-1]) and _is_router_by_place(layer, experts, place)
        ]
        if beside:
            return beside
    return []


def _scored(layer: Layer, experts: _Experts) -> int | None:
    """Return the number of experts that a weight may score, (experts, width) or a bare (width, experts); else None."""
    facts = layer.facts
    is_other = facts.other_reason is not None and not facts.guessed
    if len(facts.shape) != 2 or is_other or "lora_" in facts.name:
        return None
    classes = [cls.__name__ for module in facts.owners for cls in type(module).__mro__]
    if facts.shape[0] in experts.counts or any(map(_ROUTER_CLASS.search, classes)):
        return facts.shape[0]  # a class that is named so may also score shared experts
    is_turned = layer.is_bare and facts.shape[1] in experts.counts and facts.shape[0] in experts.widths
    return facts.shape[1] if is_turned else None


def _is_named_router(layer: Layer, experts: _Experts, depth: int) -> bool:
    """Return whether a part of the name below the mixture is that of a router; "gate" is one only beside experts."""
    parts = [part.lower() for part in layer.path[depth:]]
    return any(_ROUTER_NAME.fullmatch(part) or (experts.named and _GATE_NAME.fullmatch(part)) for part in parts)


def _is_router_by_place(layer: Layer, experts: _Experts, place: Path) -> bool:
    """Return whether a layer beside experts scores them by its shape, whatever its name."""
    return (
        layer.parent == place
        and not layer.is_bare
        and layer.cols in experts.widths
        and _PROJECTION_NAME.fullmatch(layer.name) is None
        and not layer.readers
    )


def _biases(layers: Layers, experts: _Experts) -> list[Layer]:
    """Return the bare (experts, width) parameters of the module that holds stacked experts."""
    return [
        layer
        for layer in layers.within(experts.path)
        if layer.is_bare
        and len(layer.facts.shape) == 2
        and layer.rows in experts.counts
        and layer.cols in experts.widths
    ]


def _is_transposed(experts: _Experts, inputs: Iterable[int]) -> bool:
    """Return whether stacked experts are stored (experts, in, out).

    Args:
        experts: the stacks of one module.
        inputs: the sizes of the inputs of their routers, which are those of the experts.
    """
    noted = {getattr(module, "is_transposed", None) for layer in experts.layers for module in layer.facts.owners}
    if noted & {True, False}:  # Transformers notes it on modules of experts
        return noted == {True}
    shapes = [layer.facts.shape[1:] for layer in experts.layers]
    pairs = [(a, b) for a in shapes for b in shapes]
    # Gate and up in one weight, (2 I, H) or (H, 2 I), beside down, (H, I) or (I, H), leave no doubt.
    if any(a[0] == 2 * b[1] and a[1] == b[0] for a, b in pairs):
        return False
    if any(a[1] == 2 * b[0] and a[0] == b[1] for a, b in pairs):
        return True
    verdicts = {_stores_inputs_first(layer, size) for layer in experts.layers for size in inputs}
    return True in verdicts and False not in verdicts


def _stores_inputs_first(layer: Layer, size: int) -> bool | None:
    """Return whether a stack is stored (experts, in, out), given the size of inputs; None if that is unclear."""
    is_down, is_up = _DOWN_NAME.fullmatch(layer.name), _UP_NAME.fullmatch(layer.name)
    _, first, second = layer.facts.shape
    if (first == size) == (second == size) or bool(is_down) == bool(is_up):
        return None
    return (second if is_down else first) == size
