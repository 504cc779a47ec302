"""Megatron's AnnealingLR as the surgeon computes it, on its own, from the saved state.

Source of the rule: `megatron/learning_rates.py` of BigScience's Megatron-DeepSpeed, and
`megatron/optimizer_param_scheduler.py` of DeepSpeed's. The trainer has another implementation; the
contract test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields import understood
from ckptsurgeon.formats.fields.values import Decay, Place, Setting
from ckptsurgeon.formats.schedules.check import (
    ASSERTED,
    kept_rates,
    other_rule,
    refuse_early_decay,
    refuse_low_peak,
    refuse_shape,
    samples_of,
)
from ckptsurgeon.formats.schedules.megatron import stable_then_decay
from ckptsurgeon.formats.schedules.names import NAMES, is_megatron, value
from ckptsurgeon.hints import command

PLAIN = {
    "max_lr": "max_lr", "min_lr": "min_lr", "decay_style": "decay_style",
    "warmup": "warmup_steps", "decay": "decay_steps", "position": "num_steps",
}  # fmt: skip
"""Recipe key → AnnealingLR's name."""
KEYS = frozenset(PLAIN.values())


def problem(field: str, state: Any) -> str:
    """What is wrong with the state of a scheduler of Megatron, or the empty string; of any other
    scheduler see `understood.problem`."""
    named = normal(state)
    if named is None:
        return understood.problem(field, state)
    if not understood.is_bounded(state):
        return understood.refusal(field, state, "AnnealingLR's numbers and decay style")
    for key in sorted(KEYS - {"decay_style"}):
        if not understood.is_number(named[key]):
            return understood.refusal(f"{field}.{key}", named[key], "a finite number, 0 or more")
    style = named["decay_style"]
    return (
        ""
        if isinstance(style, str)
        else understood.refusal(f"{field}.decay_style", style, "a name")
    )


def normal(schedule: Any, decay_tokens: int | None = None) -> dict[str, Any] | None:
    """The state by AnnealingLR's names, or None if it is of neither scheduler of Megatron.
    `decay_tokens` is the end of the decay where that counts tokens: a flag of the trainer that
    AnnealingLR does not save."""
    if not is_megatron(schedule):
        return None
    known = {name for names in NAMES.values() for name in names}
    out = {key: value for key, value in schedule.items() if key not in known}
    for key in NAMES:
        out[PLAIN[key]] = value(schedule, key)
    if "lr_decay_tokens" in out:
        decay_tokens = out.pop("lr_decay_tokens")
        out["warmup_tokens"] = out.get("lr_warmup_tokens")
    if decay_tokens is not None and "num_tokens" in out:
        out["decay_tokens"] = decay_tokens
    return out


def by_keys(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """A state with AnnealingLR's names by the keys of a recipe; the peak is `lr`."""
    return {"lr" if key == "max_lr" else key: schedule[name] for key, name in PLAIN.items()}


def learning_rate(schedule: Mapping[str, Any]) -> float:
    """The rate at the saved position: all three step counts are in samples.

    Linear warm-up to `max_lr`, then the decay to `min_lr`, which holds past `decay_steps`. With
    `decay_tokens` the decay is from `warmup_tokens` to it, at `num_tokens`; with
    `lr_warmup_tokens` the warm-up counts tokens too."""
    peak, floor = float(schedule["max_lr"]), float(schedule["min_lr"])
    steps = tuple(schedule[key] for key in ("warmup_steps", "num_steps", "decay_steps"))
    tokens = tuple(schedule.get(f"{key}_tokens") or 0 for key in ("warmup", "num", "decay"))
    by_tokens = schedule.get("lr_warmup_tokens") is not None
    warmup, now, _ = tokens if by_tokens else steps
    if warmup > 0 and now <= warmup:
        return peak * float(now) / float(warmup)
    style = schedule["decay_style"]
    if style == "constant":
        return peak
    start, at, end = steps if schedule.get("decay_tokens") is None else tokens
    if at > end:
        return floor
    if style == "inverse_sqrt":
        return peak / math.sqrt(max(at - start, 1))
    if style == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(warmup, 1)) / math.sqrt(max(now, 1)))
    ratio = float(at - start) / float(end - start)
    if style == "linear":
        return floor + (1.0 - ratio) * (peak - floor)
    if style == "cosine":
        return floor + 0.5 * (math.cos(math.pi * ratio) + 1.0) * (peak - floor)
    if style == "1-sqrt":  # the bundled trainer's, as is WSD with its parameters in the state
        return floor + (1.0 - math.sqrt(ratio)) * (peak - floor)
    if style == "WSD":
        return floor + stable_then_decay(at, end, schedule) * (peak - floor)
    raise ValueError(f"decay style {style!r}")


def refuse_other_rule(checkpoint: Checkpoint) -> None:
    """Raise SurgeryError where no group has the rate that AnnealingLR gives at the saved position:
    a scheduler of one's own may save its keys, and has another rule."""
    present, places = checkpoint.state().schedule, checkpoint.locate("lr")
    if present is None or not places:
        return
    rate = learning_rate(present)
    if not any(math.isclose(place.value, rate, rel_tol=1e-6) for place in places):
        raise other_rule("AnnealingLR", places[0].value, rate)


def reschedule(
    checkpoint: Checkpoint, values: Mapping[str, Any]
) -> tuple[list[Setting], list[str]]:
    """`values` in the scheduler's state in every model shard, and the groups' lr that it gives at
    the saved position, so that the first step has it too. See `Checkpoint.reschedule`."""
    state = checkpoint.state()
    present = state.schedule
    state.needed("scheduler", *(["lr"] if "lr" in values else []))
    if present is None:
        if set(values) != {"lr"}:
            raise SurgeryError(
                f"the checkpoint keeps no schedule, so {', '.join(sorted(values))} has no place",
                next="set only lr, and the schedule on the trainer's command line",
            )
        kept_rates(checkpoint)
        return list(unscheduled(checkpoint, values["lr"])), []
    if "decay" in values and present.get("decay_tokens") is not None:
        raise SurgeryError(
            f"the decay of this run ends at token {present['decay_tokens']}, a number that the "
            "command line says at each start",
            next="relaunch the trainer with --lr-decay-tokens",
        )
    if "warmup" in values and present.get("lr_warmup_tokens") is not None:
        raise SurgeryError(
            f"the warm-up of this run ends at token {present['lr_warmup_tokens']}, a number that "
            "the command line says at each start",
            next="relaunch the trainer with --lr-warmup-tokens",
        )
    if "position" in values and present.get("decay_tokens") is not None:
        raise SurgeryError(
            "the decay of this run counts tokens, so its position in samples decides nothing",
            next="set tokens, which the next step's rate comes from",
        )
    if values.get("position", 0) < 0:
        raise UsageError(
            f"position {values['position']} is below 0, and this schedule counts samples from 0",
            next=command("set", "position=0", why="the start of the schedule"),
        )
    settings: list[Setting] = []
    new = dict(present)
    for key, chosen in values.items():
        name = "max_lr" if key == "lr" else key
        new[PLAIN[name]] = chosen
        settings += [Setting(key, place, chosen) for place in checkpoint.locate(name)]
    refuse_low_peak(new["max_lr"], new["min_lr"], ASSERTED)
    if new["decay_style"] != "constant":
        refuse_early_decay(new["decay_steps"], new["warmup_steps"])
    warnings = []
    if new["num_steps"] < new["warmup_steps"]:
        warnings.append(f"still warming up: sample {new['num_steps']} of {new['warmup_steps']}")
    return settings + _rates(checkpoint, learning_rate(new), new["max_lr"]), warnings


def cooldown(
    checkpoint: Checkpoint, decay: Decay, shapes: Collection[str]
) -> tuple[list[Setting], list[str]]:
    """The present rate as the peak, with a warm-up that is over here: so the position stays, and
    the decay is from here to the end that is asked for. `shapes` are those that the trainer knows,
    by its own names."""
    checkpoint.state().needed("scheduler")
    present = checkpoint.state().schedule
    if present is None:
        raise SurgeryError(
            "the checkpoint keeps no schedule, so nothing in it can make the rate decay",
            next="set the schedule on the trainer's command line",
        )
    refuse_shape(decay, shapes)
    now = present["num_steps"]
    values = {
        "lr": present_rate(learning_rate(present), float(present["max_lr"])),
        "min_lr": decay.to,
        "warmup": now,
        "decay": now + samples_of(decay),
        "decay_style": decay.shape,
    }
    return reschedule(checkpoint, values)


def present_rate(rate: float, peak: float) -> float:
    """The peak itself where the rate is as high but for its rounding: the same cooldown planned
    again then changes nothing."""
    return peak if math.isclose(rate, peak, rel_tol=1e-12) else rate


def unscheduled(checkpoint: Checkpoint, lr: float) -> Iterator[Setting]:
    """Where no scheduler is kept: groups of different rates keep their proportions (as those of
    Muon and of Adam beside it), and the largest gets `lr`. initial_lr, which a rate may be computed
    from, is scaled as the rate is."""
    places = checkpoint.locate("lr")
    top = max((place.value for place in places), default=0.0)
    for place in places:
        same = place.value == top or not top
        yield Setting("lr", place, lr if same else place.value * (lr / top))
    for place in checkpoint.locate("initial_lr") if top else ():
        if place.value is not None:
            yield Setting("initial_lr", place, place.value * (lr / top))


def _rates(checkpoint: Checkpoint, rate: float, peak: float) -> list[Setting]:
    return [
        *(Setting("lr", p, rate * _share(checkpoint, p)) for p in checkpoint.locate("lr")),
        *(Setting("lr", place, peak) for place in checkpoint.locate("initial_lr")),
    ]


def _share(checkpoint: Checkpoint, place: Place) -> float:
    """What OptimizerParamScheduler multiplies the rate of a param group by."""
    schedule = checkpoint.state().schedule or {}
    mult = checkpoint.value(place.file, (*place.path[:-1], "lr_mult"))
    return float(mult) if "start_wd" in schedule and mult is not None else 1.0
