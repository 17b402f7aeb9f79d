"""What one step reads and writes on this rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muon_fsdp.declarations.state import State


@dataclass(frozen=True)
class StepInputs:
    """The tensors and options of one step; parameters are known by their position among all.

    Args:
        groups: the parameter groups, with the options of this step.
        shards: the local part of every parameter.
        states: the state of every parameter.
        gradients: the local parts of the gradients that this rank has, in the layouts of their parameters.
        updated: the parameters for which some rank has a gradient. Where this rank has none, it counts as zero.
        divisor: how many gradients were added up in each.
    """

    groups: Sequence[Mapping[str, Any]]
    shards: Sequence[Tensor]
    states: Sequence[State]
    gradients: dict[int, Tensor]
    updated: Collection[int]
    divisor: int


@dataclass(frozen=True)
class SingleUpdate:
    """One parameter that is updated in a step by lists of tensors, outside fused launches."""

    shard: Tensor
    state: State  # local
    dtype: torch.dtype  # working precision
    grad: Tensor | None  # None: another rank has a gradient, and it is zero here
    divisor: int

    def working_gradient(self) -> Tensor:
        """Return the gradient in working precision; called when its stage begins, so only a stage's worth exists."""
        if self.grad is None:
            return torch.zeros_like(self.shard, dtype=self.dtype)
        grad = self.grad.to(self.dtype)
        return grad / self.divisor if self.divisor > 1 else grad
