"""TritonMuon and TritonMuonW are NOT the orthogonalizing optimizer (that is `muon_fsdp.MuonOptimizer`).

They are a pair of fused element-wise optimizers with a momentum and a velocity:

    g = grad                    (+ weight_decay * W in TritonMuon: coupled)
    g = g / (||g||_2 + 1e-8)    with layerwise_norm: the norm of the whole tensor
    m = momentum * m + (1 - momentum) * g;   v = velocity * v + (1 - velocity) * g^2
    W = W * (1 - lr * weight_decay)          in TritonMuonW: decoupled
    W = W - lr / (sqrt(v) + 1e-8) * (m, or momentum * m + (1 - momentum) * g with nesterov)

CUDA tensors of a group are updated by one Triton launch (two with `layerwise_norm`), all others by foreach operations.
"""

from __future__ import annotations

from muon_fsdp.optimizers.elementwise import TritonMuon, TritonMuonW
from muon_fsdp.optimizers.elementwise_timing import benchmark_muon_optimizers

__all__ = ["TritonMuon", "TritonMuonW", "benchmark_muon_optimizers"]
