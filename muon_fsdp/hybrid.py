"""create_hybrid_optimizer: Muon for the matrices of a model, AdamW for the rest, in one optimizer object."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from muon_fsdp.optimizer import MuonOptimizer
from muon_fsdp.signature import UNSET


def create_hybrid_optimizer(
    model: nn.Module,
    muon_lr: float | Tensor = UNSET,
    *,
    adamw_lr: float | Tensor = 1e-3,
    adamw_weight_decay: float = 0.01,
    **options: Any,
) -> MuonOptimizer:
    """An optimizer that routes by module: matrices to Muon; embeddings, a language model's head and the rest to AdamW.

    `print(optimizer.routing_report())` shows what went where, and why.

    Args:
        model: the model, wrapped or not.
        muon_lr: learning rate of the matrices, 0.02 by default.
        adamw_lr: learning rate of everything else.
        adamw_weight_decay: decoupled decay of every AdamW parameter, vectors included.
        options: all others of `MuonOptimizer`; `weight_decay` (0 by default) is that of the matrices.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"create_hybrid_optimizer needs the model itself, got {type(model).__name__}")
    if "lr" in options:
        raise TypeError("create_hybrid_optimizer has two learning rates: pass muon_lr and adamw_lr instead of lr")
    return MuonOptimizer(model, lr=muon_lr, adamw_lr=adamw_lr, adamw_weight_decay=adamw_weight_decay, **options)
