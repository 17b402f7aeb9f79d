"""Notice another optimizer that updates the same parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.text import first_names, warn_user


class RivalWatch:
    """Notes the steps of other optimizers on our parameters, between two steps of ours.

    A step counts if it begins and ends in between. So wrappers that call our step inside of theirs do not count (SAM,
    Lookahead), nor those that have our groups and call our step only now and then, to accumulate gradients.

    Args:
        owner: the optimizer whose parameters these are; the watch ends with it.
        records: one per parameter.
    """

    def __init__(self, owner: torch.optim.Optimizer, records: Sequence[ParameterRecord]) -> None:
        self._owner = weakref.ref(owner)
        self._records = {id(record.tensor): record.name for record in records}
        self._begun: set[int] = set()
        self._found: dict[str, list[str]] = {}  # names of parameters, by class of the other optimizer
        hooks = (register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._end))
        self._removals = [weakref.finalize(owner, hook.remove) for hook in hooks]

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._begun.add(id(optimizer))

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        owner = self._owner()
        if id(optimizer) in self._begun and owner is not None:
            if any(group is own for group in optimizer.param_groups for own in owner.param_groups):
                return
            parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            names = [self._records[id(parameter)] for parameter in parameters if id(parameter) in self._records]
            if names:
                self._found[type(optimizer).__name__] = names

    def finish(self) -> None:
        """Stop watching, and warn about what was found."""
        for remove in self._removals:
            remove()
        for other, names in self._found.items():
            warn_user(
                f"{other} updates {len(names)} parameters of this optimizer too ({first_names(names)}), so they move "
                "twice. Give each parameter to one optimizer: MuonOptimizer(model) updates embeddings, heads and "
                "vectors with AdamW by itself."
            )
