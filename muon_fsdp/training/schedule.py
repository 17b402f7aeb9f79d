"""The factor on every learning rate, as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from muon_fsdp.training.config import ScheduleName


def make_schedule(
    name: ScheduleName, steps: int, warmup: float = 0.1, decay: float = 0.4, final: float = 0.05
) -> Callable[[int], float]:
    """Linear warmup over a part of the steps, then a half cosine down to `final`, or ("trapezoid") 1 and a line down.

    `warmup` and `decay` are parts of the steps, `final` of the lr.
    """
    warmup_steps = max(1, round(warmup * steps))
    first_down = warmup_steps if name == "cosine" else max(warmup_steps, steps - round(decay * steps))

    def factor(step: int) -> float:  # counted from 0
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, max(0, step - first_down) / max(1, steps - first_down))
        left = 0.5 * (1 + math.cos(math.pi * progress)) if name == "cosine" else 1 - progress
        return final + (1 - final) * left

    return factor
