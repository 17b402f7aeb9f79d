"""Scale of an orthogonalized update: the four named versions, as functions of the logical matrix's shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

ScaleVersion = Literal["v2", "v1", "v3", "v4"]

_FORMULAS: dict[str, Callable[[int, int], float]] = {
    # 2024-10: the first version, pre-training from scratch.
    "v1": lambda d_out, d_in: math.sqrt(max(d_out, d_in)),
    # 2025-06: the default.
    "v2": lambda d_out, d_in: math.sqrt(max(1.0, d_out / d_in)),
    # muP: a learning rate that transfers across widths.
    "v3": lambda d_out, d_in: math.sqrt(d_out / d_in),
    # Moonshot, arXiv 2502.16982: the RMS of an AdamW update, so that AdamW's learning rate can be re-used.
    "v4": lambda d_out, d_in: 0.2 * math.sqrt(max(d_out, d_in)),
}
SCALE_VERSIONS: tuple[str, ...] = get_args(ScaleVersion)


def update_scale(scale: str | float, d_out: int, d_in: int) -> float:
    """The factor for a (d_out, d_in) matrix under a named version; a number stands for itself."""
    if d_out == 0 or d_in == 0:
        return 1.0  # nothing to scale
    return _FORMULAS[scale](d_out, d_in) if isinstance(scale, str) else float(scale)
