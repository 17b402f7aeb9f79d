"""A small model, and what goes wrong as text, for the tests of faults."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))


def error_of(act: Callable[[], object]) -> str:
    """Return the text of the RuntimeError that an act ends with, "" if it does not."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""
