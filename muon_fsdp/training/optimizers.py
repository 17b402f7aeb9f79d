"""Make the optimizer of a run: the chosen rule for the hidden matrices, AdamW for all other parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from muon_fsdp import FSDPMuonOptimizer
from muon_fsdp.parameters.routing import clean_name
from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES
from muon_fsdp.training.config import DEFAULT_REST_LR, TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> FSDPMuonOptimizer:
    """Make the optimizer of a model on one device, in DDP or under FSDP2.

    Runs with different rules differ only in the hidden matrices. AdamW as the rule of the hidden matrices has a second
    learning rate for all other parameters too: with one it was much worse, and a comparison would not be fair.
    """
    named = [(clean_name(name), parameter) for name, parameter in model.named_parameters()]
    hidden = [(name, parameter) for name, parameter in named if name.startswith("blocks.") and parameter.ndim == 2]
    chosen = {name for name, _ in hidden}
    rest = [(name, parameter) for name, parameter in named if name not in chosen]
    groups: list[dict[str, Any]] = [
        {"params": hidden, "rule": config.optimizer, **config.matrix_options},
        {"params": rest, "rule": DEFAULT_OTHER_RULE, **_rest_options(config)},
    ]
    return FSDPMuonOptimizer(
        model, groups, rule=config.optimizer, cuda_graph="auto" if config.cuda_graph is None else config.cuda_graph
    )


def _rest_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of embedding, head and vectors: the rule's defaults, `--rest-lr`, and no weight decay."""
    declared = {name: option.default for name, option in RULES[DEFAULT_OTHER_RULE].all_options.items()}
    return declared | {"lr": DEFAULT_REST_LR if config.rest_lr is None else config.rest_lr, "weight_decay": 0.0}
