"""`qk_clip`: against a float64 reference, on one device and on ranks, for real models, and its errors."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer, qk_clip
from muon_fsdp.linalg.rounding import with_remainder
from muon_fsdp.parameters.attention import path_to, read_attention
from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.config import TrainConfig
from muon_fsdp.training.logits import LogitClip
from muon_fsdp.training.model import largest_logits
from muon_fsdp.training.parallel import World
from tests import qk_clip_cases as cases
from tests.pool import RankPool
from tests.program_cases import finish, flags
from tests.training_cases import TINY, surroundings, text_fixture, tiny_gpt  # noqa: F401

HEADS, SIZE = cases.HEADS, cases.SIZE


@pytest.mark.parametrize("given", ["lists", "tensors"])
def test_follows_the_reference(given):
    model = cases.Model().double()
    before = cases.whole(model)
    logits: dict[str, Any] = cases.LOGITS
    if given == "tensors":
        logits = {name: torch.tensor(values, dtype=torch.float64) for name, values in logits.items()}
    gammas = qk_clip(MuonOptimizer(model), logits, threshold=cases.THRESHOLD)
    assert gammas["latent"] == [1.0, 0.4, 0.01, 0.8]
    expected = cases.reference(before)
    for name, weight in cases.whole(model).items():
        np.testing.assert_allclose(weight, expected[name], rtol=1e-14, err_msg=name)


def test_half_precision_is_rounded_once():
    model = cases.Model().bfloat16()
    before = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    qk_clip(MuonOptimizer(model), cases.LOGITS, threshold=cases.THRESHOLD)
    for name, weight in cases.reference(before).items():
        found = dict(model.named_parameters())[name].detach()
        assert torch.equal(found, torch.from_numpy(weight).bfloat16()), name


def test_what_rounding_dropped_is_scaled_too():
    model = cases.Model().bfloat16()
    optimizer = MuonOptimizer(model, rounding="remainder")
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()

    def kept() -> dict[str, np.ndarray]:
        return {
            name: with_remainder(p.detach(), optimizer.state[p]["weight_remainder"]).double().numpy()
            for name, p in model.named_parameters()
        }

    expected = cases.reference(kept())
    qk_clip(optimizer, cases.LOGITS, threshold=cases.THRESHOLD)
    for name, weight in kept().items():
        np.testing.assert_allclose(weight, expected[name], rtol=2**-15, atol=1e-8, err_msg=name)


def test_nothing_changes_at_the_threshold_or_without_logits():
    model = cases.Model()
    before = cases.whole(model)
    optimizer = MuonOptimizer(model)
    qk_clip(optimizer, {"separate": [100.0] * HEADS, "latent": [-torch.inf] * HEADS})
    assert qk_clip(optimizer, {}) == {}
    for name, weight in cases.whole(model).items():
        assert np.array_equal(weight, before[name]), name


def latent_logits(module: cases.Latent, x: torch.Tensor) -> torch.Tensor:
    """Return the largest logit of each head."""
    nope, rope = cases.NOPE, cases.ROPE
    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))).view(len(x), HEADS, nope + rope)
    latent, shared = module.kv_a_proj_with_mqa(x).split([cases.LATENT, rope], dim=-1)
    k = module.kv_b_proj(module.kv_a_layernorm(latent)).view(len(x), HEADS, -1)[..., :nope]
    logits = torch.einsum("qhd,khd->hqk", q[..., :nope], k) + torch.einsum("qhd,kd->hqk", q[..., nope:], shared)
    return (logits / (nope + rope) ** 0.5).amax(dim=(1, 2))


def grouped_logits(module: cases.Separate, x: torch.Tensor) -> torch.Tensor:
    q = module.q_proj(x).view(len(x), HEADS, SIZE)
    k = module.k_proj(x).view(len(x), cases.KV_HEADS, SIZE).repeat_interleave(HEADS // cases.KV_HEADS, dim=1)
    return (torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5).amax(dim=(1, 2))


@pytest.mark.parametrize(("name", "measure"), [("latent", latent_logits), ("separate", grouped_logits)])
@torch.no_grad()
def test_logits_are_at_most_the_threshold_afterwards(name, measure):
    model = cases.Model().double()
    x = 5 * torch.randn(30, cases.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module = getattr(model, name)
    before = measure(module, x)
    threshold = float(before.median())
    gammas = qk_clip(MuonOptimizer(model), {name: before}, threshold=threshold)[name]
    after = measure(module, x)
    torch.testing.assert_close(after, before * torch.tensor(gammas, dtype=torch.float64), rtol=1e-12, atol=0.0)
    assert after.max() <= threshold * (1 + 1e-12) < before.max()


def published(kind: str) -> tuple[nn.Module, str]:
    """Make a model of Transformers with one layer; return it and the name of its attention."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
    latent = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 3,
              "num_key_value_heads": 4, "first_k_dense_replace": 1}  # fmt: skip
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=4, attn_implementation="eager")
        return transformers.GPT2LMHeadModel(config), "transformer.h.0.attn"
    names = {"llama": "Llama", "qwen2": "Qwen2", "phi3": "Phi3", "deepseek_v3": "DeepseekV3", "gemma": "Gemma"}
    make = getattr(transformers, f"{names[kind]}Config")
    further = latent if kind == "deepseek_v3" else {"head_dim": 6} if kind == "gemma" else {}
    config = make(**sizes | further, attn_implementation="eager")
    return getattr(transformers, f"{names[kind]}ForCausalLM")(config), "model.layers.0.self_attn"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "phi3", "gemma", "deepseek_v3"])
@torch.no_grad()
def test_logits_of_published_models_are_multiplied_by_gamma(kind):
    """Softmax shows logits up to a constant per row: log p becomes gamma log p plus a constant."""
    model, name = published(kind)
    model = model.double().eval()
    for p in model.parameters():
        p.mul_(3.0 if p.ndim > 1 else 1.0).add_(0.1 * torch.randn_like(p))
    tokens = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(2))

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        seen: list[torch.Tensor] = []
        handle = model.get_submodule(name).register_forward_hook(lambda module, args, output: seen.append(output[0]))
        attentions = model(tokens, output_attentions=True).attentions[0]
        handle.remove()
        return attentions, seen[0]

    before, _ = run()
    gammas = qk_clip(MuonOptimizer(model), {name: [400.0, 100.0, 50.0, 800.0]})[name]
    expected = [0.25, 0.25, 0.125, 0.125] if kind in ("llama", "qwen2", "phi3", "gemma") else [0.25, 1.0, 1.0, 0.125]
    assert gammas == expected
    after, _ = run()
    powers = before ** torch.tensor(expected, dtype=torch.float64)[:, None, None]
    powers = torch.where(before > 0, powers, 0.0)
    torch.testing.assert_close(after, powers / powers.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7)
    assert (before - after).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("layout", "world_size", "options"),
    [
        ("fsdp", 2, {}),
        ("fsdp", 3, {"overlap": "backward"}),
        ("fsdp_columns", 2, {}),
        ("hsdp", 4, {}),
        ("tp", 2, {}),
        ("fsdp_tp", 4, {}),
        ("ddp", 2, {"shard_state": True}),
    ],
)
def test_follows_the_reference_on_ranks(ranks: RankPool, layout, world_size, options):
    ranks.run(world_size, cases.clip_on_ranks, layout, options)


def test_a_mistake_of_one_rank_is_an_error_on_all(ranks: RankPool):
    errors, *others = ranks.run(3, cases.all_raise)
    assert others == [errors, errors]
    expected = [
        "no module 'sepparate'",
        "module 'latent' has 4 query heads.*not of a tensor-parallel shard.*on rank 1",
        r"rank 0 alone has 'latent \(4 heads\)', rank 1 alone has none",
        "head 1 of module 'separate' is NaN or infinite",
        "head 3 of module 'latent' is NaN or infinite",
        "on rank 1",
        "rank 0 alone has 'threshold 10.0', rank 1 alone has 'threshold 11.0'",
    ]
    for text, pattern in zip(errors, expected, strict=True):
        assert re.search(pattern, text), text


def test_one_reduction_for_all_modules(ranks: RankPool):
    assert ranks.run(2, cases.counted_reductions) == [1, 1]


def test_weights_that_fsdp_has_gathered_are_clipped(ranks: RankPool):
    ranks.run(2, cases.clip_after_validation)


def test_models_with_very_many_heads(ranks: RankPool):
    ranks.run(2, cases.more_heads_than_one_reduction)


def with_norm() -> nn.Module:
    model = cases.Model()
    model.separate.q_norm = nn.RMSNorm(SIZE)
    return model


def with_norm_of_another_name() -> nn.Module:
    model = cases.Model()
    model.separate.norm_q = nn.RMSNorm(SIZE)
    return model


def with_flag() -> nn.Module:
    model = cases.Model()
    model.separate.config.qk_layernorm = True
    return model


def without_heads() -> nn.Module:
    model = cases.Model()
    del model.separate.config
    return model


def with_other_size() -> nn.Module:
    model = cases.Model()
    model.separate.head_dim = 6
    return model


def without_kv_heads() -> nn.Module:
    model = cases.Model()
    del model.separate.config.num_key_value_heads
    return model


def with_adapter() -> nn.Module:
    model = cases.Model()
    model.separate.q_proj.lora_A = nn.Linear(cases.WIDTH, 2)
    return model


def with_shared_weight() -> nn.Module:
    model = cases.Model()
    model.other = cases.Separate()
    model.other.k_proj.weight = model.separate.k_proj.weight
    return model


def frozen() -> nn.Module:
    model = cases.Model()
    model.separate.k_proj.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "name", "text"),
    [
        (with_norm, "separate", "module 'separate' normalizes queries or keys"),
        (with_norm_of_another_name, "separate", "module 'separate' normalizes queries or keys"),
        (with_flag, "separate", "module 'separate' normalizes queries or keys"),
        (without_heads, "separate", "heads of module 'separate': the number of heads is not known.*'num_heads'"),
        (with_other_size, "separate", "queries has 12 rows, which are not 4 heads of size 6"),
        (without_kv_heads, "separate", "the number of key heads is not known"),
        (with_adapter, "separate", r"'q_proj' \(Linear\) is not one weight.*Merge adapters"),
        (frozen, "separate", "parameter 'separate.k_proj.weight' is not in the optimizer"),
        (cases.Model, "separate.q_proj", "no projections of queries and keys with known names"),
        (cases.Model, "blocks.0.latent", "no module 'blocks.0.latent'; modules with such a name are 'latent'"),
    ],
)
def test_what_cannot_be_clipped_is_an_error(make, name, text):
    model = make()
    before = cases.whole(model)
    with pytest.raises(ValueError, match=text):
        qk_clip(MuonOptimizer(model), {name: [400.0] * HEADS})
    for each, weight in cases.whole(model).items():
        assert np.array_equal(weight, before[each]), each


def test_wrong_arguments_are_named():
    model = cases.Model()
    shared = with_shared_weight()
    good = {"separate": [400.0] * HEADS}
    with pytest.raises(ValueError, match="threshold must be a positive number, got 0"):
        qk_clip(MuonOptimizer(model), good, threshold=0)
    with pytest.raises(ValueError, match="build it from the model"):
        qk_clip(MuonOptimizer(model.named_parameters()), good)
    with pytest.raises(ValueError, match=r"rule 'spectral_sphere' of parameter 'separate.q_proj.weight'"):
        qk_clip(MuonOptimizer(model, rule="spectral_sphere"), good)
    with pytest.raises(TypeError, match="got SGD"):
        qk_clip(torch.optim.SGD(model.parameters()), good)
    with pytest.raises(TypeError, match=r"got SimpleNamespace\. Pass the optimizer that it wraps"):
        qk_clip(SimpleNamespace(optimizer=None), good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is the weight of module 'other' too"):
        qk_clip(MuonOptimizer(shared), {**good, "other": [1.0] * HEADS})


@pytest.mark.parametrize("given", [None, ["a"] * HEADS, [1 + 2j] * HEADS, {0: 1.0}, 4.0, [400.0]])
def test_logits_that_are_no_numbers_are_named(given):
    model = cases.Model()
    with pytest.raises(ValueError, match=f"module 'separate' has {HEADS} query heads, and max_logits has .*: pass one"):
        qk_clip(MuonOptimizer(model), {"separate": given})


def test_large_logits_in_lists_keep_their_precision():
    model = cases.Model().double()
    assert qk_clip(MuonOptimizer(model), {"separate": [1e39] * HEADS})["separate"] == pytest.approx([1e-37] * HEADS)


def test_fused_rows_by_head_are_refused():
    class GPTNeoXAttention(cases.Fused):
        pass

    model = nn.ModuleDict({"attention": GPTNeoXAttention()})
    with pytest.raises(ValueError, match="does not store 'qkv_proj' as rows of Q, then K, then V"):
        read_attention(path_to(model, "attention"))


class Qkv(nn.Module):
    """timm's name, under which others store Q, K and V by head."""

    def __init__(self, sizes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.sizes = HEADS, SIZE, sizes
        self.qkv = nn.Linear(cases.WIDTH, 3 * HEADS * SIZE)

    def muon_split_sizes(self) -> dict[str, tuple[int, ...]]:
        return self.sizes


def test_the_order_of_qkv_must_be_told():
    model = nn.ModuleDict({"attn": Qkv({})})
    with pytest.raises(ValueError, match=r"if Qkv stores Q first, .* returns {'qkv.weight': \(12, 12, 12\)}"):
        qk_clip(MuonOptimizer(model), {"attn": [400.0] * HEADS})
    model = nn.ModuleDict({"attn": Qkv({"qkv.weight": (12, 12, 12)})})
    before = model["attn"].qkv.weight.detach().clone()
    qk_clip(MuonOptimizer(model), {"attn": [400.0] * HEADS})
    torch.testing.assert_close(model["attn"].qkv.weight, torch.cat([before[:24] * 0.5, before[24:]]))


def refuse(own: nn.Module, text: str) -> None:
    """Expect that `qk_clip` refuses a module of attention, with this text."""
    model = nn.ModuleDict({"attn": own})
    with pytest.raises(ValueError, match=text):
        qk_clip(MuonOptimizer(model), {"attn": [400.0] * HEADS})


def test_an_order_that_the_module_tells_counts_under_any_name():
    own = cases.Fused()
    own.muon_split_sizes = lambda: {"qkv_proj.weight": (cases.KV_HEADS * SIZE, cases.KV_HEADS * SIZE, HEADS * SIZE)}
    refuse(own, r"muon_split_sizes\(\) of Fused cuts 'qkv_proj' into .* not Q, then K, then V")


def test_a_weight_of_queries_and_keys_would_be_scaled_twice():
    own = cases.Separate()
    own.num_key_value_heads = HEADS
    own.k_proj = nn.Linear(cases.WIDTH, HEADS * SIZE)
    own.k_proj.weight = own.q_proj.weight
    refuse(own, r"q_proj\.weight and k_proj\.weight of module 'attn' are one weight")


class Norms(cases.Separate):
    """Attention that normalizes queries and keys, if told so, as its configuration says for all layers."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.config.use_qk_norm = True
        if has_norm:
            self.qk_norm = nn.LayerNorm(SIZE)


def test_a_layer_without_the_norms_of_its_class_is_clipped():
    model = nn.ModuleDict({"normed": Norms(True), "plain": Norms(False)})
    optimizer = MuonOptimizer(model)
    with pytest.raises(ValueError, match="module 'normed' normalizes queries or keys"):
        qk_clip(optimizer, {"normed": [400.0] * HEADS})
    assert qk_clip(optimizer, {"plain": [400.0] * HEADS}) == {"plain": [0.25] * HEADS}
    refuse(Norms(False), "module 'attn' normalizes")  # nothing shows that its class makes modules of norms


def test_norms_of_an_indexer_are_not_those_of_attention():
    """As in DeepSeek-V3.2, whose indexer has projections of its own."""
    own = cases.Latent()
    own.indexer = nn.ModuleDict({"wk": nn.Linear(cases.WIDTH, SIZE), "k_norm": nn.LayerNorm(SIZE)})
    model = nn.ModuleDict({"attn": own})
    assert qk_clip(MuonOptimizer(model), {"attn": [400.0] * HEADS}) == {"attn": [0.25] * HEADS}


@pytest.mark.parametrize("what", ["inner", "scale"])
def test_norms_in_a_module_of_their_own_and_cosines_are_recognized(what):
    own = cases.Separate()
    if what == "inner":
        own.norm = nn.ModuleDict({"query_norm": nn.LayerNorm(SIZE), "key_norm": nn.LayerNorm(SIZE)})
    else:
        own.logit_scale = nn.Parameter(torch.zeros(HEADS, 1, 1))
    refuse(own, "module 'attn' normalizes queries or keys")


@pytest.mark.parametrize("chunk", [3, 256])
def test_the_training_model_measures_causal_logits(chunk):
    q, k = torch.randn(2, 3, 4, 10, 6, generator=torch.Generator().manual_seed(0))  # (B, heads, T, head_dim) each
    expected = [
        max(float(q[b, h, i] @ k[b, h, j]) for b in range(3) for i in range(10) for j in range(i + 1)) / 6**0.5
        for h in range(4)
    ]
    torch.testing.assert_close(largest_logits(q, k, chunk), torch.tensor(expected))


def test_the_training_model_is_clipped():
    gpt = tiny_gpt(replace(TINY, qk_norm=False))
    clip = LogitClip(gpt, TINY.num_heads, 0.5, World(torch.device("cpu"), torch.float32))
    optimizer = MuonOptimizer(gpt)
    tokens = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(0))
    attention = gpt.blocks[0].attention
    with torch.no_grad():
        gpt(tokens)
    assert attention.largest_logits is None
    for part in tokens.chunk(2):  # micro-batches
        gpt(part)
    before = attention.largest_logits
    clip(optimizer)
    gpt(tokens)
    torch.testing.assert_close(attention.largest_logits, before.clamp(max=0.5))
    assert before.max() > 0.5


def test_the_training_program_clips_alike_on_ranks(ranks: RankPool, text: Path, tmp_path):
    options = ("--no-qk-norm", "--micro-batch-size", "2")
    free = finish(ranks, 1, flags(text, tmp_path / "free", 4, *options))
    options = (*options, "--qk-clip", "0.3")
    expected = finish(ranks, 1, flags(text, tmp_path / "one", 4, *options))
    assert abs(free[-1] - expected[-1]) > 1e-3
    for layout in (("--fsdp",), ("--tp", "2"), ("--ddp",)):
        found = finish(ranks, 2, flags(text, tmp_path / layout[0], 4, *options, *layout))
        np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"qk_clip": 100.0}, "pass --no-qk-norm too"),
        ({"qk_clip": 100.0, "qk_norm": False, "optimizer": "sso"}, "does not work with --optimizer spectral_sphere"),
        ({"qk_clip": -1.0, "qk_norm": False}, "--qk-clip must be positive"),
    ],
)
def test_mistakes_in_flags_are_named(options, text):
    with pytest.raises(ConfigError, match=text):
        TrainConfig(**options)
