"""Define the tensors and options that one step reads and writes on this rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muon_fsdp.declarations.state import State


def in_precision(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in this precision; unlike `Tensor.to`, it takes no time if it has it already."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


@dataclass(frozen=True)
class StepInputs:
    """The tensors and options of one step. A position is the number of a parameter among those of all groups.

    Args:
        groups: the parameter groups, with the options of this step.
        shards: the local part of every parameter.
        states: the state of every parameter.
        gradients: the local parts of the gradients that this rank has, in the layouts of their parameters.
        updated: the parameters for which some rank has a gradient. Where this rank has none, it counts as zero.
        divisor: the number of gradients that were summed in each `p.grad`; the step uses their mean.
        num_updates: the steps that have updated parameters before this one; the same on all ranks.
    """

    groups: Sequence[Mapping[str, Any]]
    shards: Sequence[Tensor]
    states: Sequence[State]
    gradients: dict[int, Tensor]
    updated: Collection[int]
    divisor: int
    num_updates: int = 0

    @property
    def device(self) -> torch.device:
        """Return the device on which kernels launch. The first parameter may be on the CPU, and others on a GPU."""
        devices = [shard.device for shard in self.shards]
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


class SingleUpdate(NamedTuple):  # a dataclass takes three times as long to make, for thousands of parameters a step
    """One parameter that is updated in a step by lists of tensors, outside fused launches."""

    shard: Tensor
    state: State  # local
    dtype: torch.dtype  # working precision
    grad: Tensor | None  # None if only other ranks have a gradient; it counts as zero here
    divisor: int

    def working_gradient(self) -> Tensor:
        """Return the gradient in working precision. Call it per stage, so that few converted copies exist at once."""
        if self.grad is None:
            return torch.zeros_like(self.shard, dtype=self.dtype)
        grad = in_precision(self.grad, self.dtype)
        return grad / self.divisor if self.divisor > 1 else grad
