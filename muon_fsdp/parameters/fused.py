"""Recognize weights that hold several matrices, such as Q, K and V, and decide how their rows are cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from muon_fsdp.declarations.settings import Attention
from muon_fsdp.parameters.attention import BY_HEAD_CLASS, HEAD_DIM, HEADS, HeadNumbers
from muon_fsdp.parameters.facts import Facts, Fused, Layer, Layers, Options

_METHOD = "muon_split_sizes"  # of a module: returns {name of its parameter: the rows of every matrix in it}
# Names under which published models store Q, then K, then V. Under other names some store them by head.
_IN_ORDER_NAME = re.compile(r"(.*_)?c_attn|qkv_proj|wqkv|w_pack|in_proj_qkv|in_proj_weight|(g|gate_?)qkv(_proj)?")
_GATE_FIRST_NAME = re.compile(r"w?(g|gate_?)qkv(_proj)?")
_LATENTS_NAME = re.compile(r"(.*_)?q_?kv_(a|down)(_.*)?")  # the compressed Q, the compressed K and V, a rotary key
_PER_HEAD_NAME = re.compile(
    r"(w|to_|c_)?([qkv]|q_b|q_up)(_(proj|proj_weight|linear|lin|fc))?|(query|key|value)(_(proj|layer))?"
)

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
_ALTERNATING_CLASS = re.compile(r"GptOss|ZambaMamba")  # rows of gate and up, or of the two parts of in_proj, alternate


def find_fused(layers: Layers, attention: Attention) -> None:
    """Mark the weights that look fused, and cut those whose layout is known, unless the user has set their views.

    Without a model no layout is known: names and shapes only tell what to ask.
    """
    declared = _declared(layers)
    for layer in layers.all:
        facts = layer.facts
        if facts.other_reason is not None or facts.labelled or 1 in facts.logical_shape:
            continue
        if facts.num_heads or facts.split_sizes:  # cut already at another place of the same weight
            continue
        sizes = declared.get(facts)
        if sizes is None:
            facts.fused = _fused(layer)
        elif len(sizes) > 1:
            facts.fused = Fused("parts by its module", _split_sizes(*sizes), is_known=True)
        else:  # one size says that it is one matrix
            continue
        if attention == "whole" or layers.module(()) is None:
            continue
        cut: dict[str, Any] = dict(_cut(layer, facts.fused, attention))
        if 1 not in cut.get("split_sizes", ()) and layer.rows != cut.get("num_heads"):  # a row alone is no matrix
            facts.num_heads, facts.split_sizes = cut.get("num_heads"), cut.get("split_sizes")


def _cut(layer: Layer, fused: Fused | None, attention: Attention) -> Options:
    """Return the options that cut a weight under a setting; none if it stays whole."""
    if fused is None:
        return _heads(layer) if attention == "per_head" else ()
    if attention == "per_head" and fused.by_head:
        return fused.by_head
    return fused.options if fused.is_known else ()


def _declared(layers: Layers) -> dict[Facts, tuple[int, ...]]:
    """Return the rows of the matrices in each weight, where a module tells them itself."""
    found: dict[Facts, tuple[int, ...]] = {}
    for path, module in layers.modules_with(_METHOD):
        which = f"{type(module).__name__} {'.'.join(path)!r}"
        given = getattr(module, _METHOD)()
        if not isinstance(given, Mapping):
            raise TypeError(
                f"{which}: muon_split_sizes() must return a dict of names and sizes, got {type(given).__name__}"
            )
        for name, sizes in given.items():
            of_name = layers.at(path, name)
            if not of_name:
                raise ValueError(
                    f"{which}: muon_split_sizes() names {name!r}, which is no matrix of the module: leave it out"
                )
            facts, rows = of_name[0].facts, of_name[0].rows
            are_sizes = isinstance(sizes, Iterable) and not isinstance(sizes, str)
            sizes = tuple(sizes) if are_sizes else sizes
            is_valid = are_sizes and all(type(size) is int and size > 0 for size in sizes)
            if not is_valid or sum(sizes) != rows:
                raise ValueError(
                    f"{which}: muon_split_sizes() returns the sizes {sizes} for {name!r}: they must be positive "
                    f"integers that add up to its {rows} output features"
                )
            if found.setdefault(facts, sizes) != sizes:
                raise ValueError(
                    f"{which}: muon_split_sizes() returns the sizes {sizes} for {name!r}, and another module, which "
                    f"shares this weight, {found[facts]}: return the same sizes"
                )
    return found


def _heads(layer: Layer) -> Options:
    """Return the option that cuts a weight of queries, keys or values alone into heads, if their sizes are known."""
    beside = [other for other in (layer, *layer.beside) if _PER_HEAD_NAME.fullmatch(other.name)]
    by_letter = {_letter(other): other for other in beside}
    if layer not in beside:
        return ()
    letter = _letter(layer)
    linear = layer.own_number("head_v_dim" if letter == "v" else "head_k_dim")
    if linear is not None:  # linear attention, beside which the configuration may describe full attention
        heads = layer.own_number("num_v_heads" if letter == "v" else "num_k_heads", "num_heads")
        return _equal_heads(layer, linear) if heads is not None and layer.rows == heads * linear else ()
    numbers = layer.heads
    is_latent = any(_HEADS_NAME.fullmatch(other.name) for other in layer.beside)
    # Without a size of heads, only all three beside each other tell that the rows of Q are its heads alone.
    if numbers is None or (not is_latent and numbers.size is None and not by_letter.keys() >= {"q", "k", "v"}):
        return ()
    size = numbers.size or (by_letter["q"].rows // numbers.count if "q" in by_letter else 0)
    if letter != "q":
        of_value = layer.find_number("v_head_dim") if letter == "v" else None
        fitting = [
            each for each in (of_value, size) if each and layer.rows == (numbers.kv_count or numbers.count) * each
        ]
        return _equal_heads(layer, fitting[0]) if fitting else ()
    if is_latent:
        parts = [layer.find_number(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
        size = sum(part for part in parts if part is not None)
    # Twice the rows: every head, or all heads, have a gate. A block of this size is a head or a gate either way.
    return _equal_heads(layer, size) if layer.rows in (numbers.count * size, 2 * numbers.count * size) else ()


def _letter(layer: Layer) -> str:
    """Return the first "q", "k" or "v" in the name of a projection of queries, keys or values."""
    return next(letter for letter in layer.name if letter in "qkv")


def _equal_heads(layer: Layer, size: int) -> Options:
    """Return the option that cuts a weight into heads of a size, if there are several."""
    return (("num_heads", layer.rows // size),) if size > 0 and layer.rows % size == 0 and layer.rows > size else ()


def _fused(layer: Layer) -> Fused | None:
    """Return what a weight consists of; None if it looks like one matrix, or if no option could split it."""
    if layer.facts.belongs_to(nn.RNNBase, nn.RNNCellBase):
        return _gates(layer)
    if layer.facts.belongs_to(nn.MultiheadAttention):
        head_dim = layer.find_number("head_dim") or 0
        by_head = _equal_heads(layer, head_dim)
        return Fused("Q, K, V", _equal(layer, 3), by_head, True) if layer.name == "in_proj_weight" else None
    is_input = _IN_NAME.fullmatch(layer.name) is not None
    if _QKV_NAME.fullmatch(layer.name) or (is_input and _is_in_attention(layer)):
        return _attention(layer)
    if is_input:
        return _input_projection(layer)
    if _HEADS_NAME.fullmatch(layer.name):
        return _latent_heads(layer)
    if _LATENT_NAME.fullmatch(layer.name):
        return _latent(layer)
    if _KV_NAME.fullmatch(layer.name):
        return _keys_and_values(layer)
    if _PER_HEAD_NAME.fullmatch(layer.name) and "q" in layer.name:
        return _queries_and_gate(layer)
    if _GATE_UP_NAME.fullmatch(layer.name) or _is_gated(layer):
        return None if _alternates(layer) else _gate_and_up(layer)
    return None


def _gate_and_up(layer: Layer) -> Fused:
    """Return gate and up, known by name if the next layer reads half of the rows or the configuration says so.

    Experts that are stored (experts, in, out) may alternate as in GPT-OSS, unless Transformers notes that they do not.
    """
    module = layer.module
    half = {other.cols for other in layer.beside if other.rows == layer.cols}
    half |= {layer.find_number(name) or 0 for name in ("intermediate_size", "moe_intermediate_size")}
    is_sized = bool(_GATE_UP_NAME.fullmatch(layer.name)) and layer.rows in {2 * size for size in half}
    is_in_order = not (layer.is_stack and layer.facts.transposed) or hasattr(module, "is_concatenated")
    return Fused("gate, up", _equal(layer, 2), is_known=module is not None and is_sized and is_in_order)


def _split_sizes(*sizes: int) -> Options:
    return (("split_sizes", sizes),)


def _equal(layer: Layer, parts: int) -> Options:
    """Return the option that splits a weight into equal parts, if its rows can be divided."""
    return _split_sizes(*[layer.rows // parts] * parts) if layer.rows % parts == 0 else ()


def _gates(layer: Layer) -> Fused | None:
    """Return the gates of a recurrent layer, which torch stores one after the other."""
    if not layer.name.startswith(("weight_ih", "weight_hh")):  # weight_hr projects the output
        return None
    is_lstm, is_gru = layer.facts.belongs_to(nn.LSTM, nn.LSTMCell), layer.facts.belongs_to(nn.GRU, nn.GRUCell)
    gates = 4 if is_lstm else 3 if is_gru else 1
    return Fused(f"{gates} gates", _equal(layer, gates), is_known=True) if gates > 1 else None


def _is_gated(layer: Layer) -> bool:
    """Return whether a weight, (2 I, H), has as many rows as gate and up of an MLP whose next layer is (H, I)."""
    if _QUERY_NAME.fullmatch(layer.name) or layer.readers:
        return False
    return any(
        2 * other.cols == layer.rows
        and other.rows == layer.cols != other.cols
        and other.number > layer.number
        and other.facts.shape[:-2] == layer.facts.shape[:-2]
        for other in layer.beside
    )


def _alternates(layer: Layer) -> bool:
    """Return whether the rows of the parts alternate, so that no option splits them.

    Without the module, transposed experts may be those of GPT-OSS.
    """
    module = layer.module
    if module is None:
        return layer.facts.transposed
    if layer.name == "w13" and hasattr(module, "_split_w13_on_save"):  # torchtitan's hook, also in forks
        return True
    is_concatenated = getattr(module, "is_concatenated", True)  # Transformers notes it on modules of experts
    return not is_concatenated or any(map(_ALTERNATING_CLASS.search, layer.class_names))


def _is_in_attention(layer: Layer) -> bool:
    """Return whether a layer is part of attention, by the name or the class of its module, or by torch's own name."""
    names = (*layer.parent[-1:], *layer.class_names[:-2])
    return layer.name == "in_proj_weight" or any(map(_ATTENTION.fullmatch, names))


def _input_projection(layer: Layer) -> Fused | None:
    """Return the parts of `in_proj`, as in Mamba; None if it is the first layer of an MLP or reduces its input."""
    rows, beside = layer.rows, layer.beside
    if layer.readers or (rows <= layer.cols and not beside) or _alternates(layer):
        return None
    inner = next((other.cols for other in beside if _OUT_NAME.fullmatch(other.name)), None)
    if inner is not None and rows in (2 * inner, 3 * inner):
        is_known = layer.find_number("intermediate_size", "d_inner") == inner and rows == 2 * inner
        sizes = _split_sizes(*[inner] * (rows // inner))
        return Fused(f"{rows // inner} matrices", sizes, is_known=is_known)
    groups = layer.find_number("n_groups", "ngroups")
    state = layer.find_number("ssm_state_size", "d_state", "state_size")
    heads = layer.find_number(*HEADS)
    if inner and groups and state and heads and rows == 2 * (inner + groups * state) + heads:
        sizes = _split_sizes(inner, inner, groups * state, groups * state, heads)
        return Fused("z, x, B, C, dt", sizes, is_known=True)
    return Fused("several matrices")


def _attention(layer: Layer) -> Fused:
    """Return Q, K and V, or K and V where queries have a weight of their own."""
    if _queries(layer):
        return _keys_and_values(layer) or Fused("K, V")
    if _LATENTS_NAME.fullmatch(layer.name):
        ranks = [layer.find_number(n) for n in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")]
        latents = [rank for rank in ranks if rank is not None]
        is_known = len(latents) == len(ranks) and sum(latents) == layer.rows
        return Fused("latent Q, latent K and V, rotary K", _split_sizes(*latents) if is_known else (), (), is_known)
    numbers = layer.heads
    is_by_head = any(map(BY_HEAD_CLASS.search, layer.class_names))
    if is_by_head or "query_key_value" in layer.name:
        size = layer.find_number(*HEAD_DIM) if numbers is None else numbers.size
        size = size or (layer.cols // numbers.count if numbers is not None else 0)
        cut = _equal_heads(layer, size)
        is_sized = numbers is not None and (numbers.size is not None or _read(layer) == numbers.count * size)
        return Fused("Q, K, V by head", cut, cut if is_sized else ())
    return _attention_by_numbers(layer, numbers) or Fused("Q, K, V", _attention_by_shapes(layer))


def _read(layer: Layer) -> int | None:
    """Return the inputs of the output projection beside a layer."""
    return next((o.cols for o in layer.beside if _OUT_NAME.fullmatch(o.name) and o.rows == layer.cols), None)


def _attention_by_numbers(layer: Layer, numbers: HeadNumbers | None) -> Fused | None:
    """Return Q, K and V, and a gate before or after them, if numbers of the module or its configuration fit."""
    rows, is_in_order = layer.rows, _IN_ORDER_NAME.fullmatch(layer.name) is not None
    key_dim, value_dim = (layer.find_number(name) for name in ("key_dim", "value_dim"))
    if key_dim and value_dim:  # linear attention
        if 2 * key_dim + value_dim != rows:
            return Fused("Q, K, V")
        key, value = (layer.find_number(name) or 0 for name in ("head_k_dim", "head_v_dim"))
        by_head: Options = ()
        if is_in_order and key and value and key_dim % key == 0 and value_dim % value == 0:
            by_head = _split_sizes(*[key] * (2 * key_dim // key), *[value] * (value_dim // value))
        return Fused("Q, K, V", _split_sizes(key_dim, key_dim, value_dim), by_head, is_in_order)
    if numbers is None:
        return None
    heads, kv_heads, head_dim, read = numbers.count, numbers.kv_count, numbers.size, _read(layer)
    has_gate = _GATE_FIRST_NAME.fullmatch(layer.name) is not None
    if kv_heads is head_dim is read is None and rows != (4 if has_gate else 3) * layer.cols:  # queries may be grouped
        return None
    kv_heads = kv_heads or heads
    blocks = heads + 2 * kv_heads + (heads if has_gate else 0)
    size = head_dim or rows // blocks
    if blocks * size != rows or read not in (None, heads * size):
        return None
    sizes = (heads * size,) * (2 if has_gate else 1) + (kv_heads * size,) * 2
    by_head = _equal_heads(layer, size) if is_in_order or has_gate else ()
    parts = "gate, Q, K, V" if has_gate else "Q, K, V"
    return Fused(parts, _split_sizes(*sizes), by_head, is_in_order or has_gate)


def _attention_by_shapes(layer: Layer) -> Options:
    """Return the option that splits Q, K and V as the output projection beside the layer suggests."""
    rows, read = layer.rows, _read(layer)
    if _QKV_ALONE_NAME.fullmatch(layer.name) is None:
        return ()
    if read is not None and read < rows <= 3 * read and (rows - read) % 2 == 0:
        return _split_sizes(read, (rows - read) // 2, (rows - read) // 2)
    return _equal(layer, 3) if read is None and rows == 3 * layer.cols else ()


def _keys_and_values(layer: Layer) -> Fused | None:
    """Return K and V if the weight has twice the rows of one of them; shared ones are one matrix."""
    queries = _queries(layer)
    numbers = layer.heads
    heads, head_dim = (None, None) if numbers is None else (numbers.kv_count or numbers.count, numbers.size)
    size = heads * head_dim if heads and head_dim else next(iter(queries), 0)
    if not queries or layer.rows != 2 * size:
        return None
    is_known = bool(heads and head_dim and _IN_ORDER_NAME.fullmatch(layer.name))
    return Fused("K, V", _equal(layer, 2), _equal_heads(layer, head_dim or 0) if is_known else (), is_known)


def _queries_and_gate(layer: Layer) -> Fused | None:
    """Return Q and a gate of its size, as in Qwen3-Next; nothing tells whether they alternate head by head."""
    numbers = layer.heads
    if numbers is None or numbers.size is None:
        return None
    heads, size = numbers.count, numbers.size
    if layer.rows != 2 * heads * size or _read(layer) != heads * size:
        return None
    cut = _equal_heads(layer, size)  # a block of this size is a head or a gate either way
    return Fused("Q, gate", cut, cut)


def _queries(layer: Layer) -> list[int]:
    """Return the rows of the weights of queries beside a layer."""
    beside = [other for other in layer.beside if _QUERY_NAME.fullmatch(other.name)]
    return [other.rows for other in beside if other.facts.other_reason is None]  # no learned tokens


def _latent(layer: Layer) -> Fused | None:
    """Return the compressed K and V and the rotary key; None if there is no rotary key in it."""
    expands = [other.cols for other in layer.beside if _HEADS_NAME.fullmatch(other.name)]
    rank = layer.find_number("kv_lora_rank") or next(iter(expands), None)
    if rank is None or rank >= layer.rows:
        return None
    numbers = [layer.find_number(name) for name in ("kv_lora_rank", "qk_rope_head_dim")]
    is_known = numbers == [rank, layer.rows - rank]
    return Fused("latent K and V, rotary K", _split_sizes(rank, layer.rows - rank), is_known=is_known)


def _latent_heads(layer: Layer) -> Fused:
    """Return K and V of every head, which alternate."""
    heads = layer.find_number(*HEADS)
    key, value = (layer.find_number(name) for name in ("qk_nope_head_dim", "v_head_dim"))
    if not (heads and key and value) or heads * (key + value) != layer.rows:
        return Fused("K, V by head")
    if key == value:
        return Fused("K, V by head", (("num_heads", 2 * heads),), is_known=True)
    return Fused("K, V by head", _split_sizes(*(key, value) * heads), is_known=True)
