"""The names that Megatron's schedulers have had for what they save.

AnnealingLR (`megatron/learning_rates.py`) became OptimizerParamScheduler (`megatron/core/
optimizer_param_scheduler.py`), whose state has the weight decay too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES: Mapping[str, tuple[str, ...]] = {
    "max_lr": ("start_lr", "max_lr"),
    "min_lr": ("min_lr",),
    "decay_style": ("decay_style", "lr_decay_style"),
    "warmup": ("warmup_iter", "warmup_steps", "lr_warmup_steps"),
    "decay": ("end_iter", "decay_steps", "lr_decay_steps"),
    "position": ("num_iters", "num_steps"),
}
"""Field → the names that a state has had for it; the loader reads the first that is there."""


def is_megatron(state: Any) -> bool:
    """Whether a saved state has each of the fields, by any of its names."""
    return isinstance(state, Mapping) and all(key(state, field) for field in NAMES)


def key(state: Mapping[str, Any], field: str) -> str | None:
    """The name by which `state` keeps `field`, or None."""
    return next((name for name in NAMES[field] if name in state), None)


def value(state: Mapping[str, Any], field: str) -> Any:
    """The value of `field`. Raises KeyError if `state` lacks it."""
    return state[key(state, field) or field]
