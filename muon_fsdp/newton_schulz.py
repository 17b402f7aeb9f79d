"""Orthogonalization of batches of matrices: the polar factor, by Newton-Schulz iteration or by SVD."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from muon_fsdp.coefficients import NORM_MARGINS, Triple, check_steps, coefficients
from muon_fsdp.kernels import multiply_add, symmetric_product

Orthogonalization = Literal["default", "keller", "polar_express", "quintic", "exact"]
ORTHOGONALIZATIONS: tuple[str, ...] = get_args(Orthogonalization)
Form = Literal["auto", "standard", "gram"]

# n/m from which iterating on the m x m Gram matrix is cheaper than iterating on the m x n matrix.
GRAM_ASPECT_RATIO = 1.5


def orthogonalize(
    matrices: Tensor,  # (..., m, n)
    *,
    method: str = "default",
    steps: int = 5,
    form: Form = "auto",
) -> Tensor:
    """The polar factor U V^T of every matrix U S V^T of a batch; same shape and dtype, the input is not changed.

    `method` names a set of coefficients, or is "exact" for an SVD in float64. The iterative methods bring singular
    values above 4e-3 of the Frobenius norm ("default", five steps) to 1 and lift smaller ones towards 1; directions
    with singular value 0 stay 0 in every method. `form` selects how the same iteration is evaluated.
    """
    if not isinstance(matrices, Tensor) or matrices.layout != torch.strided:
        raise TypeError("orthogonalize needs a dense tensor")
    if matrices.ndim < 2:
        raise ValueError(f"orthogonalize needs a matrix or a batch of matrices, got shape {tuple(matrices.shape)}")
    if not matrices.is_floating_point():
        raise TypeError(f"orthogonalize needs a real floating-point tensor, got {matrices.dtype}")
    check_steps(steps)
    if method not in ORTHOGONALIZATIONS:
        raise ValueError(f"Unknown orthogonalization {method!r}; valid names are {', '.join(ORTHOGONALIZATIONS)}")
    if matrices.numel() == 0:
        return matrices.clone()
    batch = matrices.reshape(-1, *matrices.shape[-2:])
    with _without_autocast(matrices.device.type):
        if method == "exact":
            result = _polar_by_svd(batch)
        else:
            result = _polar_by_iteration(batch, coefficients(method, steps), NORM_MARGINS[method], form)
    return result.reshape(matrices.shape)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Autocast would move the products to bfloat16, in which the Gram form does not converge."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _polar_by_iteration(batch: Tensor, triples: tuple[Triple, ...], margin: float, form: Form) -> Tensor:
    tall = batch.shape[-2] > batch.shape[-1]
    wide = batch.mT if tall else batch  # (B, m, n) with m <= n, so that the Gram matrix is the small one
    x = normalize(wide, margin).to(_iteration_dtype(batch))
    x = _iterate(x, triples, _refresh_steps(x.shape[-2], x.shape[-1], len(triples), form))
    return (x.mT if tall else x).to(batch.dtype)


def normalize(batch: Tensor, margin: float) -> Tensor:
    """Scale every matrix to a Frobenius norm of 1/margin, in float32 (float64 for float64); zero stays zero.

    Two divisions, because the square of an entry of 1e-20 or 1e+20 is not a float32. A margin keeps the largest
    singular value inside the interval of the coefficients when a norm or a product is rounded up.
    """
    batch = batch.to(torch.promote_types(batch.dtype, torch.float32))
    largest = torch.linalg.vector_norm(batch, ord=torch.inf, dim=(-2, -1), keepdim=True)
    batch = batch / _one_where_zero(largest)
    norm = torch.linalg.matrix_norm(batch, keepdim=True)
    return batch / (margin * _one_where_zero(norm))


def _one_where_zero(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


def _iteration_dtype(batch: Tensor) -> torch.dtype:
    """float16 on GPUs: the tensor-core rate of bfloat16 with eight times its precision, safe after `normalize`."""
    if batch.dtype == torch.float64:
        return torch.float64
    return torch.float16 if batch.is_cuda else torch.float32


def _refresh_steps(rows: int, cols: int, steps: int, form: Form) -> frozenset[int]:
    """After which steps (counted from 1) the accumulated factor is multiplied into X and X X^T is formed anew.

    Always: the standard iteration. Seldom: the Gram form, which costs only m x m products in between. It can't be
    never: rounding makes small eigenvalues of the iterated Gram matrix negative, and later steps blow them up.
    """
    if form not in get_args(Form):
        raise ValueError(f"Unknown form {form!r}; valid names are {', '.join(get_args(Form))}")
    if form == "standard" or (form == "auto" and cols < GRAM_ASPECT_RATIO * rows):
        return frozenset(range(1, steps + 1))
    return frozenset((*range(3, steps, 3), steps))


@lru_cache(maxsize=4096)
def orthogonalization_flops(rows: int, cols: int, steps: int) -> float:
    """Floating-point operations of one matrix, with every product counted in full."""
    small, large = min(rows, cols), max(rows, cols)
    refreshes = len(_refresh_steps(small, large, steps, "auto"))
    between = steps - refreshes  # steps that only touch m x m matrices
    # Per step Z; per step in between R twice, and Q unless it is the first since a refresh; per refresh XX^T and QX.
    folded = refreshes if between else 0
    square = steps + 2 * between + max(0, between - folded) + folded
    return 2.0 * small * small * (square * small + 2 * refreshes * large)


def _iterate(x: Tensor, triples: tuple[Triple, ...], refresh_steps: frozenset[int]) -> Tensor:
    """X <- aX + (bR + cR^2)X with R = XX^T, for every triple.

    Between two refreshes X is not touched: the factor Q with X_now = Q X and R_now = Q R Q are iterated in its place.
    All of them are polynomials in R, so they commute and every product among them is symmetric.
    """
    gram = symmetric_product(x, x)  # R, (B, m, m)
    factor: Tensor | None = None  # Q, None for the identity
    for step, (a, b, c) in enumerate(triples, start=1):
        z = symmetric_product(gram, gram, gram, alpha=c, beta=b)  # bR + cR^2
        if step in refresh_steps:
            if factor is None:
                x = multiply_add(z, x, x, beta=a)
            else:
                x = multiply_add(symmetric_product(factor, z, factor, beta=a), x)
                factor = None
            if step < len(triples):
                gram = symmetric_product(x, x)
        else:
            factor = _plus_identity(z, a) if factor is None else symmetric_product(factor, z, factor, beta=a)
            half = symmetric_product(gram, z, gram, beta=a)  # R(Z + aI)
            gram = symmetric_product(z, half, half, beta=a)  # (Z + aI) R (Z + aI)
    return x


def _plus_identity(z: Tensor, a: float) -> Tensor:
    shifted = z.clone()  # z is still needed
    shifted.diagonal(dim1=-2, dim2=-1).add_(a)
    return shifted


def _polar_by_svd(batch: Tensor) -> Tensor:
    finite = torch.isfinite(batch).all(-1).all(-1)[:, None, None]
    # LAPACK raises for the whole batch if one matrix is not finite.
    u, s, vh = torch.linalg.svd(torch.where(finite, batch, 0).to(torch.float64), full_matrices=False)
    # What is below the rounding of the input is no direction of it: zero, as the iteration leaves it.
    precision = torch.finfo(torch.promote_types(batch.dtype, torch.float32)).eps
    threshold = s[..., :1] * max(batch.shape[-2:]) * precision
    polar = (u * (s > threshold).unsqueeze(-2)) @ vh
    return torch.where(finite, polar, torch.nan).to(batch.dtype)
