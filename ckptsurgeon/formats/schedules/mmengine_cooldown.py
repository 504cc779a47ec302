"""One of MMEngine's schedulers, made to decay from the update at which it stands; the others rest.

Source: `optim/scheduler/param_scheduler.py`, 0.10.7. A scheduler makes each rate of the one before
it while `begin` <= its own count < `end`, and `last_step` says how far on its way it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.understood import is_number
from ckptsurgeon.formats.fields.values import Decay, Place, Setting
from ckptsurgeon.formats.schedules.check import refuse_no_rate
from ckptsurgeon.formats.schedules.mmengine import RATE, groups, kind, rated, refuse_unknown
from ckptsurgeon.hints import Hint, again

SHAPES: Mapping[str, tuple[str, ...]] = {
    "linear": ("PolyLR", "LinearLR"),
    "cosine": ("CosineAnnealingLR",),
}
"""Shape of a cooldown → the classes that can hold it, the one first that ends at one rate."""


def cooldown(checkpoint: Checkpoint, decay: Decay) -> tuple[list[Setting], list[str]]:
    """What makes a saved scheduler of a fitting class, which counts updates, decay so. All others
    of a rate end where they stand.

    Raises SurgeryError where there is none of such a class."""
    places = rated(checkpoint)
    refuse_unknown(place.value for place in places)
    able = {kind(p.value): p for p in reversed(places) if not p.value["by_epoch"]}
    chosen = next((able[name] for name in SHAPES.get(decay.shape, ()) if name in able), None)
    if chosen is None:
        raise _unable(decay, [*able])
    rates = {
        (place.file, place.path): float(place.value)
        for file, group in groups(checkpoint)
        for place in checkpoint.at(file, (*group, RATE))
        if is_number(place.value)
    }
    top = max(rates.values(), default=0.0)
    refuse_no_rate(top)
    settings = [
        Setting(RATE, Place(place.file, (*place.path, key), place.value[key]), new)
        for place in places
        for key, new in _new(place, chosen, decay, top, [*rates.values()]).items()
        if key in place.value and place.value[key] != new
    ]
    for (file, path), rate in rates.items():
        base = checkpoint.value(file, (*path[:-1], "initial_lr"))
        if is_number(base) and base != rate:
            place = Place(file, (*path[:-1], "initial_lr"), base)
            settings.append(Setting(RATE, place, rate))
    alike = kind(chosen.value) == "LinearLR" or len(set(rates.values())) < 2
    notes = [] if alike else [f"all param groups end at {decay.to:g}, whatever they start from"]
    return settings, notes


def _new(
    place: Place, chosen: Place, decay: Decay, top: float, rates: list[float]
) -> dict[str, Any]:
    """The new values of a scheduler, which decays if it is the chosen one."""
    state, now = place.value, place.value["_global_step"]
    bases = {"base_values": rates}
    if place != chosen:
        return {**bases, "end": min(state["end"], now), "last_step": -1}
    return {
        **bases,
        "begin": now,
        "end": now + decay.steps + 1,
        "last_step": 0,
        **_shape(kind(state), decay, top),
    }


def _shape(name: str, decay: Decay, top: float) -> dict[str, Any]:
    if name == "LinearLR":
        return {"start_factor": 1.0, "end_factor": decay.to / top, "total_iters": decay.steps}
    if name == "PolyLR":
        return {"power": 1.0, "eta_min": decay.to, "total_iters": decay.steps}
    return {"T_max": decay.steps, "eta_min": decay.to, "eta_min_ratio": None}


def _unable(decay: Decay, able: list[str]) -> SurgeryError:
    able_to = [shape for shape, classes in SHAPES.items() if {*classes} & {*able}]
    names = " or ".join(SHAPES.get(decay.shape, ()))
    why = f": {names} could, with by_epoch=False" if names else ", as none of its classes does"
    hint: Hint = "set param_scheduler in its config, and load the step without its param_schedulers"
    if able_to:
        (shape, *_) = able_to
        hint = again(
            "--shape",
            shape,
            setting=f"cooldown.shape={shape}",
            otherwise=f"give the cooldown the shape {shape}",
        )
    return SurgeryError(
        f"no saved scheduler of MMEngine can decay {decay.shape} by updates{why}", next=hint
    )
