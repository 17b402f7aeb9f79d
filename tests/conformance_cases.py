"""Our optimizers described in the terms of torch's own test suite, and helpers that build and train with them."""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer
from muon_optimizer import TritonMuon, TritonMuonW


def _testing_modules() -> tuple[Any, Any, Any]:
    """Import torch's test helpers; they need expecttest for comparisons with files, of which there are none here."""
    stands_in = importlib.util.find_spec("expecttest") is None
    if stands_in:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True):
        from torch.testing._internal import common_optimizers, common_utils
        from torch.testing._internal.distributed import common_state_dict

    if stands_in:
        del sys.modules["expecttest"]
    # Importing them forbids `torch.backends.x = ...` for the rest of the process.
    torch.backends.__dict__["__allow_nonbracketed_mutation_flag"] = True
    return common_optimizers, common_utils, common_state_dict


OPTIMIZERS, UTILS, STATE_DICTS = _testing_modules()
OptimizerInfo, OptimizerInput = OPTIMIZERS.OptimizerInfo, OPTIMIZERS.OptimizerInput


class FSDPMuonOnParameters(FSDPMuonOptimizer):
    """FSDPMuonOptimizer as torch's tests build an optimizer: from parameters, without their model."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(nn.Module(), params, **options)


ENGINE = (MuonOptimizer, SpectralSphereOptimizer, FSDPMuonOnParameters)
PAIR = (TritonMuon, TritonMuonW)

# What our optimizers do unlike those of torch. The tests refer to the differences by these names.
DIFFERENCES: dict[str, str] = {
    "one tensor": "`params` may be a single tensor: it can't mean anything else. torch raises a TypeError.",
    "duplicates": "A parameter twice in a group raises a ValueError: it would be updated twice. torch warns.",
    "names": "Groups with and without names may be mixed, and all get names: a report needs them. torch raises.",
    "wording": "Errors name the option and the parameter, in words of their own; types are torch's.",
    "groups": "A group with matrices and vectors becomes one group per rule, each with its own lr.",
    "flags": "foreach, fused, capturable, differentiable and maximize are unknown options: kernels are chosen alone.",
    "complex": "Complex parameters are refused when the optimizer is built, not at the first step.",
    "sparse": "Sparse gradients are refused at a step before anything is changed; element-wise rules make them dense.",
    "state without gradient": "After a step every parameter has state, also one without a gradient: the layout of a "
    "checkpoint must not depend on which gradients there were.",
    "state before the first step": "state_dict() creates state if there are gradients, so that torch.distributed."
    "checkpoint finds something to load into.",
    "statistics": "Rule spectral_sphere refines singular vectors of all matrices at a step, also without a gradient.",
    "count of steps": "The element-wise pair counts steps by an int, which torch's checks of state dicts don't know.",
    "checked loading": "A state dict that does not fit is refused whole; torch loads by position.",
    "precision": "State of half-precision parameters is float32, also after loading. torch casts it to theirs.",
}


def inputs(*kwargs: dict[str, Any]) -> Callable[..., list[Any]]:
    """Make constructor arguments in the form of torch's tests, anew at every call: a tensor lr is changed in place."""
    common: tuple[dict[str, Any], ...] = ({}, {"lr": 0.01}, {"lr": torch.tensor(0.01)}, {"weight_decay": 0.1})

    def make(device: object = None, dtype: object = None) -> list[Any]:
        return [OptimizerInput(None, copy.deepcopy(given), str(given) or "default") for given in (*common, *kwargs)]

    return make


MUON: tuple[dict[str, Any], ...] = (
    {"momentum": 0.8},
    {"nesterov": True},
    {"ns_steps": 4, "orthogonalization": "quintic"},
    {"scale": "v4"},
    {"adamw_lr": 0.1, "adamw_betas": (0.5, 0.9)},
    {"rule": "normuon", "beta2": 0.9},
)
SPHERE: tuple[dict[str, Any], ...] = ({"radius_mode": "initialize"}, {"retract_mode": "dynamic", "momentum": 0.8})
ELEMENTWISE: tuple[dict[str, Any], ...] = (
    {"momentum": 0.8, "velocity": 0.9},
    {"nesterov": True},
    {"layerwise_norm": True},
)
ARGUMENTS = {
    MuonOptimizer: MUON,
    SpectralSphereOptimizer: SPHERE,
    FSDPMuonOnParameters: (*MUON, {"gradient_accumulation_steps": 2}),
    TritonMuon: ELEMENTWISE,
    TritonMuonW: ELEMENTWISE,
}
INFOS = [
    OptimizerInfo(
        cls,
        optim_inputs_func=inputs(*given),
        supported_impls=(),
        not_og_supported_flags=(),
        supports_complex=False,
        supports_sparse=False,
        optim_error_inputs_func=OPTIMIZERS.get_error_inputs_for_all_optims,
    )
    for cls, given in ARGUMENTS.items()
]
each_optimizer = pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
each_input = pytest.mark.parametrize(
    ("info", "number"),
    [
        pytest.param(info, number, id=f"{info.name}-{given.desc}")
        for info in INFOS
        for number, given in enumerate(info.optim_inputs_func())
    ],
)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def built(info: Any, number: int, params: Any) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="weight_decay has no effect")
        return info.optim_cls(params, **info.optim_inputs_func()[number].kwargs)


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    x = torch.linspace(-1, 1, 20).reshape(5, 4).to(next(model.parameters()).dtype)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    return closure


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    closure = closure_of(model, optimizer)
    return [float(optimizer.step(closure).detach()) for _ in range(steps)]


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of all weights and states, by the names of parameter and state."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state = optimizer.state.get(p, {})
        found |= {f"{name} {key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return found
