"""Compute the scale of an orthogonalized update from the shape of its matrix, in four named versions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

ScaleVersion = Literal["v2", "v1", "v3", "v4"]

_FORMULAS: dict[str, Callable[[int, int], float]] = {
    # 2024-10: the first version, for pre-training from scratch.
    "v1": lambda d_out, d_in: math.sqrt(max(d_out, d_in)),
    # 2025-06: the default.
    "v2": lambda d_out, d_in: math.sqrt(max(1.0, d_out / d_in)),
    # muP: the learning rate transfers across widths.
    "v3": lambda d_out, d_in: math.sqrt(d_out / d_in),
    # Moonshot, arXiv 2502.16982: updates get the RMS of an AdamW update, so AdamW's learning rate can be reused.
    "v4": lambda d_out, d_in: 0.2 * math.sqrt(max(d_out, d_in)),
}
SCALE_VERSIONS: tuple[str, ...] = get_args(ScaleVersion)


def update_scale(scale: str | float, d_out: int, d_in: int) -> float:
    """Return the factor for a (d_out, d_in) matrix: that of a named version, or the number that `scale` is."""
    if d_out == 0 or d_in == 0:
        return 1.0  # the formulas would divide by zero, and an empty matrix needs no scale
    return _FORMULAS[scale](d_out, d_in) if isinstance(scale, str) else float(scale)
