"""The metrics `relative_update` and `update_angle`: against whole weights in float64, on every layout."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from muon_fsdp import MuonOptimizer
from tests import toy_rules  # noqa: F401 (registers the rules on this rank)
from tests.distributed_cases import lay_out
from tests.pool import RankPool

SIZES = (16, 12, 4)
FUSED, STACK, IDLE = "blocks.0.up.weight", "blocks.0.experts", "blocks.1.down.weight"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(14, 32), nn.Linear(32, 14, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 14, 10))


class Model(nn.Module):
    """Fused weights and stacks, vectors, a convolution under AdamW, and a matrix of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(17, 14)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.convolution = nn.Conv1d(6, 5, 3)
        self.zero = nn.Parameter(torch.zeros(14, 6))


RULES: dict[str, dict[str, Any]] = {
    "muon": {"weight_decay": 0.3},
    "cautious": {"rule": "muon", "weight_decay": 5.0, "cautious_weight_decay": True},
    "normuon": {"weight_decay": 0.1},
    "hyperball": {},
    "spectral_sphere": {},
    "toy_adamuon": {"weight_decay": 0.2},
    "adamw": {},
}


def make(layout: str | None, rule: str, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, MuonOptimizer]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    module = model if layout is None else lay_out(model, layout)[0]
    if layout in ("ddp", "ddp_sharded"):
        options |= {"replicate_group": dist.group.WORLD, "shard_state": layout == "ddp_sharded"}
    overrides: dict[str, Any] = {"convolution.weight": "adamw", "zero": "muon"}
    if rule != "adamw":
        overrides[FUSED] = {"split_sizes": SIZES}
    given = {"rule": rule, **RULES[rule], **options}
    named = [(name.removeprefix("module."), p) for name, p in module.named_parameters()]
    lr = {"adamw_lr": 0.02} if rule == "adamw" else {"lr": 0.05, "adamw_lr": 0.01}
    optimizer = MuonOptimizer(named, **lr, adamw_weight_decay=0.5, overrides=overrides, **given)
    return module, optimizer


def whole(module: nn.Module) -> dict[str, np.ndarray]:
    return {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p)
        .detach()
        .double()
        .numpy()
        .copy()
        for name, p in module.named_parameters()
    }


def matrices_of(name: str, weight: np.ndarray, is_split: bool) -> dict[str, np.ndarray]:
    if name == FUSED and is_split:
        return {f"{name}[{i}]": part for i, part in enumerate(np.split(weight, np.cumsum(SIZES)[:-1]))}
    if weight.ndim == 3 and is_split and "experts" in name:
        return {f"{name}[{i}]": part for i, part in enumerate(weight)}
    return {name: weight}


def expected_metrics(before: dict[str, np.ndarray], after: dict[str, np.ndarray], rule: str) -> dict[str, float]:
    """Return the metrics of a step as a reader of the documentation would compute them from whole weights."""
    found, by_rule = {}, {}
    for name, old in before.items():
        if old.ndim < 2 or name in (IDLE, "zero"):
            continue
        of = "adamw" if name in ("wte.weight", "convolution.weight") else rule
        of = "muon" if of == "cautious" else of
        new = matrices_of(name, after[name], rule != "adamw")
        for matrix, w in matrices_of(name, old, rule != "adamw").items():
            moved = np.linalg.norm(new[matrix] - w) / np.linalg.norm(w)
            u, v = (x.ravel() / np.linalg.norm(x) for x in (w, new[matrix]))
            turned = 2 * math.atan2(np.linalg.norm(u - v), np.linalg.norm(u + v))
            for metric, number in (("relative_update", moved), ("update_angle", turned)):
                found[f"{metric}/{matrix}"] = number
                by_rule.setdefault(f"{metric}/{of}", []).append(number)
    return found | {name: median(numbers) for name, numbers in by_rule.items()}


def metered(
    layout: str | None, rule: str, dtype: torch.dtype = torch.float64, asked_on: int = 0, **options: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Take three steps, of which the third is measured, and return its metrics and what they should be."""
    module, optimizer = make(layout, rule, dtype, **options)
    before = after = whole(module)
    for step in range(3):
        if step == 2 and (layout is None or dist.get_rank() == asked_on):
            optimizer.metrics()
        generator = torch.Generator().manual_seed(step)
        for name, p in module.named_parameters():
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
            if name.removeprefix("module.") in (IDLE, "zero") and step == 2:
                p.grad = None
        before = whole(module)
        if step < 2:
            before_zero = dict(module.named_parameters())
            del before_zero
        optimizer.step()
        after = whole(module)
    found = optimizer.metrics(per_matrix=True)
    return {n: v for n, v in found.items() if "/" in n}, expected_metrics(before, after, rule)


@pytest.mark.parametrize("rule", RULES)
def test_the_meter_follows_whole_weights(rule):
    found, expected = metered(None, rule)
    assert found == pytest.approx(expected, rel=1e-9)
    assert len(found) > 10
