"""Measure the speed and memory of optimizer steps; `muon-fsdp bench` runs it."""
