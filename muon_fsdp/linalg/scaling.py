"""Compute the scale of an orthogonalized update from the shape of its matrix, by four named formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A formula for the scale, and the learning rates that go with it.

    Args:
        version: its other name.
        formula: the factor of an orthogonalized update by (d_out, d_in).
        meaning: the formula and what it is for, in words.
        usual_lrs: the range of learning rates that are not likely a mistake; None if there is no usual lr.
        adamw_ratio: AdamW's learning rate relative to that of the matrices; None if there is no usual ratio.
    """

    version: str
    formula: Callable[[int, int], float]
    meaning: str
    usual_lrs: tuple[float, float] | None = None
    adamw_ratio: float | None = None


# Around 0.02 the spectral norm of an update is the learning rate. AdamW's ratio: docs/guides/hyperparameters.md.
_AROUND_0_02 = (2e-3, 0.3)
ADAMW_RATIO = 0.15

_SCALES: dict[str, Scale] = {
    "original": Scale(
        "v2",
        lambda d_out, d_in: math.sqrt(max(1.0, d_out / d_in)),
        "sqrt(max(1, d_out/d_in)), Keller Jordan's, for lr around 0.02",
        _AROUND_0_02,
        ADAMW_RATIO,
    ),
    "match_rms_adamw": Scale(
        "v4",
        lambda d_out, d_in: 0.2 * math.sqrt(max(d_out, d_in)),
        "0.2 sqrt(max(d_out, d_in)), Moonshot's, which keeps the learning rate of AdamW",
        adamw_ratio=1.0,
    ),
    "spectral": Scale(
        "v3",
        lambda d_out, d_in: math.sqrt(d_out / d_in),
        "sqrt(d_out/d_in), muP's, which keeps one learning rate across widths",
        _AROUND_0_02,
        ADAMW_RATIO,
    ),
    "size": Scale(
        "v1",
        lambda d_out, d_in: math.sqrt(max(d_out, d_in)),
        "sqrt(max(d_out, d_in)), the first version of 2024",
    ),
}
_BY_NAME = {**_SCALES, **{scale.version: scale for scale in _SCALES.values()}}
DEFAULT_SCALE = "original"
SCALE_NAMES = tuple(_BY_NAME)
SCALE_MEANINGS = {name: f"also {scale.version}: {scale.meaning}" for name, scale in _SCALES.items()}


def scale_named(scale: str | float) -> Scale | None:
    """Return the named formula; None if `scale` is a number."""
    return _BY_NAME[scale] if isinstance(scale, str) else None


def update_scale(scale: str | float, d_out: int, d_in: int) -> float:
    """Return the factor for a (d_out, d_in) matrix: that of a named formula, or the number that `scale` is."""
    if d_out == 0 or d_in == 0:
        return 1.0  # the formulas would divide by zero, and an empty matrix needs no scale
    return _BY_NAME[scale].formula(d_out, d_in) if isinstance(scale, str) else float(scale)
