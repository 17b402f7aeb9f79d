"""Mixtures of experts in the ways that libraries store them, and their updates on ranks, for tests/test_experts.py."""

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
from tests.reference import ReferenceMuon, ReferenceNorMuon, ReferenceSphere

EXPERTS, WIDTH, HIDDEN = 5, 12, 18  # 5 experts are uneven on every number of ranks; the other dimensions are not


class Experts(nn.Module):
    """Stacked experts with gate and up in one weight, stored (experts, in, out) or (experts, out, in)."""

    def __init__(self, transposed: bool, count: int = EXPERTS, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        up, down = (2 * hidden, width), (width, hidden)
        self.gate_up_proj = nn.Parameter(torch.randn(count, *(up[::-1] if transposed else up)))
        self.down_proj = nn.Parameter(torch.randn(count, *(down[::-1] if transposed else down)))


class Mixture(nn.Module):
    def __init__(self, transposed: bool = True, **sizes: int) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.get("width", WIDTH), sizes.get("count", EXPERTS), bias=False)
        self.experts = Experts(transposed, **sizes)


REFERENCES = {"muon": ReferenceMuon, "normuon": ReferenceNorMuon, "spectral_sphere": ReferenceSphere}


def follow_reference(dim: int | None, rule: str, overrides: dict[str, Any], steps: int = 3) -> None:
    """Check that transposed experts follow references of their transposes in float64, given random gradients.

    Args:
        dim: the dimension along which FSDP2 shards the experts; None for one device.
        rule: the rule of the matrices.
        overrides: options that split rows, by name.
        steps: how many steps to take.
    """
    torch.manual_seed(0)
    model = Mixture().double()
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "nesterov": True}
    sphere = rule == "spectral_sphere"
    references = {}
    for name, weight in model.experts.named_parameters():
        override = overrides.get(f"*{name}", {})
        heads = override.get("num_heads", 1)
        blocks = override.get("split_sizes", [weight.shape[-1] // heads] * heads)
        extra = {} if sphere else {"scale": "v3", "weight_decay": 0.05, "blocks": blocks}
        if rule == "normuon":
            extra["beta2"] = 0.9
        references[name] = [REFERENCES[rule](expert.T.numpy(), **options, **extra) for expert in weight.detach()]
    if dim is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), shard_placement_fn=_by(dim))
    given = {"weight_decay": 0.0} if sphere else {"scale": "v3", "weight_decay": 0.05}
    given |= {"beta2": 0.9} if rule == "normuon" else {}
    optimizer = FSDPMuonOptimizer(
        model, rule=rule, orthogonalization="exact", overrides=overrides, **options, **given, eps=1e-8
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for name, weight in model.experts.named_parameters():
            grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            is_sharded = isinstance(weight, DTensor)
            weight.grad = distribute_tensor(grad, weight.device_mesh, weight.placements) if is_sharded else grad
            for reference, part in zip(references[name], grad, strict=True):
                reference.step(part.T.numpy())
        optimizer.step()
    for name, weight in model.experts.named_parameters():
        whole = (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().numpy()
        expected = np.stack([reference.w.T for reference in references[name]])
        np.testing.assert_allclose(whole, expected, rtol=0, atol=2e-3 if sphere else 1e-10, err_msg=name)


def _by(dim: int) -> Any:
    return lambda parameter: Shard(dim) if parameter.ndim == 3 else None
