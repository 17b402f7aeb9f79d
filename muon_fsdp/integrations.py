"""Adapters for training libraries, where one needs more than an optimizer's class; see docs/integrations.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["trainer_optimizer"]

MakeOptimizer = Callable[..., torch.optim.Optimizer]  # make(model, **options)


def trainer_optimizer(make: MakeOptimizer, **options: Any) -> tuple[Callable[..., MakeOptimizer], dict[str, Any]]:
    """For Transformers' Trainer: `Trainer(..., optimizer_cls_and_kwargs=trainer_optimizer(MuonOptimizer, lr=0.02))`.

    Given a class, Trainer calls it with groups of tensors, and embeddings and the head could not be told from other
    matrices. Given anything else, it takes it for a factory and calls `factory()(model, **options)`.

    Args:
        make: what makes the optimizer from a model: a class of ours, `create_hybrid_optimizer`, or your own function.
        options: what it is told besides the model.
    """

    def factory(*groups: object, **_: object) -> MakeOptimizer:
        if groups:  # releases that know no factories
            raise TypeError(
                "This release of Transformers gives an optimizer groups of tensors and not the model. Update it, or "
                "build the optimizer yourself: Trainer(..., optimizers=(MuonOptimizer(model, ...), None))"
            )
        return make

    return factory, options
