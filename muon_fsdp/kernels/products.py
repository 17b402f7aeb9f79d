"""Compute the two batched products of the Newton-Schulz iteration with the kernel that `select` chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muon_fsdp.kernels.launch import Addend, KernelError, contiguous, unpack
from muon_fsdp.kernels.select import Product, give_up_gluon, probe_gluon, select, tune

if TYPE_CHECKING:
    from muon_fsdp.kernels.launch import TileConfig

# PyTorch's library multiplies an addend by at most this number before it is rounded. Half precision holds the product,
# since the entries of normalized matrices are at most 1.
LARGEST_EARLY_FACTOR = 2.0**10
# A CPU computes a symmetric product in blocks of at least this many rows: of 768 and more it takes 30 to 40% less time.
LEAST_BLOCK = 128
_FULL = (torch.float32, torch.float64)


def symmetric_product(
    a: Tensor,  # (B, m, k), or (B, k, m) if transposed
    b: Tensor,  # the same shape as a
    addends: Sequence[Addend] = (),  # at most two, (B, m, m), symmetric
    *,
    alpha: float = 1.0,
    transposed: bool = False,
    active: Tensor | None = None,  # (B,) int32
    out: Tensor | None = None,  # (B, m, m), contiguous, with the dtype of a; none of the operands
) -> Tensor:
    """Compute alpha * a @ b^T plus all addends, for operands whose product is symmetric in exact arithmetic.

    Rounding makes the product of two different matrices that commute slightly asymmetric, and the Gram form of the
    iteration amplifies the asymmetry: without a correction its float16 error on a Gaussian matrix is 40 times larger.
    All implementations therefore make the product of two different matrices exactly symmetric.

    Returns:
        `out`, or a new (B, m, m) tensor with the dtype of a. Where `active` is 0, the matrix may hold arbitrary
        numbers.
    """
    if _needs_gradient(a, b):
        return _symmetric_by_library(a, b, addends, alpha, transposed, out)
    # This runs before every launch, and small kernels take 10 microseconds: no slow Python, such as len() of a tensor.
    count, rows, inner = a.shape
    if transposed:
        rows, inner = inner, rows
    bulk = a.shape[-1] * a.element_size() % 16 == 0
    uniform = a.is_cuda and _are_uniform(a, b, addends)  # elsewhere a tensor may have no data pointer
    product = Product(
        "symmetric", count, rows, rows, inner, a.dtype, bulk, False, transposed, uniform, active is not None
    )

    def contiguous_tensors(out: Tensor | None) -> tuple[Tensor, Tensor, Sequence[Addend], Tensor]:
        left = a.contiguous()
        right = left if a is b else b.contiguous()  # kernels load an operand only once that is the same tensor twice
        return left, right, contiguous(addends), a.new_empty(count, rows, rows) if out is None else out

    def by_triton(out: Tensor | None, tiles: TileConfig) -> Tensor:
        from muon_fsdp.kernels import triton_products

        tensors = contiguous_tensors(out)
        return triton_products.symmetric_product(*tensors, tiles, alpha=alpha, transposed=transposed, active=active)

    def by_library(out: Tensor | None) -> Tensor:
        return _symmetric_by_library(a, b, addends, alpha, transposed, out)

    def by_gluon(out: Tensor | None) -> Tensor:
        from muon_fsdp.kernels import triton_hopper

        return triton_hopper.symmetric_product(*contiguous_tensors(out), alpha=alpha, transposed=transposed)

    return _compute(product, a.device, out, by_triton, by_library, by_gluon)


def multiply_add(
    a: Tensor,  # (B, m, k)
    b: Tensor,  # (B, k, n)
    c: Addend | None = None,  # (B, m, n), in any precision
    *,
    alpha: float = 1.0,
    c_scale: Tensor | None = None,  # (B,)
    factor: float = 1.0,
    out: Tensor | None = None,  # (B, m, n), in any precision; neither a nor b, but it may be the memory of c
    active: Tensor | None = None,  # (B,) int32
) -> Tensor:
    """Compute factor * (alpha * a @ b + c.factor * c_scale * c.matrices).

    The sum must fit into the precision of a, and the result into that of `out`.

    Returns:
        `out`, or a new tensor with the dtype of a. Where `active` is 0, a matrix of `out` keeps its numbers, and a
        matrix of a new tensor may hold arbitrary ones.
    """
    summand, beta = (None, 0.0) if c is None else c
    count, rows, inner = a.shape
    cols = b.shape[2]

    def by_triton(out: Tensor | None, tiles: TileConfig) -> Tensor:
        from muon_fsdp.kernels import triton_products

        result = out if out is not None and out.is_contiguous() else a.new_empty(count, rows, cols)
        addend = None if summand is None else Addend(summand.contiguous(), factor * beta)
        triton_products.multiply_add(
            a.contiguous(), b.contiguous(), addend, result, tiles, alpha=factor * alpha, c_scale=c_scale, active=active
        )
        if out is None or result is out:
            return result
        return out.copy_(result if active is None else torch.where(active[:, None, None] != 0, result, out))

    def by_library(out: Tensor | None) -> Tensor:
        if out is not None and active is not None:
            computed = multiply_all(torch.empty_like(out))
            return out.copy_(torch.where(active[:, None, None] != 0, computed, out))
        return multiply_all(out)

    def multiply_all(out: Tensor | None) -> Tensor:
        scaled, rest = summand, beta
        if summand is not None and c_scale is not None:
            # Part of beta comes before the rounding, because half precision would round small entries coarsely.
            early = min(max(abs(beta), 1.0), LARGEST_EARLY_FACTOR)
            # The scale of a tiny matrix is near the largest float32, so early * c_scale could overflow.
            scaled, rest = (summand * c_scale[:, None, None]).mul_(early), beta / early
        added = None if scaled is None else scaled.to(a.dtype)
        product = _library_product(a, b, added, alpha, rest)
        if out is not None:
            product = out.copy_(product)  # multiplied in this precision, which may have a wider range
        return product if factor == 1 else product.mul_(factor)

    if _needs_gradient(a, b):
        return by_library(out)
    wide = (summand is not None and summand.element_size() > 2) or (out is not None and out.element_size() > 2)
    bulk = inner * a.element_size() % 16 == 0 and cols * b.element_size() % 16 == 0
    product = Product("multiply_add", count, rows, cols, inner, a.dtype, bulk, wide)
    return _compute(product, a.device, out, by_triton, by_library)


def _needs_gradient(a: Tensor, b: Tensor) -> bool:
    """Return whether autograd records the product: the kernels have no backward pass."""
    return torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)


def _compute(
    product: Product,
    device: torch.device,
    out: Tensor | None,
    by_triton: Callable[[Tensor | None, TileConfig], Tensor],
    by_library: Callable[[Tensor | None], Tensor],
    by_gluon: Callable[[Tensor | None], Tensor] | None = None,
) -> Tensor:
    choice = select(product, device)
    if choice.path == "gluon" and not probe_gluon(device):
        choice = select(product, device)
    if choice.path == "gluon":
        assert by_gluon is not None
        try:
            return by_gluon(out)
        except KernelError as error:
            give_up_gluon(f"it failed with {error}")
            choice = select(product, device)
    if choice.path is None:
        trial = None if out is None else torch.empty_like(out)  # each run would read what the last one left in `out`
        choice = tune(product, device, lambda tiles: by_library(trial) if tiles is None else by_triton(trial, tiles))
    return by_library(out) if choice.config is None else by_triton(out, choice.config)


def _symmetric_by_library(
    a: Tensor, b: Tensor, addends: Sequence[Addend], alpha: float, transposed: bool, out: Tensor | None
) -> Tensor:
    left, right = (a.mT, b) if transposed else (a, b.mT)
    rows = left.shape[1]
    if a.device.type == "cpu" and rows >= 2 * LEAST_BLOCK and a.dtype in _FULL and not _needs_gradient(a, b):
        product = a.new_empty(a.shape[0], rows, rows) if out is None else out
        _multiply_triangle(left, right, product)
        if alpha != 1:
            product.mul_(alpha)
        for matrices, factor in addends:
            product.add_(matrices, alpha=factor)
    else:
        c, beta, e, gamma = unpack(addends)
        product = _library_product(left, right, c, alpha, beta)
        if e is not None:
            product.add_(e, alpha=gamma)
    if a is not b:
        product = (product + product.mT).mul_(0.5)
    return product if out is None or product is out else out.copy_(product)


def _multiply_triangle(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write left @ right to `out`, (B, m, m), computing blocks on and below the diagonal and mirroring the others."""
    rows = out.shape[1]
    if rows < 2 * LEAST_BLOCK:
        out.copy_(torch.bmm(left, right))
        return
    half = rows // 2
    _multiply_triangle(left[:, :half], right[:, :, :half], out[:, :half, :half])
    _multiply_triangle(left[:, half:], right[:, :, half:], out[:, half:, half:])
    below = torch.bmm(left[:, half:], right[:, :, :half])
    out[:, half:, :half] = below
    out[:, :half, half:] = below.mT


def _library_product(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
    if c is not None:
        return torch.baddbmm(c, a, b, alpha=alpha, beta=beta)
    if alpha == 1.0:
        return torch.bmm(a, b)
    # Not bmm() * alpha: in half precision the product alone could underflow.
    return torch.baddbmm(a.new_zeros(()), a, b, alpha=alpha, beta=0)


def _are_uniform(a: Tensor, b: Tensor, addends: Sequence[Addend]) -> bool:
    """Return whether all tensors have the same dtype and begin at a multiple of 16 bytes."""
    dtype = a.dtype
    if a.data_ptr() % 16 or (b is not a and (b.dtype != dtype or b.data_ptr() % 16)):
        return False
    return all(matrices.dtype == dtype and matrices.data_ptr() % 16 == 0 for matrices, _ in addends)
