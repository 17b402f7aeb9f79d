"""Read from a module of attention which rows of its weights belong to the queries and keys of each head."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch import Tensor, nn

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_head", "nheads", "heads")
KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_n_heads", "kv_heads", "num_query_groups",
    "n_query_groups", "multi_query_group_num",
)  # fmt: skip
_QUERIES_PER_GROUP = ("num_key_value_groups", "n_rep")
HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head", "kv_channels")
_NORM_FLAGS = ("qk_layernorm", "use_qk_norm", "qk_norm", "qk_layer_norms")

_QUERY_LAYERS = ("q_proj", "q", "wq", "to_q", "query", "q_linear")
_KEY_LAYERS = ("k_proj", "k", "wk", "to_k", "key", "k_linear")
_FUSED_LAYERS = ("qkv_proj", "qkv", "Wqkv", "wqkv", "c_attn", "W_pack")  # rows of Q, then of K, then of V
_UNCERTAIN_LAYERS = ("qkv",)  # some models store them by head, so the module must tell the order
_LATENT_QUERY_LAYERS = ("q_b_proj", "wq_b", "q_proj", "wq")
_LATENT_KEY_LAYERS = ("kv_b_proj", "wkv_b")
_NORM = re.compile(r"(q|k|qk|query|key)_?(norm|layernorm|layer_norm|ln)|(norm|ln)_(q|k|query|key)")
# Classes that store a fused weight by head or by group of heads: Q, K and V of the first, then of the second.
# torchtitan has QKVLinear, by group.
BY_HEAD_CLASS = re.compile(
    r"Bloom|CodeGen|Disentangled|Falcon|GPTBigCode|InternLM2|MiniMaxLightning|NeoX|Persimmon|QKVLinear"
)

_MISSING = "{} is not known: neither {} nor a configuration around it has one of the attributes {}"
_NO_KEY_HEADS = f"the number of key heads is not known: the module has none of the attributes {KV_HEADS}"

Value = TypeVar("Value", int, bool)
Modules: TypeAlias = Sequence[nn.Module | None]  # a module, then the modules around it; None where only names are known


@dataclass(frozen=True)
class Rows:
    """Consecutive output rows of a weight, all of one head.

    Args:
        start: the first row.
        stop: the row after the last.
        head: a query head that they belong to: the first of those that share these keys.
        power: the power of gamma that multiplies these rows, so that all logits of the head are multiplied by gamma.
    """

    start: int
    stop: int
    head: int
    power: float


@dataclass(frozen=True, eq=False)
class Projection:
    """A weight or a bias that makes queries or keys.

    Args:
        name: its name in the module of attention.
        tensor: the parameter.
        axis: the dimension that counts output rows: 1 for a weight that is stored (in, out).
        rows: the rows of queries and keys; all others, such as those of values, are left out.
    """

    name: str
    tensor: Tensor
    axis: int
    rows: tuple[Rows, ...]


@dataclass(frozen=True)
class Attention:
    """The heads of a module of attention.

    Args:
        num_heads: the number of query heads.
        heads_per_key: how many consecutive query heads share a key head.
        projections: what makes its queries and keys.
    """

    num_heads: int
    heads_per_key: int
    projections: tuple[Projection, ...]


@dataclass(frozen=True)
class HeadNumbers:
    """The numbers of heads of a module of attention, as far as it or a configuration tells them.

    Args:
        count: the number of query heads.
        kv_count: the number of key heads; None if nothing tells it.
        size: the rows of a head; None if nothing tells it.
    """

    count: int
    kv_count: int | None
    size: int | None


@dataclass(frozen=True)
class _Heads:
    """The numbers of heads of attention whose heads all have one size."""

    count: int
    kv_count: int
    size: int

    def __post_init__(self) -> None:
        if self.count % self.kv_count:
            raise ValueError(f"{self.count} query heads can't be divided into groups by {self.kv_count} key heads")

    @property
    def per_key(self) -> int:
        """Return how many query heads share a key head."""
        return self.count // self.kv_count

    def queries(self) -> tuple[Rows, ...]:
        """Return the rows of the query heads of a weight that begins with them."""
        return tuple(Rows(head * self.size, (head + 1) * self.size, head, 0.5) for head in range(self.count))

    def keys(self, first: int = 0) -> tuple[Rows, ...]:
        """Return the rows of the key heads of a weight in which they begin at `first`."""
        starts = [first + key * self.size for key in range(self.kv_count)]
        return tuple(Rows(start, start + self.size, key * self.per_key, 0.5) for key, start in enumerate(starts))


def path_to(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the module with a name of `model.named_modules()`, then the modules around it, from inside to outside."""
    modules = [model]
    for part in name.split(".") if name else ():
        modules.append(modules[-1].get_submodule(part))
    return modules[::-1]


def value_of(path: Modules, names: Sequence[str], kind: type[Value]) -> Value | None:
    """Return a value that a module, its configuration or that of a module around it has by one of these names.

    Args:
        path: the module, then the modules around it.
        names: names of attributes, the best known first.
        kind: `int` for a positive number, `bool` for a flag.
    """
    return _first_value((path[0], *_configurations(path)), names, kind)


def _configurations(path: Modules) -> list[object]:
    """Return the configurations of a module and of the modules around it, from inside to outside."""
    found = (getattr(module, "config", None) for module in path)
    return [config for config in found if config is not None]


def _first_value(holders: Iterable[object], names: Sequence[str], kind: type[Value]) -> Value | None:
    found = (own_value(holder, names, kind) for holder in holders)
    return next((value for value in found if value is not None), None)


def own_value(holder: object, names: Sequence[str], kind: type[Value]) -> Value | None:
    """Return the first value that a module or a configuration itself has by one of these names."""
    for name in names:
        try:
            value = getattr(holder, name, None)
        except RuntimeError:  # of Transformers: the layers have different values, and the configuration has none
            continue
        if type(value) is kind and (kind is bool or value > 0):
            return value
    return None


def head_numbers(path: Modules) -> HeadNumbers | None:
    """Return the numbers of heads that belong together; None if nothing says how many query heads there are.

    The module's own numbers come first, then those of configurations from inside to outside, up to the first that says
    the number of heads. If the module says it, a configuration with another number is that of other attention: a tower
    for images may lie in a model whose only configuration is that of its text.
    """
    module, configs = path[0], _configurations(path)
    count = own_value(module, HEADS, int)
    if count is not None:
        holders = [module, *(c for c in configs[:1] if own_value(c, HEADS, int) in (None, count))]
    else:
        counts = [own_value(config, HEADS, int) for config in configs]
        at = next((index for index, each in enumerate(counts) if each is not None), None)
        if at is None:
            return None
        count, holders = counts[at], [module, *configs[: at + 1]]
    assert count is not None
    per_group = own_value(module, _QUERIES_PER_GROUP, int)
    kv_count = own_value(module, KV_HEADS, int)
    if kv_count is None and per_group is not None and count % per_group == 0:
        kv_count = count // per_group
    kv_count = kv_count or _first_value(holders, KV_HEADS, int)
    return HeadNumbers(count, kv_count, _first_value(holders, HEAD_DIM, int))


def has_qk_norm(path: Sequence[nn.Module]) -> bool:
    """Return whether a module of attention normalizes its queries or keys, so that their sizes have no effect."""
    module = path[0]
    norms = _norms(module)
    if norms:
        return any(not isinstance(norm, nn.Identity) for norm in norms)
    if "logit_scale" in dict(module.named_parameters(recurse=False)):  # attention by cosines
        return True
    # A class that makes modules for it, in some layers only, has none in this one.
    is_made = any(type(other) is type(module) and _norms(other) for other in path[-1].modules())
    return not is_made and bool(value_of(path, _NORM_FLAGS, bool))


def _norms(module: nn.Module) -> list[nn.Module]:
    """Return the normalizations of queries and keys of a module, which may lie in a module of their own."""
    children = list(module.named_children())
    # A child with projections is other attention, such as the indexer of DeepSeek-V3.2.
    apart = [child for _, child in children if not any(isinstance(each, nn.Linear) for each in child.children())]
    inner = [pair for child in apart for pair in child.named_children()]
    return [each for name, each in (*children, *inner) if _NORM.fullmatch(name)]


def read_attention(path: Sequence[nn.Module]) -> Attention:
    """Return the heads of a module of attention. Sizes are read from modules and configurations and never guessed.

    Known are separate projections, with grouped queries too; latent attention, as DeepSeek's; fused weights that hold
    Q, K and V one after the other; and `nn.MultiheadAttention`.

    Args:
        path: the module, then the modules around it.

    Raises:
        ValueError: a size is missing or does not fit the weights, or the layout is not known.
    """
    module = path[0]
    if isinstance(module, nn.MultiheadAttention):
        return _torch_attention(module)
    layers = dict(module.named_children())
    latent_keys = _first(layers, _LATENT_KEY_LAYERS)
    if latent_keys is not None:
        return _latent_attention(path, layers, latent_keys)
    fused = _first(layers, _FUSED_LAYERS)
    query, key = _first(layers, _QUERY_LAYERS), _first(layers, _KEY_LAYERS)
    if query is not None and key is not None:
        heads = _heads(path, _num_rows(query, layers[query]), _num_rows(key, layers[key]))
        projections = [
            *_of_layer(query, layers[query], heads.queries()),
            *_of_layer(key, layers[key], heads.keys()),
        ]
    elif fused is not None and query is None and key is None:
        if any(BY_HEAD_CLASS.search(cls.__name__) for cls in type(module).__mro__) or "q_attn" in layers:
            raise ValueError(f"{type(module).__name__} does not store {fused!r} as rows of Q, then K, then V")
        num_rows = _num_rows(fused, layers[fused])
        heads = _fused_heads(path, num_rows, layers[fused].get_parameter("weight").numel() // num_rows)
        _require_order(module, fused, heads)
        rows = heads.queries() + heads.keys(heads.count * heads.size)
        projections = _of_layer(fused, layers[fused], rows)
    else:
        raise ValueError(
            f"{type(module).__name__} has no projections of queries and keys with known names ('q_proj' and 'k_proj', "
            f"'qkv_proj', 'c_attn', 'kv_b_proj', ...): its parts are {sorted(layers)}"
        )
    return Attention(heads.count, heads.per_key, tuple(projections))


def _first(layers: Iterable[str], names: Iterable[str]) -> str | None:
    return next((name for name in names if name in layers), None)


def _heads(path: Sequence[nn.Module], query_rows: int, key_rows: int) -> _Heads:
    """Return the heads of separate projections."""
    numbers = _required_numbers(path)
    count = numbers.count
    size = numbers.size or (query_rows // count if query_rows % count == 0 else 0)
    kv_count = numbers.kv_count or (count if key_rows == query_rows else None)
    if kv_count is None:
        raise ValueError(_NO_KEY_HEADS)
    _require_rows(path, "queries", query_rows, count, size)
    _require_rows(path, "keys", key_rows, kv_count, size)
    return _Heads(count, kv_count, size)


def _fused_heads(path: Sequence[nn.Module], num_rows: int, num_cols: int) -> _Heads:
    """Return the heads of a fused weight.

    Args:
        path: the module, then the modules around it.
        num_rows: the rows of the weight.
        num_cols: its columns, which tell whether Q, K and V are equally large where no number does.
    """
    numbers = _required_numbers(path)
    count, kv_count, size = numbers.count, numbers.kv_count, numbers.size
    if kv_count is None and size is None and num_rows != 3 * num_cols:
        raise ValueError(_NO_KEY_HEADS)
    kv_count = kv_count or count
    size = size or num_rows // (count + 2 * kv_count)
    _require_rows(path, "Q, K and V", num_rows, count + 2 * kv_count, size)
    return _Heads(count, kv_count, size)


def _require_order(module: nn.Module, fused: str, heads: _Heads) -> None:
    """Raise if a module tells that the rows of a fused weight are not Q, then K, then V, or if it should tell."""
    sizes = (heads.count * heads.size, heads.kv_count * heads.size, heads.kv_count * heads.size)
    tell = getattr(module, "muon_split_sizes", None)
    told = tuple(tell().get(f"{fused}.weight", ())) if callable(tell) else ()
    if told and told != sizes:
        raise ValueError(
            f"muon_split_sizes() of {type(module).__name__} cuts {fused!r} into {told}, which is not Q, then K, then "
            f"V: {sizes}"
        )
    if not told and fused in _UNCERTAIN_LAYERS:
        raise ValueError(
            f"weights named {fused!r} are stored as Q, then K, then V in some models and by head in others: if "
            f"{type(module).__name__} stores Q first, give it a method muon_split_sizes() that returns "
            f"{{'{fused}.weight': {sizes}}}"
        )


def _required_numbers(path: Sequence[nn.Module]) -> HeadNumbers:
    numbers = head_numbers(path)
    if numbers is None:
        raise ValueError(_MISSING.format("the number of heads", type(path[0]).__name__, HEADS))
    return numbers


def _required(path: Sequence[nn.Module], names: tuple[str, ...], what: str) -> int:
    value = value_of(path, names, int)
    if value is None:
        raise ValueError(_MISSING.format(what, type(path[0]).__name__, names))
    return value


def _require_rows(path: Sequence[nn.Module], what: str, num_rows: int, count: int, size: int) -> None:
    if size == 0 or num_rows != count * size:
        raise ValueError(
            f"the projection of {what} has {num_rows} rows, which are not {count} heads of size {size or 'unknown'}: "
            f"these are the numbers of {type(path[0]).__name__} and the configurations around it"
        )


def _latent_attention(path: Sequence[nn.Module], layers: dict[str, nn.Module], key: str) -> Attention:
    """Return the heads of latent attention, as DeepSeek's.

    A head of Q has a part without position and a rotary one. The rotary key is shared by all heads and must not change,
    so the rotary part of Q is multiplied by the whole gamma. Rows of K and V of a head follow each other.
    """
    query = _first(layers, _LATENT_QUERY_LAYERS)
    if query is None:
        raise ValueError(f"{key!r} has no projection of queries beside it: the parts are {sorted(layers)}")
    count = _required_numbers(path).count
    plain = _required(path, ("qk_nope_head_dim",), "the size of keys without position")
    rotary = _required(path, ("qk_rope_head_dim",), "the size of rotary keys")
    value = _required(path, ("v_head_dim",), "the size of values")
    _require_rows(path, "queries", _num_rows(query, layers[query]), count, plain + rotary)
    _require_rows(path, "keys and values", _num_rows(key, layers[key]), count, plain + value)
    queries: list[Rows] = []
    keys: list[Rows] = []
    for head in range(count):
        start, middle = head * (plain + rotary), head * (plain + rotary) + plain
        queries += [Rows(start, middle, head, 0.5), Rows(middle, middle + rotary, head, 1.0)]
        keys.append(Rows(head * (plain + value), head * (plain + value) + plain, head, 0.5))
    projections = [*_of_layer(query, layers[query], tuple(queries)), *_of_layer(key, layers[key], tuple(keys))]
    return Attention(count, 1, tuple(projections))


def _torch_attention(module: nn.MultiheadAttention) -> Attention:
    """Return the heads of torch's own module; its `bias_k` is a further key, of all heads."""
    heads = _Heads(module.num_heads, module.num_heads, module.head_dim)
    both = heads.queries() + heads.keys(module.embed_dim)
    places = {  # those that a module does not use are None
        "in_proj_weight": (0, both),
        "q_proj_weight": (0, heads.queries()),
        "k_proj_weight": (0, heads.keys()),
        "in_proj_bias": (0, both),
        "bias_k": (2, heads.keys()),
    }
    own = [(name, getattr(module, name), *place) for name, place in places.items()]
    return Attention(heads.count, 1, tuple(Projection(*each) for each in own if each[1] is not None))


def _is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer stores its weight (in, out), as the Conv1D of Transformers does."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _num_rows(name: str, layer: nn.Module) -> int:
    """Return the number of outputs of a layer, whole even if it is sharded; raise if it is no plain linear layer."""
    held = {each for each, _ in layer.named_parameters()}
    weight = getattr(layer, "weight", None)
    if not held <= {"weight", "bias"} or not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(
            f"{name!r} ({type(layer).__name__}) is not one weight of two dimensions with an optional bias: its "
            f"parameters are {sorted(held)}. Merge adapters and remove parametrizations first"
        )
    return int(weight.shape[1 if _is_transposed(layer) else 0])


def _of_layer(name: str, layer: nn.Module, rows: tuple[Rows, ...]) -> list[Projection]:
    weight = layer.get_parameter("weight")
    own = [Projection(f"{name}.weight", weight, 1 if _is_transposed(layer) else 0, rows)]
    bias = getattr(layer, "bias", None)
    return own if bias is None else [*own, Projection(f"{name}.bias", bias, 0, rows)]
