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
LEGACY = {
    "start_lr": "max_lr", "warmup_iter": "warmup_steps", "num_iters": "num_steps",
    "end_iter": "decay_steps",
}  # fmt: skip
"""Older names of keys. Where a state has both, the loader reads the older one."""
NAMES = {
    "max_lr": ("max_lr", "start_lr"), "min_lr": ("min_lr", ""), "decay_style": ("decay_style", ""),
    "warmup": ("warmup_steps", "warmup_iter"), "decay": ("decay_steps", "end_iter"),
    "position": ("num_steps", "num_iters"),
}  # fmt: skip
"""Recipe key → key of the state, and its older name."""


def is_annealing(schedule: Any) -> bool:
    """Whether a saved scheduler state has AnnealingLR's keys, by their new or older names."""
    return isinstance(schedule, Mapping) and {LEGACY.get(k, k) for k in schedule} >= KEYS


def normal(schedule: Any, decay_tokens: int | None = None) -> dict[str, Any] | None:
    """The state by its new names, or None if it is no AnnealingLR. `decay_tokens` is the end of
    the decay where that counts tokens: a flag of the trainer that no state keeps."""
    if not is_annealing(schedule):
        return None
    out = {key: value for key, value in schedule.items() if key not in LEGACY}
    out |= {new: schedule[old] for old, new in LEGACY.items() if old in schedule}
    if decay_tokens is not None and "num_tokens" in out:
        out["decay_tokens"] = decay_tokens
    return out


def learning_rate(schedule: Mapping[str, Any]) -> float:
    """The rate at the saved position: all three step counts are in samples.

    Linear warm-up to `max_lr`, then the decay to `min_lr`, which holds past `decay_steps`. With
    `decay_tokens` the decay is from `warmup_tokens` to it, at `num_tokens`."""
    peak, floor = float(schedule["max_lr"]), float(schedule["min_lr"])
    warmup, now, end = (schedule[key] for key in ("warmup_steps", "num_steps", "decay_steps"))
    if warmup > 0 and now <= warmup:
        return peak * float(now) / float(warmup)
    style = schedule["decay_style"]
    if style == "constant":
        return peak
    if schedule.get("decay_tokens") is not None:
        warmup, now, end = (schedule[f"{key}_tokens"] for key in ("warmup", "num", "decay"))
    if now > end:
        return floor
    if style == "inverse_sqrt":
        return peak / math.sqrt(max(now - warmup, 1))
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
        if not checkpoint.locate("lr"):
            raise SurgeryError(
                "this checkpoint keeps no lr", next="set lr on the trainer's command line"
            )
        return _rates(checkpoint, wanted["lr"], wanted["lr"]), []
    if "decay" in wanted and present.get("decay_tokens") is not None:
        raise SurgeryError(
            f"the decay of this run ends at token {present['decay_tokens']}, and no checkpoint "
            "keeps that number",
            next="relaunch the trainer with --lr-decay-tokens",
        )
    if "position" in wanted and present.get("decay_tokens") is not None:
        raise SurgeryError(
            "the decay of this run counts tokens, so its position in samples decides nothing",
            next="set tokens, which the next step's rate comes from",
        )
    if wanted.get("position", 0) < 0:
        raise UsageError(
            f"position {wanted['position']} is below 0, and this schedule counts samples from 0",
            next="ckptsurgeon set position=0    the start of the schedule",
        )
    settings: list[Setting] = []
    new = dict(present)
    for key, value in wanted.items():
        name = "max_lr" if key == "lr" else key
        new[NAMES[name][0]] = value
        settings += [Setting(key, place, value) for place in checkpoint.locate(name)]
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
