"""nanotron's schedule: what a base rate is multiplied by, as the config that it saves has it.

Source: `lr_scheduler_builder` of `nanotron/helpers.py`, 0.4 and 2411b022.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ckptsurgeon.formats.fields.understood import mapping
from ckptsurgeon.formats.schedules import shapes

SECTION = "optimizer.learning_rate_scheduler"
KEYS = {
    "warmup": "lr_warmup_steps", "min_lr": "min_decay_lr", "decay": "lr_decay_steps",
    "decay_style": "lr_decay_style",
}  # fmt: skip
"""Key of a recipe → key of the section."""


def of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of a config; empty where it has none."""
    return mapping(mapping(config.get("optimizer")).get("learning_rate_scheduler"))


def factor(schedule: Mapping[str, Any], now: int, top: float) -> float | None:
    """What a base rate is multiplied by at step `now`, where the function was made for the rate
    `top`, which it divides by. None where the section does not say."""
    try:
        return _rate(schedule, now, top) / top
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None


def gives(schedule: Mapping[str, Any], now: int, share: float, peak: float, any_top: bool) -> bool:
    """Whether the function gives `share` of a base rate at step `now`: made for `peak`, or with
    `any_top` for some rate above the floor, as it is made anew at each load of the rate by then."""
    one, other = factor(schedule, now, peak), factor(schedule, now, peak / 2)
    if one is None or other is None or math.isclose(one, share, rel_tol=1e-6):
        return one is not None
    least = (other - one) * peak  # of a decay the share is fixed + least / top
    fixed = one - least / peak
    return any_top and least > 0 and fixed < share < 1 - 1e-6


def beginning(schedule: Mapping[str, Any]) -> Any:
    """The step at which the decay begins: the end of the warm-up where no other is given."""
    start = schedule.get("lr_decay_starting_step")
    return schedule.get("lr_warmup_steps") if start is None else start


def _rate(schedule: Mapping[str, Any], now: int, top: float) -> float:
    warmup, steps = schedule["lr_warmup_steps"], schedule["lr_decay_steps"]
    start, floor = beginning(schedule), schedule["min_decay_lr"]
    if warmup == 0 and steps == 0:
        return top * top  # a slip of its own: the rate itself is the factor
    if now <= warmup:
        constant = {"linear": False, "constant": True}[schedule["lr_warmup_style"]]
        return float(schedule["learning_rate"] if constant else top * now / max(warmup, 1))
    if now < start:
        return top
    if now >= start + steps:
        return float(floor)
    shape = schedule["lr_decay_style"]
    if shape not in shapes.SHAPES:
        raise ValueError(shape)
    return float(floor + (top - floor) * shapes.share(shape, (now - start) / steps))


def in_yaml(values: Mapping[str, Any]) -> str:
    """Keys and values as its reader of YAML takes them: a number without a point is a text to it
    where it has an exponent."""
    words = {key: repr(v) if isinstance(v, float) else str(v) for key, v in values.items()}
    words = {k: w.replace("e", ".0e") if re.match(r"\d+e", w) else w for k, w in words.items()}
    return ", ".join(f"{key}: {word}" for key, word in words.items())
