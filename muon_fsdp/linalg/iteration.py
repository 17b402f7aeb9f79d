"""Run a chain of Newton-Schulz steps on batches of matrices, mostly by products of their small Gram matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from muon_fsdp.kernels import Addend, multiply_add, symmetric_product
from muon_fsdp.linalg.chains import Chain, Step

# In float16, m x m matrices are stored times a power of two that brings their largest possible entry near this number.
# It leaves a factor of four for rounding before float16 overflows.
LARGEST_STORED = 2.0**14
# In float16, X is stored times this power of two: the entries of a normalized 16384 x 53248 matrix are near 3e-5, below
# the normal numbers. No entry exceeds the largest singular value, which stays below 2 in all iterates.
X_SCALE = 2.0**10
# The bounds of stored matrices are taken over this many singular values.
GRID_POINTS = 4097


class ScaledStep(NamedTuple):
    """One step of a chain, with the factors of its products.

    A product is alpha * A B + beta * C + gamma * E. The factors include the powers of two by which the matrices are
    stored.

    Args:
        gram_alpha: alpha of R = X X^T; None if R comes from the step before.
        products: (alpha, beta, gamma) of the products that give Z, as in `Step`.
        combine: (alpha, beta, gamma) of F = F Z + a F + q Z; None if F is Z.
        next_gram: (alpha, beta) of H = R Z + a R, and of the next R = Z H + a H; None if X is refreshed.
        refresh: (alpha, beta) of X = F X + q X; None if X is not refreshed after this step. The last X is not scaled.
    """

    gram_alpha: float | None
    products: tuple[tuple[float, float, float], ...]
    combine: tuple[float, float, float] | None
    next_gram: tuple[tuple[float, float], tuple[float, float]] | None
    refresh: tuple[float, float] | None


class Exact(NamedTuple):
    """The batch of matrices factor * scales * matrices, in parts: the product is not stored."""

    matrices: Tensor  # (B, m, n)
    scales: Tensor | None = None  # (B,); None if all are 1
    factor: float = 1.0


class Operand(NamedTuple):
    """A batch of matrices that an iteration orthogonalizes.

    Args:
        x: (B, m, n), or (B, n, m) with m <= n: the normalized matrices times `x_scale`, rounded.
        exact: x before it was rounded.
        factor: a number that the result is multiplied by.
        out: the same shape, for the result.
        spare: memory for the next iterate, like x; the one after that overwrites x. `out` may be x or this, and this
            may be the memory of `exact`. None allocates memory for every iterate.
    """

    x: Tensor
    exact: Exact
    factor: float
    out: Tensor
    spare: Tensor | None = None


def iterate(operands: list[Operand], steps: Sequence[ScaledStep], active: Tensor | None = None) -> None:
    """Run X <- (Z + qI) X, Z a polynomial in R = X X^T, for every step, and write the last X to the operands' `out`.

    Between two refreshes X does not change. Instead, the iteration updates R and a factor Q: the current iterate is
    Q X, and its Gram matrix is Q R Q. All of these are polynomials in R, so they commute and every product among them
    is symmetric. Q is stored as q I + F. Where singular values are small, Q is nearly q I, so F X + q X is accurate
    there although F is rounded.

    Args:
        operands: batches of matrices whose shorter sides are equal; their Gram matrices are multiplied together. The
            list is emptied: the memory of an iterate is released when the next one of its batch is there.
        steps: what `scaled_steps` returns.
        active: (B,) int32, for a single operand: where 0, `out` need not be computed.
    """
    batches = list(operands)
    operands.clear()
    matrices = _SquareMatrices([batch.x for batch in batches])
    gram = f = None
    for number, step in enumerate(steps, start=1):
        if gram is None:
            assert step.gram_alpha is not None
            gram = _gram_matrices(batches, step.gram_alpha, matrices.take(), active)
        z = _polynomial(gram, step, matrices, active)
        if f is None:
            new_f = z
        else:
            assert step.combine is not None
            alpha, beta, gamma = step.combine
            addends = [Addend(f, beta), Addend(z, gamma)]
            new_f = symmetric_product(f, z, addends, alpha=alpha, active=active, out=matrices.take())
            matrices.give_back(f)
        if step.refresh is None:
            gram = _next_gram(gram, z, step, matrices, active)
        if new_f is not z:
            matrices.give_back(z)
        if step.refresh is None:
            f = new_f
            continue
        for index, part in enumerate(_split(new_f, batches)):
            batches[index] = _refreshed(batches[index], part, step.refresh, number == len(steps), active)
        matrices.give_back(new_f)
        gram = f = None


class _SquareMatrices:
    """Memory for the batches of m x m matrices of an iteration: as many as are needed at a time.

    Where autograd records the iteration, no memory is used twice.
    """

    def __init__(self, xs: Sequence[Tensor]) -> None:
        rows = min(xs[0].shape[-2:])
        self._shape, self._dtype, self._device = (sum(map(len, xs)), rows, rows), xs[0].dtype, xs[0].device
        self._is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
        self._free: list[Tensor] = []

    def take(self) -> Tensor | None:
        """Return memory for one batch of matrices, (B, m, m); None if the product must allocate it."""
        if self._is_recorded:
            return None
        return self._free.pop() if self._free else torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def give_back(self, matrices: Tensor) -> None:
        """Make the memory of matrices that are not needed any more available."""
        if not self._is_recorded:
            self._free.append(matrices)


def _next_gram(gram: Tensor, z: Tensor, step: ScaledStep, matrices: _SquareMatrices, active: Tensor | None) -> Tensor:
    """Return (Z + aI) R (Z + aI), and give back the memory of R."""
    assert step.next_gram is not None
    (alpha, beta), (next_alpha, next_beta) = step.next_gram
    half = symmetric_product(gram, z, [Addend(gram, beta)], alpha=alpha, active=active, out=matrices.take())
    matrices.give_back(gram)
    addends = [Addend(half, next_beta)]
    result = symmetric_product(z, half, addends, alpha=next_alpha, active=active, out=matrices.take())
    matrices.give_back(half)
    return result


def _gram_matrices(batches: Sequence[Operand], alpha: float, out: Tensor | None, active: Tensor | None) -> Tensor:
    """Return alpha * X X^T of all batches, (B, m, m), in `out` unless it is None."""
    parts = [None] * len(batches) if out is None else _split(out, batches)
    grams = [
        symmetric_product(x, x, alpha=alpha, transposed=_is_tall(x), active=active, out=part)
        for (x, *_), part in zip(batches, parts, strict=True)
    ]
    return torch.cat(grams) if out is None else out


def _polynomial(gram: Tensor, step: ScaledStep, matrices: _SquareMatrices, active: Tensor | None) -> Tensor:
    """Return Z of a step, (B, m, m), from R, and give back the memory of what is not needed any more.

    `Step` says what the products are. R is needed after the step if X is not refreshed then.
    """
    before, now = gram, gram
    kept = gram if step.refresh is None else None
    for number, (alpha, beta, gamma) in enumerate(step.products):
        addends = [Addend(now, beta)] if number == 0 else [Addend(now, beta), Addend(before, gamma)]
        result = symmetric_product(now, now, addends, alpha=alpha, active=active, out=matrices.take())
        if before is not now and before is not kept:
            matrices.give_back(before)
        before, now = now, result
    if before is not kept:
        matrices.give_back(before)
    return now


def _refreshed(
    batch: Operand,
    f: Tensor,  # (B, m, m)
    factors: tuple[float, float],
    is_last: bool,
    active: Tensor | None,
) -> Operand:
    """Return a batch with alpha F X + beta X as its X; the last one lies in `out`, times the factor of the batch."""
    alpha, beta = factors
    x, (matrices, scales, scale), factor, out, spare = batch
    left, right = (x, f) if _is_tall(x) else (f, x)
    new = multiply_add(
        left,
        right,
        Addend(matrices, beta * scale),
        alpha=alpha,
        c_scale=scales,
        factor=factor if is_last else 1.0,
        out=out if is_last else spare,
        active=active,
    )
    return batch._replace(x=new, exact=Exact(new), spare=None if spare is None else x)


def _split(matrices: Tensor, batches: Sequence[Operand]) -> Sequence[Tensor]:
    return [matrices] if len(batches) == 1 else torch.split(matrices, [len(batch.x) for batch in batches])


def _is_tall(x: Tensor) -> bool:
    return x.shape[-2] > x.shape[-1]


def square_matrices(chain: Chain) -> int:
    """Return how many (m, m) matrices `iterate` needs at a time for each matrix of a batch."""
    most = has_f = 0
    for number, step in enumerate(chain.steps, start=1):
        keeps_gram = number not in chain.refreshes and number < len(chain.steps)
        products = len(step.products)
        of_polynomial = 2 if products == 1 else 3 + (keeps_gram and products > 2)
        of_factor, of_next_gram = (3 + keeps_gram) * has_f, (3 + has_f) * keeps_gram
        most = max(most, has_f + of_polynomial, of_factor, of_next_gram)
        has_f = int(keeps_gram)
    return most


def x_scale(half: bool) -> float:
    """Return the power of two by which X is stored."""
    return X_SCALE if half else 1.0


@lru_cache(maxsize=256)
def scaled_steps(chain: Chain, half: bool) -> tuple[ScaledStep, ...]:
    """Return the steps of a chain with the factors of all their products.

    Entries of R are near 1 / (m sqrt(n)) away from the diagonal, which is below the normal numbers of float16 from
    4096 x 14336 on. With `half`, every m x m matrix is therefore stored times a power of two. Its entries are at most
    its largest eigenvalue, which is bounded by evaluating the chain on a grid of singular values.
    """
    values = torch.linspace(0, 1, GRID_POINTS, dtype=torch.float64, device="cpu")

    scale_of_x = x_scale(half)

    def stored(bounded: Tensor) -> float:
        largest = bounded.abs().max().item()
        if not half or not 0 < largest < math.inf:
            return 1.0
        return 2.0 ** min(14, max(-14, math.floor(math.log2(LARGEST_STORED / largest))))

    result = []
    gram, gram_scale, gram_alpha = values.square(), 1.0, None
    f, f_scale, q = torch.zeros_like(values), 1.0, 0.0
    is_fresh = True
    for number, step in enumerate(chain.steps, start=1):
        if is_fresh:
            gram = values.square()
            gram_scale = stored(gram)
            gram_alpha = gram_scale / scale_of_x**2
        z, z_scale, products = _scaled_products(step, gram, gram_scale, stored)
        a, combine, next_gram, refresh = step.identity, None, None, None
        if is_fresh:
            f, f_scale, q = z, z_scale, a
        else:
            new_f = f * z + a * f + q * z
            scale = stored(new_f)
            combine = (scale / (f_scale * z_scale), scale * a / f_scale, scale * q / z_scale)
            f, f_scale, q = new_f, scale, q * a
        alpha_of_gram = gram_alpha if is_fresh else None
        is_fresh = number in chain.refreshes or number == len(chain.steps)
        if is_fresh:
            result_scale = 1 / scale_of_x if number == len(chain.steps) else 1.0
            values, refresh = values * (f + q), (result_scale / f_scale, result_scale * q)
        else:
            half_gram = gram * z + a * gram
            new_gram = z * half_gram + a * half_gram
            half_scale, new_scale = stored(half_gram), stored(new_gram)
            next_gram = (
                (half_scale / (gram_scale * z_scale), half_scale * a / gram_scale),
                (new_scale / (z_scale * half_scale), new_scale * a / half_scale),
            )
            gram, gram_scale = new_gram, new_scale
        result.append(ScaledStep(alpha_of_gram, products, combine, next_gram, refresh))
    return tuple(result)


def _scaled_products(
    step: Step, gram: Tensor, gram_scale: float, stored: Callable[[Tensor], float]
) -> tuple[Tensor, float, tuple[tuple[float, float, float], ...]]:
    """Evaluate Z of a step on a grid.

    Returns:
        The values of Z, the power of two by which it is stored, and the factors of the products that give it.
    """
    before, now = (gram, gram_scale), (gram, gram_scale)
    products = []
    for number, (alpha, beta, gamma) in enumerate(step.products):
        added = (beta * now[0]) + (gamma * before[0] if number > 0 else 0.0)
        value = alpha * now[0] * now[0] + added
        # PyTorch's library rounds the sum without the second addend too, and it must not overflow either.
        scale = stored(torch.stack([value, value - gamma * before[0]]))
        products.append((scale * alpha / now[1] ** 2, scale * beta / now[1], scale * gamma / before[1]))
        before, now = now, (value, scale)
    return *now, tuple(products)
