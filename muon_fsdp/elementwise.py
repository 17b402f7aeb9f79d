"""Import TritonMuon and TritonMuonW, which are NOT the orthogonalizing optimizer (`muon_fsdp.MuonOptimizer` is).

They are two fused element-wise optimizers with a momentum m and a velocity v:

    g = grad                    (+ weight_decay * W in TritonMuon: coupled)
    g = g / (||g||_2 + 1e-8)    with layerwise_norm: the norm of the whole tensor
    m = momentum * m + (1 - momentum) * g;   v = velocity * v + (1 - velocity) * g^2
    W = W * (1 - lr * weight_decay)          in TritonMuonW: decoupled
    W = W - lr / (sqrt(v) + 1e-8) * (m, or momentum * m + (1 - momentum) * g with nesterov)

One Triton launch updates the CUDA tensors of a group (two launches with `layerwise_norm`); foreach operations update
all other tensors.
"""

from __future__ import annotations

from muon_fsdp.optimizers.elementwise import TritonMuon, TritonMuonW
from muon_fsdp.optimizers.elementwise_timing import benchmark_muon_optimizers

__all__ = ["TritonMuon", "TritonMuonW", "benchmark_muon_optimizers"]
