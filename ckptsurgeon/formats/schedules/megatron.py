"""Megatron-LM's OptimizerParamScheduler as the surgeon computes it, from the saved state.

Source of the rules: `megatron/core/optimizer_param_scheduler.py`. All counts are samples. Each
param group has its own peak and floor (`max_lr`, `min_lr`), which win over the scheduler's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError, UsageError

ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_lr": ("start_lr", "max_lr"),
    "min_lr": ("min_lr",),
    "warmup": ("warmup_iter", "warmup_steps", "lr_warmup_steps"),
    "decay": ("end_iter", "decay_steps", "lr_decay_steps"),
    "decay_style": ("decay_style", "lr_decay_style"),
    "num_steps": ("num_iters", "num_steps"),
}
"""Field → the keys that it has had; the first one present is the one that is loaded."""
STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


def is_param_scheduler(state: Any) -> bool:
    """Whether a saved state has each of the fields, by any of its names."""
    return isinstance(state, Mapping) and all(key(state, field) for field in ALIASES)


def key(state: Mapping[str, Any], field: str) -> str | None:
    """The name by which `state` keeps `field`, or None."""
    return next((name for name in ALIASES[field] if name in state), None)


def value(state: Mapping[str, Any], field: str) -> Any:
    """The value of `field`. Raises KeyError if `state` lacks it."""
    return state[key(state, field) or field]


def learning_rate(
    state: Mapping[str, Any], group: Mapping[str, Any], unsaved: Mapping[str, Any]
) -> float:
    """The rate of one param group at the saved position.

    `unsaved` are the scheduler's parameters that its state does not hold: `init_lr` (0 if absent)
    and, for WSD, `wsd_decay_steps` and `lr_wsd_decay_style`. Raises SurgeryError where they lack,
    or for a style that Megatron-LM does not have."""
    peak = float(group.get("max_lr", value(state, "max_lr")))
    floor = float(group.get("min_lr", value(state, "min_lr")))
    start = float(unsaved.get("init_lr", 0.0))
    now, warmup, end = (value(state, field) for field in ("num_steps", "warmup", "decay"))
    style = value(state, "decay_style")
    if warmup > 0 and now <= warmup:
        return start + (peak - start) * float(now) / float(warmup)
    if style == "constant":
        return peak
    if now > end:
        return floor
    if style == "inverse-square-root":
        rate: float = peak * max(warmup, 1) ** 0.5 / max(now, 1) ** 0.5
        return max(floor, rate)
    ratio = float(now - warmup) / float(end - warmup)
    if style == "linear":
        coefficient = 1.0 - ratio
    elif style == "cosine":
        coefficient = 0.5 * (math.cos(math.pi * ratio) + 1.0)
    elif style == "WSD":
        coefficient = _stable_then_decay(now, end, unsaved)
    else:
        raise SurgeryError(
            f"Megatron-LM has no decay style {style!r}", next=f"one of {', '.join(STYLES)}"
        )
    return floor + coefficient * (peak - floor)


def _stable_then_decay(now: int, end: int, unsaved: Mapping[str, Any]) -> float:
    length, style = unsaved.get("wsd_decay_steps"), unsaved.get("lr_wsd_decay_style")
    if not length:
        raise SurgeryError(
            "the schedule is WSD, and nothing saved says how long its last decay is",
            next="set the schedule on the trainer's command line: --lr-wsd-decay-samples",
        )
    if now <= end - length:
        return 1.0
    ratio = float(now - (end - length)) / float(length)
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(ratio)
    raise SurgeryError(
        f"Megatron-LM has no WSD decay style {style!r}",
        next="one of linear, cosine, exponential, minus_sqrt: --lr-wsd-decay-style",
    )


def weight_decay(state: Mapping[str, Any], group: Mapping[str, Any]) -> float:
    """The weight decay of one param group at the saved position, times its `wd_mult`.

    A group's own `start_wd` and `end_wd` win. Raises KeyError if none are saved."""
    start = float(group.get("start_wd", state["start_wd"]))
    end = float(group.get("end_wd", state["end_wd"]))
    mult = float(group.get("wd_mult", group.get("pre_wd_mult", 1.0)))
    now, steps, style = value(state, "num_steps"), state["wd_incr_steps"], state["wd_incr_style"]
    if now > steps or style == "constant":
        return end * mult
    ratio = float(now) / float(steps)
    if style == "linear":
        coefficient = ratio
    elif style == "cosine":
        coefficient = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
    else:
        raise SurgeryError(f"Megatron-LM has no weight decay style {style!r}")
    return (start + coefficient * (end - start)) * mult


def check(state: Mapping[str, Any], peak: float, floor: float) -> None:
    """Raise UsageError for a schedule that the scheduler's constructor asserts against."""
    warmup, end, style = (value(state, field) for field in ("warmup", "decay", "decay_style"))
    if style not in STYLES:
        raise UsageError(
            f"Megatron-LM has no decay style {style!r}", next=f"one of {', '.join(STYLES)}"
        )
    if peak < floor:
        raise UsageError(
            f"lr {peak:g} is below min_lr {floor:g}, and the trainer asserts max_lr >= min_lr",
            next=f"ckptsurgeon set-lr {peak:g} --min-lr {peak / 10:g}",
        )
    if end <= warmup:
        raise UsageError(
            f"decay {end} samples is not beyond warmup {warmup}",
            next="set decay above warmup; both count samples from the start of the run",
        )
