"""Define the tensors and options that one step reads and writes on this rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        groups: the parameter groups by number, with the options of this step.
        shards: the local part of every parameter.
        states: the state of every parameter, as the optimizer or as its store has it.
        gradients: the local parts of the gradients that this rank has, in the layouts of their parameters.
        updated: the parameters for which some rank has a gradient. Where this rank has none, it counts as zero.
        divisor: the number of gradients that were summed in each `p.grad`; the step uses their mean.
        num_updates: the steps that have updated parameters before this one; the same on all ranks.
    """

    groups: Mapping[int, Mapping[str, Any]]
    shards: Sequence[Tensor]
    states: Mapping[int, State]
    gradients: Mapping[int, Tensor]
    updated: Collection[int]
    divisor: int
    num_updates: int = 0
