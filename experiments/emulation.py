"""Emulate on a CPU how our kernels compute in half precision: float16 matrices, sums in float32, one rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from muon_fsdp.kernels import Addend
from muon_fsdp.linalg import iteration, newton_schulz


@contextmanager
def kernels_in_half_precision() -> Iterator[None]:
    """Let `orthogonalize` iterate in float16 as on a GPU, whatever the number of rows, except on float64 matrices."""
    usual = newton_schulz._iteration_dtype

    def dtype_on_gpu(batch: Tensor) -> torch.dtype:
        return torch.float16 if usual(batch) == torch.float32 else torch.float64

    with (
        mock.patch.object(newton_schulz, "_iteration_dtype", dtype_on_gpu),
        mock.patch.object(iteration, "symmetric_product", _symmetric_product),
        mock.patch.object(iteration, "multiply_add", _multiply_add),
    ):
        yield


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _symmetric_product(
    a: Tensor,
    b: Tensor,
    addends: Sequence[Addend] = (),
    *,
    alpha: float = 1.0,
    transposed: bool = False,
    active: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    left, right = _wide(a), _wide(b)
    result = alpha * (left.mT @ right if transposed else left @ right.mT)
    for matrices, factor in addends:
        result += factor * _wide(matrices)
    rounded = (result.tril() + result.tril(-1).mT).to(a.dtype)  # one triangle is computed and mirrored
    return rounded if out is None else out.copy_(rounded)


def _multiply_add(
    a: Tensor,
    b: Tensor,
    addend: Addend,
    *,
    alpha: float = 1.0,
    c_scale: Tensor | None = None,
    factor: float = 1.0,
    out: Tensor | None = None,
    active: Tensor | None = None,
) -> Tensor:
    c = addend.factor * _wide(addend.matrices)
    c = c if c_scale is None else c_scale[:, None, None] * c
    result = factor * (alpha * (_wide(a) @ _wide(b)) + c)
    return result.to(a.dtype) if out is None else out.copy_(result)
