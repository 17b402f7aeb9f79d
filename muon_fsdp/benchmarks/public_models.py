"""Define the parameters of public models, with the names and shapes of their published configurations.

The modules have no `forward`: build them on the meta device, where they need no memory. Weights of experts are stacked
in one parameter, as programs that train with FSDP2 keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn


@dataclass(frozen=True)
class Experts:
    """The sizes of a mixture-of-experts layer."""

    count: int
    intermediate: int
    shared: int = 0  # experts that every token uses; their weights are one MLP of the combined width
    dense_layers: int = 0  # first layers that have an ordinary MLP instead of a mixture
    # Weights are stored (experts, in, out), rows of gate and up alternate in one; experts and the router have biases.
    gpt_oss: bool = False


@dataclass(frozen=True)
class Latent:
    """The sizes of multi-head latent attention, as in DeepSeek-V3."""

    query_rank: int | None  # None: queries are not compressed
    key_value_rank: int = 512
    plain_head_dim: int = 128
    rotary_head_dim: int = 64
    value_head_dim: int = 128


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder with RMSNorm and gated MLPs."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int  # width of ordinary MLPs
    head_dim: int | None = None  # None: hidden / heads
    tied: bool = False  # whether the embedding is also the output head
    attention_bias: bool = False
    sinks: bool = False  # a learned number per head in the softmax
    qk_norm: bool = False
    experts: Experts | None = None
    latent: Latent | None = None


class _Attention(nn.Module):
    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.head_dim = head_dim = sizes.head_dim or sizes.hidden // sizes.heads
        self.num_heads, self.num_key_value_heads = sizes.heads, sizes.key_value_heads  # as `attention=` reads them
        linear = partial(nn.Linear, bias=sizes.attention_bias)
        self.q_proj = linear(sizes.hidden, sizes.heads * head_dim)
        self.k_proj = linear(sizes.hidden, sizes.key_value_heads * head_dim)
        self.v_proj = linear(sizes.hidden, sizes.key_value_heads * head_dim)
        self.o_proj = linear(sizes.heads * head_dim, sizes.hidden)
        if sizes.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        if sizes.sinks:
            self.sinks = nn.Parameter(torch.empty(sizes.heads))


class _LatentAttention(nn.Module):
    def __init__(self, sizes: Decoder, latent: Latent) -> None:
        super().__init__()
        # As `attention=` reads them.
        self.num_heads, self.kv_lora_rank, self.v_head_dim = sizes.heads, latent.key_value_rank, latent.value_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = latent.plain_head_dim, latent.rotary_head_dim
        linear = partial(nn.Linear, bias=False)
        query = sizes.heads * (latent.plain_head_dim + latent.rotary_head_dim)
        if latent.query_rank is None:
            self.q_proj = linear(sizes.hidden, query)
        else:
            self.q_a_proj = linear(sizes.hidden, latent.query_rank)
            self.q_a_layernorm = nn.RMSNorm(latent.query_rank)
            self.q_b_proj = linear(latent.query_rank, query)
        self.kv_a_proj_with_mqa = linear(sizes.hidden, latent.key_value_rank + latent.rotary_head_dim)
        self.kv_a_layernorm = nn.RMSNorm(latent.key_value_rank)
        self.kv_b_proj = linear(latent.key_value_rank, sizes.heads * (latent.plain_head_dim + latent.value_head_dim))
        self.o_proj = linear(sizes.heads * latent.value_head_dim, sizes.hidden)


class _GatedMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)


class _StackedExperts(nn.Module):
    def __init__(self, hidden: int, experts: Experts) -> None:
        super().__init__()
        count, width = experts.count, experts.intermediate
        self.is_transposed, self.is_concatenated = experts.gpt_oss, not experts.gpt_oss  # as Transformers notes it
        if experts.gpt_oss:
            self.gate_up_proj = nn.Parameter(torch.empty(count, hidden, 2 * width))
            self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * width))
            self.down_proj = nn.Parameter(torch.empty(count, width, hidden))
            self.down_proj_bias = nn.Parameter(torch.empty(count, hidden))
        else:
            self.gate_proj = nn.Parameter(torch.empty(count, width, hidden))
            self.up_proj = nn.Parameter(torch.empty(count, width, hidden))
            self.down_proj = nn.Parameter(torch.empty(count, hidden, width))


class _Mixture(nn.Module):
    def __init__(self, hidden: int, experts: Experts) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts.count, bias=experts.gpt_oss)
        self.experts = _StackedExperts(hidden, experts)
        if experts.shared:
            self.shared_experts = _GatedMLP(hidden, experts.shared * experts.intermediate)


class _Layer(nn.Module):
    def __init__(self, sizes: Decoder, number: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden)
        self.self_attn = _LatentAttention(sizes, sizes.latent) if sizes.latent else _Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden)
        mixture = sizes.experts if sizes.experts and number >= sizes.experts.dense_layers else None
        self.mlp = _Mixture(sizes.hidden, mixture) if mixture else _GatedMLP(sizes.hidden, sizes.intermediate)


class DecoderModel(nn.Module):
    """The parameters of a decoder with the given sizes."""

    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(_Layer(sizes, number) for number in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.lm_head.weight = self.embed_tokens.weight


class _GPT2Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.mlp_c_proj = nn.Linear(4 * hidden, hidden)


class GPT2Model(nn.Module):
    """The parameters of GPT-2, with matrices stored as (d_out, d_in) like those of `nn.Linear`."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50257, hidden), nn.Embedding(1024, hidden)
        self.h = nn.ModuleList(_GPT2Layer(hidden) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, 50257, bias=False)
        self.lm_head.weight = self.wte.weight


_LLAMA_3 = 128256
_QWEN_3 = 151936

DECODERS = {
    "llama-3-8b": Decoder(_LLAMA_3, 4096, 32, 32, 8, 14336),
    "llama-3-70b": Decoder(_LLAMA_3, 8192, 80, 64, 8, 28672),
    "llama-3-405b": Decoder(_LLAMA_3, 16384, 126, 128, 8, 53248),
    "llama-3.2-1b": Decoder(_LLAMA_3, 2048, 16, 32, 8, 8192, tied=True),
    "mistral-7b": Decoder(32000, 4096, 32, 32, 8, 14336),
    "mixtral-8x7b": Decoder(32000, 4096, 32, 32, 8, 0, experts=Experts(8, 14336)),
    "qwen3-0.6b": Decoder(_QWEN_3, 1024, 28, 16, 8, 3072, 128, tied=True, qk_norm=True),
    "qwen3-8b": Decoder(_QWEN_3, 4096, 36, 32, 8, 12288, 128, qk_norm=True),
    "qwen3-30b-a3b": Decoder(_QWEN_3, 2048, 48, 32, 4, 0, 128, qk_norm=True, experts=Experts(128, 768)),
    "qwen3-235b-a22b": Decoder(_QWEN_3, 4096, 94, 64, 4, 0, 128, qk_norm=True, experts=Experts(128, 1536)),
    "gpt-oss-20b": Decoder(
        201088, 2880, 24, 64, 8, 0, 64, attention_bias=True, sinks=True, experts=Experts(32, 2880, gpt_oss=True)
    ),
    "gpt-oss-120b": Decoder(
        201088, 2880, 36, 64, 8, 0, 64, attention_bias=True, sinks=True, experts=Experts(128, 2880, gpt_oss=True)
    ),
    "moonlight-16b-a3b": Decoder(
        163840, 2048, 27, 16, 16, 11264, experts=Experts(64, 1408, shared=2, dense_layers=1), latent=Latent(None)
    ),
    "deepseek-v3": Decoder(
        129280, 7168, 61, 128, 128, 18432, experts=Experts(256, 2048, shared=1, dense_layers=3), latent=Latent(1536)
    ),
    "kimi-k2": Decoder(
        163840, 7168, 61, 64, 64, 18432, experts=Experts(384, 2048, shared=1, dense_layers=1), latent=Latent(1536)
    ),
}
GPT2S = {"gpt2-124m": (768, 12), "gpt2-355m": (1024, 24), "gpt2-774m": (1280, 36), "gpt2-1.5b": (1600, 48)}


# What builds each model, by its name.
PUBLIC_MODELS: Mapping[str, Callable[[], nn.Module]] = {
    **{name: partial(GPT2Model, *sizes) for name, sizes in GPT2S.items()},
    **{name: partial(DecoderModel, sizes) for name, sizes in DECODERS.items()},
}


def matrix_shapes(build: Callable[[], nn.Module]) -> list[tuple[int, ...]]:
    """Return the shapes of the weight matrices in the layers of a model, without embeddings, heads and routers.

    Args:
        build: what builds the model, such as `PUBLIC_MODELS["llama-3-8b"]`. It is called on the meta device.
    """
    with torch.device("meta"):
        model = build()
    layers = model.h if isinstance(model, GPT2Model) else model.layers
    assert isinstance(layers, nn.ModuleList)
    return [
        tuple(parameter.shape)
        for name, parameter in layers.named_parameters()
        if parameter.ndim >= 2 and not name.endswith("bias") and ".router." not in name
    ]
