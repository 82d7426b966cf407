"""Learning rates as a function of the update's index."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    update: int,
    total_updates: int,
    peak: float,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
    warmup_ratio: float = 0.0,
    min_lr_ratio: float = 0.0,
) -> float:
    """The learning rate of one optimizer step.

    Linear warm-up over the first `w = ceil(warmup_ratio * total_updates)` updates, of which the first is not 0:

        lr_u = peak (u + 1) / w                                              u < w
        lr_u = peak                                                          constant
        lr_u = peak (m + (1 - m) (1 - (u - w) / (total - w)))                linear, m = min_lr_ratio
        lr_u = peak (m + (1 - m) (1 + cos(pi (u - w) / (total - w))) / 2)    cosine

    Args:
        update: u, counted from 0; past the end the rate stays at its minimum.
        total_updates: optimizer steps of the whole run.
        peak: after warm-up.

    Example:
        >>> [round(learning_rate(u, 6, 1.0, "cosine", warmup_ratio=1 / 3), 3) for u in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
        >>> [round(learning_rate(u, 6, 1.0, "linear", warmup_ratio=1 / 3), 3) for u in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup = math.ceil(warmup_ratio * total_updates)
    if update < warmup:
        return peak * (update + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min(1.0, (update - warmup) / max(1, total_updates - warmup))
    left = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (min_lr_ratio + (1 - min_lr_ratio) * left)
