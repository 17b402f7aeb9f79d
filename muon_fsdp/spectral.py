"""Spectral norms, spheres of them, and the multiplier that makes an update tangent to one; batched, without a wait."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.linalg.autocast import outside_autocast
from muon_fsdp.linalg.power_iteration import Triple, power_iteration, spectral_norm
from muon_fsdp.linalg.sphere import retract, target_radius
from muon_fsdp.linalg.tangent import Tangent, solve_lambda
from muon_fsdp.statistics.top_singular import spectral_norm_of_shards

__all__ = [
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
    """The largest singular value of every matrix of (..., m, n), to 1% for any matrix.

    From nothing this takes up to 96 products with W^T W. Of a DTensor all ranks must ask; it is not assembled.

    Args:
        matrices: (..., m, n), tensors or DTensors.
        right: (..., n), as `power_iteration` gave it for matrices that were little different: then `steps` products
            are made from there. Not for DTensors.
        steps: see there.
    """
    if isinstance(matrices, DTensor):
        return spectral_norm_of_shards(matrices)
    return spectral_norm(matrices, right, steps)
