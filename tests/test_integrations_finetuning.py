"""Fine-tuning libraries drive the optimizers: PEFT's adapters, and the trainers of TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from muon_fsdp import MuonOptimizer
from muon_fsdp.integrations import trainer_optimizer
from tests import integration_cases as cases
from tests.comparisons import assert_near, assert_same
from tests.reference import ReferenceAdamW, ReferenceMuon

ROWS = np.arange(48).reshape(6, 8).tolist()
ARGUMENTS: dict[str, Any] = {
    "max_steps": 6, "per_device_train_batch_size": 8, "logging_steps": 1, "save_strategy": "no", "max_grad_norm": 0.5,
    "lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [],
    "disable_tqdm": True, "dataloader_pin_memory": False,
}  # fmt: skip


def adapted(**options: Any) -> PeftModel:
    """Make a model whose linear layers have adapters of rank 4; the same numbers in every call."""
    model = cases.llama()
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, **{"target_modules": "all-linear", **options}))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# -------------------------------------------------------------------------------------------------------------- PEFT


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_follow_the_reference(use_dora):
    model = adapted(use_dora=use_dora, modules_to_save=["lm_head"]).double()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = MuonOptimizer(model, orthogonalization="exact", strict=True, **cases.OPTIONS)
    rules = {row.name: row.rule for row in optimizer.routing_report().rows}
    reasons = {row.name: row.reason for row in optimizer.routing_report().rows}
    expected: dict[str, ReferenceMuon | ReferenceAdamW] = {}
    for name, p in trainable(model).items():
        is_factor = ".lora_A." in name or ".lora_B." in name
        assert rules[name] == ("muon" if is_factor else "adamw"), name
        if is_factor:
            assert reasons[name] == f"LoRA factor {'A' if '.lora_A.' in name else 'B'}"
        weight = p.detach().numpy()
        expected[name] = ReferenceMuon(weight, weight_decay=0.1) if is_factor else ReferenceAdamW(weight, lr=0.01)
    assert len(expected) == 14 * (3 if use_dora else 2) + 1
    data = cases.sequences()
    for indices in ROWS[:4]:
        tokens = torch.stack([data[index]["input_ids"] for index in indices])
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        for name, p in trainable(model).items():
            expected[name].step(p.grad.numpy())
        optimizer.step()
    for name, p in trainable(model).items():
        assert_near(p.detach(), torch.from_numpy(expected[name].w), name, rtol=1e-7, atol=1e-9)
    assert_same({name: p for name, p in model.named_parameters() if not p.requires_grad}, frozen, "frozen weights")


def test_a_saved_adapter_resumes(tmp_path: Path):
    model = adapted()
    optimizer = MuonOptimizer(model, **cases.OPTIONS)
    cases.by_hand(model, optimizer, ROWS[:3], [1.0] * 3)
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    losses = cases.by_hand(model, optimizer, ROWS[3:], [1.0] * 3)
    again = PeftModel.from_pretrained(cases.llama(), tmp_path, is_trainable=True)
    resumed = MuonOptimizer(again, **cases.OPTIONS)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    assert cases.by_hand(again, resumed, ROWS[3:], [1.0] * 3) == losses
    assert_same(cases.weights_of(again), cases.weights_of(model), "weights")


# --------------------------------------------------------------------------------------------------------------- TRL


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(cases.VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")


class InOrder(SFTTrainer):
    """Without shuffling, so that the same batches can be drawn by hand."""

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.parametrize("uses_lora", [False, True])
def test_sft_trainer_is_the_plain_loop(uses_lora, tmp_path):
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in cases.sequences()])
    model, other = (adapted() if uses_lora else cases.llama() for _ in range(2))
    run = InOrder(
        model, SFTConfig(str(tmp_path), **ARGUMENTS), train_dataset=data, processing_class=tokenizer(),
        optimizer_cls_and_kwargs=trainer_optimizer(MuonOptimizer, **cases.OPTIONS),
    )  # fmt: skip
    run.train()
    report = run.optimizer.optimizer.routing_report()
    assert sum(row.rule == "muon" for row in report.rows) == (28 if uses_lora else 14)
    expected = cases.by_hand(other, MuonOptimizer(other, **cases.OPTIONS), ROWS, [1.0] * 6)
    np.testing.assert_allclose(cases.history(run), expected, rtol=1e-5)
    assert_near(cases.weights_of(model), cases.weights_of(other), "weights", rtol=1e-4, atol=1e-5)


def test_a_trainer_of_trl_without_the_argument(tmp_path):
    """DPOTrainer accepts an optimizer, but not what builds one from the model; an attribute of Trainer does."""
    rows = [{"prompt": f"t{i} t{i + 1} ", "chosen": f"t{i + 2} t{i + 3}", "rejected": "t0 t0"} for i in range(16)]
    arguments = DPOConfig(str(tmp_path), **{**ARGUMENTS, "max_steps": 2})
    run = DPOTrainer(
        cases.llama(), cases.llama(), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    run.optimizer_cls_and_kwargs = trainer_optimizer(MuonOptimizer, **cases.OPTIONS)
    before = cases.weights_of(run.model)
    run.train()
    rules = {row.name: row.rule for row in run.optimizer.optimizer.routing_report().rows}
    assert (rules["lm_head.weight"], rules["model.layers.0.mlp.up_proj.weight"]) == ("adamw", "muon")
    assert not torch.equal(run.model.lm_head.weight, before["lm_head.weight"])
