"""What torch's learning-rate schedulers do next by their saved state, and new values for it.

Source of the rules: `torch/optim/lr_scheduler.py`, 2.4 to 2.13. Nothing but the group's own lr is
used by the next step; what comes after is computed from the other fields, so all change together.
Positions (`last_epoch`, `T_max`, `total_steps`) count the scheduler's steps, not samples.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.understood import is_number, not_understood, refuse_rates
from ckptsurgeon.formats.fields.values import Place, Setting
from ckptsurgeon.formats.schedules import espnet, fairseq2, in_code, nemo, plateau, torch_classes
from ckptsurgeon.formats.schedules.check import (
    AFTER_LOADING,
    kept_rates,
    one_scheduler,
    refuse_foreign,
    refuse_low_peak,
    refuse_odd,
)
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.plans.promise import Caveat

KEPT: Mapping[str, frozenset[str]] = {
    "CosineAnnealingLR": frozenset({"lr", "min_lr", "decay", "position"}),
    "CosineAnnealingWarmRestarts": frozenset({"lr", "min_lr"}),
    "OneCycleLR": frozenset({"lr", "min_lr", "warmup", "decay", "decay_style", "position"}),
    "CyclicLR": frozenset({"lr"}),
    nemo.NAME: nemo.KEPT,
    nemo.ALIKE: frozenset({"lr"}),
    espnet.NAME: espnet.KEPT,
    **fairseq2.KEPT,
}
"""Recipe keys that a state can express; all others `lr` and `position`."""
NAMES = {
    "eta_min": "min_lr", "min_lr": "min_lr", "T_max": "decay", "total_steps": "decay",
    "end_step": "decay", "_anneal_func_type": "decay_style", "last_epoch": "position",
    "_step_count": "position", "warmup_steps": "warmup", "max_steps": "decay",
    "decay_steps": "decay", "final_lrs": "min_lr", "num_warmup_steps": "warmup",
    "cycle_len": "decay", "num_steps": "decay",
}  # fmt: skip
"""Field → what a plan calls it; all others are `lr`."""
MOVED = (
    "StepLR", "MultiStepLR", "ExponentialLR", "ConstantLR", "LinearLR", "PolynomialLR",
)  # fmt: skip
"""Those whose rate is computed where the position is new; else it is scaled."""
DRIFT = 1e-3
"""Share of the peak by which a class's own rates may be off its formula."""
STRATEGIES = {"cosine": "cos", "linear": "linear"}


@dataclass
class New:
    """New values by path in the scheduler's state, and by key in each param group."""

    rates: list[float]
    state: dict[tuple[Key, ...], Any] = field(default_factory=dict)
    groups: list[dict[str, float]] = field(default_factory=list)


def peak(checkpoint: Checkpoint) -> float:
    """What `lr` of a recipe sets and scales: the largest base_lr, or max_lr of OneCycleLR."""
    places = checkpoint.locate("scheduler")
    refuse_odd(places[0])
    in_groups = torch_classes.kind(places[0].value) in ("OneCycleLR", *plateau.NAMES)
    groups = group_rates(checkpoint, places[0]) if in_groups else []
    return max(peaks(places[0].value, groups), default=0.0)


def reschedule(
    checkpoint: Checkpoint, values: Mapping[str, Any]
) -> tuple[list[Setting], list[str]]:
    """`values` in base_lrs, _last_lr and what else the class computes from, and in the groups' lr
    and initial_lr. Groups of different rates keep their proportions: the largest gets `lr`.

    Needs `locate("scheduler")`, the whole state in each file that has it. See
    `Checkpoint.reschedule`."""
    places = one_scheduler(checkpoint)
    state = places[0].value
    name = torch_classes.kind(state)
    if name in plateau.NAMES:
        return plateau.reschedule(checkpoint, values)
    groups = group_rates(checkpoint, places[0])
    state = {"_last_lr": [group["lr"] for group in groups], **state}
    lacking = sorted(values.keys() - _kept(state))
    if lacking:
        again = values.keys() >= {"lr", "decay"} and values.get("position") == 0
        if name == nemo.ALIKE:
            raise SurgeryError(
                f"{', '.join(lacking)}: what the saved scheduler makes of it is not known here, as "
                "WarmupPolicy, WarmupAnnealing and three more of NeMo's save the same keys",
                next=in_code.restarting(state, groups, values)
                if again
                else "set it in a new scheduler in the trainer's code, and load no lr_scheduler "
                "state; lr alone can be set here",
            )
        raise SurgeryError(
            f"{name} keeps no {', '.join(lacking)} in its state: the trainer's own code has it",
            next=in_code.restarting(state, groups, values)
            if again
            else command("show", why="what the scheduler keeps; all else is set where it is made"),
        )
    factor = 1.0
    if "lr" in values:
        top = max(peaks(state, groups), default=0.0)
        if top <= 0:
            raise SurgeryError(
                f"the base rate of {name} is 0, so what the schedule makes of another one is "
                "not known",
                next=AFTER_LOADING,
            )
        factor = values["lr"] / top
    _refuse_other_rule(state, groups, values)
    new = one_cycle(state, groups, factor, values) if name == "OneCycleLR" else None
    if new is None:
        new = _recomputed(state, factor, values)
        new.groups = [{"lr": rate} for rate in new.rates]
        if "lr" in values:
            for group, old in zip(new.groups, groups, strict=True):
                group["initial_lr"] = old.get("initial_lr", 0.0) * factor
    refuse_rates(new.rates)
    return list(settings_of(checkpoint, places, new)), warnings_of(state, values)


def _refuse_other_rule(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, float]], values: Mapping[str, Any]
) -> None:
    """Raise SurgeryError where a new rate is computed and the last one is not what the class gives:
    a class of the trainer's own may save the same keys, and it goes on by its own rule.

    The class adds up the errors of its rates step by step, with rates in a tensor of float32 to a
    thousandth of the peak."""
    name = torch_classes.kind(state)
    if name == "OneCycleLR":
        now = one_cycle(state, groups, 1.0, {}).rates
    elif name == torch_classes.MULTIPLIER:
        now = torch_classes.multiplied(state)
    else:
        moved = "position" in values and name in MOVED
        now = _recomputed(state, 1.0, {"position": state["last_epoch"]} if moved else {}).rates
    refuse_foreign(state, name, [now], DRIFT * max(peaks(state, groups), default=0.0))


# --- each class ----------------------------------------------------------------------------------


def _recomputed(state: Mapping[str, Any], factor: float, values: Mapping[str, Any]) -> New:
    """New rates at the position. Where a rate is base_lr times what the position alone gives, it
    takes the same factor, whatever the function is."""
    name = torch_classes.kind(state)
    if name == "SequentialLR":
        new = New([])
        now = bisect_right(state["_milestones"], state["last_epoch"])
        for i, inner in enumerate(state["_schedulers"]):
            part = _recomputed({"_last_lr": state["_last_lr"], **inner}, factor, values)
            new.state |= {("_schedulers", i, *path): value for path, value in part.state.items()}
            if i == now:
                new.rates = part.rates
        new.state["_last_lr",] = new.rates
        return new
    if name in fairseq2.KINDS:
        rates, changed = fairseq2.recomputed(name, state, factor, values)
        return New(rates, {**changed, **torch_classes.moved(state, values)})
    if name in (nemo.NAME, espnet.NAME):
        rates, changed = (nemo if name == nemo.NAME else espnet).recomputed(state, factor, values)
        return New(rates, {**changed, **torch_classes.moved(state, values)})
    if name == nemo.ALIKE:
        nemo.refuse_other_kinds(state)
    base = [float(rate) * factor for rate in state["base_lrs"]]
    floor = float(values.get("min_lr", state.get("eta_min", 0.0)))
    changed = {("base_lrs",): base, **torch_classes.moved(state, values)}
    now = values.get("position", state["last_epoch"])
    if "eta_min" in state:
        refuse_low_peak(max(base, default=0.0), floor)
        end = values.get("decay", state.get("T_max", 1))
        if "T_cur" in state:
            now, end = state["T_cur"], state["T_i"]
        elif end <= now and "decay" in values:
            raise UsageError(
                f"decay {end} is not beyond step {now}: CosineAnnealingLR would rise again",
                next=f"decay counts the scheduler's steps and must be above {now}",
            )
        share = (1 + math.cos(math.pi * now / end)) / 2
        rates = [floor + (rate - floor) * share for rate in base]
        changed["eta_min",] = floor
        if "T_max" in state:
            changed["T_max",] = end
    else:
        if "max_lrs" in state:
            changed["max_lrs",] = [float(rate) * factor for rate in state["max_lrs"]]
        moved = _share(state, now) if "position" in values else None
        rates = [float(rate) * factor for rate in state["_last_lr"]]
        if moved is not None:
            rates = [rate * moved for rate in base]
    changed["_last_lr",] = rates
    return New(rates, changed)


def _share(state: Mapping[str, Any], now: int) -> float | None:
    """What base_lr is multiplied by at step `now`; None for a function that only code knows."""
    name = torch_classes.kind(state)
    if name == "StepLR":
        return float(state["gamma"] ** (now // state["step_size"]))
    if name == "MultiStepLR":
        passed = torch_classes.milestones(state["milestones"])
        return float(state["gamma"] ** sum(n for at, n in passed.items() if at <= now))
    if name == "ExponentialLR":
        return float(state["gamma"] ** now)
    if name in torch_classes.BY_CODE:
        return None
    end = state["total_iters"]
    done = min(1.0, now / end)
    if name == "ConstantLR":
        return 1.0 if now >= end else float(state["factor"])
    if name == "LinearLR":
        return float(state["start_factor"] + (state["end_factor"] - state["start_factor"]) * done)
    return float((1.0 - done) ** state["power"])  # PolynomialLR


def one_cycle(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, float]],
    factor: float,
    values: Mapping[str, Any],
) -> New:
    """OneCycleLR keeps its rates in the groups. initial_lr and min_lr follow max_lr, as the class
    derives them from it."""
    phases = [dict(phase) for phase in state["_schedule_phases"]]
    changed: dict[tuple[Key, ...], Any] = {}
    ends = [phase["end_step"] for phase in phases]
    if "warmup" in values:
        ends[:-1] = [float((i + 1) * (values["warmup"] - 1)) for i in range(len(ends) - 1)]
    if "decay" in values:
        ends[-1] = values["decay"] - 1
        changed["total_steps",] = values["decay"]
    changed |= torch_classes.moved(state, values)
    now = values.get("position", state["last_epoch"])
    beyond = ends[-1] < now and bool(values.keys() & {"decay", "position"})
    # A cycle of three steps has a warm-up that ends at -0.1: torch makes it, and trains on.
    crossed = sorted(set(ends)) != ends or ("warmup" in values and ends[0] <= 0)
    if crossed or beyond:
        raise UsageError(
            f"OneCycleLR at step {now} can't have phases that end at "
            f"{', '.join(f'{end:g}' for end in ends)}",
            next="decay above warmup and above the position; both count the scheduler's steps",
        )
    changed |= {("_schedule_phases", i, "end_step"): end for i, end in enumerate(ends)}
    style = state["_anneal_func_type"]
    if "decay_style" in values:
        if values["decay_style"] not in STRATEGIES:
            raise UsageError("OneCycleLR decays cosine or linear", next="decay_style: cosine")
        changed["_anneal_func_type",] = style = STRATEGIES[values["decay_style"]]
    new = New([], changed)
    i = next((i for i, end in enumerate(ends) if now <= end), len(ends) - 1)
    start = ends[i - 1] if i else 0.0
    done = (now - start) / (ends[i] - start)
    for group in groups:
        rates = {key: group[key] * factor for key in ("initial_lr", "max_lr", "min_lr")}
        rates["min_lr"] = float(values.get("min_lr", rates["min_lr"]))
        first, last = rates[phases[i]["start_lr"]], rates[phases[i]["end_lr"]]
        if style == "cos":
            rate = last + (first - last) / 2.0 * (math.cos(math.pi * done) + 1)
        else:
            rate = (last - first) * done + first
        new.rates.append(rate)
        new.groups.append({**rates, "lr": rate})
    new.state["base_lrs",] = [group["initial_lr"] for group in new.groups]
    new.state["_last_lr",] = new.rates
    return new


# --- places --------------------------------------------------------------------------------------


def group_rates(checkpoint: Checkpoint, scheduler: Place) -> list[dict[str, float]]:
    """The rates in each param group, as the first file that has them keeps them."""
    places = kept_rates(checkpoint)
    mine: dict[int, Place] = {}  # model-parallel ranks may keep a group side by side
    for place in (place for place in places if place.file == places[0].file):
        mine.setdefault(checkpoint.group_of(place), place)
    keys = ("lr", "initial_lr", "max_lr", "min_lr")
    out = []
    for place in mine.values():
        rates = {}
        for key in keys:
            path = checkpoint.beside(place, key)
            if (value := checkpoint.value(place.file, path)) is not None:
                if not is_number(value):
                    raise not_understood(place.file, path, value, "a rate", key)
                rates[key] = float(value)
        out.append(rates)
    state = scheduler.value
    saved = state.get("base_lrs", state.get("_last_lr", out))
    if len(saved) != len(out):
        raise SurgeryError(
            f"the scheduler has {count(len(saved), 'rate')}, and the optimizer "
            f"{count(len(out), 'param group')}",
            next=command("verify", why="list what contradicts itself"),
        )
    return out


def _kept(state: Mapping[str, Any]) -> frozenset[str]:
    """The recipe keys that this state can express. Parts of a SequentialLR share one min_lr."""
    if torch_classes.kind(state) != "SequentialLR":
        return KEPT.get(torch_classes.kind(state), frozenset({"lr", "position"}))
    inner = frozenset().union(*map(_kept, state["_schedulers"]))
    return inner & {"lr", "min_lr"}


def peaks(state: Mapping[str, Any], groups: Sequence[Mapping[str, float]]) -> list[float]:
    if torch_classes.kind(state) == "OneCycleLR":
        return [group["max_lr"] for group in groups]
    if torch_classes.kind(state) in plateau.NAMES:
        return [group["lr"] for group in groups]
    if torch_classes.kind(state) == "CyclicLR":
        return [float(rate) for rate in state["max_lrs"]]
    if torch_classes.kind(state) == "SequentialLR":
        return [rate for inner in state["_schedulers"] for rate in peaks(inner, groups)]
    return [float(rate) for rate in state["base_lrs"]]


def settings_of(checkpoint: Checkpoint, places: Sequence[Place], new: New) -> Iterator[Setting]:
    for scheduler in places:
        for path, value in new.state.items():
            full = (*scheduler.path, *path)
            old = checkpoint.value(scheduler.file, full)
            if old is not None and not _same(old, value):
                name = NAMES.get(str(path[-1]), "lr")
                place = Place(scheduler.file, full, old)
                yield from (Setting(name, *each) for each in _apart(checkpoint, place, value))
    for place in checkpoint.locate("lr"):
        index = checkpoint.group_of(place)
        for key, value in new.groups[index].items():
            path = checkpoint.beside(place, key)
            old = checkpoint.value(place.file, path)
            if old is not None and isinstance(value, float) and not isinstance(old, (int, float)):
                raise not_understood(place.file, path, old, "a rate")
            if old is not None and not _same(old, value):
                yield Setting(NAMES.get(key, "lr"), Place(place.file, path, old), value)


def _apart(checkpoint: Checkpoint, place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    """The place and its value; of rates that are tensors each, as an optimizer has them whose lr is
    one."""
    if not checkpoint.has_each(place.file, place.path):
        yield place, value
        return
    if len(place.value) != len(value):
        rates = count(len(value), "rate")
        raise not_understood(place.file, place.path, place.value, f"a list of {rates}")
    for i, (old, new) in enumerate(zip(place.value, value, strict=True)):
        yield Place(place.file, (*place.path, i), old), new


def _same(old: Any, new: Any) -> bool:
    """Whether two values differ in their rounding alone: torch sums up what is computed here."""
    if isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(new, float):
        return math.isclose(old, new, rel_tol=1e-12, abs_tol=1e-300)
    return bool(old == new)


def warnings_of(state: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    out: list[str] = []
    if "position" in values and torch_classes.kind(state) in torch_classes.BY_CODE:
        out.append(
            Caveat(
                "what the lambda gives at the new position is in code: the next step keeps the "
                "rate that it has, and the one after it has the lambda's",
                "lr",
            )
        )
    if values.keys() & {"warmup", "decay"}:
        out.append(
            f"warmup and decay of {torch_classes.kind(state)} count the scheduler's steps, "
            "not samples"
        )
    if "position" not in values and state.get("_step_count", 0) not in (0, state["last_epoch"] + 1):
        out.append(
            f"the scheduler has made {count(state['_step_count'], 'step')} and stands at "
            f"{state['last_epoch']}: it was loaded or moved by hand before"
        )
    return out
