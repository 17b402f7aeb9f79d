"""Compute the two batched products of the Newton-Schulz iteration with the kernel that `select` chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muon_fsdp.kernels.addends import Addend, contiguous, unpack
from muon_fsdp.kernels.select import Product, give_up_gluon, select, tune, unusable
from muon_fsdp.kernels.tiles import KernelError

if TYPE_CHECKING:
    from muon_fsdp.kernels.tiles import TileConfig


def symmetric_product(
    a: Tensor,  # (B, m, k), or (B, k, m) if transposed
    b: Tensor,  # the same shape as a
    addends: Sequence[Addend] = (),  # at most two, (B, m, m), symmetric
    *,
    alpha: float = 1.0,
    transposed: bool = False,
    active: Tensor | None = None,  # (B,) int32
) -> Tensor:
    """Compute alpha * a @ b^T plus all addends, for operands whose product is symmetric in exact arithmetic.

    Rounding makes the product of two different matrices that commute slightly asymmetric, and the Gram form of the
    iteration amplifies the asymmetry: without a correction its float16 error on a Gaussian matrix is 40 times larger.
    All implementations therefore make the product of two different matrices exactly symmetric.

    Returns:
        A new (B, m, m) tensor with the dtype of a. Where `active` is 0, the matrix may hold arbitrary numbers.
    """
    rows, inner = (a.shape[2], a.shape[1]) if transposed else (a.shape[1], a.shape[2])

    def by_triton(tiles: TileConfig) -> Tensor:
        from muon_fsdp.kernels import triton_products

        left, right = _contiguous_pair(a, b)
        out = a.new_empty(len(a), rows, rows)
        return triton_products.symmetric_product(
            left, right, contiguous(addends), out, tiles, alpha=alpha, transposed=transposed, active=active
        )

    def by_library() -> Tensor:
        c, beta, e, gamma = unpack(addends)
        left, right = (a.mT, b) if transposed else (a, b.mT)
        product = _library_product(left, right, c, alpha, beta)
        if e is not None:
            product.add_(e, alpha=gamma)
        return product if a is b else (product + product.mT).mul_(0.5)

    def by_gluon() -> Tensor:
        from muon_fsdp.kernels import triton_hopper

        left, right = _contiguous_pair(a, b)
        c, beta, e, gamma = unpack(contiguous(addends))
        out = a.new_empty(len(a), rows, rows)
        return triton_hopper.symmetric_product(left, right, c, e, out, alpha=alpha, beta=beta, gamma=gamma)

    product = Product(
        "symmetric",
        len(a),
        rows,
        rows,
        inner,
        a.dtype,
        _rows_are_aligned(a, b),
        transposed=transposed,
        # Checked only where kernels run: elsewhere a tensor may have no data pointer.
        uniform=unusable(a.device) is None and _are_uniform(a, b, *(addend.matrices for addend in addends)),
        masked=active is not None,
    )
    return _compute(product, a.device, by_triton, by_library, a.requires_grad or b.requires_grad, by_gluon)


def multiply_add(
    a: Tensor,  # (B, m, k)
    b: Tensor,  # (B, k, n)
    c: Addend | None = None,  # (B, m, n), in any precision
    *,
    alpha: float = 1.0,
    c_scale: Tensor | None = None,  # (B,)
    out: Tensor | None = None,  # (B, m, n), in any precision; neither a nor b
    active: Tensor | None = None,  # (B,) int32
) -> Tensor:
    """Compute alpha * a @ b + c.factor * c_scale * c.matrices.

    Returns:
        `out`, or a new tensor with the dtype of a. Where `active` is 0, a matrix of `out` keeps its numbers, and a
        matrix of a new tensor may hold arbitrary ones.
    """
    summand, beta = (None, 0.0) if c is None else c

    def by_triton(tiles: TileConfig) -> Tensor:
        from muon_fsdp.kernels import triton_products

        result = out if out is not None and out.is_contiguous() else a.new_empty(len(a), a.shape[1], b.shape[2])
        triton_products.multiply_add(
            a.contiguous(),
            b.contiguous(),
            None if summand is None else Addend(summand.contiguous(), beta),
            result,
            tiles,
            alpha=alpha,
            c_scale=c_scale,
            active=active,
        )
        if out is None or result is out:
            return result
        return out.copy_(result if active is None else torch.where(active[:, None, None] != 0, result, out))

    def by_library() -> Tensor:
        if out is not None and active is not None:
            computed = multiply_all(torch.empty_like(out))
            return out.copy_(torch.where(active[:, None, None] != 0, computed, out))
        return multiply_all(out)

    def multiply_all(out: Tensor | None) -> Tensor:
        scaled = summand if summand is None or c_scale is None else summand * c_scale[:, None, None]
        added = None if scaled is None else scaled.to(a.dtype)
        if out is None or alpha == 0:
            product = _library_product(a, b, added, alpha, beta)
            return product if out is None else out.copy_(product)
        # Multiply by alpha in the precision of `out`: alpha times the product may overflow in half precision.
        return out.copy_(_library_product(a, b, added, 1.0, beta / alpha)).mul_(alpha)

    wide = any(tensor is not None and tensor.element_size() > 2 for tensor in (summand, out))
    product = Product(
        "multiply_add", len(a), a.shape[1], b.shape[2], a.shape[2], a.dtype, _rows_are_aligned(a, b), wide
    )
    return _compute(product, a.device, by_triton, by_library, a.requires_grad or b.requires_grad)


def _compute(
    product: Product,
    device: torch.device,
    by_triton: Callable[[TileConfig], Tensor],
    by_library: Callable[[], Tensor],
    requires_grad: bool,
    by_gluon: Callable[[], Tensor] | None = None,
) -> Tensor:
    if torch.is_grad_enabled() and requires_grad:
        return by_library()  # the kernels have no backward pass
    choice = select(product, device)
    if choice.path == "gluon":
        assert by_gluon is not None
        try:
            return by_gluon()
        except KernelError as error:
            give_up_gluon(error)
            choice = select(product, device)
    if choice.path is None:
        choice = tune(product, device, lambda tiles: by_library() if tiles is None else by_triton(tiles))
    return by_library() if choice.config is None else by_triton(choice.config)


def _library_product(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
    if c is None:
        product = torch.bmm(a, b)
        return product if alpha == 1.0 else product.mul_(alpha)
    return torch.baddbmm(c, a, b, alpha=alpha, beta=beta)


def _contiguous_pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands contiguous, and the same tensor twice if they were: kernels then load it only once."""
    left = a.contiguous()
    return left, left if a is b else b.contiguous()


def _are_uniform(*tensors: Tensor) -> bool:
    return all(tensor.dtype == tensors[0].dtype and tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _rows_are_aligned(*tensors: Tensor) -> bool:
    return all(tensor.shape[-1] * tensor.element_size() % 16 == 0 for tensor in tensors)
