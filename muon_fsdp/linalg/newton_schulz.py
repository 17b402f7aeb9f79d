"""Orthogonalize batches of matrices: compute their polar factors by Newton-Schulz iteration or by SVD."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from muon_fsdp.kernels import Addend, multiply_add, on_device, symmetric_product, unusable
from muon_fsdp.linalg.autocast import without_autocast
from muon_fsdp.linalg.coefficients import NORM_MARGINS, Quintic, check_steps, coefficients

Orthogonalization = Literal["default", "keller", "polar_express", "quintic", "exact"]
ORTHOGONALIZATIONS: tuple[str, ...] = get_args(Orthogonalization)
Form = Literal["auto", "standard", "gram"]

# From this n/m on, iterating on the m x m Gram matrix is cheaper than iterating on the m x n matrix.
GRAM_ASPECT_RATIO = 1.5
# Up to this many rows, the Gram form in half precision refreshes X after every second step, otherwise every third.
SMALL_ROWS = 512
# Up to this many rows, GPUs iterate in float32 instead of float16.
TINY_ROWS = 64


def orthogonalize(
    matrices: Tensor,  # (..., m, n)
    *,
    method: str = "default",
    steps: int = 5,
    form: Form = "auto",
    factor: float = 1.0,
    inverse_norms: Tensor | None = None,  # (B,)
    out: Tensor | None = None,  # (..., m, n)
) -> Tensor:
    """Return `factor` times the polar factor U V^T of every matrix U S V^T of a batch.

    The iterative methods bring singular values above 4e-3 of the Frobenius norm ("default", five steps) to 1 and lift
    smaller ones towards 1. A singular value of 0 stays 0 in every method. The input is not changed.

    Args:
        matrices: (..., m, n), the matrices, in any floating-point precision.
        method: the name of a set of coefficients, or "exact" for an SVD in float64.
        steps: number of iterations.
        form: how the iteration is evaluated: on the matrices ("standard"), on their Gram matrices ("gram"), or
            whichever is cheaper for the shape ("auto").
        factor: a number that the result is multiplied by.
        inverse_norms: (B,), one over the Frobenius norms, if the caller has computed them already.
        out: (..., m, n), a tensor for the result, which may have another dtype.

    Returns:
        `out`, or a new tensor with the shape and dtype of `matrices`.
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
    result = torch.empty_like(matrices, memory_format=torch.contiguous_format) if out is None else out
    if matrices.numel() == 0:
        return result
    batch, target = matrices.reshape(-1, *matrices.shape[-2:]), result.view(-1, *matrices.shape[-2:])
    with without_autocast(matrices.device.type), on_device(matrices.device):
        if method == "exact":
            target.copy_(_polar_by_svd(batch).mul_(factor))
        else:
            quintics, margin = coefficients(method, steps), NORM_MARGINS[method]
            _polar_by_iteration(batch, quintics, margin, form, factor, inverse_norms, target)
    return result


class Shifted(NamedTuple):
    """The batch of matrices scales * matrices + shifts * left right^T, in parts: the sum is not stored."""

    matrices: Tensor  # (B, m, n)
    scales: Tensor  # (B,)
    left: Tensor  # (B, m)
    right: Tensor  # (B, n)
    shifts: Tensor  # (B,)


def orthogonalize_shifted(
    shifted: Shifted,
    norms: Tensor,  # (B,), the Frobenius norms of the sums
    *,
    method: str,
    steps: int,
    out: Tensor,  # (B, m, n)
    active: Tensor,  # (B,) bool
) -> None:
    """Compute the polar factors of shifted matrices into `out`, with the Triton kernels of a GPU.

    The kernels skip matrices that are not active: those cost no time and keep their numbers in `out`.
    """
    from muon_fsdp.kernels import triton_spectral

    matrices, scales, left, right, shifts = shifted
    rows, cols = matrices.shape[-2:]
    quintics, margin = coefficients(method, steps), NORM_MARGINS[method]
    flags = active.to(torch.int32)
    with without_autocast(matrices.device.type), on_device(matrices.device):
        factor = 1 / (margin * norms)
        x = torch.empty_like(matrices, dtype=_iteration_dtype(matrices))
        triton_spectral.shifted_cast(matrices, scales * factor, left, right, shifts * factor, x, flags)
        refresh_steps = _refresh_steps(min(rows, cols), max(rows, cols), len(quintics), "auto", x.dtype)
        _iterate(x, x, None, quintics, refresh_steps, 1.0, out, flags)


def _polar_by_iteration(
    batch: Tensor,  # (B, rows, cols)
    quintics: tuple[Quintic, ...],
    margin: float,
    form: Form,
    factor: float,
    inverse_norms: Tensor | None,  # (B,)
    out: Tensor,  # (B, rows, cols)
) -> None:
    rows, cols = batch.shape[-2:]
    batch = batch.contiguous()
    x, original, scale = normalize(batch, margin, _iteration_dtype(batch), inverse_norms)
    refresh_steps = _refresh_steps(min(rows, cols), max(rows, cols), len(quintics), form, x.dtype)
    _iterate(x, original, scale, quintics, refresh_steps, factor, out)


def normalize(
    batch: Tensor,  # (B, m, n)
    margin: float,
    dtype: torch.dtype,
    inverse_norms: Tensor | None = None,  # (B,), if the caller has computed them already
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scale every matrix to a Frobenius norm of 1/margin; a zero matrix stays zero.

    Norms are computed relative to the largest entry, because the squares of 1e-20 and 1e+20 are outside the normal
    range of float32. The margin keeps the largest singular value inside the interval of the coefficients even if
    rounding increases a norm or a product.

    Returns:
        A tuple (x, original, scale). x, (B, m, n), holds the scaled matrices in `dtype`. original, (B, m, n), and
        scale, (B,), give the same matrices before they were rounded to `dtype`: original * scale, or original alone
        where scale is None.
    """
    differentiable = torch.is_grad_enabled() and batch.requires_grad
    if dtype != torch.float64 and not differentiable and unusable(batch.device) is None:
        from muon_fsdp.kernels import triton_norms

        scales = triton_norms.inverse_norms(batch) if inverse_norms is None else inverse_norms
        return triton_norms.scaled_cast(batch, scales, 1 / margin, dtype), batch, scales / margin
    batch = batch.to(torch.promote_types(batch.dtype, torch.float32))
    batch = batch / _one_where_zero(torch.linalg.vector_norm(batch, ord=torch.inf, dim=(-2, -1), keepdim=True))
    batch = batch / (margin * _one_where_zero(torch.linalg.matrix_norm(batch, keepdim=True)))
    return batch.to(dtype), batch, None


def _one_where_zero(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


def _iteration_dtype(batch: Tensor) -> torch.dtype:
    """Return the dtype of the iteration: float16 on GPUs, float32 on CPUs, and float64 for float64 matrices.

    float16 is as fast as bfloat16 on tensor cores and eight times as precise, and its range suffices after
    `normalize`. Matrices with few rows are iterated in float32, which costs little: there a single entry can decide a
    singular value, so rounding that entry to float16 would change the result.
    """
    if batch.dtype == torch.float64:
        return torch.float64
    return torch.float16 if batch.is_cuda and min(batch.shape[-2:]) > TINY_ROWS else torch.float32


def _refresh_steps(rows: int, cols: int, steps: int, form: Form, dtype: torch.dtype) -> frozenset[int]:
    """Return the steps, counted from 1, after which X is refreshed.

    A refresh multiplies X by the accumulated factor and computes X X^T again.
    A refresh after every step gives the standard iteration. Fewer refreshes give the Gram form, in which the steps in
    between need only m x m products. Some refreshes are necessary: rounding makes small eigenvalues of the iterated
    Gram matrix negative, and later steps amplify them.
    In half precision, form "auto" does not refresh X after the first step, because rounding X there would lose small
    singular values. It refreshes small matrices more often, because rounding errors weigh more in them.
    """
    if form not in get_args(Form):
        raise ValueError(f"Unknown form {form!r}; valid names are {', '.join(get_args(Form))}")
    wide = cols >= GRAM_ASPECT_RATIO * rows
    half = dtype == torch.float16
    if form == "standard" or (form == "auto" and not wide):
        first = 2 if half and form == "auto" else 1
        return frozenset((*range(first, steps), steps))
    between = 2 if half and form == "auto" and rows <= SMALL_ROWS else 3
    return frozenset((*range(between, steps, between), steps))


@lru_cache(maxsize=4096)
def orthogonalization_flops(rows: int, cols: int, steps: int) -> float:
    """Return the floating-point operations for one matrix in float32, counting symmetric products in full."""
    small, large = min(rows, cols), max(rows, cols)
    refreshes = len(_refresh_steps(small, large, steps, "auto", torch.float32))
    between = steps - refreshes  # steps that only need m x m matrices
    # Every step computes Z. A step without a refresh also computes R in two products and the factor Q in one.
    # Every refresh computes X X^T and Q X.
    square = steps + 2 * between + between
    return 2.0 * small * small * (square * small + 2 * refreshes * large)


def _iterate(
    x: Tensor,  # (B, m, n), or (B, n, m) with m <= n
    original: Tensor,  # the same shape: x before it was rounded, divided by `scale`
    scale: Tensor | None,  # (B,)
    quintics: tuple[Quintic, ...],
    refresh_steps: frozenset[int],
    result_factor: float,
    out: Tensor,  # the same shape as x
    active: Tensor | None = None,  # (B,) int32: where 0, `out` need not be computed
) -> None:
    """Run X <- aX + (bR + cR^2)X, R = XX^T, for every quintic, and write the last X times `result_factor` to `out`.

    Between two refreshes X does not change. Instead, the iteration updates R and a factor Q: the current iterate is
    Q X, and its Gram matrix is Q R Q. All of these are polynomials in R, so they commute and every product among them
    is symmetric. Q is stored as q I + F. Where singular values are small, Q is nearly q I, so F X + q X is accurate
    there although F is rounded.
    """
    tall = x.shape[-2] > x.shape[-1]
    gram = symmetric_product(x, x, transposed=tall, active=active)  # R, (B, m, m)
    exact, exact_scale = original, scale
    f: Tensor | None = None
    q = 1.0
    for step, (a, b, c) in enumerate(quintics, start=1):
        z = symmetric_product(gram, gram, [Addend(gram, b)], alpha=c, active=active)  # bR + cR^2
        # (F + qI)(Z + aI) - qaI
        f = z if f is None else symmetric_product(f, z, [Addend(f, a), Addend(z, q)], active=active)
        q *= a
        if step not in refresh_steps:
            half = symmetric_product(gram, z, [Addend(gram, a)], active=active)  # R(Z + aI)
            gram = symmetric_product(z, half, [Addend(half, a)], active=active)  # (Z + aI) R (Z + aI)
            continue
        last = step == len(quintics)
        left, right = (x, f) if tall else (f, x)
        x = multiply_add(
            left,
            right,
            Addend(exact, q * (result_factor if last else 1.0)),
            alpha=result_factor if last else 1.0,
            c_scale=exact_scale,
            out=out if last else None,
            active=active,
        )
        if not last:
            gram, f, q = symmetric_product(x, x, transposed=tall, active=active), None, 1.0
            exact, exact_scale = x, None


def _polar_by_svd(batch: Tensor) -> Tensor:
    finite = torch.isfinite(batch).all(-1).all(-1)[:, None, None]
    # LAPACK raises for the whole batch if one matrix is not finite. Such matrices are zero here and NaN in the result.
    u, s, vh = torch.linalg.svd(torch.where(finite, batch, 0).to(torch.float64), full_matrices=False)
    # Singular values below the rounding error of the input count as zero and stay zero, as in the iteration.
    precision = torch.finfo(torch.promote_types(batch.dtype, torch.float32)).eps
    threshold = s[..., :1] * max(batch.shape[-2:]) * precision
    polar = (u * (s > threshold).unsqueeze(-2)) @ vh
    return torch.where(finite, polar, torch.nan).to(batch.dtype)
