"""The best vectors of subspaces: from which the top singular vectors of matrices are found, by products with them only.

Nothing here looks at a number on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

_SQUARINGS = 24

# For batches of vectors (G, b, n), b per matrix, of several widths n: W x (G, b, m), or the part of it on this rank;
Left: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor]]
# W^T y of that, whole on every rank;
Right: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor]]
# and its inner products (G, b, b), over all ranks.
Inner: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor]]


def num_products(power_iteration_steps: int) -> int:
    """How many products with W make up for so many steps of power iteration, in `refine`.

    One that looks for the best vector in all that it has seen needs about the square root of their number where
    singular values lie close together, which is where it matters.
    """
    return max(2, round(math.sqrt(power_iteration_steps)) - 1)


def best_in_krylov_space(
    gram: Callable[[Sequence[Tensor]], list[Tensor]], starts: Sequence[Tensor], steps: int
) -> list[Tensor]:
    """Unit vectors x (G, n) of the largest ||W x|| in the span of x, W^T W x, .. from `starts`, by the Lanczos method.

    Orthogonalized in full, so that copies of a vector can't appear by rounding.
    """
    current = list(starts)
    bases = [start.new_zeros(steps, *start.shape) for start in starts]
    projected = [start.new_zeros(len(start), steps, steps, dtype=torch.float64) for start in starts]
    scales: list[Tensor] = []
    for step in range(steps):
        for basis, vector in zip(bases, current, strict=True):
            basis[step] = vector
        products = gram(current)
        if not scales:  # squares of very small or large products would not be numbers
            scales = [_largest(product) for product in products]
        for index, scale in enumerate(scales):
            product, known, small = products[index] / scale, bases[index][: step + 1], projected[index]
            first = torch.einsum("qgn,gn->gq", known, product)
            rest = product - torch.einsum("gq,qgn->gn", first, known)
            second = torch.einsum("qgn,gn->gq", known, rest)  # once more: rounding leaves a part of them in it
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
    """The best vector of a subspace, W times it, and a better subspace."""

    right: Tensor  # (G, n) unit vectors
    left: Tensor  # (G, m), or the part of it on this rank
    subspace: Tensor  # (G, b, n) unit vectors


def refine(left: Left, right: Right, inner: Inner, subspaces: Sequence[Tensor], steps: int) -> list[Refined]:
    """From subspaces (G, b, n) that were nearly those of the top singular vectors, the top ones now, and the next.

    One vector would not do: when updates avoid the top one, another that grows meanwhile takes its place, and has
    hardly a part in what is known. Spanned are the subspace, W^T W times it, and so on, with `steps` products W x.
    """
    # In float64: what is nearly dependent is blown up when it is made orthonormal, and its rounding with it.
    bases = [[orthonormal(subspace.double())] for subspace in subspaces]

    def multiply_last() -> list[Tensor]:
        return left([basis[-1].to(subspace.dtype) for basis, subspace in zip(bases, subspaces, strict=True)])

    lefts = [[product] for product in multiply_last()]
    for _ in range(steps - 1):
        products = right([many[-1] for many in lefts])
        for basis, product in zip(bases, products, strict=True):
            known, new = torch.cat(basis, dim=1), product.double() / _largest(product.double())
            rest = new - (new @ known.mT) @ known
            rest = rest - (rest @ known.mT) @ known  # once more: rounding leaves a part of them in it
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
        # The eighth power of W^T W on the subspace: what is far from the top dies out, what is near stays.
        power = small / _largest(small.flatten(1))[..., None]
        for _ in range(3):
            power = power @ power
        better = normalized_or(orthonormal(power[:, : subspace.shape[1]]) @ vectors, basis[0])
        refined.append(Refined((best / norms).to(subspace.dtype), best_left, better.to(subspace.dtype)))
    return refined


def orthonormal(vectors: Tensor) -> Tensor:
    """Rows (G, b, n) in float64 made orthonormal, by Cholesky factors; what depends on others becomes zero."""
    rows = normalized_or(vectors, torch.zeros_like(vectors))
    shift = 1e-10
    identity = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    for _ in range(2):
        factor, _ = torch.linalg.cholesky_ex(rows @ rows.mT + shift * identity)
        rows = torch.linalg.solve_triangular(factor, rows, upper=False)
    # Neither one nor nearly nothing would be found again as something new, and count twice.
    kept = torch.where(_norm(rows)[..., None] > 0.5, rows, 0.0)
    return normalized_or(kept, torch.zeros_like(kept))


def _new_directions(rest: Tensor, product: Tensor) -> Tensor:
    """What is left of products without all known directions; where that is rounding only, it is none."""
    return torch.where((_norm(rest) <= 1e-5 * _norm(product))[..., None], 0.0, rest)


def _largest(vectors: Tensor) -> Tensor:
    """The largest absolute value along the last axis, 1 where that is 0; the axis is kept."""
    largest = vectors.abs().amax(-1, keepdim=True)
    return torch.where(largest == 0, 1.0, largest)


def _top_eigenvectors(symmetric: Tensor) -> Tensor:
    """Of positive semi-definite matrices (G, q, q), by squaring: torch.linalg.eigh would make a GPU wait."""
    power = symmetric
    for _ in range(_SQUARINGS):
        largest = power.abs().amax(dim=(-2, -1), keepdim=True)
        power = power / torch.where(largest > 0, largest, 1.0)
        power = power @ power
    zero = power.abs().amax(dim=(-2, -1)) == 0
    power[:, 0, 0] += zero.to(power.dtype)
    # All columns are multiples of the eigenvector by now, but some may be zero.
    column = power.square().sum(-2).argmax(-1)
    return torch.gather(power, -1, column[:, None, None].expand(-1, power.shape[-2], 1))[..., 0]


def start_vectors(like: Tensor) -> Tensor:
    """Unit vectors (.., n) that no matrix was made for, other ones along the axis before the last; the same always."""
    shape = (like.shape[-2] if like.ndim > 2 else 1, like.shape[-1])
    positions = torch.arange(1, shape[0] * shape[1] + 1, device=like.device, dtype=torch.float64)
    numbers = torch.sin(positions * 12.9898) * 43758.5453
    numbers = (numbers - numbers.floor() - 0.5).to(like.dtype).view(shape)
    unit: Tensor = numbers / torch.linalg.vector_norm(numbers, dim=-1, keepdim=True)
    return (unit if like.ndim > 2 else unit[0]).expand(like.shape).contiguous()


def normalized_or(vectors: Tensor, otherwise: Tensor) -> Tensor:
    """Unit vectors; where one is zero, `otherwise`; NaN stays. In two steps: the square of 1e-30 is not a float32."""
    scaled = vectors / _largest(vectors)
    norms = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return torch.where(norms == 0, otherwise, scaled / torch.where(norms == 0, 1.0, norms))


def _norm(vectors: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms
