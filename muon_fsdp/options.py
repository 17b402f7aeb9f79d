"""Options of a parameter group and of the engine: names, defaults, and what a valid value is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch

from muon_fsdp.coefficients import check_steps
from muon_fsdp.newton_schulz import ORTHOGONALIZATIONS
from muon_fsdp.plan import STRATEGIES, Strategy
from muon_fsdp.rules import RULES
from muon_fsdp.scaling import SCALE_VERSIONS
from muon_fsdp.spectral import LAMBDA_MODES, RADIUS_MODES, RETRACT_MODES
from muon_fsdp.views import VIEW_NAMES

NonFinite = Literal["propagate", "skip", "raise"]

# What every parameter group holds besides its parameters. Checkpoints contain these keys: adding one is a change of
# format (old checkpoints get its default on load), renaming or removing one breaks them.
GROUP_OPTIONS = (
    "rule",
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_steps",
    "ns_stepsize",
    "orthogonalization",
    "scale",
    "view",
    "num_heads",
    "split_sizes",
    "betas",
    "eps",
    "power_iteration_steps",
    "radius_mode",
    "radius_scaler",
    "retract_mode",
    "retract_alpha",
    "lambda_mode",
)
# In a user's group that holds matrices and other parameters, these are the options of the others.
ADAMW_OPTIONS = {"adamw_lr": "lr", "adamw_betas": "betas", "adamw_eps": "eps", "adamw_weight_decay": "weight_decay"}
# Keys of a group that are not options: torch's own, those of its schedulers, and a free name.
SCHEDULED_LRS = ("initial_lr", "max_lr", "min_lr")
FOREIGN_KEYS = ("params", "param_names", "name", "base_momentum", "max_momentum", *SCHEDULED_LRS)


@dataclass(frozen=True)
class EngineOptions:
    """What concerns the whole optimizer and the machines it runs on; not part of a checkpoint."""

    nonfinite: NonFinite
    max_stage_bytes: int
    strict: bool
    strategy: Strategy
    comm_dtype: torch.dtype | None
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        _flag("strict", self.strict)
        _flag("cuda_graph", self.cuda_graph)
        _choice("strategy", self.strategy, STRATEGIES)
        if self.comm_dtype is not None and not (
            isinstance(self.comm_dtype, torch.dtype) and self.comm_dtype.is_floating_point
        ):
            raise TypeError(f"Invalid comm_dtype: {self.comm_dtype!r} (must be None or a floating-point torch.dtype)")
        _choice("nonfinite", self.nonfinite, get_args(NonFinite))
        _integer("max_stage_bytes", self.max_stage_bytes, at_least=1)

    def staging_dtype(self, device_type: str, working: torch.dtype) -> torch.dtype:
        """The precision of what is staged and travels: bfloat16 on GPUs, float32 on CPUs, float64 for float64.

        Never float16 by itself: the norm of a matrix is not known before it is assembled, and gradients underflow.
        A model on the meta device is planned for GPUs.
        """
        if self.comm_dtype is not None:
            return self.comm_dtype
        if working == torch.float64:
            return torch.float64
        return torch.float32 if device_type == "cpu" else torch.bfloat16


def check_option_names(options: Mapping[str, Any], where: str, *, foreign: tuple[str, ...] = ()) -> None:
    """Refuse a misspelt option, which torch would carry along and ignore."""
    valid = (*GROUP_OPTIONS, *ADAMW_OPTIONS)
    unknown = [name for name in options if name not in (*valid, *foreign)]
    if unknown:
        names = ", ".join(repr(name) for name in unknown)
        raise ValueError(f"Unknown option {names} in {where}; valid options are {', '.join(valid)}")


def check_group(options: Mapping[str, Any]) -> None:
    """Refuse values that no rule can work with; `options` may hold any of GROUP_OPTIONS and ADAMW_OPTIONS."""
    for name, value in options.items():
        check = _CHECKS.get(name)
        if check is not None:
            check(name, value)


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options as plain Python numbers and tuples, which any checkpoint can hold; lr may stay a tensor."""
    return {
        name: value if name == "lr" and isinstance(value, torch.Tensor) else _canonical(value)
        for name, value in options.items()
    }


def _canonical(value: Any) -> Any:
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Sequence):
        return tuple(_canonical(item) for item in value)
    return value


def check_count(name: str, value: object) -> None:
    """Refuse anything but an int of at least 1."""
    _integer(name, value, at_least=1)


def _number(name: str, value: object, *, below: float = math.inf, label: str | None = None) -> None:
    shown = label or f"{name} value"
    interval = ">= 0" if below == math.inf else f"in [0, {below:g})"
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(f"Invalid {shown}: a tensor must hold one real number, got shape {tuple(value.shape)}")
        if value.is_meta:
            return
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"Invalid {shown}: {value!r} (option {name!r} must be a number {interval})")
    if not (0.0 <= float(value) < below and math.isfinite(value)):
        raise ValueError(f"Invalid {shown}: {value} (option {name!r} must be a finite number {interval})")


def _positive(name: str, value: object) -> None:
    _number(name, value)
    if value == 0:
        raise ValueError(f"Invalid {name} value: 0 (must be positive)")


def _integer(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"Invalid {name}: {value!r} (must be an int >= {at_least})")
    if value < at_least:
        raise ValueError(f"Invalid {name}: {value} (must be >= {at_least})")


def _choice(name: str, value: object, valid: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in valid:
        raise ValueError(f"Unknown {name} {value!r}; valid names are {', '.join(valid)}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"Invalid {name}: {value!r} (must be True or False)")


def _betas(name: str, value: object) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise TypeError(f"Invalid {name}: {value!r} (must be a pair of numbers)")
    for index, beta in enumerate(value):
        _number(name, beta, below=1.0, label=f"{name}[{index}]")


def _scale(name: str, value: object) -> None:
    if isinstance(value, str):
        if value not in SCALE_VERSIONS:
            raise ValueError(f"Unknown {name} {value!r}; valid names are {', '.join(SCALE_VERSIONS)}, or a number")
    else:
        _number(name, value)


def _split_sizes(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise TypeError(f"Invalid {name}: {value!r} (must be None or a sequence of positive ints)")
    for size in value:
        _integer(f"{name} entry", size, at_least=1)


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "rule": lambda name, value: _choice(name, value, RULES),
    "lr": lambda name, value: _number(name, value, label="learning rate"),
    "adamw_lr": lambda name, value: _number(name, value, label="learning rate"),
    "weight_decay": _number,
    "adamw_weight_decay": _number,
    "momentum": lambda name, value: _number(name, value, below=1.0),
    "nesterov": _flag,
    "ns_steps": lambda _, value: check_steps(value),
    "ns_stepsize": _number,
    "orthogonalization": lambda name, value: _choice(name, value, ORTHOGONALIZATIONS),
    "scale": _scale,
    "view": lambda name, value: _choice(name, value, VIEW_NAMES),
    "num_heads": lambda name, value: None if value is None else _integer(name, value, at_least=1),
    "split_sizes": _split_sizes,
    "power_iteration_steps": lambda name, value: _integer(name, value, at_least=1),
    "radius_mode": lambda name, value: _choice(name, value, RADIUS_MODES),
    "radius_scaler": _positive,
    "retract_mode": lambda name, value: _choice(name, value, RETRACT_MODES),
    "retract_alpha": _number,
    "lambda_mode": lambda name, value: _choice(name, value, LAMBDA_MODES),
    "betas": _betas,
    "adamw_betas": _betas,
    "eps": _number,
    "adamw_eps": _number,
}
