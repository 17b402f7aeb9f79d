"""Muon for PyTorch: each weight matrix is updated by the orthogonalized momentum of its gradient."""

from muon_fsdp.fsdp import FSDPMuonOptimizer
from muon_fsdp.hybrid import create_hybrid_optimizer
from muon_fsdp.optimizer import MuonOptimizer
from muon_fsdp.routing import label
from muon_fsdp.sso import SpectralSphereOptimizer

__version__ = "0.1.0"

__all__ = ["FSDPMuonOptimizer", "MuonOptimizer", "SpectralSphereOptimizer", "create_hybrid_optimizer", "label"]
