"""Toy rules on gloo ranks; run by tests/test_extending.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from muon_fsdp import MuonOptimizer
from muon_fsdp.rules import RULES
from tests import toy_rules  # noqa: F401 (registers the rules on this rank)
from tests.distributed_cases import lay_out, make_model

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "nesterov": True, "adamw_lr": 0.01}
# One fused weight in blocks, as a QKV weight has them; 32 rows, which tensor parallelism divides.
OVERRIDES = {"blocks.0.up.weight": {"split_sizes": (16, 12, 4)}, "blocks.1.up.weight": {"row_beta": 0.8}}


def make(layout: str | None, rule: str, strategy: str = "auto") -> tuple[nn.Module, MuonOptimizer]:
    model = make_model(hidden=32).double()
    module = model if layout is None else lay_out(model, layout)[0]
    group = dist.group.WORLD if layout == "ddp" else None
    options = {**OPTIONS, "weight_decay": 0.0} if rule == "hyperball" else OPTIONS
    optimizer = MuonOptimizer(
        [(name.removeprefix("module."), p) for name, p in module.named_parameters()],
        rule=rule,
        strategy=strategy,
        replicate_group=group,
        overrides=OVERRIDES if "row_beta" in RULES[rule].all_options else None,
        **{name: value for name, value in options.items() if name in RULES[rule].all_options or name == "adamw_lr"},
    )
    return module, optimizer


def step(module: nn.Module, optimizer: MuonOptimizer, number: int) -> None:
    """Take a step with the same random gradients in every layout; one matrix has none at the third step."""
    generator = torch.Generator().manual_seed(number)
    for name, p in module.named_parameters():
        grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        if number == 2 and "blocks.1.down.weight" in name:
            p.grad = None
    optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def results(module: nn.Module, optimizer: MuonOptimizer) -> dict[str, Tensor]:
    """Return whole weights and states by name."""
    found = {}
    for name, p in module.named_parameters():
        name = name.removeprefix("module.")
        found[name] = whole(p)
        for key, value in optimizer.state[p].items():
            found[f"{name} {key}"] = whole(value)
    return found


def trained(layout: str | None, rule: str, strategy: str = "auto", steps: int = 4) -> dict[str, Tensor]:
    module, optimizer = make(layout, rule, strategy)
    for number in range(steps):
        step(module, optimizer, number)
    return results(module, optimizer)


def saved(layout: str | None, rule: str, path: str) -> None:
    module, optimizer = make(layout, rule)
    for number in range(2):
        step(module, optimizer, number)
    state = {"model": get_model_state_dict(module), "optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.save(state, checkpoint_id=path)


def resumed(layout: str | None, rule: str, path: str) -> dict[str, Tensor]:
    module, optimizer = make(layout, rule)
    state = {"model": get_model_state_dict(module), "optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(module, state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
    for number in range(2, 4):
        step(module, optimizer, number)
    return results(module, optimizer)
