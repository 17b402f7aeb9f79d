"""Measure the speed and memory of optimizer steps.

`muon-fsdp bench` runs `run.py`. Three more programs run on their own: `python -m muon_fsdp.benchmarks.sphere` (spectral
spheres beside Muon), `.ranks` (several CPU ranks) and `.trace` (a timeline of one step on two GPU ranks).
"""
