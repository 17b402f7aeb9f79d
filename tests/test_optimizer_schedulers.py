"""MuonOptimizer under torch's schedulers, and with a tensor as learning rate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from muon_fsdp import MuonOptimizer
from tests.optimizer_cases import mlp, train, weights


def test_scheduler_changes_take_effect_at_once():
    model = mlp()
    optimizer = MuonOptimizer(model, lr=0.02, adamw_lr=0.004)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    sizes = []
    for _ in range(3):
        before = model[0].weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        sizes.append(float((model[0].weight.detach() - before).norm()))
        scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.02 / 8, 0.004 / 8]
    np.testing.assert_allclose([sizes[1] / sizes[0], sizes[2] / sizes[1]], 0.5, rtol=0.05)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.01], total_steps=10),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
        ),
    ],
)
@pytest.mark.parametrize("number", [float, torch.tensor])
def test_torch_schedulers(make, number):
    model = mlp()
    optimizer = MuonOptimizer(model, lr=number(0.02), adamw_lr=number(3e-4))
    scheduler = make(optimizer)
    seen = set()
    for _ in range(5):
        train(optimizer, model, 1)
        scheduler.step()
        seen.add((float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["momentum"]))
    assert len(seen) > 2
    assert [i for i, w in enumerate(weights(model)) if not w.isfinite().all()] == []


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_scheduler_on_a_plateau(number):
    model = mlp()
    optimizer = MuonOptimizer(model, lr=number(0.02), adamw_lr=number(4e-3))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    for loss in (3.0, 2.0, 2.0, 2.0):  # no better for longer than the patience
        train(optimizer, model, 1)
        scheduler.step(loss)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.01, 2e-3])


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
@pytest.mark.parametrize("number", [float, torch.tensor])
def test_one_cycle_with_a_peak_for_each_group(number):
    """Momentum is cycled where a rule has one; a peak for all groups would give AdamW the rate of matrices."""
    optimizer = MuonOptimizer(mlp(), lr=number(0.02), adamw_lr=number(3e-4))
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peaks, total_steps=10, pct_start=0.3)
    rates, momenta = [], []
    for _ in range(9):
        optimizer.step()
        scheduler.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        momenta.append(optimizer.param_groups[0]["momentum"])
    assert [max(column) for column in zip(*rates, strict=True)] == pytest.approx(peaks)
    assert momenta[1] == pytest.approx(0.85)  # lowest at the peak
    assert momenta[-1] == pytest.approx(0.95)
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)


def test_cyclic_momentum_is_that_of_the_matrices():
    optimizer = MuonOptimizer(mlp())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, max_momentum=0.97)
    assert optimizer.param_groups[0]["momentum"] == 0.97


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_lr_gives_the_steps_of_a_float(shape):
    lr = torch.full(shape, 0.05)
    model, other = mlp(), mlp()
    by_tensor, by_float = (
        MuonOptimizer(model, lr=lr, adamw_lr=lr, weight_decay=0.1),
        MuonOptimizer(other, lr=0.05, adamw_lr=0.05, weight_decay=0.1),
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (by_tensor, by_float)]
    for _ in range(3):
        train(by_tensor, model, 1)
        train(by_float, other, 1)
        for scheduler in schedulers:
            scheduler.step()
    for a, b in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(a, b)
    assert float(by_tensor.param_groups[1]["lr"]) == pytest.approx(0.05 / 8)
    assert by_tensor.param_groups[0]["lr"] is lr  # as with torch's optimizers
