"""GPT-NeoX's AnnealingLR: it has the keys of Megatron's of 2020, and rules of its own.

Source of the rules: `megatron/learning_rates.py` of EleutherAI/gpt-neox at ea7aefd8. It counts
iterations. A linear decay goes to 0 and stops at `min_lr` on its way; a cosine rises again past its
end. On resume it asserts that config and file agree, unless the config says whose word counts.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields import understood
from ckptsurgeon.formats.fields.values import Decay, Place, Setting
from ckptsurgeon.formats.schedules.annealing import present_rate
from ckptsurgeon.formats.schedules.check import (
    kept_rates,
    other_rule,
    refuse_early_decay,
    refuse_low_peak,
    refuse_shape,
)
from ckptsurgeon.hints import command

NUMBERS = {
    "lr": "start_lr", "min_lr": "min_lr", "warmup": "warmup_iter", "decay": "end_iter",
    "position": "num_iters",
}  # fmt: skip
"""Key of a recipe → name in the state."""
STYLE = "decay_style"
STYLES = ("linear", "cosine", "exponential", "constant")
SHAPES = ("linear", "cosine")
"""Those that can end at the last rate of a cooldown."""
HALVED = 0.693
"""An exponential decay has this factor in its exponent at the end."""


def is_neox(schedule: Any, args: Any) -> bool:
    """Whether a saved state is one of GPT-NeoX: it saves its arguments as a dict, which names the
    size of its model parallelism."""
    return (
        isinstance(schedule, Mapping)
        and set(schedule) == {*NUMBERS.values(), STYLE}
        and isinstance(args, Mapping)
        and "model_parallel_size" in args
    )


def problem(field: str, state: Mapping[str, Any]) -> str:
    """What is wrong with a state, or the empty string."""
    for name in NUMBERS.values():
        if not understood.is_number(state[name]):
            return understood.refusal(f"{field}.{name}", state[name], "a finite number, 0 or more")
    known = state[STYLE] in STYLES
    return "" if known else understood.refusal(f"{field}.{STYLE}", state[STYLE], ", ".join(STYLES))


def words(schedule: Mapping[str, Any]) -> str:
    """The schedule as a person would say it."""
    style, peak, floor = schedule[STYLE], schedule["start_lr"], schedule["min_lr"]
    now, warmup, end = (schedule[key] for key in ("num_iters", "warmup_iter", "end_iter"))
    if style == "constant":
        after = f"constant at {peak:.3e}"
    else:
        after = f"{style} from {peak:.3e} to {floor:.3e}"
    if now < warmup:
        return f"{after}, warming up: iteration {now:g} of {warmup:g}"
    return after if style == "constant" else f"{after}, iteration {now:g} of {end:g}"


def learning_rate(schedule: Mapping[str, Any]) -> float:
    """The rate that the next iteration uses, by the state after the last one."""
    peak, floor = float(schedule["start_lr"]), float(schedule["min_lr"])
    now, warmup = float(schedule["num_iters"]), float(schedule["warmup_iter"])
    if warmup > 0 and now <= warmup:
        return peak * max(1.0, now) / warmup
    style, whole = schedule[STYLE], float(schedule["end_iter"]) - warmup
    if style == "constant":
        return max(peak, floor)
    done = now - warmup
    if style == "linear":
        return max(peak * (whole - done) / whole, floor)
    if style == "cosine":
        return max(floor + (peak - floor) / 2.0 * (math.cos(math.pi * done / whole) + 1.0), floor)
    if style == "exponential":
        return max(peak * math.exp(-HALVED * done / whole), floor)
    raise ValueError(f"decay style {style!r}")


def reschedule(
    checkpoint: Checkpoint, schedule: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[list[Setting], list[str]]:
    """`values` in the scheduler's state in every model shard, and the rate that it gives at the
    saved position in the groups, which the first update takes. Raises SurgeryError where the saved
    rate is none that this scheduler gives."""
    places = kept_rates(checkpoint)
    before = learning_rate(schedule)
    for place in places:
        given = before * _share(checkpoint, place)
        if not math.isclose(place.value, given, rel_tol=1e-6):
            raise other_rule("GPT-NeoX's AnnealingLR", place.value, given)
    names = {**NUMBERS, STYLE: STYLE}
    lacking = sorted(values.keys() - names.keys())
    if lacking:
        raise SurgeryError(
            f"GPT-NeoX's scheduler saves no {', '.join(lacking)}",
            next="set it in the config of the relaunch",
        )
    new = {**schedule, **{names[key]: value for key, value in values.items()}}
    if new[STYLE] not in STYLES:
        raise UsageError(
            f"GPT-NeoX knows no decay style {new[STYLE]!r}",
            next=command("set", "decay_style=cosine", why=f"one of {', '.join(STYLES)}"),
        )
    refuse_low_peak(new["start_lr"], new["min_lr"])
    if new[STYLE] != "constant":
        refuse_early_decay(new["end_iter"], new["warmup_iter"], "iterations")
    settings = [
        Setting(key, p, values[key]) for key in values for p in checkpoint.locate(_field(key))
    ]
    rate = learning_rate(new)
    settings += [Setting("lr", place, rate * _share(checkpoint, place)) for place in places]
    settings += [Setting("lr", p, new["start_lr"]) for p in checkpoint.locate("initial_lr")]
    return settings, _notes(new, values)


def cooldown(
    checkpoint: Checkpoint, schedule: Mapping[str, Any], decay: Decay
) -> tuple[list[Setting], list[str]]:
    """The present rate as the peak, with a warm-up that is over here, so the position stays. As a
    linear decay heads for 0, one to another rate gets an end beyond the cooldown's: the floor holds
    it from there on."""
    refuse_shape(decay, SHAPES)
    now, peak = schedule["num_iters"], float(schedule["start_lr"])
    rate = present_rate(learning_rate(schedule), peak)
    if rate <= decay.to:
        raise UsageError(
            f"the rate is {rate:g} here, and can't decay to {decay.to:g}",
            next=command("cooldown", "--to", "0", why="or a rate below it"),
        )
    steps: float = decay.steps
    if decay.shape == "linear" and decay.to:
        steps = decay.steps * rate / (rate - decay.to)
    values = {
        "lr": rate,
        "min_lr": decay.to,
        "warmup": now,
        "decay": now + steps,
        "decay_style": decay.shape,
    }
    return reschedule(checkpoint, schedule, values)


def _field(key: str) -> str:
    return "max_lr" if key == "lr" else key


def _share(checkpoint: Checkpoint, place: Place) -> float:
    """What muP divides the rate of a param group by, as a factor."""
    width = checkpoint.value(place.file, (*place.path[:-1], "width_mult"))
    return 1.0 if width is None else 1.0 / float(width)


def _notes(schedule: Mapping[str, Any], edited: Container[str]) -> list[str]:
    """What the relaunch must say for the edited schedule to count, and where it stands."""
    out = [
        'relaunch with "use_checkpoint_lr_scheduler": true in the config, else GPT-NeoX asserts '
        'that config and file agree; with "override_lr_scheduler" it takes the config\'s'
    ]
    now, warmup = schedule["num_iters"], schedule["warmup_iter"]
    if now < warmup:
        out.append(f"still warming up: iteration {now:g} of {warmup:g}")
    if schedule[STYLE] == "cosine" and ("decay" in edited or "decay_style" in edited):
        end = f"{schedule['end_iter']:g}"
        out.append(f"past iteration {end} this trainer's cosine rises again: end the run there")
    return out
