"""MMEngine's schedulers of a rate: several may share one optimizer, each from `begin` to `end`.

Each makes a rate of the one before it: times a factor, or nearer to a floor (`eta_min`). So all
rates follow a new peak in one proportion, but for the part that is already between a peak and its
floor, which is found again by the position. Source: `optim/scheduler/param_scheduler.py`, 0.10.7.
"""

from __future__ import annotations

import math
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
}
"""Class → what its state has beside COMMON. The others keep their peak in other ways."""
RATE = "lr"
State = Mapping[str, Any]


def is_one(schedule: Any) -> bool:
    """Whether a scheduler of MMEngine saved this."""
    return isinstance(schedule, Mapping) and schedule.keys() >= COMMON - {"base_values"}


def kind(state: State) -> str:
    """Its class; empty for one of which no rule is known here."""
    own = state.keys() - COMMON
    return next((name for name, keys in KINDS.items() if keys == own), "")


def words(states: Iterable[State]) -> str:
    """As a person would say it."""
    names = dict.fromkeys(kind(state) or "a scheduler not known" for state in states)
    return f"{', '.join(names)} of MMEngine"


def peak(state: State) -> float:
    """The largest rate that it begins with."""
    return max(map(float, state.get("base_values", ())), default=0.0)


def reschedule(
    checkpoint: Checkpoint, values: Mapping[str, Any]
) -> tuple[list[Setting], list[str]]:
    """A new `lr`, and a `min_lr` where a scheduler keeps one: in all schedulers of a rate, in the
    param groups, and in what stands for the base of several. See `Checkpoint.reschedule`."""
    places = [p for p in checkpoint.locate("scheduler") if p.value.get("param_name") == RATE]
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
    top = max(map(peak, states), default=0.0)
    if top <= 0:
        raise SurgeryError(
            "MMEngine's schedulers begin with a rate of 0, or keep none: what they make of another "
            "one is not known",
            next=AFTER_LOADING,
        )
    new = _Peak(states, values.get(RATE, top) / top, values.get("min_lr"))
    found = {(*place.path, "base_values"): place for place in places}
    settings = [
        Setting(RATE, Place(at.file, path, at.value["base_values"]), new.bases(at.value))
        for path, at in found.items()
    ]
    for place in floors:
        old = Place(place.file, (*place.path, "eta_min"), place.value["eta_min"])
        settings.append(Setting("min_lr", old, new.floor(place.value)))
    for file, group in _groups(checkpoint):
        for key, made in (("lr", new.rate), ("initial_lr", new.base)):
            rate = checkpoint.value(file, (*group, key))
            if is_number(rate):
                settings.append(Setting(RATE, Place(file, (*group, key), rate), made(float(rate))))
    refuse_rates([each.value for each in settings if each.place.path[-1] == "lr"])
    return [each for each in settings if each.value != each.place.value], []


def _groups(checkpoint: Checkpoint) -> Iterator[tuple[Path, tuple[Key, ...]]]:
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
        for state in states:
            if not kind(state):
                own = ", ".join(sorted(map(str, state.keys() - COMMON)))
                raise SurgeryError(
                    "what the saved scheduler makes of an lr is not known here: it is one of "
                    f"MMEngine's with {own}",
                    next=AFTER_LOADING,
                )
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

    def floor(self, state: State) -> float:
        """Of a scheduler: 0 where it has none, or one that follows the peak."""
        own = state.get("eta_min")
        if own is None:
            return 0.0
        return float(own if self._floor is None else self._floor)

    def base(self, rate: float) -> float:
        return rate * self._factor

    def bases(self, state: State) -> list[float]:
        return [self.base(float(rate)) for rate in state["base_values"]]

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
    if kind(state) == "CosineAnnealingLR":
        return (1 + math.cos(math.pi * now / state["T_max"])) / 2
    return float((1 - now / state["total_iters"]) ** state["power"])
