"""Stand-ins for frameworks that the test environment can't hold, with the interfaces that their releases publish.

axolotl 0.19.0 pins other versions of Transformers, Accelerate and pydantic than constraints.txt, and torchtitan 0.3.0
another huggingface_hub. So tests/test_integrations_published.py uses these classes, which were written after reading
those releases, and also the frameworks themselves where somebody has installed them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import Trainer


class BasePlugin:
    """axolotl.integrations.base.BasePlugin: hooks that do nothing."""

    def get_input_args(self) -> str | None:
        """Return the path of a pydantic model with the plugin's own settings."""

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Change the trainer after axolotl has made it."""


class Settings(dict[str, Any]):
    """axolotl.utils.dict.DictDefault: a setting is an attribute, and None where it is missing."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class OptimizerMixin:
    """axolotl's trainers pass their training arguments to a factory, after the model."""

    def create_optimizer(self: Any, model: nn.Module | None = None) -> torch.optim.Optimizer:
        factory, options = self.optimizer_cls_and_kwargs
        self.optimizer = factory()(self.model if model is None else model, self.args, **options)
        return self.optimizer


class OptimizersContainer(torch.optim.Optimizer):
    """torchtitan.components.optimizer.OptimizersContainer without its own ways to build optimizers."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """What the trainer builds the container from; `build` finds the class that the configuration belongs to."""

        param_groups: list[Any] = field(default_factory=list)
        implementation: str = "fused"
        optimizer_factory_kwargs_by_name: dict[str, dict[str, Any]] = field(default_factory=dict)

        def build(self, *, model_parts: list[nn.Module]) -> OptimizersContainer:
            owner = getattr(sys.modules[type(self).__module__], type(self).__qualname__.partition(".")[0])
            return owner(config=self, model_parts=model_parts)

    optimizers: list[torch.optim.Optimizer]
    model_parts: list[nn.Module]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def _post_init(self, all_params: list[nn.Parameter]) -> None:
        super().__init__(all_params, {})


CONTENTS: dict[str, dict[str, Any]] = {
    "axolotl.core.trainers.mixins.optimizer": {"OptimizerMixin": OptimizerMixin},
    "axolotl.integrations.base": {"BasePlugin": BasePlugin},
    "axolotl.utils.dict": {"DictDefault": Settings},
    "torchtitan.components.optimizer": {"OptimizersContainer": OptimizersContainer},
}


@contextmanager
def framework(name: str, is_installed: bool) -> Iterator[ModuleType]:
    """Give our adapter `muon_fsdp.<name>`, imported beside the framework itself or beside its stand-in."""
    adapter = f"muon_fsdp.{name}"
    modules: dict[str, ModuleType] = {}
    for path, contents in CONTENTS.items() if not is_installed else ():
        for end in range(1, path.count(".") + 2):
            parent = ".".join(path.split(".")[:end])
            modules.setdefault(parent, ModuleType(parent))
        vars(modules[path]).update(contents)
    sys.modules.pop(adapter, None)  # it derives from the class that it found when it was imported
    sys.modules.update(modules)
    try:
        yield importlib.import_module(adapter)
    finally:
        for path in (adapter, *modules):  # and nothing else, unlike patch.dict: tests import more meanwhile
            sys.modules.pop(path, None)
