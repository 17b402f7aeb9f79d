"""Orthogonalization of batches of matrices: the polar factor, by Newton-Schulz iteration or by SVD."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from muon_fsdp.kernels import multiply_add, on_device, symmetric_product, unusable
from muon_fsdp.linalg.autocast import without_autocast
from muon_fsdp.linalg.coefficients import NORM_MARGINS, Triple, check_steps, coefficients

Orthogonalization = Literal["default", "keller", "polar_express", "quintic", "exact"]
ORTHOGONALIZATIONS: tuple[str, ...] = get_args(Orthogonalization)
Form = Literal["auto", "standard", "gram"]

# n/m from which iterating on the m x m Gram matrix is cheaper than iterating on the m x n matrix.
GRAM_ASPECT_RATIO = 1.5
# Up to this many rows the Gram matrix is formed anew after every second step in half precision, not every third.
SMALL_ROWS = 512
# Up to this many rows everything is float32, on GPUs too.
TINY_ROWS = 64


def orthogonalize(
    matrices: Tensor,  # (..., m, n)
    *,
    method: str = "default",
    steps: int = 5,
    form: Form = "auto",
    factor: float = 1.0,
    inverse_norms: Tensor | None = None,  # (B,)
    out: Tensor | None = None,
) -> Tensor:
    """The polar factor U V^T of every matrix U S V^T of a batch; same shape and dtype, the input is not changed.

    `method` names a set of coefficients, or is "exact" for an SVD in float64. The iterative methods bring singular
    values above 4e-3 of the Frobenius norm ("default", five steps) to 1 and lift smaller ones towards 1; directions
    with singular value 0 stay 0 in every method. `form` selects how the same iteration is evaluated. The result is
    multiplied by `factor`. `inverse_norms` are used where the caller has them, and `out`, which may have another
    dtype, takes the result.
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
            triples, margin = coefficients(method, steps), NORM_MARGINS[method]
            _polar_by_iteration(batch, triples, margin, form, factor, inverse_norms, target)
    return result


def orthogonalize_shifted(
    matrices: Tensor,  # (B, m, n)
    scales: Tensor,  # (B,)
    left: Tensor,  # (B, m)
    right: Tensor,  # (B, n)
    shifts: Tensor,  # (B,)
    norms: Tensor,  # (B,)
    *,
    method: str,
    steps: int,
    out: Tensor,
    active: Tensor,  # (B,) bool
) -> None:
    """Into `out` the polar factors of scales * matrices + shifts * left right^T, whose Frobenius norms are given.

    By kernels, on a GPU: what is not active costs no time and stays.
    """
    from muon_fsdp.kernels import triton_spectral

    rows, cols = matrices.shape[-2:]
    triples, margin = coefficients(method, steps), NORM_MARGINS[method]
    flags = active.to(torch.int32)
    with without_autocast(matrices.device.type), on_device(matrices.device):
        factor = 1 / (margin * norms)
        x = torch.empty_like(matrices, dtype=_iteration_dtype(matrices))
        triton_spectral.shifted_cast(matrices, scales * factor, left, right, shifts * factor, x, flags)
        refresh_steps = _refresh_steps(min(rows, cols), max(rows, cols), len(triples), "auto", x.dtype)
        _iterate(x, x, None, triples, refresh_steps, 1.0, out, flags)


def _polar_by_iteration(
    batch: Tensor,  # (B, rows, cols)
    triples: tuple[Triple, ...],
    margin: float,
    form: Form,
    factor: float,
    inverse_norms: Tensor | None,
    out: Tensor,
) -> None:
    rows, cols = batch.shape[-2:]
    batch = batch.contiguous()
    x, original, scale = normalize(batch, margin, _iteration_dtype(batch), inverse_norms)
    refresh_steps = _refresh_steps(min(rows, cols), max(rows, cols), len(triples), form, x.dtype)
    _iterate(x, original, scale, triples, refresh_steps, factor, out)


def normalize(
    batch: Tensor,  # (B, m, n)
    margin: float,
    dtype: torch.dtype,
    inverse_norms: Tensor | None = None,  # (B,), where they are known
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Every matrix at a Frobenius norm of 1/margin in `dtype`; what that was rounded from; and by what to multiply it.

    Zero stays zero. Norms are taken relative to the largest entry, because the square of 1e-20 or 1e+20 is not a
    float32. A margin keeps the largest singular value inside the interval of the coefficients when a norm or a
    product is rounded up.
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
    """float16 on GPUs: the tensor-core rate of bfloat16 with eight times its precision, safe after `normalize`.

    Of matrices with few rows it would round single entries that decide a singular value; float32 costs little there.
    """
    if batch.dtype == torch.float64:
        return torch.float64
    return torch.float16 if batch.is_cuda and min(batch.shape[-2:]) > TINY_ROWS else torch.float32


def _refresh_steps(rows: int, cols: int, steps: int, form: Form, dtype: torch.dtype) -> frozenset[int]:
    """After which steps (counted from 1) the accumulated factor is multiplied into X and X X^T is formed anew.

    Always: the standard iteration. Seldom: the Gram form, which costs only m x m products in between. It can't be
    never: rounding makes small eigenvalues of the iterated Gram matrix negative, and later steps blow them up.
    In half precision the first two steps are always taken together, because X would lose small singular values when
    it is rounded after the first; and small matrices, whose rounding errors weigh more, are refreshed more often.
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
    """Floating-point operations of one matrix in float32, with every product counted in full."""
    small, large = min(rows, cols), max(rows, cols)
    refreshes = len(_refresh_steps(small, large, steps, "auto", torch.float32))
    between = steps - refreshes  # steps that only touch m x m matrices
    # Per step Z; per step in between R twice; the factor once per step but the first after a refresh; XX^T and QX.
    square = steps + 2 * between + between
    return 2.0 * small * small * (square * small + 2 * refreshes * large)


def _iterate(
    x: Tensor,  # (B, m, n), or (B, n, m): the Gram matrix is the small one
    original: Tensor,  # what x was rounded from,
    scale: Tensor | None,  # (B,), before it was multiplied by this
    triples: tuple[Triple, ...],
    refresh_steps: frozenset[int],
    result_factor: float,
    out: Tensor,
    active: Tensor | None = None,  # (B,) int32: where 0, `out` need not be computed
) -> None:
    """X <- aX + (bR + cR^2)X with R = XX^T, for every triple; the last X times `result_factor` into `out`.

    Between two refreshes X is not touched: the factor Q with X_now = Q X and R_now = Q R Q are iterated in its place.
    All of them are polynomials in R, so they commute and every product among them is symmetric. Q is kept as
    q I + F: where singular values are small Q is nearly q I, and F X + q X is accurate there though F is rounded.
    """
    tall = x.shape[-2] > x.shape[-1]
    gram = symmetric_product(x, x, transposed=tall, active=active)  # R, (B, m, m)
    exact, exact_scale = original, scale
    f: Tensor | None = None
    q = 1.0
    for step, (a, b, c) in enumerate(triples, start=1):
        z = symmetric_product(gram, gram, gram, alpha=c, beta=b, active=active)  # bR + cR^2
        f = z if f is None else symmetric_product(f, z, f, z, beta=a, gamma=q, active=active)  # (F + qI)(Z + aI) - qaI
        q *= a
        if step not in refresh_steps:
            half = symmetric_product(gram, z, gram, beta=a, active=active)  # R(Z + aI)
            gram = symmetric_product(z, half, half, beta=a, active=active)  # (Z + aI) R (Z + aI)
            continue
        last = step == len(triples)
        left, right = (x, f) if tall else (f, x)
        x = multiply_add(
            left,
            right,
            exact,
            alpha=result_factor if last else 1.0,
            beta=q * (result_factor if last else 1.0),
            c_scale=exact_scale,
            out=out if last else None,
            active=active,
        )
        if not last:
            gram, f, q = symmetric_product(x, x, transposed=tall, active=active), None, 1.0
            exact, exact_scale = x, None


def _polar_by_svd(batch: Tensor) -> Tensor:
    finite = torch.isfinite(batch).all(-1).all(-1)[:, None, None]
    # LAPACK raises for the whole batch if one matrix is not finite.
    u, s, vh = torch.linalg.svd(torch.where(finite, batch, 0).to(torch.float64), full_matrices=False)
    # What is below the rounding of the input is no direction of it: zero, as the iteration leaves it.
    precision = torch.finfo(torch.promote_types(batch.dtype, torch.float32)).eps
    threshold = s[..., :1] * max(batch.shape[-2:]) * precision
    polar = (u * (s > threshold).unsqueeze(-2)) @ vh
    return torch.where(finite, polar, torch.nan).to(batch.dtype)
