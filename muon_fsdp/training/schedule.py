"""Compute the factor on every learning rate from the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal


def make_schedule(
    name: Literal["cosine", "trapezoid"], steps: int, warmup: float = 0.1, decay: float = 0.4, final: float = 0.05
) -> Callable[[int], float]:
    """Make a schedule that starts with a linear warmup.

    Args:
        name: "cosine" falls along half a cosine after the warmup; "trapezoid" stays at 1 and then falls along a line.
        steps: the number of steps of the run.
        warmup: the fraction of the steps for the warmup.
        decay: the fraction of the steps for the line of "trapezoid".
        final: the factor after the last step.

    Returns:
        A function from a step, counted from 0, to the factor.
    """
    warmup_steps = max(1, round(warmup * steps))
    first_down = warmup_steps if name == "cosine" else max(warmup_steps, steps - round(decay * steps))

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, max(0, step - first_down) / max(1, steps - first_down))
        left = 0.5 * (1 + math.cos(math.pi * progress)) if name == "cosine" else 1 - progress
        return final + (1 - final) * left

    return factor
