"""Define a compact decoder-only GPT: RMSNorm, rotary or learned positions, causal attention, GELU MLP."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and options of a `GPT`; values that cannot work raise a ValueError."""

    num_layers: int
    num_heads: int
    d_model: int
    sequence_length: int
    vocab_size: int = 256
    mlp_ratio: int = 4
    qk_norm: bool = True
    positions: Literal["rope", "learned"] = "rope"
    rope_base: float = 10_000.0
    tie_embeddings: bool = False  # whether head and embedding share their weight
    scale_embedding: bool = False  # whether the embedding's output is multiplied by sqrt(d_model)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "d_model", "sequence_length", "vocab_size", "mlp_ratio"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"GPTConfig.{name} must be a positive integer, got {value!r}")
        if self.positions not in ("rope", "learned"):
            raise ValueError(f"GPTConfig.positions must be 'rope' or 'learned', got {self.positions!r}")
        if not self.rope_base > 0:
            raise ValueError(f"GPTConfig.rope_base must be positive, got {self.rope_base!r}")
        if self.d_model % self.num_heads != 0:
            raise ValueError(
                f"GPTConfig.d_model ({self.d_model}) must be a multiple of num_heads ({self.num_heads}): "
                "each head uses an equal slice of the model width"
            )
        if self.positions == "rope" and self.head_dim % 2 != 0:
            raise ValueError(
                f"GPTConfig.d_model / num_heads must be even, got {self.head_dim}: rotary positions rotate pairs of "
                "channels; change d_model or num_heads, or pass positions='learned'"
            )

    @property
    def head_dim(self) -> int:
        """Return the number of channels of one attention head."""
        return self.d_model // self.num_heads

    @property
    def embedding_factor(self) -> float:
        """Return what the embedding's output is multiplied by."""
        return float(self.d_model**0.5) if self.scale_embedding else 1.0


# GPT-2's sizes, and its 50,257 tokens rounded up to a multiple of 64: 124M parameters.
_GPT2 = GPTConfig(num_layers=12, num_heads=12, d_model=768, sequence_length=1024, vocab_size=50304,
                  tie_embeddings=True, scale_embedding=True)  # fmt: skip
# d_model differs from vocab_size on purpose: if they were equal, the head would have the shape of a hidden matrix, and
# a reader could not see from shapes alone which matrices Muon orthogonalizes.
PRESETS: dict[str, GPTConfig] = {
    "demo": GPTConfig(num_layers=4, num_heads=4, d_model=160, sequence_length=128),  # heads for --tp 2 and --tp 4
    "small": GPTConfig(num_layers=6, num_heads=6, d_model=384, sequence_length=256),  # 10.8M
    "gpt2": _GPT2,
    "medium": replace(_GPT2, num_layers=24, num_heads=16, d_model=1024),  # 354M
}


def preset(name: str) -> GPTConfig:
    """Return the configuration with this name; an unknown name raises a ValueError that lists all names."""
    if name not in PRESETS:
        raise ValueError(f"unknown model preset {name!r}; choose one of: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


class RMSNorm(nn.RMSNorm):
    """An nn.RMSNorm that computes in the precision of its input, because torch's is slow on bfloat16 under autocast."""

    def forward(self, x: Tensor) -> Tensor:  # any shape -> same
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class RotaryEmbedding(nn.Module):
    """Rotates pairs of channels by an angle that grows with the position, so that q.k depends only on the distance."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, sequence_length: int, base: float) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # (head_dim / 2,)
        angles = torch.outer(torch.arange(sequence_length, dtype=torch.float64), frequencies)  # (T, head_dim / 2)
        # Not persistent, because checkpoints do not need what follows from the configuration.
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, heads, T, head_dim) -> same
        length = x.size(-2)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def largest_logits(q: Tensor, k: Tensor, chunk: int = 256) -> Tensor:  # two (B, heads, T, head_dim) -> (heads,)
    """Return the largest logit of every head under the causal mask, from the products of `chunk` queries at a time."""
    tops = []
    for start in range(0, q.size(-2), chunk):
        stop = min(start + chunk, q.size(-2))
        logits = q[..., start:stop, :].float() @ k[..., :stop, :].float().mT  # (B, heads, queries, keys)
        future = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).triu(start + 1)
        tops.append(logits.masked_fill(future, -torch.inf).amax(dim=(0, 2, 3)))
    return torch.stack(tops).amax(dim=0) / math.sqrt(q.size(-1))


class CausalSelfAttention(nn.Module):
    """Multi-head causal attention with separate q, k, v and o matrices, each of which Muon orthogonalizes by itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(config.d_model, config.d_model, bias=False) for _ in range(4))
        self.q_norm = RMSNorm(config.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim) if config.qk_norm else nn.Identity()
        self.rope: nn.Module = nn.Identity()
        if config.positions == "rope":
            self.rope = RotaryEmbedding(config.head_dim, config.sequence_length, config.rope_base)
        self.measures_logits = False
        self.largest_logits: Tensor | None = None  # (heads,), of all training batches since somebody took them

    def _split_heads(self, x: Tensor) -> Tensor:  # (B, T, d_model) -> (B, heads, T, head_dim)
        # By the size of a head, not by the number of heads: under tensor parallelism a rank has only some of them.
        return x.view(x.size(0), x.size(1), -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d_model) -> same
        q = self.rope(self.q_norm(self._split_heads(self.q(x))))
        k = self.rope(self.k_norm(self._split_heads(self.k(x))))
        v = self._split_heads(self.v(x))
        if self.measures_logits and torch.is_grad_enabled():  # not in validation
            found = largest_logits(q.detach(), k.detach())
            self.largest_logits = found if self.largest_logits is None else self.largest_logits.maximum(found)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, head_dim)
        return cast(Tensor, self.o(mixed.transpose(1, 2).flatten(-2)))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.mlp_ratio * config.d_model, bias=False)
        self.down = nn.Linear(config.mlp_ratio * config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d_model) -> same
        return cast(Tensor, self.down(functional.gelu(self.up(x))))


class Block(nn.Module):
    """A transformer block: attention, then MLP, each on a normalized input and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = RMSNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d_model) -> same
        x = x + self.attention(self.attention_norm(x))
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """The language model. Seed torch before building it: the initial weights come from the global generator."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = RMSNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.positions == "learned":
            self.wpe = nn.Embedding(config.sequence_length, config.d_model)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all weights at random; the head is zero, so that the first loss is log(vocab_size).

        The embedding has unit variance, and the matrices preserve it. The scale of the embedding matters: with AdamW
        and one lr of 4e-3 for all parameters, the demo's validation loss after 200 steps was 2.43 with a standard
        deviation of 0.02 and 2.06 with 1. An embedding that is also the head has to be small. `scale_embedding` then
        keeps the token visible in the residual stream, to which the first block of `gpt2` adds seven times as much.
        """
        embedding_std = 0.02 if self.config.tie_embeddings else 1.0
        nn.init.normal_(self.wte.weight, std=embedding_std)
        if self.config.positions == "learned":
            nn.init.normal_(self.wpe.weight, std=embedding_std * self.config.embedding_factor)
        # Each block adds two branches to the residual stream; this factor keeps its variance independent of the depth.
        branch_scale = (2 * self.config.num_layers) ** -0.5
        for name, module in self.blocks.named_modules():
            if isinstance(module, nn.Linear):
                gain = branch_scale if name.endswith((".o", ".down")) else 1.0
                nn.init.normal_(module.weight, std=gain * module.in_features**-0.5)
        if not self.config.tie_embeddings:
            nn.init.zeros_(self.lm_head.weight)

    def num_parameters(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Predict the next token at every position of `tokens` (B, T).

        Returns:
            Logits (B, T, vocab), and the mean cross-entropy in nats if `targets` (B, T) are given, else None.
        """
        length = tokens.size(-1)
        if length > self.config.sequence_length:
            raise ValueError(
                f"{length} tokens were given, but the model was built for sequence_length="
                f"{self.config.sequence_length}; shorten the input or raise sequence_length"
            )
        x = self.wte(tokens)  # (B, T, d_model)
        if self.config.scale_embedding:
            x = x * self.config.embedding_factor
        if self.config.positions == "learned":
            x = x + self.wpe(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.final_norm(x))  # (B, T, vocab)
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
