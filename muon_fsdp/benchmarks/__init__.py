"""Speed of orthogonalization, of whole steps and of the element-wise pair: what `muon-fsdp bench` measures."""
