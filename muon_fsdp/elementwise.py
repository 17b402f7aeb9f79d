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

import importlib.util
import warnings
from pathlib import Path

from muon_fsdp.optimizers.elementwise import TritonMuon, TritonMuonW
from muon_fsdp.optimizers.elementwise_timing import benchmark_muon_optimizers

__all__ = ["TritonMuon", "TritonMuonW", "benchmark_muon_optimizers"]


def find_other_muon_optimizer() -> str | None:
    """Find the module `muon_optimizer` that Python would import, without importing it.

    Another package installs a module of that name. Depending on the order of installation it replaces our file or lies
    before it in `sys.path`, so we recognize our own by its content, not by its path.

    Returns:
        The path of the module if it is not ours, or None if it is ours or there is none.
    """
    try:
        spec = importlib.util.find_spec("muon_optimizer")
        path = Path(spec.origin) if spec is not None and spec.origin is not None else None
        ours = path is None or __name__ in path.read_text(encoding="utf-8", errors="replace")
    except (ImportError, OSError, ValueError):  # a module without a file, or made by a program
        return None
    return None if ours else str(path)


_other = find_other_muon_optimizer()
if _other is not None:
    warnings.warn(
        f"the module muon_optimizer that Python finds belongs to another package: {_other}. Import from "
        f"{__name__} instead, or uninstall that package and reinstall muon_fsdp.",
        stacklevel=2,
    )
