"""Adapt our optimizers to training libraries that need more than an optimizer class; see docs/integrations.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from muon_fsdp.text import warn_user

__all__ = ["trainer_optimizer"]

MakeOptimizer = Callable[..., torch.optim.Optimizer]  # make(model, **options)


def trainer_optimizer(make: MakeOptimizer, **options: Any) -> tuple[Callable[..., MakeOptimizer], dict[str, Any]]:
    """Return what Transformers' Trainer needs to build an optimizer from the model.

        Trainer(..., optimizer_cls_and_kwargs=trainer_optimizer(MuonOptimizer, lr=0.02))

    Trainer passes groups of tensors to an optimizer class, and without the model, embeddings and the output head look
    like any other matrix. It treats anything that is not a class as a factory, and calls `factory()(model, **options)`.
    Trainers that derive from it, such as those of TRL and axolotl, do the same. If one does not have the argument, as
    `Seq2SeqTrainer`, set the attribute `optimizer_cls_and_kwargs` before `train()`.

    `learning_rate` and `weight_decay` of TrainingArguments are not used, because Trainer does not pass them on: pass
    `lr` and `weight_decay` here. A warning says so if no learning rate is passed.

    Args:
        make: what builds the optimizer from a model: one of our classes, `create_hybrid_optimizer`, or your own
            function.
        options: further arguments of `make`.

    Returns:
        The factory and the options, for `Trainer(optimizer_cls_and_kwargs=...)`.

    Raises:
        ValueError: `gradient_accumulation_steps` is among the options.
    """
    if options.get("gradient_accumulation_steps", 1) != 1:
        raise ValueError(
            "trainer_optimizer: pass gradient_accumulation_steps to TrainingArguments, not to the optimizer. Trainer "
            "clears gradients with model.zero_grad(), so all but the last of them would be lost."
        )
    if not any(name == "lr" or name.endswith("_lr") for name in options):
        warn_user(
            "trainer_optimizer: no learning rate was passed, so the optimizer uses its default. learning_rate and "
            "weight_decay of TrainingArguments are not used: pass lr= and weight_decay= to trainer_optimizer."
        )

    def build(model: nn.Module, training_arguments: object = None, **options: Any) -> torch.optim.Optimizer:
        return make(model, **options)  # axolotl's trainers pass their training arguments too

    def factory(*groups: object, **_: object) -> MakeOptimizer:
        if groups:  # older releases of Transformers call the factory as they call a class
            raise TypeError(
                "This release of Transformers passes groups of tensors to the optimizer instead of the model. Update "
                "Transformers, or build the optimizer yourself: "
                "Trainer(..., optimizers=(MuonOptimizer(model, ...), None))"
            )
        return build

    return factory, options
