"""Megatron's AnnealingLR as the surgeon computes it, on its own, from the saved state.

Source of the rule: `megatron/learning_rates.py` of Megatron-DeepSpeed. The trainer has another
implementation; the contract test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint, Setting

KEYS = frozenset({"max_lr", "min_lr", "warmup_steps", "num_steps", "decay_steps", "decay_style"})


def is_annealing(schedule: Any) -> bool:
    """Whether a saved scheduler state has AnnealingLR's keys."""
    return isinstance(schedule, Mapping) and schedule.keys() >= KEYS


def learning_rate(schedule: Mapping[str, Any]) -> float:
    """The rate at the saved position: all three step counts are in samples.

    Linear warm-up to `max_lr`, then the decay to `min_lr`, which holds past `decay_steps`."""
    peak, floor = float(schedule["max_lr"]), float(schedule["min_lr"])
    warmup, now, end = (schedule[key] for key in ("warmup_steps", "num_steps", "decay_steps"))
    if warmup > 0 and now <= warmup:
        return peak * float(now) / float(warmup)
    style = schedule["decay_style"]
    if style == "constant":
        return peak
    if now > end:
        return floor
    ratio = float(now - warmup) / float(end - warmup)
    if style == "linear":
        return floor + (1.0 - ratio) * (peak - floor)
    if style == "cosine":
        return floor + 0.5 * (math.cos(math.pi * ratio) + 1.0) * (peak - floor)
    raise ValueError(f"decay style {style!r}")


def reschedule(
    checkpoint: Checkpoint, wanted: Mapping[str, Any]
) -> tuple[list[Setting], list[str]]:
    """`wanted` in the scheduler's state in every model shard, and the groups' lr that it gives at
    the saved position, so that the first step has it too. See `Checkpoint.reschedule`."""
    present = checkpoint.state().schedule
    if present is None:
        if set(wanted) != {"lr"}:
            raise SurgeryError(
                f"the checkpoint keeps no schedule, so {', '.join(sorted(wanted))} has no place",
                next="set only lr, and the schedule on the trainer's command line",
            )
        return _rates(checkpoint, wanted["lr"], wanted["lr"]), []
    settings: list[Setting] = []
    new = dict(present)
    for key, value in wanted.items():
        for place in checkpoint.locate("max_lr" if key == "lr" else key):
            new[str(place.path[-1])] = value
            settings.append(Setting(key, place, value))
    if new["max_lr"] < new["min_lr"]:
        raise UsageError(
            f"lr {new['max_lr']:g} is below min_lr {new['min_lr']:g}, and the trainer asserts "
            "max_lr >= min_lr on resume",
            next=f"ckptsurgeon set-lr {new['max_lr']:g} --min-lr {new['max_lr'] / 10:g}",
        )
    if new["decay_style"] != "constant" and new["decay_steps"] <= new["warmup_steps"]:
        raise UsageError(
            f"decay {new['decay_steps']} samples is not beyond warmup {new['warmup_steps']}",
            next="set decay above warmup; both count samples from the start of the run",
        )
    warnings = []
    if new["num_steps"] < new["warmup_steps"]:
        warnings.append(f"still warming up: sample {new['num_steps']} of {new['warmup_steps']}")
    return settings + _rates(checkpoint, learning_rate(new), new["max_lr"]), warnings


def _rates(checkpoint: Checkpoint, rate: float, peak: float) -> list[Setting]:
    return [
        *(Setting("lr", place, rate) for place in checkpoint.locate("lr")),
        *(Setting("lr", place, peak) for place in checkpoint.locate("initial_lr")),
    ]
