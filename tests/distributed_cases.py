"""A small model and training loops that run on any number of ranks and in any layout, for the distributed tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muon_fsdp import MuonOptimizer

VOCABULARY, WIDTH, BATCH = 11, 10, 12


class Experts(nn.Module):
    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, width, width) / width)

    def forward(self, x: Tensor) -> Tensor:  # every expert on every token, averaged
        weight = self.weight
        return torch.einsum("bi,eoi->bo", x, weight) / weight.shape[0]


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.experts = Experts(num_experts, width) if num_experts else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.down(torch.tanh(self.up(y)))
        return x if self.experts is None else x + self.experts(y)


class Model(nn.Module):
    """Embedding, blocks, a (1, width) matrix that most ranks hold nothing of, and a head."""

    # 31 rows are uneven on every number of ranks.
    def __init__(self, num_blocks: int = 2, num_experts: int = 3, width: int = WIDTH, hidden: int = 31) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width, hidden, num_experts) for _ in range(num_blocks)])
        self.gate = nn.Linear(width, 1)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x * torch.sigmoid(self.gate(x)))


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (2, BATCH), generator=generator)
    return tokens[0], tokens[1]


OPTIONS: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 0.05,
    "adamw_lr": 0.02,
    "adamw_weight_decay": 0.03,
}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    data_rank: int = 0,
    data_size: int = 1,
    after_backward: Callable[[nn.Module], None] | None = None,
) -> list[float]:
    """Train on this rank's part of every batch; the losses of the whole batch."""
    losses = []
    for step in steps:
        tokens, targets = (part.chunk(data_size)[data_rank] for part in batch(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).float(), targets)
        loss.backward()
        if after_backward is not None:
            after_backward(model)
        optimizer.step()
        total = loss.detach().clone()
        if data_size > 1:
            dist.all_reduce(total)  # also over tensor-parallel ranks, which hold equal losses
            total /= dist.get_world_size()
        losses.append(total.item())
    return losses


def full_state(model: nn.Module) -> dict[str, np.ndarray]:
    return {
        name.replace("module.", ""): (p.full_tensor() if isinstance(p, DTensor) else p).detach().float().numpy().copy()
        for name, p in model.named_parameters()
    }


# ---------------------------------------------------------------------------------------------------------- layouts


def shard(model: Model, mesh: Any, placement_fn: Any = None) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=placement_fn)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement_fn)


def lay_out(model: Model, layout: str) -> tuple[nn.Module, int, int]:
    """Distribute the model; gives it back with this rank's place in the data-parallel dimension."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if layout == "fsdp":
        shard(model, init_device_mesh("cpu", (world,)))
    elif layout == "fsdp_columns":

        def columns(parameter: nn.Parameter) -> Shard | None:
            return Shard(parameter.ndim - 1) if parameter.ndim > 1 and parameter.shape[-1] % world == 0 else None

        shard(model, init_device_mesh("cpu", (world,)), columns)
    elif layout == "hsdp":
        shard(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif layout in ("fsdp_tp", "tp"):
        shards = world // 2 if layout == "fsdp_tp" else 1
        mesh = init_device_mesh("cpu", (shards, world // shards), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "fsdp_tp":
            shard(model, mesh["dp"])
        return model, mesh["dp"].get_local_rank(), shards
    elif layout == "experts_inside":  # experts sharded inside their matrices, the rest plain FSDP

        def inside(parameter: nn.Parameter) -> Shard | None:
            return Shard(1) if parameter.ndim == 3 and parameter.shape[1] % world == 0 else None

        shard(model, init_device_mesh("cpu", (world,)), inside)
    elif layout == "two_meshes":  # experts over pairs of ranks, the rest over all
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
        for block in model.blocks:
            fully_shard(block.experts, mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("r", "s")))
        shard(model, mesh._flatten("all"))
    elif layout == "ddp":
        return nn.parallel.DistributedDataParallel(model), rank, world
    else:
        raise ValueError(layout)
    return model, rank, world


def curve(
    layout: str | None, steps: int = 20, by_model: bool = False, model_options: Any = None, **options: Any
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The loss curve and the final weights of a training run in a layout; None is one device."""
    model = make_model(**(model_options or {}))
    module, data_rank, data_size = (model, 0, 1) if layout is None else lay_out(model, layout)
    options = {**OPTIONS, **options}
    if by_model:
        optimizer: torch.optim.Optimizer = MuonOptimizer(module, **options)
    else:
        group = dist.group.WORLD if layout == "ddp" else None
        optimizer = MuonOptimizer(module.named_parameters(), replicate_group=group, **options)
    losses = train(module, optimizer, range(steps), data_rank, data_size)
    return losses, full_state(module)


def curve_kw(layout: str, options: dict[str, Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    return curve(layout, **options)
