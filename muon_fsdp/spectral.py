"""Compute spectral norms, retract matrices to spheres of equal spectral norm, and find tangent updates, in batches."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.linalg.autocast import outside_autocast
from muon_fsdp.linalg.power_iteration import Triple, power_iteration, spectral_norm
from muon_fsdp.linalg.sphere import retract, target_radius
from muon_fsdp.linalg.tangent import Known, Msign, Tangent, solve_lambda
from muon_fsdp.statistics.top_singular import spectral_norm_of_shards

__all__ = [
    "Known",
    "Msign",
    "Tangent",
    "Triple",
    "compute_spectral_norm",
    "power_iteration",
    "retract",
    "solve_lambda",
    "target_radius",
]


@outside_autocast
def compute_spectral_norm(matrices: Tensor, right: Tensor | None = None, steps: int = 10) -> Tensor:
    """Compute the largest singular value of every matrix of a batch, to 1% for any matrix.

    Without `right` this takes up to 96 products with W^T W. For a DTensor all ranks must call this function; the
    DTensor is not gathered.

    Args:
        matrices: (..., m, n), a tensor or a DTensor.
        right: (..., n), the `right` that `power_iteration` returned for similar matrices. The iteration then starts
            from these vectors and makes `steps` products. Not supported for DTensors.
        steps: products with W^T W if `right` is given.

    Returns:
        (...), the largest singular values.
    """
    if isinstance(matrices, DTensor):
        return spectral_norm_of_shards(matrices)
    return spectral_norm(matrices, right, steps)
