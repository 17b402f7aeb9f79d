"""Weights that look fused: which are split, how the report marks others, what `strict` asks, and which are none."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from torch import nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, create_hybrid_optimizer, label
from tests.optimizer_cases import updates_of
from tests.routing_cases import rows
from tests.test_optimizer_views import expected_update


class Conv1D(nn.Module):
    """Hugging Face's Linear that stores (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


class Numbered(nn.ModuleDict):
    """Layers by name, and numbers that their module notes."""

    def __init__(self, layers: dict[str, nn.Module], **numbers: int) -> None:
        super().__init__(layers)
        self.__dict__.update(numbers)


class TokenAttention(nn.Module):
    """Attention with tokens whose name begins like that of a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.query_tokens, self.qkv, self.proj = nn.Parameter(torch.randn(1, 4, 32)), linear(96, 32), linear(32, 32)


def linear(rows: int, cols: int) -> nn.Linear:
    return nn.Linear(cols, rows)


def attention(name: str, rows: int, out: tuple[str, int] | None = ("o_proj", 32), **numbers: int) -> nn.Module:
    layers = {name: linear(rows, 32)} | ({out[0]: linear(32, out[1])} if out else {})
    return Numbered(layers, **numbers)


def mlp(first: str, rows: int, second: str, cols: int, width: int = 32) -> nn.Module:
    return nn.ModuleDict({first: linear(rows, width), second: linear(width, cols)})


def latent(head: int, value: int, **extra: int) -> nn.Module:
    layers = {
        "q_proj": linear(4 * (head + 8), 32), "kv_a_proj_with_mqa": linear(16 + 8, 32),
        "kv_b_proj": linear(4 * (head + value), 16), "o_proj": linear(32, 4 * value),
    }  # fmt: skip
    return Numbered(layers, **extra)


THIRDS, GROUPED = {"split_sizes": (32, 32, 32)}, {"split_sizes": (32, 16, 16)}
# The model, the weight, what it consists of, and the options that split it.
FUSED = {
    "nn.MultiheadAttention": (nn.MultiheadAttention(32, 4), "in_proj_weight", "Q, K, V", THIRDS),
    "nn.TransformerEncoderLayer": (
        nn.TransformerEncoderLayer(32, 4), "self_attn.in_proj_weight", "Q, K, V", THIRDS,
    ),
    "qkv": (attention("qkv", 96), "qkv.weight", "Q, K, V", THIRDS),
    "Wqkv without another layer": (attention("Wqkv", 96, None), "Wqkv.weight", "Q, K, V", THIRDS),
    "to_qkv": (attention("to_qkv", 192, ("to_out", 64)), "to_qkv.weight", "Q, K, V", {"split_sizes": (64, 64, 64)}),
    "grouped queries by the output projection": (attention("qkv_proj", 64), "qkv_proj.weight", "Q, K, V", GROUPED),
    "grouped queries by numbers": (
        attention("wqkv", 64, None, n_heads=8, n_kv_heads=4), "wqkv.weight", "Q, K, V", GROUPED,
    ),
    "wide heads by numbers": (
        attention("qkv_proj", 96, ("o_proj", 64), num_heads=8, num_key_value_heads=2, head_dim=8), "qkv_proj.weight",
        "Q, K, V", {"split_sizes": (64, 16, 16)},
    ),
    "nobody knows": (attention("fused_qkv", 70, None), "fused_qkv.weight", "Q, K, V", {}),
    "linear attention": (
        attention("in_proj_qkv", 128, ("out_proj", 64), key_dim=32, value_dim=64), "in_proj_qkv.weight", "Q, K, V",
        {"split_sizes": (32, 32, 64)},
    ),
    "c_attn": (attention("c_attn", 96, ("c_proj", 32)), "c_attn.weight", "Q, K, V", THIRDS),
    "cross attention": (
        Numbered({"c_attn": linear(64, 32), "q_attn": linear(32, 32), "c_proj": linear(32, 32)}), "c_attn.weight",
        "K, V", {"split_sizes": (32, 32)},
    ),
    "queries of learned tokens": (
        TokenAttention(), "qkv.weight", "Q, K, V", THIRDS,
    ),
    "to_kv": (
        Numbered({"to_q": linear(32, 32), "to_kv": linear(64, 32)}), "to_kv.weight", "K, V", {"split_sizes": (32, 32)},
    ),
    "queries with a gate": (
        Numbered(
            {name: linear(size, 32) for name, size in (("q_proj", 64), ("k_proj", 16), ("v_proj", 16), ("o_proj", 32))},
            num_heads=4, num_key_value_heads=2, head_dim=8,
        ),
        "q_proj.weight", "Q, gate", {"num_heads": 8},
    ),
    "query_key_value": (
        attention("query_key_value", 96, ("dense", 32), head_size=8), "query_key_value.weight", "Q, K, V by head",
        {"num_heads": 12},
    ),
    "in_proj of attention": (
        nn.ModuleDict({"attn": attention("in_proj", 96)}), "attn.in_proj.weight", "Q, K, V", THIRDS,
    ),
    "in_proj of Mamba": (
        mlp("in_proj", 128, "out_proj", 64), "in_proj.weight", "2 matrices", {"split_sizes": (64, 64)},
    ),
    "in_proj of Mamba 2": (
        attention("in_proj", 2 * 64 + 2 * 16 + 8, ("out_proj", 64), n_groups=2, ssm_state_size=8, num_heads=8),
        "in_proj.weight", "z, x, B, C, dt", {"split_sizes": (64, 64, 16, 16, 8)},
    ),
    "in_proj with three times the inputs of the next layer": (
        mlp("in_proj", 144, "out_proj", 48), "in_proj.weight", "3 matrices", {"split_sizes": (48, 48, 48)},
    ),
    "Q, K, V and more": (attention("to_qkv_mlp", 160, ("to_out", 64)), "to_qkv_mlp.weight", "Q, K, V", {}),
    "in_proj of something else": (mlp("in_proj", 150, "out_proj", 64), "in_proj.weight", "several matrices", {}),
    "gate_up_proj": (mlp("gate_up_proj", 80, "down", 40), "gate_up_proj.weight", "gate, up", {"split_sizes": (40, 40)}),
    "w13": (mlp("w13", 80, "w2", 40), "w13.weight", "gate, up", {"split_sizes": (40, 40)}),
    "twice the inputs of the next layer": (mlp("Wi", 80, "Wo", 40), "Wi.weight", "gate, up", {"split_sizes": (40, 40)}),
    "the first of two": (
        nn.Sequential(linear(80, 32), nn.GLU(), linear(32, 40)), "0.weight", "gate, up", {"split_sizes": (40, 40)},
    ),
    "latent attention": (
        latent(24, 8, num_heads=4, qk_nope_head_dim=24, v_head_dim=8), "kv_b_proj.weight", "K, V by head",
        {"split_sizes": (24, 8, 24, 8, 24, 8, 24, 8)},
    ),
    "latent attention with equal heads": (
        latent(8, 8, num_heads=4, qk_nope_head_dim=8, v_head_dim=8), "kv_b_proj.weight", "K, V by head",
        {"num_heads": 8},
    ),
    "the compressed part": (
        latent(8, 8), "kv_a_proj_with_mqa.weight", "latent K and V, rotary K", {"split_sizes": (16, 8)},
    ),
    "LSTM": (nn.LSTM(12, 8), "weight_ih_l0", "4 gates", {"split_sizes": (8, 8, 8, 8)}),
    "GRUCell": (nn.GRUCell(12, 8), "weight_hh", "3 gates", {"split_sizes": (8, 8, 8)}),
    "a convolution": (nn.ModuleDict({"qkv": nn.Conv1d(32, 96, 1)}), "qkv.weight", "Q, K, V", THIRDS),
}  # fmt: skip


@pytest.mark.parametrize(("model", "name", "parts", "split"), FUSED.values(), ids=FUSED)
def test_the_report_marks_fused_weights_with_what_splits_them(model, name, parts, split):
    whole = MuonOptimizer(model, attention="whole", strict=not isinstance(model, nn.TransformerEncoderLayer))
    row = rows(whole)[name]
    assert (row.rule, row.fused, row.split_by) == ("muon", parts, split)
    assert f"looks fused ({parts}), to split it: " in str(whole.routing_report())


KNOWN = [
    "nn.MultiheadAttention", "nn.TransformerEncoderLayer", "grouped queries by numbers", "wide heads by numbers",
    "linear attention", "in_proj of Mamba 2", "gate_up_proj", "w13", "latent attention",
    "latent attention with equal heads", "LSTM", "GRUCell",
]  # fmt: skip


@pytest.mark.parametrize("case", KNOWN)
def test_what_the_model_tells_is_split(case):
    model, name, parts, split = FUSED[case]
    row = rows(MuonOptimizer(model))[name]
    assert (row.fused, row.split_by) == ("", {})
    assert row.reason.endswith(f"split: {parts}")
    asked = rows(MuonOptimizer(model, attention="whole", overrides={name: split}))[name]
    assert row.matrices == asked.matrices != rows(MuonOptimizer(model, attention="whole"))[name].matrices
    assert rows(MuonOptimizer(model.named_parameters()))[name].matrices != row.matrices  # names tell nothing for sure


@pytest.mark.parametrize("case", [case for case in FUSED if case not in KNOWN])
def test_strict_asks_about_weights_that_only_look_fused(case):
    model, name, parts, split = FUSED[case]
    row = rows(MuonOptimizer(model))[name]
    assert (row.fused, row.split_by) == (parts, split)
    with pytest.raises(ValueError, match=r"(?s)strict: .*looks fused") as error:
        FSDPMuonOptimizer(model, strict=True)
    (line,) = [line for line in str(error.value).splitlines() if f"parameter {name!r}" in line]
    both = re.fullmatch(r".* pass overrides=(.*) to split it into parts that follow each other, or (.*) if .*", line)
    assert eval(both[2]) == {name: "muon"}
    assert eval(both[1]) == {name: split or {"split_sizes": (...)}}
    if split:  # the advice is valid, and then there is nothing to ask about this weight
        assert rows(MuonOptimizer(model, overrides=eval(both[1])))[name].fused == ""


@pytest.mark.parametrize(
    "case",
    [
        "nn.MultiheadAttention",
        "qkv",
        "c_attn",
        "to_kv",
        "in_proj of Mamba",
        "gate_up_proj",
        "w13",
        "the compressed part",
    ],
)
def test_names_and_shapes_suffice(case):
    model, name, parts, split = FUSED[case]
    row = rows(MuonOptimizer(model.named_parameters()))[name]
    assert (row.fused, row.split_by) == (parts, split)


class TitanFeedForward(nn.ModuleDict):
    """torchtitan's MLP: rows of gate and up alternate."""

    def __init__(self) -> None:
        super().__init__({"w13": linear(80, 32), "w2": linear(32, 40)})
        self.register_state_dict_post_hook(self._split_w13_on_save)

    @staticmethod
    def _split_w13_on_save(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
        gate_up = state_dict.pop(f"{prefix}w13.weight").unflatten(0, (-1, 2))
        state_dict[f"{prefix}w1.weight"], state_dict[f"{prefix}w3.weight"] = gate_up[:, 0], gate_up[:, 1]


def test_alternating_rows_of_gate_and_up_stay_whole():
    model = nn.ModuleDict({"feed_forward": TitanFeedForward()})
    assert rows(MuonOptimizer(model))["feed_forward.w13.weight"].matrices == "80x32"


def test_the_name_that_torch_gives_suffices():
    model = nn.ModuleDict({"some": nn.MultiheadAttention(32, 4)})
    row = rows(MuonOptimizer(model.named_parameters()))["some.in_proj_weight"]
    assert (row.fused, row.split_by) == ("Q, K, V", THIRDS)


def test_the_advice_updates_each_part_like_a_weight_of_its_own():
    for layer, turned in ((linear(96, 32), False), (Conv1D(96, 32), True)):
        model = nn.ModuleDict({"c_attn": layer, "c_proj": linear(32, 32)}).double()
        weight = layer.weight
        weight.grad = torch.randn_like(weight)
        options = {"lr": 1.0, "orthogonalization": "exact", "scale": "v3"}
        row = rows(MuonOptimizer(model))["c_attn.weight"]
        assert row.split_by == THIRDS
        (update,) = updates_of(MuonOptimizer(model, overrides={"c_attn.weight": row.split_by}, **options), weight)
        grad = weight.grad.T if turned else weight.grad
        expected = expected_update(grad, blocks=[32, 32, 32], scale="v3")
        torch.testing.assert_close(update, expected.T if turned else expected)


@pytest.mark.parametrize(("attention", "blocks"), [("split", [8] * 3), ("per_head", [4] * 6), ("whole", [24])])
def test_each_part_is_updated_like_a_weight_of_its_own(attention, blocks):
    layer = nn.MultiheadAttention(8, 2).double()
    layer.in_proj_weight.grad = torch.randn_like(layer.in_proj_weight)
    options = {"lr": 1.0, "orthogonalization": "exact", "attention": attention}
    (update,) = updates_of(MuonOptimizer(layer, **options), layer.in_proj_weight)
    torch.testing.assert_close(update, expected_update(layer.in_proj_weight.grad, blocks=blocks))


ONE_MATRIX = {
    "separate projections": nn.ModuleDict({f"{name}_proj": linear(32, 32) for name in "qkvo"}),
    "an MLP that is called in_proj": mlp("in_proj", 128, "out_proj", 128),
    "an input projection": nn.ModuleDict({"in_proj": linear(16, 32)}),
    "parts that are separate already": nn.ModuleDict({f"in_proj_{part}": linear(48, 32) for part in "zab"}),
    "names that only contain the letters": nn.ModuleDict(
        {"main_proj": linear(96, 32), "kva": linear(64, 32), "gate_proj": linear(96, 32), "proj_in": linear(96, 32)}
    ),
    "an MLP": mlp("fc1", 128, "fc2", 128),
    "an MLP that doubles": mlp("fc1", 64, "fc2", 64),
    "two heads": nn.ModuleDict({"a": linear(64, 32), "b": linear(32, 32)}),
    "a net that widens": nn.Sequential(linear(24, 24), linear(48, 24)),
    "shared keys and values": Numbered({"q_proj": linear(64, 32), "kv_proj": linear(16, 32)}, kv_heads=1, head_dim=16),
    "query_key": Numbered({"query_key": linear(32, 32), "value": linear(32, 32)}),
    "a query with a gate": nn.ModuleDict({"q_proj": linear(96, 32), "o_proj": linear(32, 48)}),
    "a compressed part alone": nn.ModuleDict({"kv_a_proj": linear(16, 32), "kv_norm": nn.LayerNorm(16)}),
    "an RNN": nn.RNN(12, 8),
    "keys and values of another width": nn.MultiheadAttention(32, 4, kdim=16, vdim=16),
    "adapters": nn.ModuleDict({"c_attn": nn.ModuleDict({"lora_A": nn.ModuleDict({"default": linear(4, 32)})})}),
}  # fmt: skip


@pytest.mark.parametrize("model", ONE_MATRIX.values(), ids=ONE_MATRIX)
def test_these_are_one_matrix(model):
    for params in (model, model.named_parameters()):
        assert [row.name for row in rows(MuonOptimizer(params, strict=True)).values() if row.fused] == []


def decided(model: nn.Module) -> list[dict]:
    """Return arguments by each of which a user decides how `attn.qkv.weight` is read."""
    body = [("attn.qkv.weight", model["attn"]["qkv"].weight), ("attn.o_proj.weight", model["attn"]["o_proj"].weight)]
    return [
        {"params": model, "overrides": {"attn.qkv.weight": "muon"}},
        {"params": model, "overrides": {"attn.qkv.*": {"view": "matrix"}}},
        {"params": model, "overrides": {"*qkv.weight": {"split_sizes": (32, 32, 32)}}},
        {"params": model, "overrides": {"*qkv.weight": {"num_heads": 12}}},
        {"params": model, "overrides": {"*qkv.weight": "adamw"}},
        {"params": [{"params": body, "num_heads": 2}]},
        {"params": [{"params": body, "rule": "muon"}]},
        {"params": model, "view": "matrix"},
    ]


@pytest.mark.parametrize("number", range(8))
def test_what_the_user_decides_is_neither_marked_nor_asked(number):
    model = nn.ModuleDict({"attn": attention("qkv", 96)})
    optimizer = MuonOptimizer(**decided(model)[number], strict=True)
    assert not any(row.fused for row in optimizer.routing_report().rows)
    assert "looks fused" not in str(optimizer.routing_report())


def test_a_label_decides():
    model = nn.ModuleDict({"attn": attention("qkv", 96)})
    label(model["attn"]["qkv"], "matrix")
    assert not any(row.fused for row in MuonOptimizer(model, strict=True).routing_report().rows)
    parameter = nn.Parameter(torch.randn(8, 32))
    parameter.label = "attn"
    assert not any(row.fused for row in MuonOptimizer([("qkvo", parameter)], strict=True).routing_report().rows)


def test_the_mark_follows_the_options_that_a_group_has_now():
    optimizer = MuonOptimizer(nn.ModuleDict({"attn": attention("qkv", 96, None)}))
    assert rows(optimizer)["attn.qkv.weight"].split_by == THIRDS
    optimizer.param_groups[0]["transposed"] = True
    assert (rows(optimizer)["attn.qkv.weight"].fused, rows(optimizer)["attn.qkv.weight"].split_by) == ("Q, K, V", {})
    optimizer.param_groups[0].update(transposed=None, split_sizes=(64, 32))
    assert rows(optimizer)["attn.qkv.weight"].fused == ""
    optimizer.param_groups[0]["rule"] = "adamw"
    assert rows(optimizer)["attn.qkv.weight"].fused == ""


def test_strict_asks_once_for_all_layers_with_a_pattern_that_matches_them_alone():
    layers = [nn.ModuleDict({"attn": attention("qkv", 96), "mlp": mlp("Wi", 80, "Wo", 40)}) for _ in range(3)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "router": nn.Linear(32, 4)})
    with pytest.raises(ValueError, match="strict") as error:
        create_hybrid_optimizer(model, strict=True)
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert (
        "parameter 'layers.0.attn.qkv.weight' of shape (96, 32) (and 2 more like it) looks fused (Q, K, V)" in lines[0]
    )
    assert "overrides={'layers.*.attn.qkv.weight': {'split_sizes': (32, 32, 32)}}" in lines[0]
    assert "overrides={'layers.*.mlp.Wi.weight': {'split_sizes': (40, 40)}}" in lines[1]
    layers[0]["inner"] = nn.ModuleDict({"attn": nn.ModuleDict({"qkv": linear(48, 16)})})
    with pytest.raises(ValueError, match="strict") as error:
        create_hybrid_optimizer(model, strict=True)
    # "layers.*.attn.qkv.weight" would match the other one too.
    assert "overrides={'layers.0.attn.qkv.weight': {'split_sizes': (32, 32, 32)}}" in str(error.value)


def test_bare_parameters_are_not_marked():
    model = nn.ModuleDict({"attn": attention("qkv", 96)})
    assert not any(row.fused for row in MuonOptimizer(model.parameters(), strict=True).routing_report().rows)


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        (
            "GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "add_cross_attention": True},
            {"attn.c_attn": THIRDS, "crossattention.c_attn": {"split_sizes": (32, 32)}},
        ),
        (
            "Phi3", {"num_key_value_heads": 2},
            {"self_attn.qkv_proj": GROUPED, "mlp.gate_up_proj": {"split_sizes": (40, 40)}},
        ),
        ("GPTNeoX", {}, {"attention.query_key_value": {"num_heads": 12}}),
        (
            "CodeGen", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}, {"attn.qkv_proj": {"num_heads": 12}},
        ),
        ("Mamba", {"state_size": 4}, {"mixer.in_proj": {"split_sizes": (40, 40)}}),
        (
            "ModernBert", {"layer_types": ["full_attention"] * 2},
            {"attn.Wqkv": THIRDS, "mlp.Wi": {"split_sizes": (40, 40)}},
        ),
        ("Llama", {"num_key_value_heads": 2}, {}),
    ],
)  # fmt: skip
def test_models_of_transformers(name, sizes, expected):
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**{**SMALL, **sizes}))
    found = {}
    for row in MuonOptimizer(model, attention="whole").routing_report().rows:
        if row.fused:
            *_, module, layer, _ = row.name.split(".")
            assert found.setdefault(f"{module}.{layer}", row.split_by) == row.split_by
    assert found == expected
