"""Programs that measure, and their results; `muon-fsdp bench` itself is in `muon_fsdp.benchmarks`."""
