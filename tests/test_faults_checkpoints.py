"""Checkpoints and state."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer, migrate
from muon_fsdp.comm.transfers import local
from muon_optimizer import TritonMuon
from tests.comparisons import assert_changed, assert_near, assert_same
from tests.pool import RankPool
from tests.promises import promise

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is (unavailable|disabled)")

OPTIMIZERS = [MuonOptimizer, FSDPMuonOptimizer, SpectralSphereOptimizer]
FLATTENED = {flag: StateDictOptions(flatten_optimizer_state_dict=flag) for flag in (False, True)}
Make = Callable[..., torch.optim.Optimizer]


def net(seed: int = 0) -> nn.Sequential:
    """Make a model with matrices, vectors and an embedding, sharded where there are ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.LayerNorm(8))
    if dist.is_initialized():
        fully_shard(model[1])
        fully_shard(model)
    return model


def backward(model: nn.Module) -> None:
    model(torch.arange(8)).square().mean().backward()


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        backward(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return a copy of this rank's state, by the names of parameter and state."""
    return {
        f"{name} {key}": local(torch.as_tensor(value)).clone()
        for name, parameter in model.named_parameters()
        for optimizer in optimizers
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that two results of `state_of` are equal, and that the state is not all zeros, as in a new optimizer."""
    assert any(value.any() for value in expected.values()), f"state of a new optimizer: {expected}"
    assert_same(found, expected)


@contextmanager
def folder() -> Iterator[str]:
    """Make a temporary folder that all ranks know."""
    with tempfile.TemporaryDirectory() as name:
        names = [name]
        if dist.is_initialized():
            dist.broadcast_object_list(names)
        yield names[0]
        if dist.is_initialized():
            dist.barrier()


def others(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Train a model with torch.optim.Muon for matrices and AdamW for other parameters; return both."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors)]
    train(model, *optimizers)
    return optimizers


# ------------------------------------------------------------------------------------- torch.distributed.checkpoint


def the_page_in_order() -> None:
    from tests.test_docs import ROOT, snippets

    page = "docs/faq.md"
    names: dict[str, Any] = {"__name__": page}
    for line, code in snippets(page, "distributed"):
        before = state_of(names["model"], names["optimizer"]) if "dcp.load" in code else None
        exec(compile("\n" * line + code, str(ROOT / page), "exec"), names)
        if before is not None:
            assert_same_state(state_of(names["model"], names["optimizer"]), before)
            return
    raise AssertionError("the page has no snippet that resumes")


@promise(
    "A run is resumed as the FAQ shows, in a process that has gradients",
    "All state is as it was saved",
)
def test_the_snippet_of_the_faq_restores_state(ranks: RankPool):
    ranks.run(2, the_page_in_order)


def resumed(make: Make, flatten: bool, whole: bool) -> None:
    """Save, load into a new optimizer whose model has gradients, and check that its state is what was saved."""
    model, options = net(), FLATTENED[flatten]
    optimizer = make(model)
    train(model, optimizer)
    fresh_model = net(seed=1)
    fresh = make(fresh_model)
    backward(fresh_model)
    with folder() as path:
        if whole:
            names = ("model", "optimizer")
            saved = get_state_dict(model, optimizer, options=options)
            dcp.save(dict(zip(names, saved, strict=True)), checkpoint_id=path)
            state: Any = dict(zip(names, get_state_dict(fresh_model, fresh, options=options), strict=True))
            dcp.load(state, checkpoint_id=path)
            set_state_dict(
                fresh_model,
                fresh,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=options,
            )
        else:
            dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=path)
            state = {"optimizer": get_optimizer_state_dict(fresh_model, fresh, options=options)}
            dcp.load(state, checkpoint_id=path)
            set_optimizer_state_dict(fresh_model, fresh, state["optimizer"], options=options)
    assert_same_state(state_of(fresh_model, fresh), state_of(model, optimizer))


def all_resumed() -> None:
    for flatten in (False, True):
        for make in OPTIMIZERS:
            resumed(make, flatten, whole=False)
        resumed(MuonOptimizer, flatten, whole=True)


@promise(
    "A checkpoint is loaded while the model has gradients, and torch.distributed.checkpoint creates no state",
    "All state is loaded: `state_dict()` creates it",
)
def test_state_is_loaded_while_there_are_gradients(ranks: RankPool):
    all_resumed()
    resumed(lambda model: TritonMuon(model.parameters()), flatten=False, whole=False)
    resumed(lambda model: TritonMuon(model.parameters()), flatten=True, whole=False)
    ranks.run(2, all_resumed)


@pytest.mark.parametrize("make", [*OPTIMIZERS, lambda model: TritonMuon(model.parameters())])
def test_a_new_state_dict_has_state_only_if_there_are_gradients(make):
    """Accelerate loads the state dict of a new optimizer before it exchanges parameters: there must be no state yet."""
    model = net()
    optimizer = make(model)
    assert not optimizer.state_dict()["state"]
    assert not optimizer.state
    optimizer.load_state_dict(optimizer.state_dict())
    backward(model)
    state = optimizer.state_dict()["state"]
    assert len(state) == len(list(model.parameters()))
    assert [(i, key) for i, each in state.items() for key, value in each.items() if torch.as_tensor(value).any()] == []
    other = net()
    expected = make(other)
    backward(other)
    optimizer.step()
    expected.step()
    assert_same_state(state_of(model, optimizer), state_of(other, expected))


def test_state_of_a_model_on_the_meta_device_is_created_when_it_is_materialised():
    with torch.device("meta"):
        model = net()
    optimizer = MuonOptimizer(model)
    model(torch.arange(8, device="meta")).sum().backward()
    state = optimizer.state_dict()["state"]
    assert {value.device.type for each in state.values() for value in each.values()} == {"meta"}
    for parameter in model.parameters():
        parameter.grad = None
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(parameter.shape)))
    backward(model)
    optimizer.step()
    assert not any(value.is_meta for state in optimizer.state.values() for value in state.values())


@promise(
    "A flattened state dict is set, without `get_optimizer_state_dict` first, on a model that has gradients",
    "An error that says to call `optimizer.state_dict()` first; afterwards it loads",
)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_state_that_would_not_be_loaded_is_an_error(make):
    model, fresh_model = net(), net()
    optimizer, fresh = make(model), make(fresh_model)
    train(model, optimizer)
    saved = get_optimizer_state_dict(model, optimizer, options=FLATTENED[True])
    backward(fresh_model)
    with pytest.raises(RuntimeError, match=r"the state of 7 parameters is empty.*optimizer\.state_dict\(\) first"):
        set_optimizer_state_dict(fresh_model, fresh, saved, options=FLATTENED[True])
    fresh.state_dict()
    set_optimizer_state_dict(fresh_model, fresh, saved, options=FLATTENED[True])
    assert_same_state(state_of(fresh_model, fresh), state_of(model, optimizer))


@promise(
    "A state dict lacks the state of trainable parameters",
    "It is loaded, and a warning names them",
)
def test_parameters_without_saved_state_are_named():
    model = net()
    optimizer = MuonOptimizer(model)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]
    fresh = MuonOptimizer(model)
    model[1].weight.requires_grad_(False)
    fresh.load_state_dict(saved)  # frozen: nothing is missing
    model[1].weight.requires_grad_(True)
    with pytest.warns(UserWarning, match="no state of 1 parameters, which start anew: '1.weight'$"):
        fresh.load_state_dict(saved)
    with pytest.warns(UserWarning, match="no state of 7 parameters, which start anew: '1.weight', .*, ..."):
        fresh.load_state_dict({**saved, "state": {}})


# ------------------------------------------------------------------------------------------------- other optimizers


def partly_loaded(make: Callable[[nn.Module], list[torch.optim.Optimizer]], flatten: bool) -> str:
    """Load another optimizer's checkpoint as far as names fit, and check that nothing of it is left.

    Returns:
        The error, or "" if there was none.
    """
    model, options = net(), FLATTENED[flatten]
    old = make(model)
    fresh = MuonOptimizer(model, overrides={"0.weight": "muon"})
    with folder() as path:
        dcp.save({"optimizer": get_optimizer_state_dict(model, old, options=options)}, checkpoint_id=path)
        state = {"optimizer": get_optimizer_state_dict(model, fresh, options=options)}
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=path, planner=planner)
    try:
        set_optimizer_state_dict(model, fresh, state["optimizer"], options=options)
    except RuntimeError as error:
        kept = [name for name, value in state_of(model, fresh).items() if value.any()]
        assert not kept, f"state of the other optimizer is left: {kept}"
        assert fresh.param_groups[0]["nesterov"] is False, fresh.param_groups[0]
        return str(error)
    return ""


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return [optimizer]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    return [optimizer]


def all_partly_loaded() -> list[str]:
    return [partly_loaded(make, flatten) for make in (others, adamw, sgd) for flatten in (False, True)]


@promise(
    "A checkpoint of `torch.optim.Muon`, AdamW or SGD is loaded with `allow_partial_load=True`",
    "Refused, and nothing of it stays: momentum would be on another scale, or counts without moments",
)
def test_a_part_of_another_optimizers_checkpoint_is_refused(ranks: RankPool):
    for texts in [all_partly_loaded(), *ranks.run(2, all_partly_loaded)]:
        for text in texts:
            assert "another optimizer" in text
            assert "docs/migration.md" in text


@promise(
    "Nothing in a checkpoint has the names of the model, and `allow_partial_load=True` lets that pass",
    "A warning says that no state was found",
)
def test_a_load_that_found_nothing_is_told():
    model = net()
    old, fresh = MuonOptimizer(model), MuonOptimizer(model)
    train(model, old)
    with folder() as path:
        dcp.save({"another": get_optimizer_state_dict(model, old)}, checkpoint_id=path)
        state = {"optimizer": get_optimizer_state_dict(model, fresh)}
        dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    with pytest.warns(UserWarning, match="as before the first step.*none of its state was found"):
        set_optimizer_state_dict(model, fresh, state["optimizer"])


@promise(
    "`load_state_dict` is given the state dict of a torch optimizer",
    "One line names that optimizer and the page on migration",
)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torch.optim.AdamW, "torch.optim.AdamW"),
        (torch.optim.Adam, "torch.optim.Adam"),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), "torch.optim.SGD"),
        (lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]), "torch.optim.Muon"),
        (torch.optim.RMSprop, "another optimizer"),
        (TritonMuon, "another optimizer"),
    ],
)
@pytest.mark.parametrize("ours", OPTIMIZERS)
def test_the_state_dict_of_another_optimizer_is_called_so(make, name, ours):
    model = net()
    optimizer, old = ours(model), make(model.parameters())
    train(model, old)
    with pytest.raises(RuntimeError) as raised:
        optimizer.load_state_dict(old.state_dict())
    lines = str(raised.value).splitlines()
    assert len(lines) == 2
    assert f"saved by {name}, not by {ours.__name__}." in lines[1]
    assert "docs/migration.md" in lines[1]
    assert not optimizer.state


# -------------------------------------------------------------------------------------------------------- migration

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
    "`migrate.load_state_dict` loads the moments: AdamW's parameters go on as before, matrices start without momentum",
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
        ("ours", "saved by an optimizer of muon_fsdp: call optimizer.load_state_dict"),
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


# ------------------------------------------------------------------------------------------- ZeroRedundancyOptimizer


def wrapped() -> list[str]:
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    texts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

        for make in OPTIMIZERS:
            with pytest.raises(Exception) as raised:  # noqa: PT011 (the text is looked at)
                ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, lr=0.02)
            texts.append(str(raised.value))
        matrices = [model[0].weight, model[2].weight]  # one rule: its groups stay as they are
        optimizer = ZeroRedundancyOptimizer(matrices, optimizer_class=MuonOptimizer, lr=0.02)
        before = [p.detach().clone() for p in matrices]
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
    assert_changed(matrices, before)
    return texts


@promise(
    "`ZeroRedundancyOptimizer` is built around one of ours",
    "An error that names FSDP2, or DDP with `FSDPMuonOptimizer`, in its place",
)
def test_zero_redundancy_optimizer_is_refused(ranks: RankPool):
    for texts in ranks.run(2, wrapped):
        assert len(texts) == len(OPTIMIZERS)
        for text, make in zip(texts, OPTIMIZERS, strict=True):
            assert f"ZeroRedundancyOptimizer can't wrap {make.__name__}" in text
            assert "fully_shard" in text
            assert "FSDPMuonOptimizer(ddp_model)" in text
