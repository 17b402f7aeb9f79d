"""The contract of `torch.optim.Optimizer`, checked for every optimizer of ours, in the terms of torch's own test suite.

Optimizers are described as `OptimizerInfo` of `torch.testing._internal.common_optimizers`, so that inputs, errors and
schedulers are those that torch's own optimizers are tested with. Where ours differ on purpose, `DIFFERENCES` says so.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from muon_fsdp.statistics.observer import STATISTICS
from tests.comparisons import assert_changed, assert_same
from tests.conformance_cases import (
    DIFFERENCES,
    ENGINE,
    INFOS,
    OPTIMIZERS,
    PAIR,
    STATE_DICTS,
    UTILS,
    built,
    closure_of,
    each_input,
    each_optimizer,
    network,
    train,
    values,
)
from tests.pool import RankPool

# ---------------------------------------------------------------------------------------------------- steps and state


@each_input
def test_the_loss_falls_and_a_run_is_repeatable(info, number):
    runs = []
    for _ in range(2):
        model = network()
        optimizer = built(info, number, model.parameters())
        losses = train(model, optimizer, 8)
        assert losses[-1] < losses[0]
        runs.append(values(model, optimizer))
    assert_same(*runs)


@each_input
def test_a_run_is_resumed_from_a_file(info, number):
    model = network()
    optimizer = built(info, number, model.parameters())
    train(model, optimizer)
    twin, file = copy.deepcopy(model), io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = built(info, number, twin.parameters())
    for group in other.param_groups:
        group["lr"] = 0.5
    other.load_state_dict(torch.load(file, weights_only=True))
    assert train(model, optimizer) == train(twin, other)
    assert_same(values(model, optimizer), values(twin, other))


@each_optimizer
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_goes_on_in_the_same_way(info, duplicate):
    """An optimizer is copied together with its model, because parameters are the keys of the state."""
    model = network()
    optimizer = info.optim_cls(model.parameters())
    train(model, optimizer)
    twin, other = duplicate((model, optimizer))
    assert {name for name in vars(other) if name[0] != "_"} == {name for name in vars(optimizer) if name[0] != "_"}
    assert train(model, optimizer) == train(twin, other)
    assert_same(values(model, optimizer), values(twin, other))


@each_optimizer
def test_state_dicts(info):
    """A state dict has the keys of torch and the names of parameters, and two in a row are equal."""
    model = network()
    optimizer = info.optim_cls(list(model.named_parameters()))
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer)
    saved, again = optimizer.state_dict(), optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"}
    assert saved["param_groups"] == again["param_groups"]
    assert list(saved["state"]) == list(range(4))
    assert [i for group in saved["param_groups"] for i in group["params"]] == list(range(4))
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == again["param_groups"]


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
@each_optimizer
def test_a_missing_gradient_changes_nothing(info):
    model = network()
    optimizer = info.optim_cls(model.parameters())
    optimizer.step()
    assert_same([p.detach() for p in model.parameters()], [p.detach() for p in network().parameters()])
    train(model, optimizer)
    model[0].weight.grad = None
    before, state = model[0].weight.detach().clone(), copy.deepcopy(optimizer.state[model[0].weight])
    optimizer.step()
    assert_same(model[0].weight, before)
    # statistics
    refined = {spec.name for spec in STATISTICS["top_singular"].state}
    for key, value in optimizer.state[model[0].weight].items():
        if key not in refined:
            assert_same(value, state[key], key)


@each_optimizer
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(info, set_to_none):
    model = network()
    optimizer = info.optim_cls(model.parameters())
    train(model, optimizer, 1)
    optimizer.zero_grad(set_to_none)
    for p in model.parameters():
        assert p.grad is None if set_to_none else not p.grad.any()


@each_optimizer
def test_memory_layout_of_parameters_and_gradients_does_not_matter(info):
    found = []
    for transposed in (False, True):
        torch.manual_seed(0)
        start, grads = torch.randn(4, 6), [torch.randn(4, 6) for _ in range(3)]
        weight = nn.Parameter(start.t().contiguous().t() if transposed else start.clone())
        assert weight.is_contiguous() != transposed
        optimizer = info.optim_cls([weight])
        for index, grad in enumerate(grads):
            weight.grad = grad.t().contiguous().t() if transposed != (index == 1) else grad.clone()
            optimizer.step()
        found.append(weight.detach().contiguous())
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


# ----------------------------------------------------------------------------------------- options, groups, schedulers


@each_optimizer
def test_a_tensor_as_lr_is_the_number_in_it_and_is_followed(info):
    models = [network(), network()]
    rates: list[Any] = [0.03, torch.tensor(0.03)]
    optimizers = [info.optim_cls(model.parameters(), lr=lr) for model, lr in zip(models, rates, strict=True)]
    first = [train(m, o) for m, o in zip(models, optimizers, strict=True)]
    assert first[0] == first[1]
    optimizers[0].param_groups[0]["lr"] = 0.5
    optimizers[1].param_groups[0]["lr"].fill_(0.5)
    torch.testing.assert_close(*[torch.tensor(train(m, o)) for m, o in zip(models, optimizers, strict=True)])
    assert isinstance(optimizers[1].param_groups[0]["lr"], Tensor)


@each_optimizer
def test_groups_have_options_of_their_own(info):
    model = network()
    fixed, free = list(model[0].parameters()), list(model[2].parameters())
    optimizer = info.optim_cls([{"params": [fixed[0]], "lr": 0.0}, {"params": [free[0]]}], lr=0.1)
    optimizer.add_param_group({"params": [free[1]], "lr": 0.2})
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.1, 0.2]
    parameters = (fixed[0], free[0], free[1])
    before = [p.detach().clone() for p in parameters]
    train(model, optimizer)
    assert_same(fixed[0], before[0], "the parameter with lr=0")
    assert_changed(free, before[1:], "the parameters with another lr")
    assert "lr: 0.2" in repr(optimizer)


SGD = next(info for info in OPTIMIZERS.optim_db if info.optim_cls is torch.optim.SGD)  # the one with most schedulers
SCHEDULERS = [make for makers in SGD.scheduler_inputs for make in makers]


@each_optimizer
@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_of_torchs_tests(info, as_tensor):
    """Each scheduler moves lr as it does for SGD, and training works with it."""
    assert len(SCHEDULERS) > 5
    for make in SCHEDULERS:
        rates = []
        for cls in (info.optim_cls, torch.optim.SGD):
            model = network()
            options = {"adamw_lr": 0.1} if cls in ENGINE else {}
            optimizer = cls(model.parameters(), lr=torch.tensor(0.1) if as_tensor else 0.1, **options)
            scheduler = make(optimizer)
            for _ in range(3):
                loss = train(model, optimizer, 1)[0]
                takes_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(loss) if takes_loss else scheduler.step()
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
        assert rates[0] == pytest.approx(rates[1] * len(rates[0]))


@each_optimizer
def test_a_closure_is_called_once_with_gradients_and_its_result_comes_back(info):
    model = network()
    optimizer = info.optim_cls(model.parameters())
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return closure_of(model, optimizer)()

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert isinstance(loss, Tensor)
    assert optimizer.step() is None


@each_optimizer
def test_hooks_run_in_torchs_order(info):
    model = network()
    optimizer = info.optim_cls(model.parameters())
    seen: list[str] = []
    note = lambda name: lambda *_: seen.append(name)  # noqa: E731
    handles = [
        register_optimizer_step_pre_hook(note("global before step")),
        register_optimizer_step_post_hook(note("global after step")),
        optimizer.register_step_pre_hook(note("before step")),
        optimizer.register_step_post_hook(note("after step")),
        optimizer.register_state_dict_pre_hook(note("before saving")),
        optimizer.register_state_dict_post_hook(note("after saving")),
        optimizer.register_load_state_dict_pre_hook(note("before loading")),
        optimizer.register_load_state_dict_post_hook(note("after loading")),
    ]
    train(model, optimizer, 1)
    assert seen == ["global before step", "before step", "after step", "global after step"]
    seen.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before saving", "after saving", "before loading", "after loading"]
    for handle in handles:
        handle.remove()
    seen.clear()
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not seen


@each_optimizer
def test_grad_scaler_leaves_steps_out_that_overflow(info):
    model = network()
    optimizer = info.optim_cls(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    expected = network()
    other = info.optim_cls(expected.parameters())
    for overflow in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
        if overflow:
            model[0].bias.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update(4.0)
        if not overflow:
            other.zero_grad()
            expected(torch.ones(2, 4)).square().mean().backward()
            other.step()
    assert_same([p.detach() for p in model.parameters()], [p.detach() for p in expected.parameters()])


# ---------------------------------------------------------------------------------------------------------- differences


# Errors that torch's tests expect of every optimizer, and the difference under which ours do something else.
OTHER_ERRORS = {
    "invalid param type": ("one tensor", ENGINE + PAIR),
    "a param group cannot have duplicate parameters": ("duplicates", ENGINE),
    "all optimizer param groups should be with/without names.": ("names", ENGINE),
}
WORDING = "is given twice|must be one real number|either all parameters of a group have names|params must be a model"


@each_optimizer
@pytest.mark.filterwarnings("ignore:.* has nothing to update")  # torch's cases hold vectors
def test_errors_are_torchs_or_a_documented_difference(info):
    for case in info.optim_error_inputs_func("cpu", torch.float32):
        given = case.optimizer_error_input
        params = given.params if given.params is not None else [nn.Parameter(torch.randn(2, 3))]
        difference, those = OTHER_ERRORS.get(given.desc, ("wording", ()))
        assert difference in DIFFERENCES
        if info.optim_cls not in those:
            # Torch 2.15 warns about a set of parameters, which has no order; ours refuse it.
            with pytest.raises((case.error_type, UserWarning, TypeError), match=f"{case.error_regex}|{WORDING}"):
                info.optim_cls(params, **given.kwargs)
        elif difference == "duplicates":
            with pytest.raises(ValueError, match="is given twice"):
                info.optim_cls(params, **given.kwargs)
        else:
            optimizer = info.optim_cls(params, **given.kwargs)
            assert difference == "one tensor" or all("param_names" in group for group in optimizer.param_groups)


@each_optimizer
@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable", "differentiable", "maximize"])
def test_flags(info, flag):
    with pytest.raises(TypeError, match=f"'{flag}'"):
        info.optim_cls(network().parameters(), **{flag: True})


@each_optimizer
def test_complex(info):
    weight = nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))
    with pytest.raises((ValueError, TypeError), match="complex"):
        info.optim_cls([weight])


@each_optimizer
def test_sparse(info):
    table, weight = nn.Embedding(5, 3, sparse=True), nn.Parameter(torch.ones(3, 3))
    optimizer = info.optim_cls([table.weight, weight])
    (table(torch.tensor([1, 2])) @ weight).sum().backward()
    before = [p.detach().clone() for p in (table.weight, weight)]
    with pytest.raises(RuntimeError, match=r"[Ss]parse gradients"):
        optimizer.step()
    assert_same(before, [table.weight.detach(), weight.detach()])
    if info.optim_cls in ENGINE:
        optimizer = info.optim_cls([{"params": [table.weight], "rule": "adamw"}])
        optimizer.step()
        assert_changed(table.weight, before[0])


@each_optimizer
def test_groups_states_and_precision(info):
    model = network(torch.bfloat16)
    optimizer = info.optim_cls(model.parameters())
    is_engine = info.optim_cls in ENGINE
    assert len(optimizer.param_groups) == (2 if is_engine else 1)  # groups
    model[0](torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert len(optimizer.state_dict()["state"]) == 4  # state before the first step
    fresh = info.optim_cls(model.parameters())
    fresh.step()
    assert len(fresh.state) == (4 if is_engine else 2)  # state without gradient, of the last layer
    fresh.load_state_dict(fresh.state_dict())
    moments = [v for state in fresh.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim == 2]
    assert moments
    assert {moment.dtype for moment in moments} == {torch.float32}  # precision
    if is_engine:
        other = info.optim_cls(nn.Linear(5, 6).parameters())
        other.param_groups[0]["params"][0].grad = torch.ones(6, 5)
        with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"):  # checked loading
            other.load_state_dict(fresh.state_dict())


# ------------------------------------------------------------------------------------- torch's checks of state dicts


class Verified(STATE_DICTS.VerifyStateDictMixin, UTILS.TestCase):
    """torch's comparison of a distributed state dict with that of a single process."""


def verify_state_dicts(info: Any) -> None:
    """Compare the state dicts of a sharded model and of a whole one by torch's own checks.

    Both are in float64, because shards are summed in another order.
    """
    check = Verified("run")
    single, model = network(torch.float64), network(torch.float64)
    fully_shard(model[0])
    fully_shard(model)
    optimizers = []
    for net in (single, model):
        optimizer = info.optim_cls(net.parameters())
        for step in range(2):
            torch.manual_seed(step)
            net(torch.randn(4, 4, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    weights, state = get_state_dict(model, optimizers[1])
    check._verify_msd(single.state_dict(), weights)
    check._verify_osd(single, optimizers[0], optimizers[0].state_dict(), state)
    fresh = info.optim_cls(single.parameters())
    check._verify_osd_by_load(single, optimizers[0], fresh, state)


def verify_all() -> None:
    for info in INFOS:
        if info.optim_cls in ENGINE:  # count of steps
            verify_state_dicts(info)


@pytest.mark.filterwarnings("ignore")
def test_distributed_state_dicts_pass_torchs_checks(ranks: RankPool):
    ranks.run(2, verify_all)
