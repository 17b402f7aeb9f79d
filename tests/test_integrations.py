"""Training libraries drive the optimizers: Transformers' Trainer, Accelerate, Lightning and its Fabric."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, create_hybrid_optimizer
from muon_fsdp.integrations import trainer_optimizer
from tests import fabric_cases
from tests import integration_cases as cases
from tests.comparisons import assert_near, assert_same
from tests.pool import RankPool

pytestmark = [
    # Of the libraries themselves.
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable"),
    pytest.mark.filterwarnings("ignore:.*configure_model"),
]


def assert_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert_near(actual, expected, "weights", **tolerance)


# ----------------------------------------------------------------------------------------------------- Transformers


class InOrder(Trainer):
    """Without shuffling, so that the same batches can be drawn by hand."""

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.parametrize("make_model", [cases.llama, cases.gpt2])
def test_trainer_with_an_optimizer_and_a_scheduler_is_the_plain_loop(make_model, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "Trainer", InOrder)
    model, other = make_model(), make_model()
    optimizer = MuonOptimizer(model, **cases.OPTIONS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    run = cases.trainer(model, tmp_path, {"optimizers": (optimizer, scheduler)}, save_strategy="no")
    run.train()
    rows = np.arange(48).reshape(6, 8).tolist()
    expected = cases.by_hand(other, MuonOptimizer(other, **cases.OPTIONS), rows, [0.9**step for step in range(6)])
    np.testing.assert_allclose(cases.history(run), expected, rtol=1e-6)
    assert_weights(cases.weights_of(model), cases.weights_of(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (MuonOptimizer, {"lr": 0.02}),
        (FSDPMuonOptimizer, {"lr": 0.02}),
        (create_hybrid_optimizer, {"muon_lr": 0.02}),
    ],
)
def test_trainer_builds_the_optimizer_from_the_model(make, options, tmp_path):
    run = cases.trainer(
        cases.llama(), tmp_path, {"optimizer_cls_and_kwargs": trainer_optimizer(make, **options)}, save_strategy="no"
    )
    run.train()
    rules = {row.name: (row.rule, row.reason) for row in run.optimizer.optimizer.routing_report().rows}
    assert rules["model.embed_tokens.weight"] == ("adamw", "embedding")
    assert rules["lm_head.weight"] == ("adamw", "output head")
    assert rules["model.norm.weight"] == ("adamw", "vector")
    assert sum(rule == "muon" for rule, _ in rules.values()) == 14
    # warm-up over two steps, then a cosine to zero; logged after the step that used the rate before it
    rates = cases.history(run, "learning_rate")
    np.testing.assert_allclose(rates[:3], [0, 0.01, 0.02])
    assert rates[2] > rates[3] > rates[4] > rates[5] > 0


def test_trainer_given_the_class_knows_no_modules(tmp_path):
    """The groups that Trainer makes hold nameless tensors, which is why there is an adapter."""
    run = cases.trainer(
        cases.llama(), tmp_path, {"optimizer_cls_and_kwargs": (MuonOptimizer, {"lr": 0.02})}, save_strategy="no"
    )
    with pytest.warns(UserWarning, match="embedding or output head"):
        rows = run.create_optimizer().routing_report().rows
    assert sum(row.rule == "muon" for row in rows) == 16  # the embedding and the head too


def test_names_of_optimizers_in_trainer_are_a_closed_list(tmp_path):
    """docs/integrations.md says that `optim` can't name our optimizers. If this changes, the page has to."""
    with pytest.raises(ValueError, match="muon_fsdp is not a valid OptimizerNames"):
        TrainingArguments(str(tmp_path), optim="muon_fsdp")


def test_trainer_without_factories_is_refused():
    factory, options = trainer_optimizer(MuonOptimizer, lr=0.02)
    with pytest.raises(TypeError, match="optimizers=\\(MuonOptimizer"):
        factory([{"params": [torch.ones(2, 2)]}], **options)


@pytest.mark.parametrize("make_model", [cases.llama, cases.gpt2])
@pytest.mark.parametrize("scheduler", ["linear", "cosine_with_restarts"])
def test_trainer_resumes_its_checkpoint(make_model, scheduler, tmp_path):
    optimizer = {"optimizer_cls_and_kwargs": trainer_optimizer(MuonOptimizer, **cases.OPTIONS)}
    run = cases.trainer(make_model(), tmp_path, optimizer, lr_scheduler_type=scheduler)
    run.train()
    resumed = cases.trainer(make_model(), tmp_path, optimizer, lr_scheduler_type=scheduler)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert cases.history(resumed) == cases.history(run)
    assert_weights(cases.weights_of(resumed.model), cases.weights_of(run.model))
    state, expected = cases.state_of(resumed.optimizer), cases.state_of(run.optimizer)
    assert len(state) == len(expected) > 20
    assert_same(state, expected, "optimizer state")


def test_gradient_accumulation_of_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "Trainer", InOrder)
    optimizer = {"optimizer_cls_and_kwargs": trainer_optimizer(MuonOptimizer, **cases.OPTIONS)}
    runs = [
        cases.trainer(
            cases.llama(), tmp_path, optimizer, save_strategy="no", per_device_train_batch_size=8 // micro_steps,
            gradient_accumulation_steps=micro_steps,
        )
        for micro_steps in (1, 4)
    ]  # fmt: skip
    for run in runs:
        run.train()
    assert_weights(cases.weights_of(runs[1].model), cases.weights_of(runs[0].model), rtol=1e-4, atol=1e-5)


def test_fused_weights_of_gpt2():
    """A Conv1D stores (d_in, d_out); with `num_heads=3` its three fused matrices are separate."""
    model = cases.gpt2()
    optimizer = MuonOptimizer(model, orthogonalization="exact", overrides={"*.c_attn.weight": {"num_heads": 3}})
    scales = {row.name.removeprefix("transformer.h.0."): row.scale for row in optimizer.routing_report().rows}
    assert scales["attn.c_attn.weight"] == "1"  # as three of (16, 16); fused, (48, 16), it would be 1.732
    assert scales["mlp.c_fc.weight"] == "2"  # (64, 16)
    assert scales["mlp.c_proj.weight"] == "1"  # (16, 64)
    weight = model.transformer.h[0].attn.c_attn.weight
    before = weight.detach().clone()
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    for gradient, update in zip(weight.grad.mT.chunk(3), (before - weight.detach()).mT.chunk(3), strict=True):
        u, _, vh = torch.linalg.svd(gradient)
        torch.testing.assert_close(update, 0.02 * u @ vh, rtol=0, atol=1e-6)


def test_trainer_on_fsdp2(ranks: RankPool, tmp_path):
    alone = cases.trainer(
        cases.llama(),
        tmp_path / "alone",
        {"optimizer_cls_and_kwargs": trainer_optimizer(FSDPMuonOptimizer, **cases.OPTIONS)},
    )
    alone.train()
    for result in ranks.run(2, cases.trainer_fsdp, str(tmp_path / "ranks")):
        assert result["sharded"]
        assert result["ranks"] == 2
        assert result["resumed"] == result["losses"]
        assert_weights(result["resumed weights"], result["weights"])
        np.testing.assert_allclose(result["losses"], cases.history(alone), rtol=1e-5)
        assert_weights(result["weights"], cases.weights_of(alone.model), rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- Accelerate


@pytest.mark.parametrize(("kind", "name"), [("fsdp", "llama"), ("fsdp", "gpt2"), ("ddp", "llama")])
def test_accelerate(ranks: RankPool, kind, name, tmp_path):
    (expected,) = ranks.run(1, cases.accelerate_run, str(tmp_path / "alone"), "ddp", name)
    for result in ranks.run(2, cases.accelerate_run, str(tmp_path / "ranks"), kind, name):
        assert result["sharded"] == (kind == "fsdp")
        assert result["ranks"] == 2
        assert result["scales"] == expected["scales"]
        assert result["routes after prepare"] == result["routes before prepare"]
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-5)
        assert_weights(result["weights"], expected["weights"], rtol=1e-3, atol=1e-4)
        assert result["resumed"] == result["losses"]
        assert_weights(result["resumed weights"], result["weights"])
        assert_weights(result["unsharded weights"], result["resumed weights"])


# -------------------------------------------------------------------------------------------------------- Lightning


def test_lightning_alone(tmp_path):
    result = cases.lightning_run(str(tmp_path), "one")
    assert result["losses"][5] < result["losses"][0]
    assert result["resumed"] == result["losses"]
    assert_weights(result["resumed weights"], result["weights"])
    assert result["lr"] == pytest.approx(0.02 * (1 + np.cos(np.pi * 6 / 8)) / 2)


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_lightning_unfreezes_layers_and_resumes(tmp_path):
    """BaseFinetuning assigns `param_groups` when it resumes; LearningRateMonitor refuses two groups of one name."""
    result = cases.lightning_finetuning(str(tmp_path))
    assert result["resumed"] == result["losses"]
    assert_weights(result["resumed weights"], result["weights"])
    assert result["names"] == ["head", "head.adamw", "thawed", "thawed.adamw"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_lightning_on_ranks(ranks: RankPool, kind, tmp_path):
    expected = cases.lightning_run(str(tmp_path / "alone"), "one")
    for result in ranks.run(2, cases.lightning_on_ranks, str(tmp_path / "ranks"), kind):
        assert result["sharded"] == (kind == "fsdp")
        assert result["ranks"] == 2
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-5)
        assert_weights(result["weights"], expected["weights"], rtol=1e-3, atol=1e-4)
        assert result["resumed"] == result["losses"]
        assert_weights(result["resumed weights"], result["weights"])


@pytest.mark.parametrize("kind", ["one", "ddp", "fsdp"])
def test_fabric(ranks: RankPool, kind, tmp_path):
    expected = fabric_cases.fabric_run(str(tmp_path / "alone"), "one")
    assert expected["losses"][5] < expected["losses"][0]
    assert expected["muon"] == [(8, 24), (24, 8)]
    on_ranks = [] if kind == "one" else ranks.run(2, fabric_cases.fabric_on_ranks, str(tmp_path / "ranks"), kind)
    for result in [expected, *on_ranks]:
        assert result["resumed"] == result["losses"]
        assert_same(result["resumed weights"], result["weights"], "resumed weights")
    for result in on_ranks:
        assert result["sharded"] == (kind == "fsdp")
        assert result["ranks"] == 2
        assert result["muon"] == expected["muon"]
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-5)
        assert_near(result["weights"], expected["weights"], "weights", rtol=1e-3, atol=1e-4)


def test_trainers_adapter_says_what_it_does_not_use():
    with pytest.raises(ValueError, match="pass gradient_accumulation_steps to TrainingArguments"):
        trainer_optimizer(FSDPMuonOptimizer, lr=0.02, gradient_accumulation_steps=4)
    with pytest.warns(UserWarning, match="learning_rate and weight_decay of TrainingArguments are not used") as caught:
        trainer_optimizer(MuonOptimizer, weight_decay=0.1)
    assert caught[0].filename == __file__
    trainer_optimizer(create_hybrid_optimizer, muon_lr=0.02)
