"""Orthogonalize batches of matrices: compute their polar factors by Newton-Schulz iteration or by SVD."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from muon_fsdp.kernels import on_device, unusable
from muon_fsdp.kernels.select import is_hopper
from muon_fsdp.linalg.autocast import without_autocast
from muon_fsdp.linalg.chains import STORED_CHAINS, Chain, Step
from muon_fsdp.linalg.coefficients import DEFAULT_STEPS, NORM_MARGINS, check_steps, coefficients
from muon_fsdp.linalg.iteration import Exact, Operand, iterate, scaled_steps, square_matrices, x_scale

Orthogonalization = Literal[
    "default", "accurate", "fast", "keller", "polar_express", "quintic", "cans", "deepseek_v4", "exact"
]
ORTHOGONALIZATIONS: tuple[str, ...] = get_args(Orthogonalization)
Form = Literal["auto", "standard", "gram"]

# From this n/m on, the accurate chain with fewer refreshes is cheaper: 3 n/m + 6.5 products of size m against
# 4.5 n/m + 4.
GRAM_ASPECT_RATIO = 5 / 3
# Up to this many rows, the accurate chain with more refreshes is taken in any case: rounding errors weigh more.
FEW_ROWS = 256
# Up to this many rows, the Gram form in half precision refreshes X after every second step, otherwise every third.
SMALL_ROWS = 512
# Up to this many rows, one kernel may compute the whole iteration of one of these chains.
SMALL_KERNEL_ROWS = 128
SMALL_KERNEL_CHAINS = tuple(chains.square for chains in STORED_CHAINS.values())
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

    The iterative methods bring singular values above 4e-3 of the Frobenius norm ("default" with five steps, which is
    "accurate") to 1, or those above 1.04e-3 to between 0.65 and 1.35 ("fast"), and lift smaller ones towards 1. A
    singular value of 0 stays 0 in every method. The input is not changed.

    Args:
        matrices: (..., m, n), the matrices, in any floating-point precision.
        method: the name of a set of coefficients, or "exact" for an SVD in float64.
        steps: number of iterations; "accurate", "fast", "cans" and "deepseek_v4" have a fixed number, which 5 stands
            for.
        form: how the iteration is evaluated: on the matrices ("standard"), on their Gram matrices ("gram"), or
            whichever is cheaper for the shape ("auto").
        factor: a number that the result is multiplied by.
        inverse_norms: (B,), one over the Frobenius norms, if the caller has computed them already.
        out: (..., m, n), a tensor for the result, which may have another dtype.

    Returns:
        `out`, or a new tensor with the shape and dtype of `matrices`.
    """
    check_steps(steps, method)
    if method not in ORTHOGONALIZATIONS:
        raise ValueError(f"Unknown orthogonalization {method!r}; valid names are {', '.join(ORTHOGONALIZATIONS)}")
    _check_matrices(matrices)
    result = torch.empty_like(matrices, memory_format=torch.contiguous_format) if out is None else out
    if matrices.numel() == 0:
        return result
    shape = (-1, *matrices.shape[-2:])
    request = Request(matrices.reshape(shape), result.view(shape), factor, inverse_norms)
    orthogonalize_together([request], method=method, steps=steps, form=form)
    return result


def _check_matrices(matrices: Tensor) -> None:
    if not isinstance(matrices, Tensor) or matrices.layout != torch.strided:
        raise TypeError("orthogonalize needs a dense tensor")
    if matrices.ndim < 2:
        raise ValueError(f"orthogonalize needs a matrix or a batch of matrices, got shape {tuple(matrices.shape)}")
    if not matrices.is_floating_point():
        raise TypeError(f"orthogonalize needs a real floating-point tensor, got {matrices.dtype}")


class Request(NamedTuple):
    """A batch of matrices to orthogonalize.

    Args:
        matrices: (B, m, n).
        out: (B, m, n), for the result, which may have another dtype.
        factor: a number that the result is multiplied by.
        inverse_norms: (B,), one over the Frobenius norms, if the caller has computed them already.
        overwrites: whether the memory of `matrices` may be used for iterates.
    """

    matrices: Tensor
    out: Tensor
    factor: float = 1.0
    inverse_norms: Tensor | None = None
    overwrites: bool = False


def orthogonalize_together(
    requests: Sequence[Request], *, method: str = "default", steps: int = 5, form: Form = "auto"
) -> list[Tensor]:
    """Orthogonalize several batches on one device; Gram matrices of equal size are multiplied in the same launches.

    Returns:
        For each request one over the Frobenius norms of its matrices, (B,), as `inverse_norms` returns them.
    """
    if not requests:
        return []
    device = requests[0].matrices.device
    with without_autocast(device.type), on_device(device):
        if method != "exact":
            return _iterate_together(requests, method, steps, form)
        for matrices, out, factor, *_ in requests:
            out.copy_(_polar_by_svd(matrices).mul_(factor))
        return [inverse_norms(r.matrices) if r.inverse_norms is None else r.inverse_norms for r in requests]


def _iterate_together(requests: Sequence[Request], method: str, steps: int, form: Form) -> list[Tensor]:
    """Orthogonalize batches by Newton-Schulz iteration, and return one over the norms of each batch."""
    norms: dict[int, Tensor] = {}  # by number of the request
    alike: dict[tuple[int, Chain, torch.dtype], list[int]] = defaultdict(list)
    margin = NORM_MARGINS[method]
    for number, request in enumerate(requests):
        matrices, out, *_ = request
        if matrices.numel() == 0:
            norms[number] = matrices.new_ones(matrices.shape[0])
            continue
        rows, cols = matrices.shape[-2:]
        dtype = _iteration_dtype(matrices)
        chain = _chain(method, steps, rows, cols, form, dtype == torch.float16)
        if form == "auto" and chain in SMALL_KERNEL_CHAINS and _takes_small_kernel(matrices, out):
            norms[number] = _orthogonalize_small(request, chain.steps, margin)
        else:
            alike[(min(rows, cols), chain, dtype)].append(number)
    for (_, chain, dtype), numbers in alike.items():
        half = dtype == torch.float16
        scaled = scaled_steps(chain, half)
        refreshes = sum(step.refresh is not None for step in scaled)
        operands = []
        for number in numbers:
            operand, norms[number] = _operand(requests[number], margin / x_scale(half), dtype, refreshes)
            operands.append(operand)
        del operand  # `iterate` releases each batch as soon as its next iterate is there
        iterate(operands, scaled)
    return [norms[number] for number in range(len(requests))]


def _operand(request: Request, margin: float, dtype: torch.dtype, refreshes: int) -> tuple[Operand, Tensor]:
    """Return the normalized batch to iterate, and one over its norms."""
    matrices, out, factor, known_norms, overwrites = request
    batch = matrices.contiguous()
    x_out, spare = _buffers(batch, out, dtype, refreshes, overwrites or batch is not matrices)
    x, exact, found = normalize(batch, margin, dtype, known_norms, x_out)
    return Operand(x, exact, factor, out, spare), found


def _is_recorded(matrices: Tensor) -> bool:
    """Return whether autograd records what is computed from these matrices."""
    return torch.is_grad_enabled() and matrices.requires_grad


class Shifted(NamedTuple):
    """The batch of matrices scales * matrices + shifts * left right^T, in parts: the sum is not stored."""

    matrices: Tensor  # (B, m, n)
    scales: Tensor  # (B,)
    left: Tensor  # (B, m)
    right: Tensor  # (B, n)
    shifts: Tensor  # (B,)


def orthogonalize_shifted(
    shifted: Shifted,
    norms: Tensor,  # (B,), the Frobenius norms of the sums; at most 1% too small, or the iteration diverges
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
    flags = active.to(torch.int32)
    with without_autocast(matrices.device.type), on_device(matrices.device):
        x = torch.empty_like(matrices, dtype=_iteration_dtype(matrices))
        half = x.dtype == torch.float16
        factors = x_scale(half) / (NORM_MARGINS[method] * norms)
        triton_spectral.shifted_cast(matrices, scales, left, right, shifts, factors, x, flags)
        chain = _chain(method, steps, *matrices.shape[-2:], "auto", half)
        iterate([Operand(x, Exact(x), 1.0, out)], scaled_steps(chain, half), flags)


def _takes_small_kernel(matrices: Tensor, out: Tensor) -> bool:
    """Return whether one kernel computes the whole iteration of these matrices, because they have few rows."""
    count, rows, cols = matrices.shape
    device = matrices.device
    if min(rows, cols) > SMALL_KERNEL_ROWS or matrices.dtype == torch.float64 or not matrices.is_cuda:
        return False
    if unusable(device) is not None or not is_hopper(device) or _is_recorded(matrices):
        return False
    if matrices.data_ptr() % 16 or out.data_ptr() % 16:
        return False
    from muon_fsdp.kernels import triton_small

    return triton_small.is_faster(count, rows, cols, device)


def _orthogonalize_small(request: Request, steps: tuple[Step, ...], margin: float) -> Tensor:
    """Orthogonalize matrices with few rows in one launch, and return one over their norms.

    The kernel keeps m x m matrices on the chip and in more than half precision, so it refreshes X only once in between.
    """
    from muon_fsdp.kernels import triton_small

    matrices, out, factor, known_norms, _ = request
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    batch, refreshes = matrices.contiguous(), frozenset({1, len(steps)})
    norms = triton_small.orthogonalize_small(batch, steps, refreshes, margin, factor, known_norms, target)
    if target is not out:
        out.copy_(target)
    return norms


def _buffers(
    matrices: Tensor, out: Tensor, dtype: torch.dtype, refreshes: int, overwrites: bool
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return two buffers for the iterates, `out` one of them, such that the last iterate but one is not in `out`.

    Returns:
        The buffers, the one for the normalized matrices first. The other may be the memory of `matrices`, which the
        first refresh still reads: it replaces each element by the same one of the next iterate. None twice if `out`
        can't hold an iterate: its dtype differs, it is not contiguous, it shares memory with the matrices, or autograd
        records the iteration.
    """
    if out.dtype != dtype or not out.is_contiguous() or _is_recorded(matrices):
        return None, None
    if out.untyped_storage().data_ptr() == matrices.untyped_storage().data_ptr():
        return None, None
    is_even = refreshes % 2 == 0
    if is_even and overwrites and matrices.element_size() == out.element_size():
        return out, matrices.view(dtype)
    other = torch.empty_like(out)
    return (out, other) if is_even else (other, out)


def normalize(
    batch: Tensor,  # (B, m, n)
    margin: float,
    dtype: torch.dtype,
    known_norms: Tensor | None = None,  # (B,), one over the Frobenius norms, if the caller has computed them already
    out: Tensor | None = None,  # (B, m, n) in `dtype`, for x
) -> tuple[Tensor, Exact, Tensor]:
    """Scale every matrix to a Frobenius norm of 1/margin; a zero matrix stays zero.

    Norms are computed relative to the largest entry, because the squares of 1e-20 and 1e+20 are outside the normal
    range of float32. The margin keeps the largest singular value inside the interval of the coefficients even if
    rounding increases a norm or a product.

    Returns:
        The scaled matrices in `dtype`, the same matrices before they were rounded to it, and one over the norms, (B,).
    """
    if dtype != torch.float64 and not _is_recorded(batch) and unusable(batch.device) is None:
        from muon_fsdp.kernels import triton_norms

        scales = triton_norms.inverse_norms(batch) if known_norms is None else known_norms
        x = torch.empty_like(batch, dtype=dtype) if out is None else out
        return triton_norms.scaled_cast(batch, scales, 1 / margin, x), Exact(batch, scales, 1 / margin), scales
    batch, largest, norms = _relative(batch)
    batch = batch / (margin * norms)
    return batch.to(dtype) if out is None else out.copy_(batch), Exact(batch), _inverse(largest, norms)


def inverse_norms(matrices: Tensor) -> Tensor:
    """Return one over the Frobenius norm of every matrix of a batch (B, m, n).

    Returns:
        (B,), with 1 for a zero matrix, and a finite number where a norm is too small for its inverse.
    """
    if matrices.dtype != torch.float64 and not _is_recorded(matrices) and unusable(matrices.device) is None:
        from muon_fsdp.kernels import triton_norms

        return triton_norms.inverse_norms(matrices.contiguous())
    _, largest, norms = _relative(matrices)
    return _inverse(largest, norms)


def _relative(batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divide every matrix by its largest entry.

    Returns:
        The divided matrices, the largest entries, and the norms of the divided matrices, both (B, 1, 1) and 1 for a
        zero matrix.
    """
    batch = batch.to(torch.promote_types(batch.dtype, torch.float32))
    largest = _one_where_zero(torch.linalg.vector_norm(batch, ord=torch.inf, dim=(-2, -1), keepdim=True))
    batch = batch / largest
    return batch, largest, _one_where_zero(torch.linalg.matrix_norm(batch, keepdim=True))


def _inverse(largest: Tensor, norms: Tensor) -> Tensor:
    """Return 1 / (largest * norms), (B,), without infinity."""
    inverse = (1 / (largest * norms)).flatten()
    return inverse.clamp_max(torch.finfo(inverse.dtype).max)


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


@lru_cache(maxsize=4096)
def _chain(method: str, steps: int, rows: int, cols: int, form: Form, half: bool) -> Chain:
    """Return the steps of a method for matrices of this shape, and after which of them X is refreshed.

    A refresh multiplies X by the accumulated factor and computes X X^T again.
    A refresh after every step gives the standard iteration. Fewer refreshes give the Gram form, in which the steps in
    between need only m x m products. Some refreshes are necessary: rounding makes small eigenvalues of the iterated
    Gram matrix negative, and later steps amplify them.
    """
    if form not in get_args(Form):
        raise ValueError(f"Unknown form {form!r}; valid names are {', '.join(get_args(Form))}")
    small, large = min(rows, cols), max(rows, cols)
    wide = large >= GRAM_ASPECT_RATIO * small
    if method == "default" and steps == DEFAULT_STEPS:  # fewer steps of a higher degree, as accurate and cheaper
        method = "accurate"
    if method in STORED_CHAINS:
        chains = STORED_CHAINS[method]
        chain = chains.wide if wide and small > FEW_ROWS else chains.square
        refreshes = chain.refreshes
    else:
        chain = Chain(tuple(Step(5, ((c, b, 0.0),), a) for a, b, c in coefficients(method, steps)), frozenset())
        refreshes = _refresh_steps(small, len(chain.steps), wide, form, half)
    if form == "standard":
        refreshes = frozenset(range(1, len(chain.steps) + 1))
    return Chain(chain.steps, refreshes)


def _refresh_steps(rows: int, steps: int, wide: bool, form: Form, half: bool) -> frozenset[int]:
    """Return the steps of degree 5, counted from 1, after which X is refreshed.

    In half precision, form "auto" does not refresh X after the first step, because rounding X there would lose small
    singular values. It refreshes small matrices more often, because rounding errors weigh more in them.
    """
    if form == "auto" and not wide:
        return frozenset((*range(2 if half else 1, steps), steps))
    between = 2 if half and form == "auto" and rows <= SMALL_ROWS else 3
    return frozenset((*range(between, steps, between), steps))


@lru_cache(maxsize=4096)
def orthogonalization_flops(
    rows: int, cols: int, steps: int = DEFAULT_STEPS, method: str = "default", symmetric: float = 1.0
) -> float:
    """Return the floating-point operations for one matrix.

    Args:
        rows: rows of the matrix.
        cols: columns of the matrix.
        steps: number of steps.
        method: the name of a set of coefficients; an SVD counts as the default.
        symmetric: the share of a symmetric product that is computed: 1 by PyTorch's library, 0.5 by our kernels.
    """
    small, large = min(rows, cols), max(rows, cols)
    chain = _chain("default" if method == "exact" else method, steps, rows, cols, "auto", False)
    squares = gram_products = refreshes = 0
    is_fresh = True
    for number, step in enumerate(chain.steps, start=1):
        gram_products += is_fresh
        squares += len(step.products) + (not is_fresh)  # F is combined with Z unless it is Z
        is_fresh = number in chain.refreshes
        refreshes += is_fresh
        squares += 0 if is_fresh else 2  # the next R
    return 2.0 * small**2 * (symmetric * (squares * small + gram_products * large) + refreshes * large)


@lru_cache(maxsize=4096)
def orthogonalization_scratch(rows: int, cols: int, steps: int, method: str, *, overwrites: bool) -> int:
    """Return the bytes that the iteration of a matrix in half precision takes on a GPU, beside it and its result.

    Args:
        rows: rows of the matrix.
        cols: columns of the matrix.
        steps: number of steps.
        method: the name of a set of coefficients.
        overwrites: whether iterates may lie in the memory of the matrix and in that of the result.
    """
    small = min(rows, cols)
    half = small > TINY_ROWS
    chain = _chain(method, steps, rows, cols, "auto", half)
    refreshes = len(chain.refreshes | {len(chain.steps)})
    iterates = refreshes % 2 if overwrites and half else 2
    return (2 if half else 4) * (iterates * rows * cols + square_matrices(chain) * small**2)


def _polar_by_svd(batch: Tensor) -> Tensor:
    finite = torch.isfinite(batch).all(-1).all(-1)[:, None, None]
    # LAPACK raises for the whole batch if one matrix is not finite. Such matrices are zero here and NaN in the result.
    u, s, vh = torch.linalg.svd(torch.where(finite, batch, 0).to(torch.float64), full_matrices=False)
    # Singular values below the rounding error of the input count as zero and stay zero, as in the iteration.
    precision = torch.finfo(torch.promote_types(batch.dtype, torch.float32)).eps
    threshold = s[..., :1] * max(batch.shape[-2:]) * precision
    polar = (u * (s > threshold).unsqueeze(-2)) @ vh
    return torch.where(finite, polar, torch.nan).to(batch.dtype)
