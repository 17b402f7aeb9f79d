"""Make the optimizer of a run: the chosen rule for the hidden matrices, AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.declarations.settings import CudaGraph
from muon_fsdp.parameters.names import clean_name
from muon_fsdp.rules import DEFAULT_OTHER_RULE, RULES
from muon_fsdp.rules.recipes import recipes
from muon_fsdp.training.config import DEFAULT_REST_LR, TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> MuonOptimizer:
    """Make the optimizer of a model on one device, in DDP or under FSDP2.

    Runs with different rules differ only in the hidden matrices. AdamW as the rule of the hidden matrices has a second
    learning rate for all other parameters too: with one it was much worse, and a comparison would not be fair.
    """
    graph: CudaGraph = "auto" if config.cuda_graph is None else config.cuda_graph
    settings: dict[str, Any] = {"cuda_graph": graph, "offload_state": config.offload_state}
    if config.recipe is not None:
        return _by_recipe(model, config.recipe, settings | _storage(config))
    named = [(clean_name(name), parameter) for name, parameter in model.named_parameters()]
    hidden = [(name, parameter) for name, parameter in named if name.startswith("blocks.") and parameter.ndim == 2]
    chosen = {name for name, _ in hidden}
    groups: list[dict[str, Any]] = [
        {"params": hidden, "rule": config.optimizer, **config.matrix_options},
        *_rest_groups([(name, parameter) for name, parameter in named if name not in chosen], config),
    ]
    return FSDPMuonOptimizer(model, groups, rule=config.optimizer, attention=config.attention, **settings)


def _by_recipe(model: nn.Module, name: str, settings: dict[str, Any]) -> MuonOptimizer:
    """Make the optimizer of a published recipe, whose overrides have other names of the embedding than this model."""
    options = {**recipes[name].options, **settings}
    renamed = {"*embed*": "*wte*", "*embed_tokens*": "*wte*"}
    named = {renamed.get(pattern, pattern): given for pattern, given in options.pop("overrides", {}).items()}
    names = [clean_name(each) for each, _ in model.named_parameters()]  # without a head of its own if it is tied
    overrides = {pattern: given for pattern, given in named.items() if any(fnmatchcase(n, pattern) for n in names)}
    return MuonOptimizer(model, **options, overrides=overrides or None)


def _storage(config: TrainConfig) -> dict[str, Any]:
    """Return how state is stored and weights are rounded, for all parameters."""
    return {"state_dtype": config.state_dtype, "rounding": config.rounding}


def _rest_groups(named: Sequence[tuple[str, nn.Parameter]], config: TrainConfig) -> list[dict[str, Any]]:
    """Return the groups of embedding, head and vectors.

    They have the rule's defaults, `--rest-lr` and `--rest-betas`. Embedding and head also have `--rest-weight-decay`,
    in a group of their own: weight decay of the gains of normalizations is bad practice.
    """
    options = {name: option.default for name, option in RULES[DEFAULT_OTHER_RULE].all_options.items()}
    options |= {"rule": DEFAULT_OTHER_RULE, "lr": DEFAULT_REST_LR if config.rest_lr is None else config.rest_lr}
    options |= {"weight_decay": 0.0, **_storage(config)}
    if config.rest_betas is not None:
        options["betas"] = tuple(config.rest_betas)
    if not config.rest_weight_decay:
        return [{**options, "params": list(named)}]
    tables = [(name, parameter) for name, parameter in named if parameter.ndim >= 2]
    vectors = [(name, parameter) for name, parameter in named if parameter.ndim < 2]
    decay = {"weight_decay": config.rest_weight_decay}
    return [{**options, **decay, "params": tables}, {**options, "params": vectors}]
