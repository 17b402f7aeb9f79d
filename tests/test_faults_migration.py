"""Migration from other optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, migrate
from muon_fsdp.comm.dtensors import local
from tests.checkpoint_cases import FLATTENED, Make, assert_same_state, net, others, state_of, train
from tests.comparisons import assert_near, assert_same
from tests.pool import RankPool
from tests.promises import promise

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is (unavailable|disabled)")

ADAMW = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
OURS = {f"adamw_{key}": value for key, value in ADAMW.items()}


def give_gradients(parameters: list[Tensor], step: int) -> None:
    for index, parameter in enumerate(parameters):
        torch.manual_seed(100 * step + index)
        whole = torch.randn(parameter.shape, dtype=torch.float64).to(parameter.dtype)
        parameter.grad = torch.zeros_like(parameter)
        shard = local(parameter.grad)
        if shard.shape != whole.shape:
            chunks = whole.chunk(dist.get_world_size())
            whole = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else whole[:0]
        shard.copy_(whole)


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(list(model.parameters()), step)
        optimizer.step()


def build(model: nn.Module, form: str, **options: Any) -> tuple[torch.optim.AdamW, Any]:
    """Build AdamW in one of the forms that users do.

    Returns:
        The optimizer, and what users then pass as `params` to `migrate.load_state_dict`.
    """
    parameters = list(model.parameters())
    decayed, rest = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    given: dict[str, Any] = {
        "order": parameters,
        "groups": [{"params": rest}, {"params": decayed}],
        "model": parameters,
        "names": list(model.named_parameters()),
    }
    optimizer = torch.optim.AdamW(given[form], **{**ADAMW, **options})
    return optimizer, {"model": model, "names": None}.get(form, given[form])


def continued(form: str, options: dict[str, Any], through_dcp: bool = False) -> None:
    """Train with AdamW, continue with AdamW and with ours, and compare the parameters that stay under AdamW.

    Check also that matrices start without momentum.
    """
    model = net()
    old, params = build(model, form, **options)
    advance(model, old, range(3))
    twin = net()
    twin.load_state_dict(model.state_dict())
    optimizer = FSDPMuonOptimizer(twin, **OURS)  # embedding and vectors under AdamW
    for group in optimizer.param_groups:
        group["weight_decay"] = ADAMW["weight_decay"]
    saved = get_optimizer_state_dict(model, old) if through_dcp else copy.deepcopy(old.state_dict())
    if through_dcp:
        params = None
    elif params is not None:  # the same parameters of the new model
        same = dict(zip(model.parameters(), twin.parameters(), strict=True))
        params = {
            "model": twin,
            "groups": [{"params": [same[p] for p in group["params"]]} for group in old.param_groups],
        }.get(form, list(twin.parameters()))
    names = migrate.load_state_dict(optimizer, saved, params)
    assert sorted(names) == ["0.weight", "1.bias", "3.bias", "4.bias", "4.weight"]
    assert not local(optimizer.state[twin[1].weight]["momentum_buffer"]).any()
    advance(model, old, range(3, 8))
    advance(twin, optimizer, range(3, 8))
    for name in names:
        there, here = local(model.get_parameter(name)), local(twin.get_parameter(name))
        assert_near(here, there, name, rtol=2e-5, atol=2e-6)
    resumed = FSDPMuonOptimizer(twin, **OURS)
    resumed.load_state_dict(optimizer.state_dict())  # it counts as one of ours from now on
    assert_same_state(state_of(twin, resumed), state_of(twin, optimizer))


VARIANTS: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": False}, {"capturable": False, "foreach": True}]


def all_continued() -> None:
    for form in ("order", "groups", "model", "names"):
        continued(form, {})
    continued("order", {}, through_dcp=True)


@promise(
    "A run changes from `torch.optim.AdamW` to ours in the middle",
    "`migrate.load_state_dict` loads the moments: AdamW's parameters continue, and matrices start without momentum",
)
def test_adamw_goes_on_where_it_was(ranks: RankPool):
    all_continued()
    for options in VARIANTS:
        continued("order", options)
    ranks.run(2, all_continued)


@promise(
    "The old optimizer was saved whole, and parameters are sharded now",
    "`migrate.load_state_dict` loads every rank's part",
)
def test_whole_state_is_migrated_to_shards(ranks: RankPool):
    ranks.run(2, whole_to_shards)


def whole_to_shards() -> None:
    model = net()
    old = torch.optim.AdamW(model.parameters(), **ADAMW)  # type: ignore[arg-type]
    advance(model, old, range(3))
    whole = get_optimizer_state_dict(model, old, options=StateDictOptions(full_state_dict=True))
    optimizer = FSDPMuonOptimizer(model, **OURS)
    migrate.load_state_dict(optimizer, whole)
    for name in ("0.weight", "1.bias"):
        parameter = model.get_parameter(name)
        assert_took_over_adamw(name, optimizer.state[parameter], old.state[parameter])


def assert_took_over_adamw(name: str, here: dict[str, Tensor], there: dict[str, Tensor]) -> None:
    """Check that our state of a parameter is what torch.optim.AdamW had after three steps."""
    assert_same(here["momentum_buffer"], there["exp_avg"], f"first moment of {name}")
    assert_same(here["second_moment"], there["exp_avg_sq"], f"second moment of {name}")
    assert here["step"] == 3, f"{name}: {here['step']}"


def from_the_pair_of_torch() -> None:
    """Migrate from torch.optim.Muon and AdamW, by two calls or from one state dict of torch.distributed.checkpoint."""
    model = net()
    old = others(model)
    for at_once in (True, False):
        optimizer = MuonOptimizer(model, overrides={"0.weight": "muon"})
        if at_once:
            migrate.load_state_dict(optimizer, get_optimizer_state_dict(model, old))
        else:
            for part in old:
                migrate.load_state_dict(optimizer, part.state_dict(), part.param_groups)
        for name, p in model.named_parameters():
            here = {key: local(torch.as_tensor(value)) for key, value in optimizer.state[p].items()}
            there = {key: local(torch.as_tensor(v)) for o in old for key, v in o.state.get(p, {}).items()}
            if p.ndim == 2:
                torch.testing.assert_close(here["momentum_buffer"], there["momentum_buffer"] / (1 - 0.95))
            else:
                assert_took_over_adamw(name, here, there)


@promise(
    "A run changes from `torch.optim.Muon` to ours in the middle",
    "`migrate.load_state_dict` brings its momentum to our scale, also beside AdamW's in one state dict",
)
def test_torch_muon_and_adamw_are_migrated(ranks: RankPool):
    from_the_pair_of_torch()
    ranks.run(2, from_the_pair_of_torch)


def test_rules_that_extend_muon_take_its_momentum_and_start_the_rest():
    model = net()
    old = torch.optim.Muon([model[1].weight], lr=0.02)
    train(model, old)
    for rule in ("normuon", "spectral_sphere"):
        optimizer = MuonOptimizer(model, rule=rule)
        assert migrate.load_state_dict(optimizer, old.state_dict(), [model[1].weight]) == ["1.weight"]
        state = optimizer.state[model[1].weight]
        momentum = state.pop("momentum_buffer")
        torch.testing.assert_close(momentum, old.state[model[1].weight]["momentum_buffer"] / 0.05)
        assert state
        assert not any(value.any() for value in state.values())


def test_keller_jordans_state_is_migrated():
    """His package is not installed, so state and groups are written here as it saves them."""
    model = net()
    matrix, vector = model[1].weight, model[1].bias
    moments = {"exp_avg": torch.ones(12), "exp_avg_sq": torch.full((12,), 2.0), "step": 3}
    saved = {
        "state": {0: {"momentum_buffer": torch.ones(12, 8)}, 1: moments},
        "param_groups": [
            {"params": [0], "lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, "use_muon": True},
            {"params": [1], "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "use_muon": False},
        ],
    }
    optimizer = MuonOptimizer(model)
    assert migrate.load_state_dict(optimizer, saved, [matrix, vector]) == ["1.weight", "1.bias"]
    torch.testing.assert_close(optimizer.state[matrix]["momentum_buffer"], torch.full((12, 8), 10.0))
    here = optimizer.state[vector]
    assert [float(here[key].mean()) for key in ("momentum_buffer", "second_moment", "step")] == [1, 2, 3]


@promise(
    "The rule of the matrices changes in the middle of a run, from `muon` to `normuon`",
    "`migrate.load_state_dict` loads momentum, which both keep, and AdamW's moments; `optimizer.load_state_dict` "
    "refers to it",
)
@pytest.mark.parametrize("rule", ["normuon", "spectral_sphere"])
@pytest.mark.parametrize("named", [True, False])
def test_momentum_is_taken_over_by_another_rule(rule, named):
    model = net()

    def make(**options: Any) -> MuonOptimizer:
        return MuonOptimizer(model if named else model.parameters(), **options)

    old = make()
    train(model, old)
    new = make(rule=rule)
    with pytest.raises(
        RuntimeError, match=r"'muon', but takes .* here\n\tto change rules in a run, call muon_fsdp\.mig"
    ):
        new.load_state_dict(old.state_dict())
    # `params` are not in the order of the groups, which have matrices first.
    loaded = migrate.load_state_dict(new, old.state_dict(), reversed(list(model.parameters())))
    assert loaded == [record.name for record in new._records()]
    for parameter in model.parameters():
        before, state = old.state[parameter], new.state[parameter]
        assert_same({name: state[name] for name in before}, before)
        assert not any(state[name].any() for name in state if name not in before)
    train(model, new)
    back = make()
    migrate.load_state_dict(back, new.state_dict())
    assert_same(*[[o.state[p]["momentum_buffer"] for p in model.parameters()] for o in (back, new)])


def test_state_that_two_rules_do_not_share_is_not_taken_over():
    model = nn.Linear(4, 4, bias=False)
    old = MuonOptimizer(model)
    model(torch.ones(1, 4)).sum().backward()
    old.step()
    with pytest.raises(RuntimeError, match="saved by rule 'muon' of muon_fsdp: no rule in use can load any of its st"):
        migrate.load_state_dict(MuonOptimizer(model, rule="adamw"), old.state_dict())
    saved = old.state_dict()
    saved["param_groups"][0]["rule"] = "forgotten"
    with pytest.raises(RuntimeError, match="weight: Unknown rule 'forgotten'"):
        migrate.load_state_dict(MuonOptimizer(model), saved)


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7), torch.tensor([7.0])])
def test_the_count_of_steps_may_be_any_number(step):
    model = net()
    old = torch.optim.AdamW(model.parameters())
    train(model, old)
    saved = old.state_dict()
    for state in saved["state"].values():
        state["step"] = step
    optimizer = MuonOptimizer(model)
    migrate.load_state_dict(optimizer, saved, model.parameters())
    count = optimizer.state[model[1].bias]["step"]
    assert_same(count, torch.tensor(7.0, dtype=torch.float32))


def test_a_frozen_parameter_is_no_mismatch():
    model = net()
    old = torch.optim.AdamW(model.named_parameters())
    train(model, old)
    model[0].requires_grad_(False)
    for params in (model.parameters(), None):
        optimizer = MuonOptimizer(model)
        assert "1.bias" in migrate.load_state_dict(optimizer, old.state_dict(), params)


@promise(
    "State of another optimizer does not fit: amsgrad, other shapes or parameters, no names",
    "`migrate.load_state_dict` raises, names what does not fit, and changes nothing",
)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("amsgrad", "1.bias: saved with amsgrad=True, which rule 'adamw' does not have"),
        ("maximize", "4.weight: saved with maximize=True"),
        ("coupled", "1.bias: saved by Adam, whose weight_decay is part of its moments"),
        ("shape", r"1.bias: saved momentum_buffer of shape \(3,\), expected \(12,\)"),
        ("unknown", "gone: saved, but not in this optimizer"),
        ("fewer", "the state dict has 7 parameters and params has 6"),
        ("foreign", r"params\[0\]: saved, but not in this optimizer"),
        ("nameless", "the state dict has no names: pass the params"),
        ("flattened", "not an optimizer's state dict"),
        ("sgd", "saved by torch.optim.SGD: no rule in use can load any of its state"),
        ("ours", "no names, and its groups have other sizes .*: build both optimizers from the model"),
    ],
)
def test_state_that_can_not_be_migrated_is_named(change, match):
    model = net()
    makers: dict[str, Make] = {
        "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
        "maximize": lambda params: torch.optim.AdamW(params, maximize=True),
        "coupled": lambda params: torch.optim.Adam(params, weight_decay=0.1),
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "ours": MuonOptimizer,
    }
    old = makers.get(change, torch.optim.AdamW)(model.parameters())
    train(model, old)
    saved, params = copy.deepcopy(old.state_dict()), list(model.parameters())
    if change == "shape":
        saved["state"][2]["exp_avg"] = torch.ones(3)
    elif change == "unknown":
        saved = get_optimizer_state_dict(model, old)
        saved["state"]["gone"] = saved["state"].pop("0.weight")
        saved["param_groups"][0]["params"][0] = "gone"
    elif change == "fewer":
        params = params[1:]
    elif change == "foreign":
        params[0] = nn.Parameter(torch.zeros(10, 8))
    elif change == "flattened":
        saved = get_optimizer_state_dict(model, old, options=FLATTENED[True])
    elif change == "ours":
        params = old._parameters()
    optimizer = MuonOptimizer(model)
    with pytest.raises((RuntimeError, ValueError), match=match):
        migrate.load_state_dict(optimizer, saved, None if change == "nameless" else params)
    assert [name for name, value in state_of(model, optimizer).items() if value.any()] == []
