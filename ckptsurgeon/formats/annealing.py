"""Megatron's AnnealingLR as the surgeon computes it, on its own, from the saved state.

Source of the rule: `megatron/learning_rates.py` of Megatron-DeepSpeed. The trainer has another
implementation; the contract test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

KEYS = frozenset({"max_lr", "min_lr", "warmup_steps", "num_steps", "decay_steps", "decay_style"})


def is_annealing(schedule: Any) -> bool:
    """Whether a saved scheduler state has AnnealingLR's keys."""
    return isinstance(schedule, Mapping) and schedule.keys() >= KEYS


def learning_rate(schedule: Mapping[str, Any]) -> float:
    """The rate at the saved position: all three step counts are in samples.

    Linear warm-up to `max_lr`, then the decay to `min_lr`, which holds past `decay_steps`."""
    peak, floor = float(schedule["max_lr"]), float(schedule["min_lr"])
    warmup, now, end = (schedule[key] for key in ("warmup_steps", "num_steps", "decay_steps"))
    if warmup > 0 and now <= warmup:
        return peak * float(now) / float(warmup)
    style = schedule["decay_style"]
    if style == "constant":
        return peak
    if now > end:
        return floor
    ratio = float(now - warmup) / float(end - warmup)
    if style == "linear":
        return floor + (1.0 - ratio) * (peak - floor)
    if style == "cosine":
        return floor + 0.5 * (math.cos(math.pi * ratio) + 1.0) * (peak - floor)
    raise ValueError(f"decay style {style!r}")
