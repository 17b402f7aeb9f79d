"""The optimizer of a run: matrices with what was asked for, everything else with AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from muon_fsdp import FSDPMuonOptimizer
from muon_fsdp.training.config import TrainConfig

ADAMW_BETAS = (0.9, 0.95)
DEFAULT_LR = {"muon": 0.02, "normuon": 0.02, "sso": 0.02, "adamw": 2e-3}
DEFAULT_DECAY = {
    "muon": 0.01,
    "normuon": 0.01,
    "sso": 0.0,
    "adamw": 0.1,
}  # times lr, Muon's and AdamW's are the same per step
DEFAULT_REST_LR = 4e-3


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """For a model on one device, in DDP or under FSDP2. The runs differ in the hidden matrices alone."""
    lr = DEFAULT_LR[config.optimizer] if config.lr is None else config.lr
    rest_lr = DEFAULT_REST_LR if config.rest_lr is None else config.rest_lr
    decay = DEFAULT_DECAY[config.optimizer] if config.weight_decay is None else config.weight_decay
    if config.optimizer == "adamw":
        return _make_adamw(model, lr, rest_lr, decay)
    options: dict[str, Any]
    if config.optimizer == "sso":
        options = {"rule": "spectral_sphere", "lambda_mode": config.lambda_mode}
    else:
        options = {"rule": config.optimizer, "scale": config.scale}
    return FSDPMuonOptimizer(
        model,
        lr=lr,
        weight_decay=decay,
        adamw_lr=rest_lr,
        adamw_betas=ADAMW_BETAS,
        adamw_weight_decay=0.0,
        cuda_graph=config.cuda_graph,
        **options,
    )


def _make_adamw(model: nn.Module, lr: float, rest_lr: float, decay: float) -> torch.optim.Optimizer:
    """Two learning rates, as Muon has: one for everything was much worse, and the comparison would not be fair."""
    named = dict(model.named_parameters())
    matrices = [parameter for name, parameter in named.items() if "blocks." in name and parameter.ndim == 2]
    rest = [parameter for parameter in named.values() if not any(parameter is matrix for matrix in matrices)]
    groups = [
        {"params": matrices, "lr": lr, "weight_decay": decay},
        {"params": rest, "lr": rest_lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=ADAMW_BETAS, fused=True)
