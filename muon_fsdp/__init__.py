"""Muon for PyTorch: each weight matrix is updated by the orthogonalized momentum of its gradient."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muon_fsdp.fsdp import FSDPMuonOptimizer
    from muon_fsdp.hybrid import create_hybrid_optimizer
    from muon_fsdp.optimizer import MuonOptimizer
    from muon_fsdp.routing import label
    from muon_fsdp.sso import SpectralSphereOptimizer

__version__ = "0.1.0"

__all__ = ["FSDPMuonOptimizer", "MuonOptimizer", "SpectralSphereOptimizer", "create_hybrid_optimizer", "label"]

_MODULES = {
    "FSDPMuonOptimizer": "fsdp",
    "MuonOptimizer": "optimizer",
    "SpectralSphereOptimizer": "sso",
    "create_hybrid_optimizer": "hybrid",
    "label": "routing",
}


def __getattr__(name: str) -> Any:
    """Import torch when something is asked for: `muon-fsdp --help` need not wait for it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
