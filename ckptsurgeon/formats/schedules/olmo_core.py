"""OLMo-core's schedules: the rate of an update, by the scheduler in a run's `config.json`.

Source: `olmo_core/optim/scheduler.py`, 3.0.0. A schedule is a function of the peak (`initial_lr`),
of where it stands and of where the run ends, all in steps or all in tokens; nothing of it is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
ALIASES = {
    "warmup": "warmup_steps",
    "decay": "decay_steps",
    "schedulers_max": "schedulers_max_steps",
}
"""Key → its name in older configs."""


def rate(config: Config, peak: float, now: int, end: int) -> float | None:
    """The rate of the update at `now` of a run that ends at `end`.

    None for a scheduler that is not known here. Raises ArithmeticError, LookupError, TypeError or
    ValueError for a config that no such scheduler has."""
    formula = FORMULAS.get(str(config.get("_CLASS_", "")).rpartition(".")[2])
    return None if formula is None else formula(config, peak, now, end)


def words(config: Config) -> str:
    """The schedule as a person would say it."""
    name = str(config.get("_CLASS_", "")).rpartition(".")[2] or "a scheduler without a name"
    return f"{name}, in {config.get('units', 'steps')}, by the config at every step"


def _get(config: Config, key: str) -> Any:
    value = config.get(key)
    return config.get(ALIASES[key]) if value is None and key in ALIASES else value


def _length(config: Config, key: str, end: int) -> int:
    """Of the warm-up or the decay, which may be a share of the run."""
    value = _get(config, key)
    return int(round(end * config[f"{key}_fraction"]) if value is None else value)


def _warming(config: Config, peak: float, now: int, warmup: int) -> float:
    low = float(config.get("warmup_min_lr", 0.0))
    return low + (peak - low) * min(now, warmup) / warmup


def _falling(config: Config, top: float, left: int, decay: int) -> float:
    low = float(config.get("decay_min_lr", 0.0))
    return low + (top - low) * min(left, decay) / decay


def _with_default_decay(config: Config) -> Config:
    """A decay takes the last tenth of the run unless the config says another."""
    return config if _get(config, "decay") is not None else {"decay_fraction": 0.1, **config}


def _constant(config: Config, peak: float, now: int, end: int) -> float:
    return peak


def _constant_with_warmup(config: Config, peak: float, now: int, end: int) -> float:
    warmup = _length(config, "warmup", end)
    return _warming(config, peak, now, warmup) if now <= warmup else peak


def _wsd(config: Config, peak: float, now: int, end: int) -> float:
    config = _with_default_decay(config)
    warmup, decay = _length(config, "warmup", end), _length(config, "decay", end)
    if now <= warmup:
        return _warming(config, peak, now, warmup)
    return _falling(config, peak, end - now, decay) if now >= end - decay else peak


def _power(config: Config, peak: float, now: int, end: int) -> float:
    config = _with_default_decay(config)
    warmup, decay = _length(config, "warmup", end), _length(config, "decay", end)
    exponent = float(config.get("b", -0.51))
    if now <= warmup:
        return _warming(config, peak, now, warmup)
    if now >= end - decay:
        top = peak * ((end - decay) / warmup) ** exponent
        return _falling(config, float(top), end - now, decay)
    return float(peak * (now / warmup) ** exponent)


def _annealed(
    shape: Callable[[float, float, float], float],
) -> Callable[[Config, float, int, int], float]:
    """A warm-up, and from its end to that of the run `shape(peak, floor, share of the way)`."""

    def formula(config: Config, peak: float, now: int, end: int) -> float:
        end = int(config.get("t_max") or end)
        floor = peak * float(config.get("alpha_f", 0.1))
        warmup = _length(config, "warmup", end)
        if now < warmup:
            return _warming(config, shape(peak, floor, 0.0), now, warmup)
        return floor if now >= end else shape(peak, floor, (now - warmup) / (end - warmup))

    return formula


def _line(peak: float, floor: float, share: float) -> float:
    return peak - (peak - floor) * share


def _cosine(peak: float, floor: float, share: float) -> float:
    return floor + (peak - floor) * (1 + math.cos(math.pi * share)) / 2


def _second_half(peak: float, floor: float, share: float) -> float:
    return _cosine(peak, floor, (1 + share) / 2)


_cosine_with_warmup = _annealed(_cosine)


def _cosine_then_line(config: Config, peak: float, now: int, end: int) -> float:
    config = _with_default_decay(config)
    decay = _length(config, "decay", end)
    if now < end - decay:
        return _cosine_with_warmup(config, peak, now, end)
    top = _cosine_with_warmup(config, peak, end - decay, end)
    return _falling(config, top, end - now, decay)


def _inverse_root(config: Config, peak: float, now: int, end: int) -> float:
    warmup = _length(config, "warmup", end)
    if now < warmup:
        return _warming(config, peak, now, warmup)
    floor = peak * float(config.get("alpha_f", 0.1))
    return floor + (peak - floor) * math.sqrt(warmup / now)


def _exponential(config: Config, peak: float, now: int, end: int) -> float:
    low = float(config.get("lr_min", 1e-9))
    if now >= end:
        return peak
    return low if now == 0 else low * math.exp(math.log(peak / low) * now / end)


def _end_of(stage: Config, peak: float) -> float:
    value = stage.get("end_lr")
    return float(peak * stage["end_lr_fraction"] if value is None else value)


def _between(stage: Config, start: float, peak: float, now: int) -> float:
    """The rate `now` after the start of a stage, which may be over."""
    low = _end_of(stage, peak)
    share = min(now / stage["duration"], 1.0)
    return (
        _cosine(start, low, share) if stage.get("shape") == "cosine" else _line(start, low, share)
    )


def _overridden(
    main: Callable[[Config, float, int, int], float | None],
) -> Callable[[Config, float, int, int], float | None]:
    """`main`, until a decay of its own begins (`override_decay`)."""

    def formula(config: Config, peak: float, now: int, end: int) -> float | None:
        late = config.get("override_decay")
        if not late or now < late["start"]:
            return main(config, peak, now, end)
        top = main(config, peak, late["start"], end)
        return None if top is None else _between(late, top, peak, now - late["start"])

    return formula


def _stages(config: Config, peak: float, now: int, end: int) -> float:
    top, left = peak, max(now, 0)
    for stage in config["stages"]:
        value, share = stage.get("start_lr"), stage.get("start_lr_fraction")
        start = top if value is None and share is None else peak * share if value is None else value
        if left < stage["duration"]:
            return _between(stage, float(start), peak, left)
        top, left = _end_of(stage, peak), left - stage["duration"]
    return top


def _sequence(config: Config, peak: float, now: int, end: int) -> float | None:
    """Each begins with the rate at which the one before it ended, and counts from there."""
    top: float | None = peak
    inner, ends = config["schedulers"], _get(config, "schedulers_max")
    for item, length in zip(inner[:-1], ends, strict=False):
        if top is None or now <= length:
            return None if top is None else rate(item, top, now, min(end, length))
        top = rate(item, top, length, length)
        now, end = now - length, end - length
    return None if top is None else rate(inner[-1], top, now, end)


def _periods(config: Config, peak: float, now: int, end: int) -> float:
    """Warm-up, then for each period a plateau and a decay."""
    lengths = list(config["period_lengths"])
    shares = config.get("period_lr_multipliers") or [1.0] * len(lengths)
    warmup = _length(config, "warmup", lengths[0])
    if now < warmup:
        return _warming(config, peak * shares[0], now, warmup)
    at, start = now - warmup, 0
    for number, (length, share) in enumerate(zip(lengths, shares, strict=True)):
        room = length - warmup if number == 0 else length
        last = number == len(lengths) - 1
        if at < start + room or (at == start + room and not last):
            decay = _length(config, "decay", length)
            left = start + room - at
            return peak * share if left > decay else _falling(config, peak * share, left, decay)
        start += room
    return float(config.get("decay_min_lr", 0.0))


FORMULAS: Mapping[str, Callable[[Config, float, int, int], float | None]] = {
    "ConstantScheduler": _constant,
    "ConstantWithWarmup": _constant_with_warmup,
    "WSD": _wsd,
    "PowerLR": _power,
    "LinearWithWarmup": _annealed(_line),
    "InvSqrtWithWarmup": _inverse_root,
    "CosWithWarmup": _cosine_with_warmup,
    "HalfCosWithWarmup": _annealed(_second_half),
    "CosWithWarmupAndLinearDecay": _cosine_then_line,
    "ComposableScheduler": _overridden(_stages),
    "SequentialScheduler": _overridden(_sequence),
    "WSDS": _periods,
    "ExponentialScheduler": _exponential,
}
"""Class → its formula."""
