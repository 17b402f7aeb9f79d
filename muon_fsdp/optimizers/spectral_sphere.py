"""SpectralSphereOptimizer: MuonOptimizer with the rule "spectral_sphere" for matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from muon_fsdp.optimizers.muon import MuonOptimizer
from muon_fsdp.optimizers.signature import UNSET, show_options
from muon_fsdp.parameters.groups import Params
from muon_fsdp.rules import SpectralSphere


@show_options(SpectralSphere.name)
class SpectralSphereOptimizer(MuonOptimizer):
    """Keeps every matrix on a sphere of spectral norm R (arXiv 2601.08393); AdamW for all other parameters.

        M       = momentum as in Muon, at a Frobenius norm of 1
        s, u, v = top singular triple of W, by power iteration from the last step's v
        W       = (R / s) W
        W       = W - lr R msign(M + lambda u v^T),   lambda such that the step is tangent: <u v^T, msign(..)> = 0

    `FSDPMuonOptimizer(model, rule="spectral_sphere")` is the same for a model that FSDP2 has wrapped. Parameters may
    have any layout; W is never assembled.

    Args:
        params: as for `MuonOptimizer`.
        lr: length of a step along the sphere, relative to R.
        {options}
        options: all other options of `MuonOptimizer` except `scale` and `ns_stepsize`, which R replaces, and
            `cautious_weight_decay`, because retraction replaces decay.
    """

    def __init__(self, params: Params, lr: float | Tensor = UNSET, **options: Any) -> None:
        super().__init__(params, lr=lr, **{"rule": SpectralSphere.name, **options})
