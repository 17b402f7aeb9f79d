"""Import the element-wise optimizers, which do not orthogonalize; see `muon_fsdp.elementwise`."""

from muon_fsdp.elementwise import TritonMuon, TritonMuonW, benchmark_muon_optimizers

__all__ = ["TritonMuon", "TritonMuonW", "benchmark_muon_optimizers"]
