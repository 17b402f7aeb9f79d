"""A step with gradients that are zero, missing, very large or not finite."""

from __future__ import annotations

import pytest
import torch

from muon_fsdp import create_hybrid_optimizer
from tests.comparisons import assert_changed, assert_same
from tests.small_model import Net, snapshot, train, weights


def test_a_step_with_zero_gradients_at_lr_zero_creates_state_and_changes_nothing():
    model = Net()
    optimizer = create_hybrid_optimizer(model, weight_decay=0.1)
    before = weights(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_same(weights(model), before)
    assert set(optimizer.state) == set(model.parameters())
    for name, p in model.named_parameters():
        assert [key for key, value in optimizer.state[p].items() if value.any()] == [], name
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    other = Net()
    assert train(model, optimizer, 4) == train(other, create_hybrid_optimizer(other, weight_decay=0.1), 4)


def test_any_other_step_at_lr_zero_counts():
    model = Net()
    optimizer = create_hybrid_optimizer(model, muon_lr=0.0, adamw_lr=0.0)
    before = weights(model)
    train(model, optimizer, 2)
    assert_same(weights(model), before)
    assert optimizer.state[model.embed.weight]["step"] == 2
    assert optimizer.state[model.up.weight]["momentum_buffer"].any()


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
def test_a_missing_gradient_leaves_parameter_and_state_untouched():
    model = Net()
    optimizer = create_hybrid_optimizer(model, weight_decay=0.1)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for p in (model.up.weight, model.up.bias, model.embed.weight):
        p.grad = None
    before = snapshot(model, optimizer)
    optimizer.step()
    after = snapshot(model, optimizer)
    for name, p in model.named_parameters():
        compare = assert_same if p.grad is None else assert_changed
        compare(after[name], before[name], name)
    for p in model.parameters():
        p.grad = None
    before = snapshot(model, optimizer)
    optimizer.step()
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["up.weight", "down.bias"])
def test_a_gradient_that_is_not_finite_poisons_nothing(policy, value, which):
    model = Net()
    optimizer = create_hybrid_optimizer(model, nonfinite=policy)
    train(model, optimizer, 2)
    before = snapshot(model, optimizer)
    model.get_parameter(which).grad.view(-1)[1] = value
    if policy == "raise":
        with pytest.raises(RuntimeError, match=f"'{which}'.*Nothing was changed"):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.metrics()["skipped_steps"] == 1
    assert_same(snapshot(model, optimizer), before)
    train(model, optimizer, 1)
    for name, tensors in snapshot(model, optimizer).items():
        assert [key for key, value in tensors.items() if not value.isfinite().all()] == [], name


def test_large_finite_gradients_are_used():
    model = Net()
    optimizer = create_hybrid_optimizer(model, nonfinite="raise")
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e30)
    before = weights(model)
    optimizer.step()
    after = weights(model)
    assert_changed(after, before)
    assert [name for name, value in after.items() if not value.isfinite().all()] == []


def test_by_default_a_nan_spreads_as_in_pytorch():
    model = Net()
    optimizer = create_hybrid_optimizer(model)
    train(model, optimizer, 1)
    model.up.weight.grad.fill_(torch.nan)
    optimizer.step()
    assert model.up.weight.isnan().all()
    assert model.down.weight.isfinite().all()
