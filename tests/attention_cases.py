"""Fused weights on ranks, against references in float64, for tests/test_attention.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muon_fsdp import FSDPMuonOptimizer
from tests.reference import ReferenceMuon, ReferenceNorMuon

WIDTH, HEADS = 12, 3
BLOCKS = {"whole": [36], "split": [12, 12, 12], "per_head": [4] * 9}


def follow_reference(mesh: tuple[int, ...], dim: int, rule: str, attention: str) -> None:
    """Check that `in_proj_weight` of torch's attention follows references of separate matrices, on real ranks."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(WIDTH, HEADS).double()
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}
    of_rule = {"beta2": 0.9} if rule == "normuon" else {}
    make = ReferenceNorMuon if rule == "normuon" else ReferenceMuon
    reference = make(model.in_proj_weight.detach().numpy(), blocks=BLOCKS[attention], **options, **of_rule)
    if dist.is_initialized() and dist.get_world_size() > 1:
        names = ("replicas", "shards")[-len(mesh) :]
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        fully_shard(model, mesh=device_mesh, shard_placement_fn=lambda p: Shard(min(dim, p.ndim - 1)))
    optimizer = FSDPMuonOptimizer(
        model, rule=rule, attention=attention, orthogonalization="exact", **options, **of_rule
    )
    generator = torch.Generator().manual_seed(1)
    weight = model.in_proj_weight
    for _ in range(3):
        grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        is_sharded = isinstance(weight, DTensor)
        weight.grad = distribute_tensor(grad, weight.device_mesh, weight.placements) if is_sharded else grad
        reference.step(grad.numpy())
        optimizer.step()
    whole = (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().numpy()
    np.testing.assert_allclose(whole, reference.w, rtol=0, atol=1e-10)
