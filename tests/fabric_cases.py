"""Runs of Lightning Fabric, in one process and on ranks, for tests/test_integrations.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from muon_fsdp import FSDPMuonOptimizer
from tests.integration_cases import OPTIONS, launched, weights_of


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def make_fabric(kind: str) -> Fabric:
    world = 1 if kind == "one" else dist.get_world_size()
    strategies: dict[str, Any] = {
        "one": lambda: "auto",
        "ddp": DDPStrategy,
        "fsdp": lambda: ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1),
    }
    plugins = [] if kind == "one" else [LightningEnvironment()]
    return Fabric(accelerator="cpu", devices=world, strategy=strategies[kind](), plugins=plugins)


def set_up(fabric: Fabric, kind: str) -> tuple[nn.Module, Any]:
    """Build model and optimizer in the order that each strategy needs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))
    if kind == "fsdp":
        model = fabric.setup_module(model)
        return model, fabric.setup_optimizers(FSDPMuonOptimizer(model, **OPTIONS))
    group = dist.group.WORLD if kind == "ddp" else None
    return fabric.setup(model, FSDPMuonOptimizer(model, replicate_group=group, **OPTIONS))


def steps(fabric: Fabric, model: nn.Module, optimizer: Any, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(number))
        batch = rows.chunk(fabric.world_size)[fabric.global_rank]
        loss = (model(batch) - batch.roll(1, -1)).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
    return losses


def fabric_run(folder: str, kind: str) -> dict[str, Any]:
    """Train six steps with a checkpoint after three, which another model and optimizer resume."""
    fabric = make_fabric(kind)
    fabric.launch()
    model, optimizer = set_up(fabric, kind)
    losses = steps(fabric, model, optimizer, range(3))
    fabric.save(f"{folder}/half", {"model": model, "optimizer": optimizer})
    other, resumed = set_up(fabric, kind)
    fabric.load(f"{folder}/half", {"model": other, "optimizer": resumed})
    before = list(losses)
    losses += steps(fabric, model, optimizer, range(3, 6))
    return {
        "losses": losses,
        "resumed": before + steps(fabric, other, resumed, range(3, 6)),
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
        "ranks": optimizer.plan_report().num_ranks,  # Fabric's wrapper passes on what it does not have
        "muon": sorted(row.shape for row in optimizer.routing_report().rows if row.rule == "muon"),
        "weights": list(weights_of(model).values()),
        "resumed weights": list(weights_of(other).values()),
    }


def fabric_on_ranks(folder: str, kind: str) -> dict[str, Any]:
    with launched():
        return fabric_run(folder, kind)
