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
from muon_fsdp.step import meter
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
            if (step == 2 and name.endswith(IDLE)) or (step < 2 and name.endswith("zero")):
                p.grad = None
        before = whole(module)
        optimizer.step()
        after = whole(module)
    found = optimizer.metrics(per_matrix=True)
    return {n: v for n, v in found.items() if "/" in n}, expected_metrics(before, after, rule)


@pytest.mark.parametrize("rule", RULES)
def test_the_meter_follows_whole_weights(rule):
    found, expected = metered(None, rule)
    assert found == pytest.approx(expected, rel=1e-9)
    assert len(found) > 10


@pytest.mark.parametrize(
    ("layout", "world_size", "rule", "options"),
    [
        ("fsdp", 2, "muon", {}),
        ("fsdp", 3, "cautious", {"strategy": "replicate"}),
        ("fsdp", 3, "hyperball", {"strategy": "owner"}),
        ("fsdp_columns", 2, "spectral_sphere", {}),
        ("hsdp", 4, "normuon", {}),
        ("fsdp_tp", 4, "muon", {}),
        ("fsdp_tp", 4, "adamw", {}),
        ("ddp", 2, "hyperball", {"strategy": "owner"}),
        ("ddp_sharded", 3, "muon", {}),
    ],
)
def test_the_meter_on_ranks(ranks: RankPool, layout, world_size, rule, options):
    """One rank asks, and every rank has the numbers of all matrices of which it holds a part, however uneven."""
    for found, expected in ranks.run(world_size, metered_with, layout, rule, options):
        assert found == pytest.approx(expected, rel=1e-9)


def metered_with(layout: str, rule: str, options: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    return metered(layout, rule, asked_on=dist.get_world_size() - 1, **options)


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_what_rounding_does_to_weights_in_bfloat16_counts(rule):
    found, expected = metered(None, rule, torch.bfloat16)
    assert found == pytest.approx(expected, rel=1e-6)


def test_experts_on_other_ranks_are_measured_there(ranks: RankPool):
    """Each rank measures local experts of its own, beside weights that all ranks share."""
    for rank, (found, expected) in enumerate(ranks.run(2, with_local_experts)):
        assert found == pytest.approx(expected, rel=1e-9), rank


def with_local_experts() -> tuple[dict[str, float], dict[str, float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(dist.get_rank())
    own = nn.ParameterList([nn.Parameter(torch.randn(6, 8).double()) for _ in range(1 + dist.get_rank())])
    torch.manual_seed(0)
    shared = nn.Linear(9, 7, bias=False).double()
    fully_shard(shared, mesh=init_device_mesh("cpu", (2,)))
    module = nn.ModuleDict({"own": own, "shared": shared})
    optimizer = MuonOptimizer(module.named_parameters(), lr=0.1)
    if dist.get_rank() == 1:
        optimizer.metrics()
    before = whole(module)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    found = optimizer.metrics(per_matrix=True)
    return {n: v for n, v in found.items() if "/" in n}, expected_metrics(before, whole(module), "muon")


def test_overlap_with_backward_changes_no_number(ranks: RankPool):
    early, late = (ranks.run(2, metered_by_backward, overlap) for overlap in ("backward", "step"))
    for one, other in zip(early, late, strict=True):
        assert one["overlapped_stages"] > 0
        assert {name: one[name] for name in one if "/" in name} == {name: other[name] for name in other if "/" in name}


def metered_by_backward(overlap: str) -> dict[str, float]:
    module, optimizer = make("fsdp", "muon", torch.float64, overlap=overlap)
    for step in range(4):
        optimizer.zero_grad()
        sum((p * (step + 1 + p)).square().sum() for p in module.parameters()).backward()
        optimizer.step()
        found = optimizer.metrics(per_matrix=True)
    return found


def test_nobody_pays_who_does_not_ask(monkeypatch):
    """Without a call of `metrics` nothing is measured; after one, a single step is."""
    measured: list[int] = []
    init = meter.MeasuredStep.__init__
    monkeypatch.setattr(meter.MeasuredStep, "__init__", lambda self, *args: measured.append(step) or init(self, *args))
    w = nn.Parameter(torch.randn(6, 4))
    optimizer = MuonOptimizer([w], lr=0.1)
    for step in range(6):
        w.grad = torch.randn_like(w)
        optimizer.step()
        if step in (2, 3):
            assert ("relative_update/muon" in optimizer.metrics()) == (step == 3)
    assert measured == [3, 4]


def test_a_step_that_is_skipped_is_measured_later():
    w = nn.Parameter(torch.randn(6, 4))
    optimizer = MuonOptimizer([w], lr=0.1, nonfinite="skip")
    optimizer.metrics()
    for value in (math.nan, 1.0):
        w.grad = torch.full_like(w, value)
        optimizer.step()
    assert optimizer.metrics()["relative_update/muon"] > 0
