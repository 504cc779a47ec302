"""Megatron-LM's OptimizerParamScheduler as the surgeon computes it, from the saved state.

Source of the rules: `megatron/core/optimizer_param_scheduler.py`. All counts are samples. Each
param group has its own peak and floor (`max_lr`, `min_lr`), which win over the scheduler's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptsurgeon.errors import NotUnderstood, UsageError
from ckptsurgeon.formats.fields.understood import refusal, short
from ckptsurgeon.formats.schedules.check import ASSERTED, refuse_early_decay, refuse_low_peak
from ckptsurgeon.formats.schedules.names import value

LARGEST = 4096
"""The largest denominator of a width multiplier."""
MULTIPLIERS = frozenset({"wd_mult", "pre_wd_mult"})
"""Keys of a param group for its share of the weight decay: of now, and of old releases."""
STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


def learning_rate(
    state: Mapping[str, Any], group: Mapping[str, Any], unsaved: Mapping[str, Any]
) -> float:
    """The rate of one param group at the saved position.

    `unsaved` are the scheduler's parameters that its state does not hold: `init_lr` (0 if absent)
    and, for WSD, `wsd_decay_steps` and `lr_wsd_decay_style`. Raises NotUnderstood where they lack,
    or for a style that Megatron-LM does not have."""
    peak = float(group.get("max_lr", value(state, "max_lr")))
    floor = float(group.get("min_lr", value(state, "min_lr")))
    start = float(unsaved.get("init_lr", 0.0))
    now, warmup, end = (value(state, field) for field in ("position", "warmup", "decay"))
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
        coefficient = stable_then_decay(now, end, unsaved)
    else:
        raise NotUnderstood(
            f"Megatron-LM has no decay style {short(style)}", next=f"one of {', '.join(STYLES)}"
        )
    return floor + coefficient * (peak - floor)


def stable_then_decay(now: int, end: int, unsaved: Mapping[str, Any]) -> float:
    """The share of the way from floor to peak that WSD gives, by `wsd_decay_steps` and
    `lr_wsd_decay_style` of `unsaved`. Raises NotUnderstood where they lack."""
    length, style = unsaved.get("wsd_decay_steps"), unsaved.get("lr_wsd_decay_style")
    if not length:
        raise NotUnderstood(
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
    raise NotUnderstood(
        f"Megatron-LM has no WSD decay style {short(style)}",
        next="one of linear, cosine, exponential, minus_sqrt: --lr-wsd-decay-style",
    )


def weight_decay(state: Mapping[str, Any], group: Mapping[str, Any]) -> float:
    """The weight decay of one param group at the saved position, times its `wd_mult`.

    A group's own `start_wd` and `end_wd` win. Raises KeyError if none are saved."""
    start = float(group.get("start_wd", state["start_wd"]))
    end = float(group.get("end_wd", state["end_wd"]))
    mult = multiplier(group)
    now, steps, style = value(state, "position"), state["wd_incr_steps"], state["wd_incr_style"]
    if now > steps or style == "constant":
        return end * mult
    ratio = float(now) / float(steps)
    if style == "linear":
        coefficient = ratio
    elif style == "cosine":
        coefficient = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
    else:
        raise NotUnderstood(f"Megatron-LM has no weight decay style {short(style)}")
    return (start + coefficient * (end - start)) * mult


def multiplier(group: Mapping[str, Any]) -> float:
    """The share of the scheduler's weight decay that a param group gets. Raises ValueError for what
    is no number."""
    for key in (key for key in ("wd_mult", "pre_wd_mult") if key in group):
        if not isinstance(group[key], (int, float)):
            raise ValueError(refusal(key, group[key], "a number"))
        return float(group[key])
    return 1.0


def in_proportion(own: float, old: float, new: float) -> float:
    """What a param group's `own` rate becomes when the trainer's goes from `old` to `new`.

    A trainer makes it of its rate times a number or times 1 over one (µP: 1 / width_mult), and
    finds the group of a checkpoint by the very float: where such a number leads from `old` to
    `own`, it leads to the result, to the last bit."""
    if own == old or not old:
        return new if own == old else own
    from fractions import Fraction  # which loads decimal, and few runs have such groups

    for number in (Fraction(old / own), Fraction(own / old)):
        whole = float(number.limit_denominator(LARGEST))
        for factor in (1.0 / whole if whole else 0.0, whole):
            if old * factor == own:
                return new * factor
    return new * (own / old)


def check(state: Mapping[str, Any], peak: float, floor: float) -> None:
    """Raise UsageError for a schedule that the scheduler's constructor asserts against."""
    warmup, end, style = (value(state, field) for field in ("warmup", "decay", "decay_style"))
    if style not in STYLES:
        raise UsageError(
            f"Megatron-LM has no decay style {short(style)}", next=f"one of {', '.join(STYLES)}"
        )
    refuse_low_peak(peak, floor, ASSERTED)
    refuse_early_decay(end, warmup)
