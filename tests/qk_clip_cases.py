"""Modules of attention in the layouts that `qk_clip` knows, a reference in NumPy, and what ranks run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, qk_clip
from tests.training_cases import TINY, tiny_gpt

WIDTH, HEADS, KV_HEADS, SIZE = 12, 4, 2, 3
NOPE, ROPE, VALUE, LATENT = 3, 2, 5, 7
THRESHOLD = 10.0
# Of GQA, the first group is clipped by its second head, and the second group is not clipped.
LOGITS = {
    "separate": [11.0, 40.0, 3.0, -2.0],
    "latent": [10.0, 25.0, 1000.0, 12.5],
    "fused": [10.5, 2.0, 9.0, 90.0],
    "conv": [70.0, 8.0, 16.0, 4.0],
    "torch": [1.0, 20.0, 30.0, 5.0],
}


class Separate(nn.Module):
    """Grouped queries, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
        self.head_dim = SIZE
        self.q_proj = nn.Linear(WIDTH, HEADS * SIZE)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * SIZE)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * SIZE)
        self.o_proj = nn.Linear(HEADS * SIZE, WIDTH)


class Latent(nn.Module):
    """Latent attention with DeepSeek's names."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = HEADS, NOPE, ROPE, VALUE
        self.q_a_proj = nn.Linear(WIDTH, LATENT, bias=False)
        self.q_a_layernorm = nn.RMSNorm(LATENT)
        self.q_b_proj = nn.Linear(LATENT, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(LATENT)
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)


class Fused(nn.Module):
    """Phi-3's layout: Q, K, V in one weight, with grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, head_dim=SIZE)
        self.num_key_value_groups = HEADS // KV_HEADS
        self.qkv_proj = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * SIZE)


class Conv1D(nn.Module):
    """Transformers' layer of that name: it stores (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))


class Conv(nn.Module):
    """GPT-2's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE
        self.c_attn = Conv1D(3 * HEADS * SIZE, WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.separate, self.latent, self.fused, self.conv = Separate(), Latent(), Fused(), Conv()
        self.torch = nn.MultiheadAttention(WIDTH, HEADS)
        nn.init.normal_(self.torch.in_proj_bias)


def reference(weights: dict[str, np.ndarray], logits: dict[str, list[float]] = LOGITS) -> dict[str, np.ndarray]:
    """Return the weights after clipping, in float64, by the paper's formulas."""
    new = {name: weight.astype(np.float64).copy() for name, weight in weights.items()}
    gamma = {name: np.minimum(1.0, THRESHOLD / np.maximum(values, 1e-9)) for name, values in logits.items()}
    grouped = {name: gamma[name].reshape(KV_HEADS, -1).min(axis=1) for name in ("separate", "fused")}
    queries, keys = np.repeat(grouped["separate"], 2 * SIZE) ** 0.5, np.repeat(grouped["separate"], SIZE) ** 0.5
    for kind in ("weight", "bias"):
        new[f"separate.q_proj.{kind}"] = (new[f"separate.q_proj.{kind}"].T * queries).T
        new[f"separate.k_proj.{kind}"] = (new[f"separate.k_proj.{kind}"].T * keys).T
    for head, value in enumerate(gamma["latent"]):
        q = new["latent.q_b_proj.weight"].reshape(HEADS, NOPE + ROPE, LATENT)[head]
        q[:NOPE] *= value**0.5
        q[NOPE:] *= value
        new["latent.kv_b_proj.weight"].reshape(HEADS, NOPE + VALUE, LATENT)[head][:NOPE] *= value**0.5
    both = np.concatenate([np.repeat(grouped["fused"], 2 * SIZE), np.repeat(grouped["fused"], SIZE)]) ** 0.5
    for kind in ("weight", "bias"):
        new[f"fused.qkv_proj.{kind}"][: len(both)] = (new[f"fused.qkv_proj.{kind}"][: len(both)].T * both).T
    for name, weight in (("conv", "conv.c_attn.weight"), ("torch", "torch.in_proj_weight")):
        twice = np.tile(np.repeat(gamma[name], SIZE) ** 0.5, 2)
        bias = weight.replace("weight", "bias")
        (new[weight] if name == "conv" else new[weight].T)[:, : len(twice)] *= twice
        new[bias][: len(twice)] *= twice
    return new


def whole(model: nn.Module) -> dict[str, np.ndarray]:
    named = ((name.removeprefix("module."), p.detach()) for name, p in model.named_parameters())
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).numpy().copy() for name, p in named}


def lay_out(model: Model, layout: str) -> nn.Module:
    world = dist.get_world_size()
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "fsdp":
        mesh: Any = init_device_mesh("cpu", (world,))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif layout == "fsdp_columns":
        fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % world == 0 else None)
        return model
    else:
        meshes = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for module, layers in ((model.separate, ("q_proj", "k_proj")), (model.latent, ("q_b_proj", "kv_b_proj"))):
            parallelize_module(module, meshes["tp"], {name: ColwiseParallel() for name in layers})
        if layout == "tp":
            return model
        mesh = meshes["dp"]
    for module in model.children():
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def logits_of_rank(rank: int, world: int) -> dict[str, Tensor]:
    """Return what a rank has seen: of each head, one rank has the largest logit, and some ranks none."""
    given = {}
    for name, values in LOGITS.items():
        own = [v if h % world == rank else v - 5 if h % 2 else -torch.inf for h, v in enumerate(values)]
        given[name] = torch.tensor(own)
    return given


def clip_on_ranks(layout: str, options: dict[str, Any]) -> None:
    """Compare weights with the reference after a step; momentum stays as it is, and a further step works."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = lay_out(Model(), layout)
    optimizer = FSDPMuonOptimizer(model, lr=0.01, **options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = whole(model)
    state = [t.clone() for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    given = logits_of_rank(rank, world)
    items = list(given.items())
    gammas = qk_clip(optimizer, dict(items if rank else items[::-1]), threshold=THRESHOLD)
    assert gammas["separate"] == [0.25, 0.25, 1.0, 1.0]
    after, expected = whole(model), reference(before)
    for name, weight in after.items():
        np.testing.assert_allclose(weight, expected[name], rtol=3e-7, err_msg=name)
        is_scaled = not np.array_equal(expected[name], before[name])
        assert np.array_equal(weight, before[name]) != is_scaled, name
    new_state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    for old, new in zip(state, new_state, strict=True):
        assert torch.equal(old.to_local() if isinstance(old, DTensor) else old,
                           new.to_local() if isinstance(new, DTensor) else new)  # fmt: skip
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def all_raise(layout: str = "fsdp") -> list[str]:
    """Return the errors of this rank for mistakes of rank 1 alone."""
    rank = dist.get_rank()
    model = lay_out(Model(), layout)
    optimizer = MuonOptimizer(model)
    before = whole(model)
    good = {"separate": [50.0] * HEADS, "latent": [50.0] * HEADS}
    mistakes: list[dict[str, Any]] = [
        {**good, "sepparate": [1.0] * HEADS},
        {**good, "latent": [50.0] * (HEADS // 2)},
        {"separate": good["separate"]},
        {**good, "separate": [1.0, float("nan"), 2.0, 3.0]},
        {**good, "latent": [1.0, 2.0, 3.0, float("inf")]},
        {3: [1.0]},  # type: ignore[dict-item]
    ]
    errors = []
    for mistake in mistakes:
        with pytest.raises((ValueError, FloatingPointError), match=r"qk_clip|on rank 1") as raised:
            qk_clip(optimizer, mistake if rank == 1 else good)
        errors.append(str(raised.value))
    with pytest.raises(ValueError, match="different modules or thresholds") as raised:
        qk_clip(optimizer, good, threshold=10.0 + rank)
    errors.append(str(raised.value))
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    with pytest.raises(ValueError, match=r"holds a part of parameter 'latent.q_b_proj.weight'"):
        qk_clip(optimizer, good, group=alone)
    for name, weight in whole(model).items():
        assert np.array_equal(weight, before[name]), name
    return errors


def more_heads_than_one_reduction() -> None:
    """Clip a head whose logit is in the second reduction."""
    with torch.device("meta"):
        model = nn.ModuleDict({"attention": nn.MultiheadAttention(8200, 8200, bias=False)})
    attention = model["attention"]
    attention.in_proj_weight = nn.Parameter(torch.ones(3 * 8200, 1))
    attention.out_proj.weight = nn.Parameter(torch.ones(2, 2))
    optimizer = MuonOptimizer(model, replicate_group=dist.group.WORLD)
    logits = torch.full((8200,), -torch.inf)
    if dist.get_rank() == 1:
        logits[8197] = 400.0
    qk_clip(optimizer, {"attention": logits})
    changed = (attention.in_proj_weight[:, 0] != 1).nonzero()[:, 0]
    assert changed.tolist() == [8197, 8200 + 8197]
    assert attention.in_proj_weight[8197, 0] == 0.5


def counted_reductions() -> int:
    """Return how many collectives one call starts."""
    model = lay_out(Model(), "fsdp")
    optimizer = MuonOptimizer(model)
    qk_clip(optimizer, LOGITS)
    calls = []
    original, dist.all_reduce = dist.all_reduce, lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))
    try:
        qk_clip(optimizer, LOGITS)
    finally:
        dist.all_reduce = original
    return len(calls)


def clip_after_validation() -> None:
    """Clip after a forward without backward, which leaves whole weights in the modules."""
    gpt = tiny_gpt(replace(TINY, qk_norm=False))
    whole_model = fully_shard(gpt)
    optimizer = MuonOptimizer(gpt)
    attention = gpt.blocks[0].attention
    attention.measures_logits = True
    tokens = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    whole_model(tokens)
    before, attention.largest_logits = attention.largest_logits, None
    assert not isinstance(attention.q.weight, DTensor)
    name = "blocks.0.attention"
    gammas = qk_clip(optimizer, {name: before}, threshold=0.5)[name]
    whole_model(tokens)
    torch.testing.assert_close(attention.largest_logits, before * torch.tensor(gammas))
    assert max(gammas) < 1
