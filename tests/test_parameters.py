"""Parameters that are exchanged, added by hand, tied, empty or moved to another dtype after the optimizer was built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer, create_hybrid_optimizer
from tests.comparisons import assert_changed
from tests.small_model import Net, train


def test_parameters_exchanged_after_construction_are_trained():
    """Accelerate prepares a model after its optimizer was built, and puts new parameters into the groups."""
    model, other = Net(), Net()
    optimizer, expected = create_hybrid_optimizer(model), create_hybrid_optimizer(other)
    new = {p: nn.Parameter(p.detach().clone()) for p in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [new[p] for p in group["params"]]
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, new[p])
    assert train(model, optimizer, 4) == train(other, expected, 4)
    assert set(optimizer.state) == set(model.parameters())


def test_parameters_exchanged_during_training_are_trained():
    model = Net()
    optimizer = create_hybrid_optimizer(model)
    train(model, optimizer, 2)
    weight = nn.Parameter(model.up.weight.detach().clone())
    (group,) = (g for g in optimizer.param_groups if any(p is model.up.weight for p in g["params"]))
    group["params"] = [weight if p is model.up.weight else p for p in group["params"]]
    model.up.weight = weight
    before = weight.detach().clone()
    train(model, optimizer, 1)
    assert_changed(weight, before)


def test_parameters_added_by_hand_are_refused():
    model = Net()
    optimizer = MuonOptimizer(model)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.randn(3, 3)))
    with pytest.raises(RuntimeError, match="add_param_group"):
        train(model, optimizer, 1)


def test_state_exists_for_every_parameter_after_the_first_step():
    model = Net()
    optimizer = MuonOptimizer(model.parameters())
    train(model, optimizer, 1)
    for p in model.parameters():
        assert optimizer.state[p]["momentum_buffer"].shape == p.shape


def test_tied_weights_are_updated_once():
    model = Net()
    model.lm_head.weight = model.embed.weight
    optimizer = MuonOptimizer(model)
    train(model, optimizer, 1)
    assert sum(p is model.embed.weight for g in optimizer.param_groups for p in g["params"]) == 1


def test_empty_and_scalar_parameters_are_updated_and_have_state():
    parameters = [
        nn.Parameter(torch.zeros(0, 5)),
        nn.Parameter(torch.zeros(3, 0)),
        nn.Parameter(torch.zeros(0)),
        nn.Parameter(torch.ones(())),
    ]
    optimizer = MuonOptimizer(parameters, nonfinite="raise")
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert parameters[-1] != 1
    assert [i for i, p in enumerate(parameters) if "momentum_buffer" not in optimizer.state[p]] == []


def test_a_model_moved_to_another_dtype_keeps_state_in_float32():
    model = Net()
    optimizer = MuonOptimizer(model)
    model.bfloat16()
    train(model, optimizer, 2)
    assert optimizer.state[model.up.weight]["momentum_buffer"].dtype == torch.float32
