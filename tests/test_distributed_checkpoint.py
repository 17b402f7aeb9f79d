"""State dicts of torch.distributed.checkpoint on one device, without a process group."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from muon_fsdp import MuonOptimizer, create_hybrid_optimizer
from tests.comparisons import assert_same
from tests.small_model import Net, snapshot, train


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"flatten_optimizer_state_dict": True},
        {"full_state_dict": True},
        {"full_state_dict": True, "cpu_offload": True},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_restored(options, dtype):
    model = Net(dtype=dtype)
    optimizer = create_hybrid_optimizer(model, overrides={"up.weight": {"num_heads": 2}})
    train(model, optimizer, 3)
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    resumed_model = Net(seed=1, dtype=dtype)
    resumed_model.load_state_dict(model.state_dict())
    resumed = create_hybrid_optimizer(resumed_model, muon_lr=0.5, overrides={"up.weight": {"num_heads": 2}})
    set_optimizer_state_dict(resumed_model, resumed, saved, options=StateDictOptions(**options))
    assert resumed.state[resumed_model.up.weight]["momentum_buffer"].dtype == torch.float32
    assert_same(snapshot(resumed_model, resumed), snapshot(model, optimizer))
    assert train(model, optimizer, 4, seed=1) == train(resumed_model, resumed, 4, seed=1)


@pytest.mark.parametrize("flatten", [False, True])
def test_state_is_restored_beside_frozen_parameters(flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, other = Net(), Net(seed=1)
    for net in (model, other):
        net.down.requires_grad_(False)
    optimizer, resumed = MuonOptimizer(model.named_parameters()), MuonOptimizer(other.named_parameters())
    train(model, optimizer, 2)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved, options=options)
    assert train(model, optimizer, 3) == train(other, resumed, 3)


def test_parameters_are_found_by_name():
    """A model with the same modules, registered in another order."""
    model = Net()
    optimizer = create_hybrid_optimizer(model)
    train(model, optimizer, 2)
    saved = get_optimizer_state_dict(model, optimizer)
    reordered = Net()
    reordered.load_state_dict(model.state_dict())
    for name in ("up", "embed"):
        reordered._modules[name] = reordered._modules.pop(name)
    resumed = create_hybrid_optimizer(reordered)
    set_optimizer_state_dict(reordered, resumed, saved)
    assert_same(snapshot(reordered, resumed), snapshot(model, optimizer))


def test_saving_a_new_optimizer_does_not_change_training():
    model, other = Net(), Net()
    optimizer = create_hybrid_optimizer(model)
    get_optimizer_state_dict(model, optimizer)
    assert train(model, optimizer, 3) == train(other, create_hybrid_optimizer(other), 3)
