"""Give torchtitan a container that holds our optimizers; see docs/integrations.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer

from muon_fsdp.optimizers.fsdp import FSDPMuonOptimizer

__all__ = ["MuonContainer"]


class MuonContainer(OptimizersContainer):
    """A container with one `FSDPMuonOptimizer` for each part of the model.

        optimizer=MuonContainer.Config(options={"lr": 0.02})

    The optimizer chooses the rule of each parameter from the model. torchtitan's `param_groups` choose rules by names,
    so a configuration can't have both.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The configuration of the container: `options` are the arguments of `FSDPMuonOptimizer`."""

        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.param_groups or config.optimizer_factory_kwargs_by_name:
            raise ValueError(
                "MuonContainer: param_groups and optimizer_factory_kwargs_by_name have no effect; choose rules with "
                "options={'overrides': ...}"
            )
        self.model_parts = model_parts
        self.optimizers = [FSDPMuonOptimizer(part, **config.options) for part in model_parts]
        self._post_init([p for part in model_parts for p in part.parameters() if p.requires_grad])
