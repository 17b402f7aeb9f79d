"""`attention=`: sizes read from models, updates like those of separate projections, and what travels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer, create_hybrid_optimizer, qk_clip
from muon_fsdp.benchmarks.public_models import PUBLIC_MODELS
from muon_fsdp.training.model import GPT, GPTConfig
from tests import attention_cases as cases
from tests.optimizer_cases import updates_of
from tests.pool import RankPool
from tests.routing_cases import rows
from tests.test_optimizer_views import expected_update

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "first_k_dense_replace": 0,
}  # fmt: skip
SEPARATE = {"q_proj": "4 of 8x32", "k_proj": "2 of 8x32", "v_proj": "2 of 8x32"}
GPT2_SIZES = {"n_embd": 32, "n_head": 4, "n_layer": 1}
# The model, its sizes, and the weights that are several matrices with "split" and with "per_head".
MODELS = {
    "Llama": (GROUPED, {}, SEPARATE),
    "Qwen3": ({**GROUPED, "head_dim": 8}, {}, SEPARATE),
    "Gemma": ({"num_key_value_heads": 1, "head_dim": 16}, {}, {"q_proj": "4 of 16x32"}),
    "GPT2": (GPT2_SIZES, {"c_attn": "3 of 32x32"}, {"c_attn": "12 of 8x32"}),
    "Phi3": (
        GROUPED, {"qkv_proj": "32x32, 2 of 16x32", "gate_up_proj": "2 of 40x32"},
        {"qkv_proj": "8 of 8x32", "gate_up_proj": "2 of 40x32"},
    ),
    "Mixtral": (
        {**GROUPED, "num_local_experts": 4}, {"gate_up_proj": "8 of 40x32", "down_proj": "4 of 32x40"},
        {**SEPARATE, "gate_up_proj": "8 of 40x32", "down_proj": "4 of 32x40"},
    ),
    "DeepseekV3": (
        LATENT,
        {
            "kv_a_proj_with_mqa": "16x32, 4x32", "kv_b_proj": "4 of 8x16, 4 of 6x16", "gate_up_proj": "8 of 12x32",
            "down_proj": "4 of 32x12",
        },
        {
            "q_b_proj": "4 of 12x24", "kv_a_proj_with_mqa": "16x32, 4x32", "kv_b_proj": "4 of 8x16, 4 of 6x16",
            "gate_up_proj": "8 of 12x32", "down_proj": "4 of 32x12",
        },
    ),
    # Q, K and V of one head follow each other: only heads can be cut out.
    "GPTNeoX": ({}, {}, {"query_key_value": "12 of 8x32"}),
    "Bloom": ({"n_head": 4, "n_layer": 1}, {}, {"query_key_value": "12 of 8x32"}),
    "Falcon": ({}, {}, {"query_key_value": "6 of 8x32"}),
    # Rows of gate and up alternate.
    "GptOss": (
        {**GROUPED, "head_dim": 8, "num_local_experts": 4, "layer_types": ["full_attention"]},
        {"gate_up_proj": "4 of 80x32", "down_proj": "4 of 32x40"},
        {**SEPARATE, "gate_up_proj": "4 of 80x32", "down_proj": "4 of 32x40"},
    ),
}  # fmt: skip


def several(optimizer: MuonOptimizer) -> dict[str, str]:
    """Return the matrices of each parameter that is read as several, by the last part of its name."""
    found = rows(optimizer)
    return {name.removesuffix(".weight").rpartition(".")[2]: row.matrices for name, row in found.items()
            if " of " in row.matrices or "," in row.matrices}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name):
    sizes, split, per_head = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Model")(config)
    assert several(MuonOptimizer(model)) == split
    assert several(MuonOptimizer(model, attention="per_head")) == per_head
    stacks = {
        key for key, value in split.items() if key in ("gate_up_proj", "down_proj") and not value.startswith("2 ")
    }
    assert several(MuonOptimizer(model, attention="whole")).keys() == stacks
    assert several(MuonOptimizer(model.named_parameters(), attention="per_head")).keys() == stacks  # nothing is known


@pytest.mark.parametrize(("attention", "blocks"), [("split", [32, 32, 32]), ("per_head", [8] * 12), ("whole", [96])])
def test_gpt2_is_updated_like_separate_projections(attention, blocks):
    """Conv1D stores (in, out), so its parts are columns."""
    model = transformers.GPT2Model(transformers.GPT2Config(**{**SIZES, **GPT2_SIZES})).double()
    weight = model.h[0].attn.c_attn.weight
    weight.grad = torch.randn_like(weight)
    options = {"lr": 1.0, "orthogonalization": "exact", "scale": "v3"}
    (update,) = updates_of(MuonOptimizer(model, attention=attention, **options), weight)
    torch.testing.assert_close(update, expected_update(weight.grad.T, blocks=blocks, scale="v3").T)


def test_phi3_is_updated_like_llama_with_the_same_gradients():
    phi, llama = (
        getattr(transformers, f"{name}Model")(
            getattr(transformers, f"{name}Config")(**{**SIZES, **GROUPED})
        ).double().layers[0]
        for name in ("Phi3", "Llama")
    )  # fmt: skip
    pairs = [
        (phi.self_attn.qkv_proj, [llama.self_attn.q_proj, llama.self_attn.k_proj, llama.self_attn.v_proj]),
        (phi.mlp.gate_up_proj, [llama.mlp.gate_proj, llama.mlp.up_proj]),
    ]
    for fused, separate in pairs:
        for linear in separate:
            linear.weight.grad = torch.randn_like(linear.weight)
        fused.weight.grad = torch.cat([linear.weight.grad for linear in separate])
    options = {"lr": 1.0, "orthogonalization": "exact"}
    for attention in ("split", "per_head"):
        for fused, separate in pairs:
            (together,) = updates_of(MuonOptimizer(phi, attention=attention, **options), fused.weight)
            alone = updates_of(
                MuonOptimizer(llama, attention=attention, **options), *[linear.weight for linear in separate]
            )
            torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [MuonOptimizer, FSDPMuonOptimizer, SpectralSphereOptimizer, create_hybrid_optimizer])
def test_every_optimizer_reads_the_heads_of_our_model(make):
    model = GPT(GPTConfig(num_layers=1, num_heads=4, d_model=16, sequence_length=8))
    assert several(make(model)) == {}
    assert several(make(model, attention="per_head")) == dict.fromkeys("qkv", "4 of 4x16")
    with pytest.raises(ValueError, match="attention"):
        make(model, attention="heads")


class QKVLinear(nn.Module):
    """torchtitan's projection: Q, K and V of the first group of heads, then of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.wqkv = 8, nn.Linear(32, 64, bias=False)


class Titan(nn.Module):
    """Attention whose model notes the numbers of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_heads=4, n_kv_heads=2)
        self.attention = nn.ModuleDict({"qkv_linear": QKVLinear(), "wo": nn.Linear(32, 32, bias=False)})


def test_weights_by_group_of_heads_are_not_split_into_q_k_and_v():
    model = Titan()
    optimizer = MuonOptimizer(model)
    assert several(optimizer) == {}
    row = rows(optimizer)["attention.qkv_linear.wqkv.weight"]
    assert (row.fused, row.split_by) == ("Q, K, V by head", {"num_heads": 8})
    assert several(MuonOptimizer(Titan(), attention="per_head")) == {"wqkv": "8 of 8x32"}
    with pytest.raises(ValueError, match=r"QKVLinear does not store 'wqkv' as rows of Q, then K, then V"):
        qk_clip(optimizer, {"attention.qkv_linear": [1.0] * 4})


class Fused(nn.Module):
    """Eight heads, whose size and groups nothing tells."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.num_heads, self.wqkv = 8, nn.Linear(32, outputs)


def test_queries_that_may_be_grouped_are_not_split():
    """192 rows are 8 heads of Q, K and V with 8 rows each, or 8 of Q and 2 of K and V with 16 rows."""
    model = nn.ModuleDict({"attn": Fused(96)})
    assert several(MuonOptimizer(model)) == {"wqkv": "3 of 32x32"}
    model = nn.ModuleDict({"attn": Fused(192)})
    optimizer = MuonOptimizer(model, attention="per_head")
    assert several(optimizer) == {}
    with pytest.raises(ValueError, match="the number of key heads is not known"):
        qk_clip(optimizer, {"attn": [1.0] * 8})


class Varied:
    """A configuration that refuses what its layers have different values of, as those of Transformers do."""

    num_attention_heads, head_dim = 4, 8

    @property
    def num_key_value_heads(self) -> int:
        raise RuntimeError("'num_key_value_heads' is a per-layer attribute")


def test_a_configuration_may_refuse_what_differs_between_layers():
    sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    model = nn.ModuleDict({"attn": nn.ModuleDict({name: nn.Linear(32, size) for name, size in sizes.items()})})
    model.config = Varied()
    assert several(MuonOptimizer(model, attention="per_head")) == {"q_proj": "4 of 8x32"}
    model["attn"].num_key_value_groups = 2
    assert several(MuonOptimizer(model, attention="per_head")) == SEPARATE


class Own(nn.Module):
    """A module that says how its weights are cut."""

    def __init__(self, sizes: object) -> None:
        super().__init__()
        self.mixed, self.other, self.sizes = nn.Linear(8, 20), nn.Parameter(torch.randn(6, 8)), sizes

    def muon_split_sizes(self) -> object:
        return self.sizes


def test_a_module_says_sizes_itself():
    model = nn.ModuleDict({"own": Own({"mixed.weight": (8, 8, 4), "other": [2, 4]})})
    for attention in ("split", "per_head"):
        optimizer = MuonOptimizer(model, attention=attention, strict=True)
        assert several(optimizer) == {"mixed": "2 of 8x8, 4x8", "other": "2x8, 4x8"}
    assert several(MuonOptimizer(model, attention="whole")) == {}
    assert several(MuonOptimizer(model, overrides={"own.mixed.weight": {"view": "matrix"}})) == {"other": "2x8, 4x8"}
    one = nn.MultiheadAttention(8, 2)
    one.muon_split_sizes = lambda: {"in_proj_weight": (24,)}
    assert several(MuonOptimizer(one, strict=True)) == {}


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ([("mixed.weight", (8, 12))], TypeError, r"Own 'own': muon_split_sizes\(\) must return a dict"),
        ({"mixed": (8, 8)}, ValueError, r"sizes \(8, 8\) for 'mixed': .* its 20 output features"),
        ({"mixed.weight": (8, 8)}, ValueError, r"Own 'own': .*sizes \(8, 8\) .* add up to its 20 output features"),
        ({"mixed.weight": (24, -4)}, ValueError, "positive integers"),
        ({"missing": (8, 8)}, ValueError, "names 'missing', which is no matrix of the module"),
    ],
)
def test_wrong_sizes_of_a_module_raise(sizes, error, text):
    with pytest.raises(error, match=text):
        MuonOptimizer(nn.ModuleDict({"own": Own(sizes)}))


def test_a_checkpoint_with_other_matrices_says_what_to_pass():
    torch.manual_seed(0)
    models = [nn.MultiheadAttention(8, 2) for _ in range(2)]
    whole = SpectralSphereOptimizer(models[0], attention="whole")
    models[0].in_proj_weight.grad = torch.randn(24, 8)
    whole.step()
    saved = whole.state_dict()
    with pytest.raises(RuntimeError, match=r"in_proj_weight: saved .* pass attention='whole'"):
        SpectralSphereOptimizer(models[1]).load_state_dict(saved)
    SpectralSphereOptimizer(models[1], attention="whole").load_state_dict(saved)


# ------------------------------------------------------------------------------------------------------------- on ranks


def gathered(attention: str, world_size: int, **layout: object) -> int:
    """Return the bytes that all ranks receive in gathers for `in_proj_weight` of 3 x 48 rows, 4 heads."""
    model = nn.MultiheadAttention(48, 4, bias=False)
    model.out_proj.weight.requires_grad_(False)
    report = MuonOptimizer(model, attention=attention, strategy="owner").plan_report(world_size=world_size, **layout)
    return sum(row.gather_bytes for row in report.rows)


def test_what_lies_whole_on_a_rank_does_not_travel():
    assert gathered("split", 3) == 0  # a projection per rank
    assert gathered("per_head", 12) == gathered("per_head", 4) == 0  # heads of 12 rows
    assert gathered("split", 3, mesh=(1, 3)) == 0
    size = 48 * 48 * 2  # bytes of a projection in bfloat16, or float32 on a CPU
    assert gathered("split", 2) in (size // 2, size)  # one of the three lies on two ranks
    assert gathered("whole", 3) >= 2 * size
    assert gathered("split", 4) > 0


@pytest.mark.parametrize(
    ("world_size", "mesh", "dim", "rule", "attention"),
    [
        (2, (2,), 0, "muon", "split"),
        (2, (2,), 0, "normuon", "per_head"),
        (3, (3,), 0, "normuon", "split"),
        (3, (3,), 1, "muon", "per_head"),
        (4, (2, 2), 0, "normuon", "split"),
        (4, (4,), 0, "normuon", "per_head"),
    ],
)
def test_shards_follow_the_reference(ranks: RankPool, world_size, mesh, dim, rule, attention):
    ranks.run(world_size, cases.follow_reference, mesh, dim, rule, attention)


def test_the_plan_has_rows_for_heads():
    """The output projection has the shape of the queries, and is another matrix."""
    with torch.device("meta"):
        model = transformers.LlamaModel(transformers.LlamaConfig(**{**SIZES, **GROUPED}))
    report = MuonOptimizer(model, attention="per_head").plan_report(world_size=2)
    rows_of = {row.matrices: row for row in report.rows if row.shape in ((32, 32), (16, 32))}
    assert rows_of.keys() == {"4 of 8x32", "2 of 8x32", "32x32"}
    assert rows_of["4 of 8x32"].num_matrices == 4
    assert rows_of["4 of 8x32"].flops == pytest.approx(2 * rows_of["2 of 8x32"].flops / 2)  # K and V share a row
    assert rows_of["4 of 8x32"].gather_bytes == 0 < rows_of["32x32"].gather_bytes
    assert "4 of 8x32" in str(report)


@pytest.mark.parametrize(("name", "heads"), [("llama-3-8b", "32 of 128x4096"), ("deepseek-v3", "128 of 192x1536")])
def test_public_models_tell_their_heads(name, heads):
    with torch.device("meta"):
        model = PUBLIC_MODELS[name]()
    report = MuonOptimizer(model, attention="per_head").plan_report(world_size=8)
    assert heads in {row.matrices for row in report.rows}


# ------------------------------------------------------------------------- numbers of the module and of those around it


class Projections(nn.ModuleDict):
    """Layers by name, and numbers that their module notes."""

    def __init__(self, rows_of: dict[str, int], width: int, **numbers: int) -> None:
        super().__init__({name: nn.Linear(width, rows, bias=False) for name, rows in rows_of.items()})
        self.__dict__.update(numbers)


def tower(attention: nn.Module, **config: int) -> nn.Module:
    """Return a model with attention two levels down, whose only configuration is at the top."""
    model = nn.ModuleDict({"tower": nn.ModuleDict({"attn": attention})})
    model.config = SimpleNamespace(**config)
    return model


@pytest.mark.parametrize("has_dropout", [False, True])
def test_numbers_of_heads_belong_together(has_dropout):
    """The attention of a tower for images says how many heads it has, and the configuration is that of the text."""
    own = Projections({"qkv_proj": 216, "out_proj": 72}, 72, num_heads=6)
    if has_dropout:
        own["out_proj"] = nn.Sequential(own["out_proj"], nn.Dropout(0.0))
    model = tower(own, num_attention_heads=8, num_key_value_heads=3, head_dim=16)
    optimizer = MuonOptimizer(model)
    assert several(optimizer)["qkv_proj"] == "3 of 72x72"
    assert several(MuonOptimizer(model, attention="per_head"))["qkv_proj"] == "18 of 12x72"
    before = own["qkv_proj"].weight.detach().clone()
    qk_clip(optimizer, {"tower.attn": [400.0, *[1.0] * 5]})
    changed = (own["qkv_proj"].weight != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [*range(12), *range(72, 84)]


@pytest.mark.parametrize(
    ("own", "config", "expected"),
    [
        (  # linear attention in a model whose configuration describes its full attention
            Projections(
                {"q_proj": 48, "k_proj": 48, "v_proj": 48}, 64,
                num_k_heads=4, num_v_heads=2, head_k_dim=12, head_v_dim=24,
            ),
            {"num_attention_heads": 8},
            {"q_proj": "4 of 12x64", "k_proj": "4 of 12x64", "v_proj": "2 of 24x64"},
        ),
        (  # one number of heads for all three
            Projections({"q_proj": 64, "k_proj": 64, "v_proj": 128}, 64, num_heads=4, head_k_dim=16, head_v_dim=32),
            {},
            {"q_proj": "4 of 16x64", "k_proj": "4 of 16x64", "v_proj": "4 of 32x64"},
        ),
        (  # layers with other groups than the configuration's
            Projections(
                {"q_proj": 64, "k_proj": 16, "v_proj": 8}, 64, head_dim=8, v_head_dim=4, num_key_value_groups=4
            ),
            {"num_attention_heads": 8, "num_key_value_heads": 4},
            {"q_proj": "8 of 8x64", "k_proj": "2 of 8x64", "v_proj": "2 of 4x64"},
        ),
        (Projections({"q_proj": 64}, 64, num_heads=4, head_dim=16), {}, {"q_proj": "4 of 16x64"}),
        (  # the size of values is that of other layers
            Projections({"q_proj": 64, "k_proj": 64, "v_proj": 64}, 64, num_heads=4, head_dim=16),
            {"v_head_dim": 8}, dict.fromkeys(("q_proj", "k_proj", "v_proj"), "4 of 16x64"),
        ),
        (Projections({"q_proj": 64}, 64, num_heads=4), {}, {}),  # no size of heads, and nothing beside it
        (
            Projections({"c_q": 64, "c_k": 32, "c_v": 32}, 64, n_head=4, n_kv_head=2),
            {}, {"c_q": "4 of 16x64", "c_k": "2 of 16x64", "c_v": "2 of 16x64"},
        ),
    ],
)  # fmt: skip
def test_heads_of_projections(own, config, expected):
    assert several(MuonOptimizer(tower(own, **config), attention="per_head")) == expected


class Told(Projections):
    """A module that may tell how its weight is divided."""

    def __init__(self, sizes: object) -> None:
        super().__init__({"fused": 32}, 16)
        self.sizes = sizes

    def muon_split_sizes(self) -> dict[str, object]:
        return {} if self.sizes == () else {"fused.weight": self.sizes}


@pytest.mark.parametrize("sizes", [((16, 8, 8), ()), ((), (16, 8, 8)), ((16, 8, 8), (16, 8, 8))])
def test_a_shared_weight_is_divided_as_one_of_its_modules_tells(sizes):
    model = nn.ModuleDict({"a": Told(sizes[0]), "b": Told(sizes[1])})
    model["b"]["fused"].weight = model["a"]["fused"].weight
    assert several(MuonOptimizer(model)) == {"fused": "16x16, 2 of 8x16"}


def test_sizes_that_contradict_each_other_or_are_none_are_errors():
    model = nn.ModuleDict({"a": Told((16, 8, 8)), "b": Told((20, 12))})
    model["b"]["fused"].weight = model["a"]["fused"].weight
    with pytest.raises(
        ValueError, match=r"Told 'b': .* \(20, 12\) .* shares this weight, \(16, 8, 8\): return the same"
    ):
        MuonOptimizer(model)
    with pytest.raises(ValueError, match=r"returns the sizes None for 'fused.weight': they must be positive integers"):
        MuonOptimizer(nn.ModuleDict({"a": Told(None)}))
