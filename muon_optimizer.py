"""Import the element-wise optimizers under another name; `muon_fsdp.elementwise` is the first name."""

from muon_fsdp.elementwise import TritonMuon, TritonMuonW, benchmark_muon_optimizers

__all__ = ["TritonMuon", "TritonMuonW", "benchmark_muon_optimizers"]
