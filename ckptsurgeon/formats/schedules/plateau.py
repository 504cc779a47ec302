"""torch's ReduceLROnPlateau: the param groups' lr is the rate, and a metric decides when it falls;
and GreedyLR of transformers, which raises it too.

Source of the rules: `torch/optim/lr_scheduler.py`, 2.4 to 2.13; `transformers/optimization.py`,
5.23. The state keeps a copy of the rates, the factor, the floors, and how many bad epochs there
were. A load of GreedyLR writes the copy into the groups; nothing reads torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.values import Place, Setting
from ckptsurgeon.formats.schedules.annealing import unscheduled
from ckptsurgeon.formats.schedules.check import one_scheduler, refuse_low_peak
from ckptsurgeon.hints import command

NAME, GREEDY = "ReduceLROnPlateau", "GreedyLR"
NAMES = (NAME, GREEDY)
KEYS = frozenset(
    {"factor", "min_lrs", "patience", "cooldown", "num_bad_epochs", "best", "mode", "last_epoch"}
)


def called(schedule: Any) -> str:
    """Which of the two saved this state; empty for neither."""
    if not isinstance(schedule, Mapping) or not schedule.keys() >= KEYS:
        return ""
    return GREEDY if "num_good_epochs" in schedule else NAME


def words(schedule: Mapping[str, Any]) -> str:
    """The schedule as a person would say it."""
    bad, patience = schedule["num_bad_epochs"], schedule["patience"]
    return f"{called(schedule)}, {bad} bad of {patience} allowed, then × {schedule['factor']:g}"


def reschedule(
    checkpoint: Checkpoint, values: Mapping[str, Any]
) -> tuple[list[Setting], list[str]]:
    """The groups' lr, the largest of which gets `lr`, and the floors. See
    `Checkpoint.reschedule`."""
    places = one_scheduler(checkpoint)
    if lacking := sorted(values.keys() - {"lr", "min_lr"}):
        raise SurgeryError(
            f"{called(places[0].value)} has no {', '.join(lacking)}: a metric decides when its "
            "rate falls",
            next=command(
                "set-lr", "LR", "--min-lr", "LR", why="the rate now, and the least it falls to"
            ),
        )
    peak = values.get("lr", max((place.value for place in checkpoint.locate("lr")), default=0.0))
    refuse_low_peak(peak, values.get("min_lr", 0.0))
    settings = list(unscheduled(checkpoint, values["lr"])) if "lr" in values else []
    rates = [setting.value for setting in settings if setting.place.path[-1] == "lr"]
    for scheduler in places:
        new: dict[str, Any] = {"_last_lr": rates[: len(scheduler.value["min_lrs"])] or None}
        if "min_lr" in values:
            new["min_lrs"] = [float(values["min_lr"])] * len(scheduler.value["min_lrs"])
            new["default_min_lr"] = float(values["min_lr"])
        for key, value in new.items():
            path = (*scheduler.path, key)
            old = checkpoint.value(scheduler.file, path)
            if old is not None and value is not None:
                name = "lr" if key == "_last_lr" else "min_lr"
                settings.append(Setting(name, Place(scheduler.file, path, old), value))
    return settings, [_later(places[0].value, values)] if "lr" in values else []


def _later(state: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """What becomes of the rate. A new floor is of every group; of old ones the lowest counts."""
    name, factor = called(state), state["factor"]
    floor = values.get("min_lr", min(state["min_lrs"]))
    left = int(state["patience"]) - int(state["num_bad_epochs"]) + 1
    left = max(1, left + int(state.get("cooldown_counter", 0)))
    bad = f"{count(left, 'more bad evaluation')} in a row"
    falls = f"after {bad} it multiplies the rate by {factor:g}, down to {floor:g}"
    if values["lr"] <= floor:
        falls = f"it is not above its floor of {floor:g}"
    if name == GREEDY:
        return (
            f"{GREEDY} moves this rate with its metric: {falls}; where the metric keeps improving "
            f"it divides it by {factor:g}, up to {max(state['max_lrs']):g}; and after "
            f"{count(state['reset_start'], 'such fall')} at the floor it starts again at "
            f"{max(state['_init_lrs']):g}"
        )
    if values["lr"] <= floor:
        return f"{NAME} never lowers this rate: {falls}"
    return f"{NAME} keeps this rate until its metric stops improving: {falls}"
