"""Measure the largest attention logits of a model in training, and clip them with `qk_clip`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from muon_fsdp import qk_clip
from muon_fsdp.parameters.names import clean_name
from muon_fsdp.training.model import CausalSelfAttention
from muon_fsdp.training.parallel import World


class LogitClip:
    """Lets a model measure its largest attention logits, and clips them after a step.

    Args:
        model: as `place` has returned it.
        num_heads: the number of heads of a block of the whole model.
        threshold: the largest logit that is allowed.
        world: the ranks of the run.
    """

    def __init__(self, model: nn.Module, num_heads: int, threshold: float, world: World) -> None:
        self._num_heads, self._threshold = num_heads, threshold
        self._tensor_rank = world.rank % (world.size // world.data_size)
        named = [(clean_name(name), module) for name, module in model.named_modules()]
        self._modules = {name: module for name, module in named if isinstance(module, CausalSelfAttention)}
        for module in self._modules.values():
            module.measures_logits = True

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip by the logits since the last call; all ranks must call this after `step()`."""
        qk_clip(optimizer, {name: self._take(module) for name, module in self._modules.items()}, self._threshold)

    def _take(self, module: CausalSelfAttention) -> Tensor:
        """Return the largest logit of each head of the whole model, and forget it; -inf for heads of other ranks."""
        found, module.largest_logits = module.largest_logits, None
        assert found is not None
        logits = found.new_full((self._num_heads,), -torch.inf)
        first = self._tensor_rank * len(found)  # under tensor parallelism a rank has equally many consecutive heads
        logits[first : first + len(found)] = found
        return logits
