"""Contracts with the programs around an optimizer: Accelerate, torch.distributed.checkpoint, missing gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from muon_fsdp import MuonOptimizer, create_hybrid_optimizer
from tests.comparisons import assert_changed, assert_same


class Net(nn.Module):
    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.unused = nn.Linear(4, 4)
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.down = nn.Linear(10, 6)
        self.to(dtype)

    def forward(self, tokens):
        return self.lm_head(self.down(torch.relu(self.up(self.embed(tokens)))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 11, (4, 5), generator=generator)
        optimizer.zero_grad()
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [p.detach().clone() for p in model.parameters()]
    return tensors + [value.clone() for p in model.parameters() for value in optimizer.state.get(p, {}).values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_parameters_exchanged_after_construction():
    """Accelerate prepares the model after the optimizer was built and puts new parameters into its groups."""
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


def test_parameters_exchanged_during_training():
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


def test_inert_step_creates_state_and_changes_nothing():
    model = Net()
    optimizer = create_hybrid_optimizer(model, weight_decay=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert same(before, [p.detach() for p in model.parameters()])
    assert set(optimizer.state) == set(model.parameters())
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    other = Net()
    assert train(model, optimizer, 4) == train(other, create_hybrid_optimizer(other, weight_decay=0.1), 4)


def test_any_other_step_at_lr_zero_counts():
    model = Net()
    optimizer = create_hybrid_optimizer(model, muon_lr=0.0, adamw_lr=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 2)
    assert same(before, [p.detach() for p in model.parameters()])
    assert optimizer.state[model.embed.weight]["step"] == 2
    assert optimizer.state[model.up.weight]["momentum_buffer"].any()


def test_state_exists_for_every_parameter_after_the_first_step():
    model = Net()
    optimizer = MuonOptimizer(model.parameters())
    train(model, optimizer, 1)
    for p in model.parameters():
        assert optimizer.state[p]["momentum_buffer"].shape == p.shape


def test_a_missing_gradient_leaves_parameter_and_state_untouched():
    model = Net()
    optimizer = create_hybrid_optimizer(model, weight_decay=0.1)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for p in (model.up.weight, model.up.bias, model.embed.weight):
        p.grad = None
    before = {
        p: (p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in model.parameters()
    }
    optimizer.step()
    for p, (value, state) in before.items():
        changed = p.grad is not None
        assert torch.equal(value, p) != changed
        assert all(torch.equal(state[k], optimizer.state[p][k]) != changed for k in state)
    for p in model.parameters():
        p.grad = None
    before_all = snapshot(model, optimizer)
    optimizer.step()
    assert same(before_all, snapshot(model, optimizer))


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
    assert same(before, snapshot(model, optimizer))
    train(model, optimizer, 1)
    assert all(torch.isfinite(t).all() for t in snapshot(model, optimizer))


def test_large_finite_gradients_are_not_taken_for_infinite():
    model = Net()
    optimizer = create_hybrid_optimizer(model, nonfinite="raise")
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e30)
    optimizer.step()


def test_propagate_is_what_pytorch_does():
    model = Net()
    optimizer = create_hybrid_optimizer(model)
    train(model, optimizer, 1)
    model.up.weight.grad.fill_(torch.nan)
    optimizer.step()
    assert model.up.weight.isnan().all()
    assert model.down.weight.isfinite().all()


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
def test_distributed_checkpoint_without_a_process_group(options, dtype):
    model = Net(dtype=dtype)
    optimizer = create_hybrid_optimizer(model, overrides={"up.weight": {"num_heads": 2}})
    train(model, optimizer, 3)
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    resumed_model = Net(seed=1, dtype=dtype)
    resumed_model.load_state_dict(model.state_dict())
    resumed = create_hybrid_optimizer(resumed_model, muon_lr=0.5, overrides={"up.weight": {"num_heads": 2}})
    set_optimizer_state_dict(resumed_model, resumed, saved, options=StateDictOptions(**options))
    assert resumed.state[resumed_model.up.weight]["momentum_buffer"].dtype == torch.float32
    assert same(snapshot(model, optimizer), snapshot(resumed_model, resumed))
    assert train(model, optimizer, 4, seed=1) == train(resumed_model, resumed, 4, seed=1)


@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoint_with_frozen_parameters(flatten):
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


def test_distributed_checkpoint_finds_parameters_by_name():
    """The same modules registered in another order: DCP loads by name, whatever the order of the groups."""
    model = Net()
    optimizer = create_hybrid_optimizer(model)
    train(model, optimizer, 2)
    saved = get_optimizer_state_dict(model, optimizer)
    reordered = Net()
    for name in ("up", "embed"):
        reordered._modules[name] = reordered._modules.pop(name)
    resumed = create_hybrid_optimizer(reordered)
    set_optimizer_state_dict(reordered, resumed, saved)
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            assert_same(resumed.state[reordered.get_parameter(name)][key], value)


def test_a_fresh_optimizer_can_be_saved_through_distributed_checkpoint():
    model, other = Net(), Net()
    optimizer = create_hybrid_optimizer(model)
    get_optimizer_state_dict(model, optimizer)
    assert train(model, optimizer, 3) == train(other, create_hybrid_optimizer(other), 3)


def test_tied_weights_are_updated_once():
    model = Net()
    model.lm_head.weight = model.embed.weight
    optimizer = MuonOptimizer(model)
    train(model, optimizer, 1)
    assert sum(p is model.embed.weight for g in optimizer.param_groups for p in g["params"]) == 1


def test_empty_and_scalar_parameters():
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
    assert all("momentum_buffer" in optimizer.state[p] for p in parameters)


def test_a_model_moved_to_another_dtype_after_construction():
    model = Net()
    optimizer = MuonOptimizer(model)
    model.bfloat16()
    train(model, optimizer, 2)
    assert optimizer.state[model.up.weight]["momentum_buffer"].dtype == torch.float32


def test_options_changed_during_training_take_effect():
    model = Net()
    optimizer = MuonOptimizer(model)
    train(model, optimizer, 1)
    optimizer.param_groups[0]["ns_stepsize"] = 0.0
    before = model.up.weight.detach().clone()
    train(model, optimizer, 1)
    assert_same(model.up.weight, before)


def test_a_profile_explains_itself():
    model = Net()
    optimizer = create_hybrid_optimizer(model)
    train(model, optimizer, 1)
    with torch.profiler.profile() as profiler:
        optimizer.step()
    names = {event.key for event in profiler.key_averages() if event.key.startswith("muon_fsdp.")}
    assert any(name.startswith("muon_fsdp.orthogonalize stage 0 muon") and "10x6" in name for name in names)
    assert {name.split()[0] for name in names} == {"muon_fsdp.prepare", "muon_fsdp.orthogonalize", "muon_fsdp.apply"}
