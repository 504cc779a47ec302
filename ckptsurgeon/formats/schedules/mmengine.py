"""MMEngine's schedulers of a rate: several may share one optimizer, each from `begin` to `end`.

Each makes a rate of the one before it: times a factor, or nearer to a floor (`eta_min`). So all
rates follow a new peak in one proportion, but for the part that is already between a peak and its
floor, which is found again by the position. Source: `optim/scheduler/param_scheduler.py`, 0.10.7.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.understood import is_number, refuse_rates
from ckptsurgeon.formats.fields.values import Place, Setting
from ckptsurgeon.formats.schedules.check import AFTER_LOADING, kept_rates, refuse_low_peak
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

COMMON = frozenset(
    {
        "param_name", "begin", "end", "by_epoch", "base_values", "last_step", "_global_step",
        "verbose", "_last_value",
    }
)  # fmt: skip
KINDS: Mapping[str, frozenset[str]] = {
    "StepLR": frozenset({"step_size", "gamma"}),
    "MultiStepLR": frozenset({"milestones", "gamma"}),
    "ExponentialLR": frozenset({"gamma"}),
    "ConstantLR": frozenset({"factor", "total_iters"}),
    "LinearLR": frozenset({"start_factor", "end_factor", "total_iters"}),
    "CosineAnnealingLR": frozenset({"T_max", "eta_min", "eta_min_ratio"}),
    "PolyLR": frozenset({"power", "eta_min", "total_iters"}),
    "CosineRestartLR": frozenset(
        {"periods", "restart_weights", "cumulative_periods", "eta_min", "eta_min_ratio"}
    ),
    "OneCycleLR": frozenset(
        {
            "eta_max", "div_factor", "final_div_factor", "total_steps", "anneal_func",
            "_schedule_phases",
        }
    ),
    "ReduceOnPlateauLR": frozenset(
        {
            "factor", "min_values", "patience", "cooldown", "cooldown_counter", "rule_worse",
            "best", "num_bad_epochs", "eps", "monitor", "rule", "threshold", "threshold_rule",
        }
    ),
}  # fmt: skip
"""Class → what its state has beside COMMON."""
PLATEAU = "ReduceOnPlateauLR"
RATE = "lr"
State = Mapping[str, Any]


def is_one(schedule: Any) -> bool:
    """Whether a scheduler of MMEngine saved this."""
    return isinstance(schedule, Mapping) and schedule.keys() >= COMMON - {"base_values"}


def kind(state: State) -> str:
    """Its class; empty for one of which no rule is known here."""
    own = state.keys() - COMMON
    return next((name for name, keys in KINDS.items() if keys == own), "")


def refuse_unknown(states: Iterable[State]) -> None:
    """Raise SurgeryError where one is of a class of which no rule is known here."""
    for state in states:
        if not kind(state):
            own = ", ".join(sorted(map(str, state.keys() - COMMON)))
            raise SurgeryError(
                "what the saved scheduler makes of an lr is not known here: it is one of "
                f"MMEngine's with {own}",
                next=AFTER_LOADING,
            )


def words(states: Iterable[State]) -> str:
    """As a person would say it."""
    names = dict.fromkeys(kind(state) or "a scheduler not known" for state in states)
    return f"{', '.join(names)} of MMEngine"


def rated(checkpoint: Checkpoint) -> list[Place]:
    """The schedulers of a rate: others have the momentum."""
    return [p for p in checkpoint.locate("scheduler") if p.value.get("param_name") == RATE]


def top(checkpoint: Checkpoint) -> float:
    """What `lr` of a recipe sets and scales: the largest peak, or the rate that a metric lowers."""
    states = [place.value for place in rated(checkpoint)]
    if states and all(kind(state) == PLATEAU for state in states):
        return max(checkpoint.rates(), default=0.0)
    return max(map(peak, states), default=0.0)


def peak(state: State) -> float:
    """The largest rate that it begins with, or rises to."""
    highest = state.get("eta_max", state.get("base_values", ()))
    several = isinstance(highest, (list, tuple))
    return max(map(float, highest), default=0.0) if several else float(highest)


def reschedule(
    checkpoint: Checkpoint, values: Mapping[str, Any]
) -> tuple[list[Setting], list[str]]:
    """A new `lr`, and a `min_lr` where a scheduler keeps one: in all schedulers of a rate, in the
    param groups, and in what stands for the base of several. See `Checkpoint.reschedule`."""
    places = rated(checkpoint)
    states = [place.value for place in places]
    floors = [place for place in places if place.value.get("eta_min") is not None]
    known = {RATE, "min_lr"} if floors else {RATE}
    lacking = sorted(values.keys() - known)
    if lacking:
        raise SurgeryError(
            f"{', '.join(lacking)}: MMEngine's schedulers keep none that can be set here",
            next=command(
                "show", why="what they keep; all else is in param_scheduler of the config"
            ),
        )
    old = top(checkpoint)
    if old <= 0:
        raise SurgeryError(
            "MMEngine's schedulers begin with a rate of 0, or keep none: what they make of another "
            "one is not known",
            next=AFTER_LOADING,
        )
    new = _Peak(states, values.get(RATE, old) / old, values.get("min_lr"))
    settings = [
        Setting(RATE, Place(at.file, (*at.path, key), at.value[key]), new.each(at.value[key]))
        for at in places
        for key in ("base_values", "eta_max")
        if key in at.value
    ]
    for place in floors:
        floor = Place(place.file, (*place.path, "eta_min"), place.value["eta_min"])
        settings.append(Setting("min_lr", floor, new.floor(place.value)))
    cycle = ("max_lr", new.base), ("min_lr", new.base)
    for file, group in groups(checkpoint):
        for key, made in (("lr", new.rate), ("initial_lr", new.base), *cycle):
            rate = checkpoint.value(file, (*group, key))
            if is_number(rate):
                settings.append(Setting(RATE, Place(file, (*group, key), rate), made(float(rate))))
    refuse_rates([each.value for each in settings if each.place.path[-1] == "lr"])
    lowered = any(kind(state) == PLATEAU for state in states) and RATE in values
    notes = [f"{PLATEAU} keeps this rate until its metric stops improving"] if lowered else []
    return [each for each in settings if each.value != each.place.value], notes


def groups(checkpoint: Checkpoint) -> Iterator[tuple[Path, tuple[Key, ...]]]:
    """The param groups, and beside several the one without weights whose rate is logged."""
    bases: dict[tuple[Path, tuple[Key, ...]], None] = {}
    for place in kept_rates(checkpoint):
        yield place.file, place.path[:-1]
        bases[place.file, (*place.path[:-3], "base_param_settings")] = None
    yield from bases


class _Peak:
    """What becomes of rates under a peak that is `factor` times the old one, and a new floor.

    Raises SurgeryError for a class that is not known, and where a floor is no longer told from the
    rate; UsageError for a peak below a floor."""

    def __init__(self, states: Sequence[State], factor: float, floor: float | None) -> None:
        self._factor, self._floor = factor, floor
        refuse_unknown(states)
        for state in states:
            refuse_low_peak(peak(state) * factor, self.floor(state))
        begun = [state for state in states if state["last_step"] > 0]
        floored = [state for state in begun if self.floor(state) or state.get("eta_min")]
        self._last = max(begun, key=lambda state: int(state["begin"])) if floored else None
        if self._last is not None and floored != [self._last]:
            raise SurgeryError(
                f"{kind(floored[0])} of MMEngine went towards its eta_min, and "
                f"{kind(self._last)} went on from there: what both make of another lr is not known "
                "here",
                next=AFTER_LOADING,
            )
        last = self._last
        if last is None:
            return
        if other := next((s for s in states if s is not last and _moved_within(s, last)), None):
            raise SurgeryError(
                f"{kind(other)} of MMEngine moved the rate, too, while {kind(last)} went towards "
                "its eta_min: what both make of another lr is not known here",
                next=AFTER_LOADING,
            )

    def floor(self, state: State) -> float:
        """Of a scheduler: 0 where it has none, or one that follows the peak."""
        own = state.get("eta_min")
        if own is None:
            return 0.0
        return float(own if self._floor is None else self._floor)

    def base(self, rate: float) -> float:
        return rate * self._factor

    def each(self, rates: Any) -> Any:
        """Of a number, or of several."""
        if isinstance(rates, (list, tuple)):
            return [self.base(float(rate)) for rate in rates]
        return self.base(float(rates))

    def rate(self, rate: float) -> float:
        """Of a group at the position."""
        if self._last is None:
            return rate * self._factor
        old, new, left = float(self._last["eta_min"]), self.floor(self._last), _left(self._last)
        start = old + (rate - old) / left if left > 0 else 0.0
        return new + (start * self._factor - new) * left


def _left(state: State) -> float:
    """How much of the way from the peak to the floor is left."""
    now = state["last_step"]
    if kind(state) == "PolyLR":
        return float((1 - now / state["total_iters"]) ** state["power"])
    length = state.get("T_max", 0)
    if kind(state) == "CosineRestartLR":
        ends = state["cumulative_periods"]
        now = min(now, ends[-1] - 1)  # it stays as it is then
        at = bisect_right(ends, now)
        now, length = now - (ends[at - 1] if at else 0), state["periods"][at]
    return (1 + math.cos(math.pi * now / length)) / 2


def _moved_within(other: State, last: State) -> bool:
    """Whether `other` may have moved the rate after the first step of `last`, which moves nothing.
    Where one of them counts epochs, by how many updates these have at least, or at most."""
    begin, end, starts, now = last["begin"] + 1, other["end"], other["begin"], last["_global_step"]
    if other["by_epoch"] != last["by_epoch"]:
        updates, epochs = sorted((other["_global_step"], now), reverse=True)
        if last["by_epoch"]:
            begin, now = last["begin"] * updates / (epochs + 1) + 1, updates
        else:
            longest = updates / epochs if epochs else math.inf
            starts, end = starts * updates / (epochs + 1), end * longest
    return bool(end > begin and starts <= now and other["last_step"] >= 0)
