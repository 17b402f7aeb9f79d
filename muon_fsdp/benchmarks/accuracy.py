"""Measure what an orthogonalization makes of singular values: where large ones end, and what lifts tiny ones."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from muon_fsdp.benchmarks.contestants import Orthogonalizer

# Singular values from this share of the Frobenius norm on are large: the default brings them to 1.
LARGE = 4e-3
# The tiny ones, of which a lifted one shows the slope at zero. Slopes near 1 / TINY and above are shown too small.
TINY = 1e-4
# Probes have at most as many rows that their singular values can be computed anywhere, and at least as many that
# rounding to bfloat16 leaves the tiny ones visible.
MOST_ROWS, LEAST_ROWS = 384, 64


class Accuracy(TypedDict):
    """Where large singular values end, at least and at most, and by what tiny ones are multiplied."""

    low: float
    high: float
    slope: float


class Probe(NamedTuple):
    """A matrix whose singular vectors are known."""

    matrices: Tensor  # (1, rows, cols)
    left: Tensor  # (rows, m) float64, m the shorter side
    right: Tensor  # (cols, m) float64
    num_large: int  # how many of its singular values are large; the others are tiny


def make_probe(rows: int, cols: int, device: str, dtype: torch.dtype) -> Probe:
    """Return a matrix with the aspect ratio of (rows, cols), whose shorter side is within the limits above."""
    small = min(rows, cols)
    scale = min(max(small, LEAST_ROWS), MOST_ROWS) / small
    rows, cols = round(rows * scale), round(cols * scale)
    short = min(rows, cols)
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(size, short, generator=generator, dtype=torch.float64))[0] for size in (rows, cols)
    )
    num_large = short - short // 4
    values = torch.full((short,), TINY, dtype=torch.float64)
    values[:num_large] = torch.logspace(0, -2.2, num_large, dtype=torch.float64)
    values[:num_large] = (values[:num_large] / values[:num_large].norm()).clamp_min(LARGE)
    matrices = ((left * values) @ right.mT).unsqueeze(0)
    return Probe(matrices.to(device, dtype), left.to(device), right.to(device), num_large)


def measure_accuracy(function: Orthogonalizer, probe: Probe) -> Accuracy:
    """Return what an orthogonalization makes of the singular values of a probe.

    Rounding turns singular vectors within the large and within the tiny ones, so both are compared as subspaces.
    """
    matrices, left, right, num_large = probe
    result = left.mT @ function(matrices)[0].double() @ right
    given = left.mT @ matrices[0].double() @ right
    large = torch.linalg.svdvals(result[:num_large, :num_large])
    lifted, tiny = (x.diagonal()[num_large:].sum().item() for x in (result, given))
    return {"low": large.min().item(), "high": large.max().item(), "slope": lifted / tiny}


def show_accuracy(accuracy: Accuracy | None) -> str:
    """Return the band and the slope as a cell of a table."""
    return "-" if accuracy is None else f"{accuracy['low']:.3f} to {accuracy['high']:.3f}, {accuracy['slope']:.3g}"
