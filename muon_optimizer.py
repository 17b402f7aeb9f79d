"""The element-wise pair, not orthogonalizing; see `muon_fsdp.elementwise`."""

from muon_fsdp.elementwise import TritonMuon, TritonMuonW, benchmark_muon_optimizers

__all__ = ["TritonMuon", "TritonMuonW", "benchmark_muon_optimizers"]
