"""The element-wise pair beside a reference in float64, and on sharded parameters of gloo ranks."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from muon_optimizer import TritonMuon, TritonMuonW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIR = [TritonMuon, TritonMuonW]


class Reference:
    """The published formulas, one tensor, NumPy float64."""

    def __init__(self, weight, *, coupled, lr, momentum, velocity, weight_decay, nesterov, layerwise_norm):
        self.w = np.array(weight, dtype=np.float64)
        self.m, self.v = np.zeros_like(self.w), np.zeros_like(self.w)
        self.coupled, self.lr, self.b1, self.b2 = coupled, lr, momentum, velocity
        self.decay, self.nesterov, self.norm = weight_decay, nesterov, layerwise_norm

    def step(self, grad):
        g = np.array(grad, dtype=np.float64)
        if self.coupled:
            g = g + self.decay * self.w
        if self.norm:
            g = g / (np.sqrt((g**2).sum()) + 1e-8)
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        direction = self.b1 * self.m + (1 - self.b1) * g if self.nesterov else self.m
        if not self.coupled:
            self.w = self.w * (1 - self.lr * self.decay)
        self.w = self.w - self.lr / (np.sqrt(self.v) + 1e-8) * direction


def options(**changed):
    base = {
        "lr": 0.01,
        "momentum": 0.9,
        "velocity": 0.99,
        "weight_decay": 0.1,
        "nesterov": False,
        "layerwise_norm": False,
    }
    return {**base, **changed}


def compare(cls, shapes, dtype=torch.float32, steps=3, tolerance=1e-5, **changed):
    """Train tensors by the optimizer and by the reference on the same gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]
    chosen = options(**changed)
    optimizer = cls(params, **chosen)
    references = [Reference(p.detach().cpu().double().numpy(), coupled=cls is TritonMuon, **chosen) for p in params]
    # Where decay and gradient cancel, rounding is all that is left, and the velocity makes it large.
    cancelled = [np.zeros(p.shape, dtype=bool) for p in params]
    for _ in range(steps):
        for p, reference, mask in zip(params, references, cancelled, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE, dtype)
            grad = p.grad.cpu().double().numpy()
            decay = chosen["weight_decay"] * reference.w if cls is TritonMuon else np.zeros_like(grad)
            mask |= np.abs(grad + decay) < 1e-2 * (np.abs(grad) + np.abs(decay))
            reference.step(grad)
        optimizer.step()
    for p, reference, mask in zip(params, references, cancelled, strict=True):
        for result, expected in (
            (p.detach(), reference.w),
            (optimizer.state[p]["momentum"], reference.m),
            (optimizer.state[p]["velocity"], reference.v),
        ):
            found = np.where(mask, expected, result.cpu().double().numpy())
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    return optimizer


# -------------------------------------------------------------------------------------------------------- on ranks


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
