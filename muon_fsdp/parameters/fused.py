"""Recognize weights that hold several matrices, such as Q, K and V, and find the options that split them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from muon_fsdp.parameters.facts import Fused, Layer, Layers

_QKV_NAME = re.compile(r".*qkv.*|(.*_)?c_attn|.*query_key_value.*|w_pack")
_QKV_ALONE_NAME = re.compile(
    r"(.*_)?w?qkv(_(proj|projection|linear|layer|fc|weight))?|(.*_)?c_attn|w_pack|in_proj(_weight)?"
)
_KV_NAME = re.compile(r"(.*_)?w?kv(_proj|_linear|_fc)?|.*key_value")
_LATENT_NAME = re.compile(r"(.*_)?w?kv_(a|down)(_.*)?")  # the compressed K and V of latent attention, and a rotary key
_HEADS_NAME = re.compile(r"(.*_)?w?kv_(b|up)(_.*)?")  # what expands them: K and V of every head
_IN_NAME = re.compile(r"in_proj(_weight|_(?!weight|bias)[a-z]{2,})?")  # "in_proj_ba" is two; "in_proj_z" is one
_GATE_UP_NAME = re.compile(r".*gate_?(and_)?up.*|(.*_)?w_?1_?w?3(_.*)?")
_QUERY_NAME = re.compile(r"(w|to_)?q(_.*)?|query(_.*)?")
_OUT_NAME = re.compile(r"w?o|out|to_out|proj|dense|output|(o|c|out|attn|output|linear)_proj|(proj|attn)_out|out_linear")
_ATTENTION = re.compile(r".*att(entio)?n.*", re.IGNORECASE)
# Classes that store the rows of a fused weight by head: Q, K and V of the first head, then of the second.
_BY_HEAD_CLASS = re.compile(r"Bloom|CodeGen|Disentangled|Falcon|GPTBigCode|InternLM2|MiniMaxLightning|NeoX|Persimmon")
_ALTERNATING_CLASS = re.compile(r"GptOss|ZambaMamba")  # rows of gate and up, or of the two parts of in_proj, alternate

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_head", "nheads", "heads")
_KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_n_heads", "kv_heads", "num_query_groups",
    "n_query_groups", "multi_query_group_num",
)  # fmt: skip
_HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head", "kv_channels")


def find_fused(layers: Layers) -> None:
    """Mark the weights that look fused, unless the user has set their views."""
    for layer in layers.all:
        facts = layer.facts
        if facts.other_reason is None and not facts.labelled and 1 not in facts.logical_shape:
            facts.fused = _fused(layers, layer)


def _fused(layers: Layers, layer: Layer) -> Fused | None:
    """Return what a weight consists of; None if it looks like one matrix, or if no option could split it."""
    if layer.facts.belongs_to(nn.RNNBase, nn.RNNCellBase):
        return _gates(layer)
    if layer.facts.belongs_to(nn.MultiheadAttention):
        return Fused("Q, K, V", _equal(layer, 3)) if layer.name == "in_proj_weight" else None
    is_input = _IN_NAME.fullmatch(layer.name) is not None
    if _QKV_NAME.fullmatch(layer.name) or (is_input and _is_in_attention(layers, layer)):
        return _attention(layers, layer)
    if is_input:
        return _input_projection(layers, layer)
    if _HEADS_NAME.fullmatch(layer.name):
        return _latent_heads(layers, layer)
    if _LATENT_NAME.fullmatch(layer.name):
        return _latent(layers, layer)
    if _KV_NAME.fullmatch(layer.name):
        return _keys_and_values(layers, layer)
    if _GATE_UP_NAME.fullmatch(layer.name) or _is_gated(layers, layer):
        return None if _alternates(layers, layer) else Fused("gate, up", _equal(layer, 2))
    return None


def _split_sizes(*sizes: int) -> tuple[tuple[str, object], ...]:
    return (("split_sizes", sizes),)


def _equal(layer: Layer, parts: int) -> tuple[tuple[str, object], ...]:
    """Return the option that splits a weight into equal parts, if its rows can be divided."""
    return _split_sizes(*[layer.rows // parts] * parts) if layer.rows % parts == 0 else ()


def _gates(layer: Layer) -> Fused | None:
    """Return the gates of a recurrent layer, which torch stores one after the other."""
    if not layer.name.startswith(("weight_ih", "weight_hh")):  # weight_hr projects the output
        return None
    is_lstm, is_gru = layer.facts.belongs_to(nn.LSTM, nn.LSTMCell), layer.facts.belongs_to(nn.GRU, nn.GRUCell)
    gates = 4 if is_lstm else 3 if is_gru else 1
    return Fused(f"{gates} gates", _equal(layer, gates)) if gates > 1 else None


def _is_gated(layers: Layers, layer: Layer) -> bool:
    """Return whether a weight, (2 I, H), has as many rows as gate and up of an MLP whose next layer is (H, I)."""
    if _QUERY_NAME.fullmatch(layer.name) or layers.readers(layer, layer.rows):
        return False
    return any(
        2 * other.cols == layer.rows
        and other.rows == layer.cols != other.cols
        and other.number > layer.number
        and other.facts.shape[:-2] == layer.facts.shape[:-2]
        for other in layers.beside(layer)
    )


def _alternates(layers: Layers, layer: Layer) -> bool:
    """Return whether the rows of the parts alternate, so that no option splits them.

    Without the module, transposed experts may be those of GPT-OSS.
    """
    module = layers.module(layer.parent)
    if module is None:
        return layer.facts.transposed
    is_concatenated = getattr(module, "is_concatenated", True)  # Transformers notes it on modules of experts
    return not is_concatenated or any(map(_ALTERNATING_CLASS.search, layers.class_names(layer.parent)))


def _is_in_attention(layers: Layers, layer: Layer) -> bool:
    """Return whether a layer is part of attention, by the name or the class of its module, or by torch's own name."""
    names = (*layer.parent[-1:], *layers.class_names(layer.parent)[:-2])
    return layer.name == "in_proj_weight" or any(map(_ATTENTION.fullmatch, names))


def _input_projection(layers: Layers, layer: Layer) -> Fused | None:
    """Return the parts of `in_proj`, as in Mamba; None if it is the first layer of an MLP or reduces its input."""
    rows, beside = layer.rows, layers.beside(layer)
    if layers.readers(layer, rows) or (rows <= layer.cols and not beside) or _alternates(layers, layer):
        return None
    inner = next((other.cols for other in beside if _OUT_NAME.fullmatch(other.name)), None)
    if inner is not None and rows in (2 * inner, 3 * inner):
        return Fused(f"{rows // inner} matrices", _split_sizes(*[inner] * (rows // inner)))
    groups = layers.number_at(layer.parent, ("n_groups", "ngroups"))
    state = layers.number_at(layer.parent, ("ssm_state_size", "d_state", "state_size"))
    heads = layers.number_at(layer.parent, _HEADS)
    if inner and groups and state and heads and rows == 2 * (inner + groups * state) + heads:
        return Fused("z, x, B, C, dt", _split_sizes(inner, inner, groups * state, groups * state, heads))
    return Fused("several matrices")


def _attention(layers: Layers, layer: Layer) -> Fused:
    """Return Q, K and V, or K and V where queries have a weight of their own."""
    if _queries(layers, layer):
        return _keys_and_values(layers, layer) or Fused("K, V")
    heads, head_dim = (layers.number_at(layer.parent, names) for names in (_HEADS, _HEAD_DIM))
    is_by_head = any(map(_BY_HEAD_CLASS.search, layers.class_names(layer.parent)))
    if is_by_head or "query_key_value" in layer.name:
        size = head_dim or (layer.cols // heads if heads else 0)
        fits = size > 0 and layer.rows % size == 0
        return Fused("Q, K, V by head", (("num_heads", layer.rows // size),) if fits else ())
    sizes = _attention_sizes(layers, layer, heads, head_dim)
    return Fused("Q, K, V", _split_sizes(*sizes) if sizes else ())


def _attention_sizes(layers: Layers, layer: Layer, heads: int | None, head_dim: int | None) -> Sequence[int] | None:
    """Return the rows of Q, K and V from what the module tells, or else from the output projection beside it."""
    rows = layer.rows
    key_dim, value_dim = (layers.number_at(layer.parent, (name,)) for name in ("key_dim", "value_dim"))
    if key_dim and value_dim:  # linear attention
        return (key_dim, key_dim, value_dim) if 2 * key_dim + value_dim == rows else None
    read = next((o.cols for o in layers.beside(layer) if _OUT_NAME.fullmatch(o.name) and o.rows == layer.cols), None)
    if heads:
        kv_heads = layers.number_at(layer.parent, _KV_HEADS) or heads
        size = head_dim or rows // (heads + 2 * kv_heads)
        if (heads + 2 * kv_heads) * size == rows and read in (None, heads * size):
            return heads * size, kv_heads * size, kv_heads * size
    if _QKV_ALONE_NAME.fullmatch(layer.name) is None:
        return None
    if read is not None and read < rows <= 3 * read and (rows - read) % 2 == 0:
        return read, (rows - read) // 2, (rows - read) // 2
    return (layer.cols,) * 3 if read is None and rows == 3 * layer.cols else None


def _keys_and_values(layers: Layers, layer: Layer) -> Fused | None:
    """Return K and V if the weight has twice the rows of one of them; shared ones are one matrix."""
    queries = _queries(layers, layer)
    heads = layers.number_at(layer.parent, _KV_HEADS) or layers.number_at(layer.parent, _HEADS)
    head_dim = layers.number_at(layer.parent, _HEAD_DIM)
    size = heads * head_dim if heads and head_dim else next(iter(queries), 0)
    return Fused("K, V", _equal(layer, 2)) if queries and layer.rows == 2 * size else None


def _queries(layers: Layers, layer: Layer) -> list[int]:
    """Return the rows of the weights of queries beside a layer."""
    beside = [other for other in layers.beside(layer) if _QUERY_NAME.fullmatch(other.name)]
    return [other.rows for other in beside if other.facts.other_reason is None]  # no learned tokens


def _latent(layers: Layers, layer: Layer) -> Fused | None:
    """Return the compressed K and V and the rotary key; None if there is no rotary key in it."""
    expands = [other.cols for other in layers.beside(layer) if _HEADS_NAME.fullmatch(other.name)]
    rank = layers.number_at(layer.parent, ("kv_lora_rank",)) or next(iter(expands), None)
    if rank is None or rank >= layer.rows:
        return None
    return Fused("latent K and V, rotary K", _split_sizes(rank, layer.rows - rank))


def _latent_heads(layers: Layers, layer: Layer) -> Fused:
    """Return K and V of every head, which alternate."""
    heads = layers.number_at(layer.parent, _HEADS)
    key, value = (layers.number_at(layer.parent, (name,)) for name in ("qk_nope_head_dim", "v_head_dim"))
    if not (heads and key and value) or heads * (key + value) != layer.rows:
        return Fused("K, V by head")
    if key == value:
        return Fused("K, V by head", (("num_heads", 2 * heads),))
    return Fused("K, V by head", _split_sizes(*(key, value) * heads))
