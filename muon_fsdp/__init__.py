"""Muon for PyTorch: an optimizer that updates each weight matrix by the orthogonalized momentum of its gradients."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muon_fsdp.optimizers.fsdp import FSDPMuonOptimizer
    from muon_fsdp.optimizers.hybrid import create_hybrid_optimizer
    from muon_fsdp.optimizers.muon import MuonOptimizer
    from muon_fsdp.optimizers.qk_clip import qk_clip
    from muon_fsdp.optimizers.spectral_sphere import SpectralSphereOptimizer
    from muon_fsdp.parameters.routing import label
    from muon_fsdp.rules.recipes import recipes

__version__ = "0.1.0"

__all__ = [
    "FSDPMuonOptimizer",
    "MuonOptimizer",
    "SpectralSphereOptimizer",
    "create_hybrid_optimizer",
    "label",
    "qk_clip",
    "recipes",
]

_MODULES = {
    "FSDPMuonOptimizer": "optimizers.fsdp",
    "MuonOptimizer": "optimizers.muon",
    "SpectralSphereOptimizer": "optimizers.spectral_sphere",
    "create_hybrid_optimizer": "optimizers.hybrid",
    "label": "parameters.routing",
    "qk_clip": "optimizers.qk_clip",
    "recipes": "rules.recipes",
}


def __getattr__(name: str) -> Any:
    """Import a public name, and torch with it, on first use, so that `muon-fsdp --help` is fast."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    """List the public names too, which are not imported yet."""
    return sorted({*globals(), *__all__})
