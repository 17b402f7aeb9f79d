"""The element-wise pair on sharded parameters; run by tests/test_muon_optimizer.py on gloo ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from muon_optimizer import TritonMuon


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def _train(model: nn.Module, norm: bool) -> dict[str, Tensor]:
    optimizer = TritonMuon(model.parameters(), lr=0.01, weight_decay=0.1, layerwise_norm=norm, nesterov=True)
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    result = {}
    for name, p in model.named_parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        result[name.removeprefix("module.")] = whole.detach().clone()
    return result


def train_plain(norm: bool) -> dict[str, Tensor]:
    return _train(_model(), norm)


def train_sharded(layout: str, norm: bool) -> dict[str, Tensor]:
    """Train a sharded model; all ranks see the same data, so the mean gradient is the gradient of each."""
    model = _model()
    if layout == "ddp":
        return _train(DistributedDataParallel(model), norm)
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return _train(model, norm)


def one_rank_without_a_gradient(missing: int) -> tuple[float, float]:
    """Take a step where the gradient of the first weight is missing on rank `missing`.

    Returns:
        The norms of the momentum of the first weight and of the second, which has its whole gradient.
    """
    # Of a shape that no other case has: DTensor remembers the mesh of an operation, here one of groups that are gone.
    model = nn.Sequential(nn.Linear(23, 19, bias=False), nn.Linear(19, 23, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = TritonMuon(model.parameters(), momentum=0.0, layerwise_norm=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if dist.get_rank() == missing:
        model[0].weight.grad = None
    optimizer.step()
    norms = []
    for p in model.parameters():
        whole = optimizer.state[p]["momentum"] if p in optimizer.state else torch.zeros_like(p)
        norms.append(float(whole.full_tensor().norm()))
    return norms[0], norms[1]
