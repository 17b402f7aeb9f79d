"""Switch autocast off around iterations: they do not converge when autocast moves their products to bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_autocast(function: Function) -> Function:
    """Wrap a function so that autocast is off while it runs, on the device of its first argument."""

    @functools.wraps(function)
    def wrapped(matrices: Tensor, *args: Any, **options: Any) -> Any:
        device_type = matrices.device.type if isinstance(matrices, Tensor) else "cpu"
        with without_autocast(device_type):
            return function(matrices, *args, **options)

    return wrapped  # type: ignore[return-value]


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context manager that switches autocast off for a device type."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
