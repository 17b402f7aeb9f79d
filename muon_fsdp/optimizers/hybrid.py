"""create_hybrid_optimizer: Muon for the matrices of a model and AdamW for its other parameters, in one object."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from muon_fsdp.optimizers.muon import MuonOptimizer
from muon_fsdp.optimizers.signature import UNSET, show_defaults
from muon_fsdp.rules import DEFAULT_OTHER_RULE, DEFAULT_RULE, RULES

ADAMW_DEFAULTS = {"adamw_lr": 1e-3, "adamw_weight_decay": 0.01}


@show_defaults(muon_lr=RULES[DEFAULT_RULE].all_options["lr"].default, **ADAMW_DEFAULTS)
def create_hybrid_optimizer(
    model: nn.Module,
    muon_lr: float | Tensor = UNSET,
    *,
    adamw_lr: float | Tensor = UNSET,
    adamw_weight_decay: float = UNSET,
    **options: Any,
) -> MuonOptimizer:
    """Build an optimizer that uses Muon for matrices, and AdamW for embeddings, output heads and all other parameters.

    `print(optimizer.routing_report())` shows the rule of every parameter and the reason.

    Args:
        model: the model, wrapped or not.
        muon_lr: learning rate of the matrices.
        adamw_lr: learning rate of all other parameters.
        adamw_weight_decay: decoupled decay of every AdamW parameter, vectors included.
        options: all other options of `MuonOptimizer`; `weight_decay` (0 by default) applies to the matrices.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"create_hybrid_optimizer needs the model itself, got {type(model).__name__}")
    if "lr" in options:
        raise TypeError("create_hybrid_optimizer has two learning rates: pass muon_lr and adamw_lr instead of lr")
    others = {"adamw_lr": adamw_lr, "adamw_weight_decay": adamw_weight_decay}
    given = {name: value for name, value in others.items() if value is not UNSET}
    # Another element-wise rule (other_rule) has options of its own.
    defaults = ADAMW_DEFAULTS if options.get("other_rule", DEFAULT_OTHER_RULE) == DEFAULT_OTHER_RULE else {}
    return MuonOptimizer(model, lr=muon_lr, **{**defaults, **given, **options})
