"""Run the adapters for axolotl and torchtitan beside the interfaces that these publish, or beside themselves."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from muon_fsdp import FSDPMuonOptimizer
from muon_fsdp.integrations import trainer_optimizer
from tests import integration_cases as cases
from tests import published
from tests.comparisons import assert_changed, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*trl.experimental")  # of axolotl itself


def interfaces(name: str) -> list[Any]:
    """Return the parameters of a fixture: the stand-in, and the framework, which is no test dependency."""
    is_missing = importlib.util.find_spec(name) is None
    return [
        pytest.param(False, id="published"),
        pytest.param(True, id="installed", marks=pytest.mark.skipif(is_missing, reason=f"{name} is not installed")),
    ]


# ----------------------------------------------------------------------------------------------------------- axolotl


@pytest.fixture(params=interfaces("axolotl"))
def axolotl(request) -> Iterator[ModuleType]:
    with published.framework("axolotl", request.param) as adapter:
        yield adapter


def axolotl_trainer(folder, **arguments: Any) -> Trainer:
    """Make a trainer that builds its optimizer as axolotl's do."""
    run = cases.trainer(cases.llama(), folder, {}, learning_rate=0.02, weight_decay=0.1, **arguments)
    mixin = importlib.import_module("axolotl.core.trainers.mixins.optimizer").OptimizerMixin
    run.__class__ = type("AxolotlTrainer", (mixin, Trainer), {})
    for name in ("embedding_lr", "embedding_lr_scale", "loraplus_lr_ratio", "lr_groups"):
        setattr(run.args, name, None)
    return run


def settings(**values: Any) -> Any:
    return importlib.import_module("axolotl.utils.dict").DictDefault(values)


def test_axolotl_trains_with_the_plugin(axolotl, tmp_path):
    run = axolotl_trainer(tmp_path, save_strategy="no")
    plugin = axolotl.MuonPlugin()
    section = {"adamw_lr": 0.01, "adamw_betas": [0.9, 0.99], "overrides": {"*.o_proj.weight": {"lr": 0.01}}}
    plugin.post_trainer_create(settings(muon_fsdp=section), run)
    run.train()
    rows = {row.name: row.rule for row in run.optimizer.optimizer.routing_report().rows}
    assert rows["lm_head.weight"] == "adamw"
    assert sum(rule == "muon" for rule in rows.values()) == 14
    options = {**cases.OPTIONS, **section, "adamw_betas": (0.9, 0.99)}
    expected = cases.trainer(
        cases.llama(), tmp_path, {"optimizer_cls_and_kwargs": trainer_optimizer(FSDPMuonOptimizer, **options)},
        save_strategy="no",
    )  # fmt: skip
    expected.train()
    assert cases.history(run) == cases.history(expected)
    assert_same(cases.weights_of(run.model), cases.weights_of(expected.model), "weights")


def test_axolotl_knows_the_section_of_the_plugin(axolotl):
    module, _, name = axolotl.MuonPlugin().get_input_args().rpartition(".")
    declared = getattr(importlib.import_module(module), name)
    assert declared(muon_fsdp={"lr": 0.02}).muon_fsdp == {"lr": 0.02}
    assert declared().muon_fsdp == {}


def test_settings_of_axolotl_without_effect_are_refused(axolotl, tmp_path):
    run = axolotl_trainer(tmp_path)
    run.args.lr_groups = [{"name": "head", "modules": ["lm_head"], "lr": 1e-3}]
    with pytest.raises(ValueError, match="lr_groups would have no effect"):
        axolotl.MuonPlugin().post_trainer_create(settings(), run)


# -------------------------------------------------------------------------------------------------------- torchtitan


@pytest.fixture(params=interfaces("torchtitan"))
def torchtitan(request) -> Iterator[ModuleType]:
    with published.framework("torchtitan", request.param) as adapter:
        yield adapter


def parts() -> list[nn.Module]:
    """Make the two parts of a model that a pipeline has cut."""
    torch.manual_seed(0)
    first = nn.ModuleDict({"tok_embeddings": nn.Embedding(16, 8), "layers": nn.ModuleDict({"0": nn.Linear(8, 8)})})
    return [first, nn.ModuleDict({"layers": nn.ModuleDict({"1": nn.Linear(8, 12)}), "norm": nn.LayerNorm(8)})]


def train(model_parts: list[nn.Module], optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for part in model_parts:
            for p in part.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_torchtitan_steps_every_part(torchtitan):
    model_parts, others = parts(), parts()
    container = torchtitan.MuonContainer.Config(options=cases.OPTIONS).build(model_parts=model_parts)
    assert [type(optimizer) for optimizer in container] == [FSDPMuonOptimizer] * 2
    assert len(container.param_groups[0]["params"]) == 7
    rules = {row.name: row.rule for optimizer in container for row in optimizer.routing_report().rows}
    assert rules["tok_embeddings.weight"] == "adamw"
    assert rules["layers.1.weight"] == "muon"
    before = [cases.weights_of(part) for part in model_parts]
    train(model_parts, [container], range(3))
    train(others, [FSDPMuonOptimizer(part, **cases.OPTIONS) for part in others], range(3))
    for found, expected, initial in zip(model_parts, others, before, strict=True):
        assert_same(cases.weights_of(found), cases.weights_of(expected), "weights")
        assert_changed(cases.weights_of(found), initial, "weights")


def test_torchtitan_saves_and_loads(torchtitan):
    """The stand-in has no checkpoints of its own, so its optimizers save theirs."""
    model_parts, others = parts(), parts()
    make = torchtitan.MuonContainer.Config(options=cases.OPTIONS).build
    container, resumed = make(model_parts=model_parts), make(model_parts=others)
    train(model_parts, [container], range(3))
    for part, other in zip(model_parts, others, strict=True):
        other.load_state_dict(part.state_dict())
    if hasattr(type(container), "init_cache_state_dict"):  # torchtitan itself
        resumed.load_state_dict(container.state_dict())
    else:
        for optimizer, other in zip(container, resumed, strict=True):
            other.load_state_dict(optimizer.state_dict())
    train(model_parts, [container], range(3, 6))
    train(others, [resumed], range(3, 6))
    for found, expected in zip(others, model_parts, strict=True):
        assert_same(cases.weights_of(found), cases.weights_of(expected), "weights")


@pytest.mark.parametrize("given", [{"param_groups": [None]}, {"optimizer_factory_kwargs_by_name": {"AdamW": {}}}])
def test_groups_of_torchtitan_are_refused(torchtitan, given):
    with pytest.raises(ValueError, match="have no effect; choose rules with options"):
        torchtitan.MuonContainer.Config(options={"lr": 0.02}, **given).build(model_parts=parts())
