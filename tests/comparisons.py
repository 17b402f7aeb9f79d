"""Compare tensors, one or many; a failure names the tensor and prints the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def assert_same(found: Any, expected: Any, name: str = "") -> None:
    """Check that two tensors are equal to the last bit; see `assert_near`."""
    assert_near(found, expected, name)


def assert_near(found: Any, expected: Any, name: str = "", *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Check that two tensors differ by no more than the tolerances.

    Mappings and sequences of tensors are compared item by item, and the failure names the item. A DTensor is compared
    by the shard on this rank. `name` is put before the message: pass the parameter, the rank, or what both sides are.
    """

    def message(text: str) -> str:
        return f"{name}: {text}" if name else text

    torch.testing.assert_close(_comparable(found), _comparable(expected), rtol=rtol, atol=atol, msg=message)


def assert_changed(found: Any, before: Any, name: str = "") -> None:
    """Check that a tensor differs from what it was before, or that every tensor of a mapping or sequence does."""
    now, then = _comparable(found), _comparable(before)
    if isinstance(now, Mapping):
        assert now.keys() == then.keys(), f"{name} has {sorted(now)}, and had {sorted(then)}"
        for key, value in now.items():
            assert_changed(value, then[key], f"{name} {key}".strip())
    elif isinstance(now, Sequence):
        for index, (value, old) in enumerate(zip(now, then, strict=True)):
            assert_changed(value, old, f"{name} [{index}]".strip())
    else:
        assert not torch.equal(now, then), f"{name or 'the tensor'} did not change: {now}"


def _comparable(value: Any) -> Any:
    """Replace every DTensor by its local shard, which needs no communication to be compared."""
    if isinstance(value, Mapping):
        return {key: _comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(each) for each in value]
    if isinstance(value, Tensor):
        value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value
