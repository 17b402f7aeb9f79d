"""Compute the largest singular values of whole matrices by products with vectors, without waiting for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muon_fsdp.linalg.autocast import outside_autocast
from muon_fsdp.linalg.subspaces import best_in_krylov_space, normalized_or, start_vectors

# Products W^T W x from a start vector that is independent of W. By the gap-free bound for random start vectors
# (Kuczynski, Wozniakowski 1992) the expected error of the norm is at most 0.5% for any matrix of up to 10,000 columns.
COLD_STEPS = 96


class Triple(NamedTuple):
    """The top singular triple of every matrix of a batch.

    Args:
        norm: (...), the largest singular value.
        left: (..., m), unit vectors u.
        right: (..., n), unit vectors v.
    """

    norm: Tensor
    left: Tensor
    right: Tensor


@outside_autocast
def power_iteration(matrices: Tensor, steps: int = 10, right: Tensor | None = None) -> Triple:
    """Approximate the top singular triple of every matrix of a batch by `steps` products with W^T W.

    A few steps suffice if `right` comes from similar matrices. Otherwise about a hundred steps are needed to come
    within 1%, and `compute_spectral_norm` is better.

    Args:
        matrices: (..., m, n), a tensor, not a DTensor.
        steps: products with W^T W.
        right: (..., n), the `right` that this function returned for similar matrices; None starts from a fixed vector.
    """
    batch = _as_batch(matrices)
    vectors = _starts(batch)
    if right is not None:
        vectors = normalized_or(right.detach().reshape(len(batch), -1).to(batch.dtype), vectors)
    for _ in range(steps):
        vectors = normalized_or(_gram(batch, vectors), vectors)
    return _triple(matrices, batch, vectors)


@outside_autocast
def spectral_norm(matrices: Tensor, right: Tensor | None = None, steps: int = 10) -> Tensor:
    """Compute what `muon_fsdp.spectral.compute_spectral_norm` documents, for tensors that are not DTensors."""
    if right is not None:
        return power_iteration(matrices, steps, right).norm
    batch = _as_batch(matrices)
    steps = min(COLD_STEPS, 1 + min(batch.shape[-2:]))
    (vectors,) = best_in_krylov_space(lambda x: [_gram(batch, x[0])], [_starts(batch)], steps)
    return _triple(matrices, batch, vectors).norm


def _as_batch(matrices: Tensor) -> Tensor:
    if not isinstance(matrices, Tensor) or matrices.ndim < 2:
        found = getattr(matrices, "shape", type(matrices))
        raise ValueError(f"expected a matrix or a batch of matrices, a tensor (..., m, n), got {found}")
    batch = matrices.detach().reshape(-1, *matrices.shape[-2:])
    return batch.to(torch.promote_types(batch.dtype, torch.float32))


def _starts(batch: Tensor) -> Tensor:
    return start_vectors(batch.new_empty(len(batch), batch.shape[-1]))


def _gram(batch: Tensor, vectors: Tensor) -> Tensor:
    return (batch.mT @ (batch @ vectors.unsqueeze(-1))).squeeze(-1)


def _triple(matrices: Tensor, batch: Tensor, right: Tensor) -> Triple:
    left = (batch @ right.unsqueeze(-1)).squeeze(-1)
    outer = matrices.shape[:-2]
    norm = torch.linalg.vector_norm(left, dim=-1)
    left = normalized_or(left, torch.zeros_like(left))
    return Triple(norm.reshape(outer), left.reshape(*outer, -1), right.reshape(*outer, -1))
