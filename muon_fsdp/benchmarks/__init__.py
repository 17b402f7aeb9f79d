"""Measure the speed and memory of optimizer steps.

`muon-fsdp bench` runs `run.py`. Two more programs run on their own: `python -m muon_fsdp.benchmarks.ranks` (several CPU
ranks) and `.trace` (a timeline of one step on two GPU ranks).
"""
