"""Provide other implementations to compare with: PyTorch's, and those of dion and gram_newton_schulz if installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

Orthogonalizer = Callable[[Tensor], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def plain_newton_schulz(matrices: Tensor) -> Tensor:
    """Orthogonalize with the five published Newton-Schulz steps, in bfloat16 and with PyTorch's matrix products."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if tall else x


def orthogonalizers(device: str) -> dict[str, Orthogonalizer]:
    """Return the other orthogonalizations that run on a device, by the name that the table shows."""
    found: dict[str, Orthogonalizer] = {"plain NS5, torch": plain_newton_schulz}
    if device != "cuda":
        return found
    with suppress(ImportError):
        from dion.newton_schulz_triton import newton_schulz_triton

        found["dion Triton"] = newton_schulz_triton
    with suppress(ImportError):
        from gram_newton_schulz import POLAR_EXPRESS_COEFFICIENTS, GramNewtonSchulz

        found["gram-newton-schulz"] = GramNewtonSchulz(
            ns_coefficients=POLAR_EXPRESS_COEFFICIENTS, gram_newton_schulz_reset_iterations=[2]
        )
    return found


def optimizers(device: str) -> dict[str, MakeOptimizer]:
    """Return what makes each of the other optimizers that run on a device, by the name that the table shows."""
    found: dict[str, MakeOptimizer] = {
        "torch.optim.AdamW(fused)": lambda params: torch.optim.AdamW(params, fused=True),
        "torch.optim.Muon": lambda params: torch.optim.Muon(params, lr=0.02, weight_decay=0.0),
    }
    if device != "cuda":
        return found
    with suppress(ImportError):
        from dion import Muon

        found["dion Muon (Triton)"] = _with(Muon, use_triton=True)
        found["dion Muon (Gram)"] = _with(Muon, use_gram_newton_schulz=True)
    with suppress(ImportError):
        from gram_newton_schulz import Muon as GramMuon

        found["gram-newton-schulz Muon"] = _with(GramMuon)
    return found


def _with(cls: Any, **options: Any) -> MakeOptimizer:
    """Return what makes an optimizer of this class with a usual learning rate and these options."""
    return lambda params: cls(params, lr=0.02, **options)
