"""create_hybrid_optimizer: Muon for the matrices of a model, AdamW for the rest, in one optimizer object."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from muon_fsdp.optimizer import MuonOptimizer


def create_hybrid_optimizer(
    model: nn.Module,
    muon_lr: float | Tensor = 0.02,
    adamw_lr: float | Tensor = 1e-3,
    adamw_weight_decay: float = 0.01,
    **options: Any,
) -> MuonOptimizer:
    """An optimizer that routes by module: embeddings, output head, vectors and scalars to AdamW, matrices to Muon.

    `adamw_weight_decay` applies to every AdamW parameter, `weight_decay` (0 by default) to the matrices. Further
    options are those of `MuonOptimizer`; `print(optimizer.routing_report())` shows what went where, and why.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"create_hybrid_optimizer needs the model itself, got {type(model).__name__}")
    if "lr" in options:
        raise TypeError("create_hybrid_optimizer has two learning rates: say muon_lr and adamw_lr instead of lr")
    return MuonOptimizer(model, lr=muon_lr, adamw_lr=adamw_lr, adamw_weight_decay=adamw_weight_decay, **options)
