"""Find the top singular vectors of matrices in subspaces, using only products of the matrices with vectors.

The host never reads a number, so it never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

_SQUARINGS = 24

# Each function takes and returns one tensor per class of matrices, where a class has G matrices of one shape (m, n).
# From vectors x (G, b, n), b per matrix, to products W x (G, b, m), or the part of them on this rank.
Left: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor]]
# From these products y to W^T y (G, b, n), complete on every rank.
Right: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor]]
# From these products y to their inner products (G, b, b), summed over all ranks.
Inner: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor]]


def num_products(power_iteration_steps: int) -> int:
    """Return how many products with W `refine` needs to be as accurate as so many steps of power iteration.

    `refine` searches the span of all vectors that it has seen. Where singular values lie close together, which is the
    hard case, such a method needs about the square root of the steps of power iteration.
    """
    return max(2, round(math.sqrt(power_iteration_steps)) - 1)


def best_in_krylov_space(
    gram: Callable[[Sequence[Tensor]], list[Tensor]],  # from x (G, n) to W^T W x (G, n), for every class
    starts: Sequence[Tensor],  # (G, n) for every class
    steps: int,
) -> list[Tensor]:
    """Find the vector x with the largest ||W x|| in the span of s, W^T W s, .., with the Lanczos method.

    Every new vector is orthogonalized against all earlier ones. Otherwise rounding would bring copies of a vector back.

    Returns:
        Unit vectors x, (G, n) for every class.
    """
    current = list(starts)
    bases = [start.new_zeros(steps, *start.shape) for start in starts]
    projected = [start.new_zeros(len(start), steps, steps, dtype=torch.float64) for start in starts]
    scales: list[Tensor] = []
    for step in range(steps):
        for basis, vector in zip(bases, current, strict=True):
            basis[step] = vector
        products = gram(current)
        if not scales:  # the squares of very small or very large products would leave the range of the dtype
            scales = [_largest(product) for product in products]
        for index, scale in enumerate(scales):
            product, known, small = products[index] / scale, bases[index][: step + 1], projected[index]
            first = torch.einsum("qgn,gn->gq", known, product)
            rest = product - torch.einsum("gq,qgn->gn", first, known)
            second = torch.einsum("qgn,gn->gq", known, rest)  # again: rounding leaves parts of `known` in `rest`
            rest = rest - torch.einsum("gq,qgn->gn", second, known)
            column = (first + second).to(torch.float64)
            small[:, : step + 1, step] = column
            small[:, step, : step + 1] = column
            current[index] = normalized_or(_new_directions(rest, product), torch.zeros_like(rest))
    found = []
    for basis, small, start in zip(bases, projected, starts, strict=True):
        weights = _top_eigenvectors(small).to(start.dtype)
        found.append(normalized_or(torch.einsum("gq,qgn->gn", weights, basis), start))
    return found


class Refined(NamedTuple):
    """The best vector of the span that `refine` searched, W times that vector, and the subspace for the next call."""

    right: Tensor  # (G, n) unit vectors
    left: Tensor  # (G, m), or the part of it on this rank
    subspace: Tensor  # (G, b, n) unit vectors


def refine(left: Left, right: Right, inner: Inner, subspaces: Sequence[Tensor], steps: int) -> list[Refined]:
    """Find the top singular vectors of W in the span of a subspace, W^T W times the subspace, and so on.

    The subspaces, (G, b, n) for every class, come from a similar W, and `steps` products W x are made. A single vector
    instead of a subspace would not suffice: when updates avoid the top singular vector, another one grows, becomes
    the top one, and has almost no component along the single known vector.
    """
    # In float64: making nearly dependent vectors orthonormal amplifies their rounding errors.
    bases = [[orthonormal(subspace.double())] for subspace in subspaces]

    def multiply_last() -> list[Tensor]:
        return left([basis[-1].to(subspace.dtype) for basis, subspace in zip(bases, subspaces, strict=True)])

    lefts = [[product] for product in multiply_last()]
    for _ in range(steps - 1):
        products = right([many[-1] for many in lefts])
        for basis, product in zip(bases, products, strict=True):
            known, new = torch.cat(basis, dim=1), product.double() / _largest(product.double())
            rest = new - (new @ known.mT) @ known
            rest = rest - (rest @ known.mT) @ known  # again: rounding leaves parts of `known` in `rest`
            basis.append(orthonormal(_new_directions(rest, new)))
        for many, product in zip(lefts, multiply_last(), strict=True):
            many.append(product)
    spanned = [torch.cat(many, dim=1) for many in lefts]
    refined = []
    for basis, subspace, spanned_left, small in zip(bases, subspaces, spanned, inner(spanned), strict=True):
        vectors, small = torch.cat(basis, dim=1), small.double()
        small = (small + small.mT) / 2
        weights = _top_eigenvectors(small)[:, None]
        best = (weights @ vectors)[:, 0]
        norms = _norm(best).clamp_min(1e-300)[:, None]
        best_left = (weights.to(spanned_left.dtype) @ spanned_left)[:, 0] / norms.to(spanned_left.dtype)
        # The eighth power of W^T W on the span: directions with small singular values vanish, those near the top stay.
        power = small / _largest(small.flatten(1))[..., None]
        for _ in range(3):
            power = power @ power
        better = normalized_or(orthonormal(power[:, : subspace.shape[1]]) @ vectors, basis[0])
        refined.append(Refined((best / norms).to(subspace.dtype), best_left, better.to(subspace.dtype)))
    return refined


def orthonormal(vectors: Tensor) -> Tensor:
    """Return an orthonormal basis of the rows (G, b, n), which must be float64, by Cholesky factorization.

    Rows that depend on others become zero.
    """
    rows = normalized_or(vectors, torch.zeros_like(vectors))
    shift = 1e-10
    identity = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    for _ in range(2):
        factor, _ = torch.linalg.cholesky_ex(rows @ rows.mT + shift * identity)
        rows = torch.linalg.solve_triangular(factor, rows, upper=False)
    # A row of intermediate norm is nearly dependent. If it stayed, the same direction could appear in the basis twice.
    kept = torch.where(_norm(rows)[..., None] > 0.5, rows, 0.0)
    return normalized_or(kept, torch.zeros_like(kept))


def _new_directions(rest: Tensor, product: Tensor) -> Tensor:
    """Return `rest`, the part of products outside the known directions, with zeros where it is only rounding error."""
    return torch.where((_norm(rest) <= 1e-5 * _norm(product))[..., None], 0.0, rest)


def _largest(vectors: Tensor) -> Tensor:
    """Return the largest absolute value along the last axis, or 1 where that is 0. The axis is kept."""
    largest = vectors.abs().amax(-1, keepdim=True)
    return torch.where(largest == 0, 1.0, largest)


def _top_eigenvectors(symmetric: Tensor) -> Tensor:
    """Return the top eigenvectors (G, q) of positive semi-definite matrices (G, q, q), found by repeated squaring.

    `torch.linalg.eigh` would make the host wait for the GPU.
    """
    power = symmetric
    for _ in range(_SQUARINGS):
        largest = power.abs().amax(dim=(-2, -1), keepdim=True)
        power = power / torch.where(largest > 0, largest, 1.0)
        power = power @ power
    zero = power.abs().amax(dim=(-2, -1)) == 0
    power[:, 0, 0] += zero.to(power.dtype)
    # Every column is now a multiple of the eigenvector, but some columns may be zero.
    column = power.square().sum(-2).argmax(-1)
    return torch.gather(power, -1, column[:, None, None].expand(-1, power.shape[-2], 1))[..., 0]


def start_vectors(like: Tensor) -> Tensor:
    """Return pseudo-random unit vectors in the shape of `like`, (.., n), the same ones at every call.

    The vectors differ along the second to last axis of a tensor with three or more axes and repeat along all other
    axes. They are independent of the weights, so an iteration can start from them for any matrix.
    """
    shape = (like.shape[-2] if like.ndim > 2 else 1, like.shape[-1])
    positions = torch.arange(1, shape[0] * shape[1] + 1, device=like.device, dtype=torch.float64)
    numbers = torch.sin(positions * 12.9898) * 43758.5453
    numbers = (numbers - numbers.floor() - 0.5).to(like.dtype).view(shape)
    unit: Tensor = numbers / torch.linalg.vector_norm(numbers, dim=-1, keepdim=True)
    return (unit if like.ndim > 2 else unit[0]).expand(like.shape).contiguous()


def normalized_or(vectors: Tensor, otherwise: Tensor) -> Tensor:
    """Return vectors divided by their norms, or `otherwise` where a vector is zero. NaN stays NaN.

    Vectors are first divided by their largest entry, because the square of 1e-30 is not representable in float32.
    """
    scaled = vectors / _largest(vectors)
    norms = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return torch.where(norms == 0, otherwise, scaled / torch.where(norms == 0, 1.0, norms))


def _norm(vectors: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms
