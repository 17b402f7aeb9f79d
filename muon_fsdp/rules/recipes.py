"""Hold published recipes by name: options of the optimizer, and schedules for a run of any length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from muon_fsdp.declarations.option import suggestion

# A warm-up that a source gives in steps is at most this fraction of a run, which may be much shorter than the source's.
LONGEST_WARMUP = 0.1


@dataclass(frozen=True)
class Phase:
    """A part of a schedule, at whose end a value is reached.

    Args:
        until: a number of steps (int), at most a tenth of the run, or the fraction of the run where it ends (float).
        value: the value at the last step of the phase.
        shape: how the value changes.
    """

    until: int | float
    value: float
    shape: Literal["linear", "cosine"] = "linear"


@dataclass(frozen=True)
class Schedule:
    """A value as a function of the step.

    Args:
        start: the value before the first step.
        phases: the phases in order.
    """

    start: float
    phases: tuple[Phase, ...]

    def at(self, step: int, total_steps: int) -> float:
        """Return the value of a step, counted from 0; after the last phase its value stays."""
        begin, value = 0, self.start
        for phase in self.phases:
            if isinstance(phase.until, int):
                end = begin + min(phase.until, int(LONGEST_WARMUP * total_steps))
            else:
                end = max(begin, round(phase.until * total_steps))
            if step < end:
                done = (step + 1 - begin) / (end - begin)
                done = done if phase.shape == "linear" else (1 - math.cos(math.pi * done)) / 2
                return value + (phase.value - value) * done
            begin, value = end, phase.value
        return value


@dataclass(frozen=True)
class Recipe:
    """A published recipe.

    Args:
        name: its name in `muon_fsdp.recipes`.
        options: arguments of `MuonOptimizer`, next to the model.
        sources: where the values come from.
        lr: the factor of every learning rate; None leaves them constant.
        momentum: the momentum of the groups that have this option; None leaves it constant.
        weight_decay: the factor of every weight decay; None leaves them constant.
        left_out: what the source does beyond this, and values that are this library's and not the source's.
    """

    name: str
    options: Mapping[str, Any]
    sources: tuple[str, ...]
    lr: Schedule | None = None
    momentum: Schedule | None = None
    weight_decay: Schedule | None = None
    left_out: tuple[str, ...] = ()

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> RecipeScheduler:
        """Return a scheduler that sets the learning rates, momentum and weight decay of every step.

        Args:
            optimizer: an optimizer that was built with `options`.
            total_steps: the number of steps of the run. Phases that the source gives in tokens take the same fraction
                of it.
        """
        return RecipeScheduler(optimizer, self, total_steps)

    def lr_factor(self, step: int, total_steps: int) -> float:
        """Return the factor of every learning rate at a step, counted from 0."""
        return 1.0 if self.lr is None else self.lr.at(step, total_steps)

    def set_options(
        self, groups: Sequence[dict[str, Any]], base_decays: Sequence[float], step: int, total_steps: int
    ) -> None:
        """Set the momentum and the weight decay of parameter groups for a step, counted from 0.

        Args:
            groups: the parameter groups.
            base_decays: the weight decay that each had before the first step.
            step: the step.
            total_steps: the number of steps of the run.
        """
        for group, base in zip(groups, base_decays, strict=True):
            if self.momentum is not None and "momentum" in group:
                group["momentum"] = self.momentum.at(step, total_steps)
            if self.weight_decay is not None:
                group["weight_decay"] = base * self.weight_decay.at(step, total_steps)


class RecipeScheduler(LRScheduler):
    """A scheduler of PyTorch that follows a recipe: call `step()` after every `optimizer.step()`.

    Args:
        optimizer: the optimizer.
        recipe: the recipe.
        total_steps: the number of steps of the run.
    """

    def __init__(self, optimizer: Optimizer, recipe: Recipe, total_steps: int) -> None:
        if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
            raise ValueError(f"total_steps must be an int of at least 1, got {total_steps!r}")
        self.recipe, self.total_steps = recipe, total_steps
        self.base_decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of every group at the current step."""
        factor = self.recipe.lr_factor(self.last_epoch, self.total_steps)
        return [lr * factor for lr in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Count a step and set the options of all groups."""
        super().step(epoch)
        self.recipe.set_options(self.optimizer.param_groups, self.base_decays, self.last_epoch, self.total_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, with the name of the recipe in place of the recipe."""
        saved = super().state_dict()
        return {"name": self.recipe.name, **{key: value for key, value in saved.items() if key != "recipe"}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the step of a saved scheduler of the same recipe, and set the options of all groups for it.

        Raises:
            ValueError: the state is that of another recipe.
        """
        saved = dict(state_dict)
        name = saved.pop("name", None)
        if name != self.recipe.name:
            raise ValueError(f"this scheduler follows the recipe {self.recipe.name!r}, and the saved one {name!r}")
        super().load_state_dict(saved)
        groups = self.optimizer.param_groups
        for group, lr in zip(groups, self.get_lr(), strict=True):  # making this scheduler has set those of step 0
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self.recipe.set_options(groups, self.base_decays, self.last_epoch, self.total_steps)


class Recipes(dict[str, Recipe]):
    """Recipes by name; an unknown name raises a KeyError that lists the valid ones."""

    def __missing__(self, name: str) -> Recipe:
        near = suggestion(name, self) if isinstance(name, str) else ""
        raise KeyError(f"unknown recipe {name!r}; valid names are {', '.join(self)}{near}")


_QK_CLIP = "QK-clip with a threshold of 100, which is a call after each step and not an option"
_ADAMW_DECAY = "the weight decay of AdamW's parameters: 0 here, pass adamw_weight_decay"
_ADAMW_V4 = {"adamw_betas": (0.9, 0.95), "adamw_eps": 1e-20, "adamw_weight_decay": 0.1}
# 0.18 sqrt(max(d_out, d_in)): nine tenths of "match_rms_adamw".
_SCALE_018 = {"scale": "match_rms_adamw", "ns_stepsize": 0.9}
_MUON_V4 = {"weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "orthogonalization": "deepseek_v4", **_SCALE_018}
_SINKHORN = {"rule": "sinkhorn", "weight_decay": 0.0}

_ALL = (
    Recipe(
        "moonlight",
        {
            "lr": 4.2e-4,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "orthogonalization": "keller",
            "ns_steps": 5,
            "scale": "match_rms_adamw",
        },
        ("arXiv 2502.16982",),
        # 5.2T tokens with a cosine, then 500B tokens: up to 1e-4 in 100 steps and down to 0.
        lr=Schedule(
            0.0, (Phase(2000, 1.0), Phase(5.2 / 5.7, 0.1, "cosine"), Phase(100, 1e-4 / 4.2e-4), Phase(1.0, 0.0))
        ),
        left_out=(_ADAMW_DECAY, "the shape of the last decay, from 1e-4 to 0: linear here"),
    ),
    Recipe(
        "kimi_k2",
        {"lr": 2e-4, "weight_decay": 0.1, "nesterov": False, "scale": "match_rms_adamw"},
        ("arXiv 2507.20534",),
        # 10T tokens at 2e-4, and 5.5T with a cosine.
        lr=Schedule(0.0, (Phase(500, 1.0), Phase(10 / 15.5, 1.0), Phase(1.0, 0.1, "cosine"))),
        left_out=(_QK_CLIP, _ADAMW_DECAY, "the value of the momentum and the coefficients: the library's defaults"),
    ),
    Recipe(
        "glm_4_5",
        {
            "lr": 2.5e-4,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "ns_steps": 5,
            "scale": "match_rms_adamw",
            "overrides": {"*lm_head*": "muon"},  # all but the word embedding, biases and RMSNorm
        },
        ("arXiv 2508.06471",),
        lr=Schedule(0.0, (Phase(0.01, 1.0), Phase(1.0, 0.1, "cosine"))),
        left_out=(_ADAMW_DECAY, "the length of the warm-up: 1% of the run here", "Nesterov momentum: not used here"),
    ),
    Recipe(
        "deepseek_v4",
        {"lr": 2.7e-4, **_MUON_V4, **_ADAMW_V4},
        ("arXiv 2606.19348",),
        lr=Schedule(0.0, (Phase(2000, 1.0), Phase(1.0, 0.1, "cosine"))),
        left_out=("where the decay to 2.7e-5 begins and its shape: a cosine after the warm-up here",),
    ),
    Recipe(
        "deepseek_v4_1_flash",
        {
            "lr": 2.6e-4,
            **_MUON_V4,
            **_ADAMW_V4,
            "attention": "per_head",
            "overrides": {"*embed_tokens*": _SINKHORN, "*lm_head*": _SINKHORN},
        },
        ("DeepSeek-V4.1 report, section 2.5", "arXiv 2606.19348"),
        # 28T of 40T tokens at 2.6e-4, then a cosine.
        lr=Schedule(0.0, (Phase(2000, 1.0), Phase(28 / 40, 1.0), Phase(1.0, 0.1, "cosine"))),
        left_out=("only Q and K per head: attention='per_head' cuts V too", "the warm-up: that of DeepSeek-V4 here"),
    ),
    Recipe(
        "nanochat",
        {
            "rule": "normuon",
            "lr": 0.02,
            "scale": "original",
            "orthogonalization": "polar_express",
            "ns_steps": 5,
            "beta2": 0.9,
            "momentum": 0.85,
            "nesterov": True,
            "cautious_weight_decay": True,
            "adamw_betas": (0.8, 0.95),
            "adamw_eps": 1e-10,
            "overrides": {
                "*embed*": {"adamw_lr": 0.3, "adamw_betas": (0.8, 0.995), "adamw_weight_decay": 0.001},
                "*lm_head*": {"adamw_lr": 0.008, "adamw_betas": (0.8, 0.96), "adamw_weight_decay": 0.01},
            },
        },
        ("nanochat 92d63d4",),
        lr=Schedule(0.0, (Phase(40, 1.0), Phase(0.35, 1.0), Phase(1.0, 0.05))),
        momentum=Schedule(0.85, (Phase(400, 0.97), Phase(0.35, 0.97), Phase(1.0, 0.90))),
        left_out=(
            "equilibrated rows before the orthogonalization",
            "second moments over the longer side: ours are those of rows",
            "the factor (d/768)^-0.5 of the learning rates of embedding and head: multiply them by it",
            "the weight decay of matrices, 0.28 times a factor of batch and run, with a cosine to 0: here 0, "
            "pass weight_decay",
            "the learning rates of scalars, which each kind has of its own",
        ),
    ),
    Recipe(
        "modded_nanogpt_track_3",
        {
            "lr": 0.025,
            "weight_decay": 0.05,
            "momentum": 0.95,
            "nesterov": True,
            "adamw_lr": 0.015,
            "adamw_betas": (0.8, 0.95),
            "adamw_eps": 1e-10,
            "adamw_weight_decay": 0.001,
            "overrides": {"*embed*": {"adamw_lr": 0.7}, "*lm_head*": {"adamw_lr": 0.004}},
        },
        ("modded-nanogpt track 3, baseline 36 (3250 steps)",),
        lr=Schedule(1.0, (Phase(0.3, 1.0), Phase(1.0, 0.0))),
        left_out=("12 steps of the coefficients (2, -1.5, 0.5): the library's default here",),
    ),
)
recipes: Mapping[str, Recipe] = Recipes(
    {each.name: replace(each, options=MappingProxyType(dict(each.options))) for each in _ALL}
)
