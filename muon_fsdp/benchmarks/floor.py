"""Compute the floor of a benchmark: the time of the least work at the ceilings of the same run."""

from __future__ import annotations

from muon_fsdp.benchmarks.machine import Ceilings
from muon_fsdp.linalg.newton_schulz import orthogonalization_flops


def least_flops(rows: int, cols: int, steps: int = 5) -> float:
    """Return the floating-point operations of our orthogonalization with `steps` iterations.

    Symmetric products count half, because the kernels compute one triangle. All tables get their operations from here.
    """
    return orthogonalization_flops(rows, cols, steps, symmetric=0.5)


def floor_milliseconds(ceilings: Ceilings, flops: float, num_bytes: float) -> float:
    """Return the time of this work at the sustained rate of products and the speed of a copy."""
    return 1e3 * (flops / ceilings.sustained_flops + num_bytes / ceilings.bytes)
