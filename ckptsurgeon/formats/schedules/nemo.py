"""NeMo's schedulers of torch's kind: CosineAnnealing, and WarmupPolicy with four of its children.

CosineAnnealing is warm-up, cosine, and a floor that is held; with `constant_steps` its rates are
those of the first base rate, whatever group they are for. The other five save the same keys. With a
`min_lr` of 0 each of them gives base_lrs times what the step alone gives, so all of them make the
same of another lr, and which one it is need not be known.
Source: `nemo/core/optim/lr_scheduler.py` of NVIDIA/NeMo 2381f42 (v2.4.0; 2.0 to 2.7 compute alike).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats.fields.values import Decay
from ckptsurgeon.formats.schedules.check import refuse_foreign, refuse_low_peak
from ckptsurgeon.plans.edits import Key

NAME = "CosineAnnealing"
KEYS = frozenset({"max_steps", "warmup_steps", "constant_steps", "decay_steps", "min_lr"})
"""What its state has beside that of every scheduler of torch."""
KEPT = frozenset({"lr", "min_lr", "warmup", "decay", "position"})
"""Recipe keys that its state can express."""
SHARED = frozenset({"max_steps", "warmup_steps", "min_lr"})
"""What the states of WarmupPolicy, SquareAnnealing, SquareRootAnnealing, WarmupAnnealing and
InverseSquareRootAnnealing have: none says which of them it is."""
ALIKE = "WarmupPolicy or alike"
State = Mapping[str, Any]


def rates(state: State) -> list[float]:
    """The rate of each group at `last_epoch`."""
    base = [float(rate) for rate in state["base_lrs"]]
    if not state["constant_steps"]:
        return [_rate(state, rate) for rate in base]
    return [_held(state, base[0])] * len(base)


def _rate(state: State, base: float) -> float:
    step, end = state["last_epoch"], state["max_steps"]
    warmup = state["warmup_steps"]
    floor = float(state["min_lr"])
    if warmup > 0 and step <= warmup:
        return float(base * (step + 1) / (warmup + 1))
    if step > end:
        return floor
    share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup)))
    return (base - floor) * share + floor


def _held(state: State, base: float) -> float:
    """With steps at the floor before the end, the warm-up begins at 0."""
    step, decay = state["last_epoch"], state["decay_steps"]
    warmup = state["warmup_steps"]
    floor = float(state["min_lr"])
    if warmup > 0 and step <= warmup:
        return float(base * step / warmup)
    if step > min(warmup + decay, state["max_steps"]):
        return floor
    return floor + 0.5 * (math.cos(math.pi * (step - warmup) / decay) + 1.0) * (base - floor)


def recomputed(
    state: State, factor: float, values: Mapping[str, Any]
) -> tuple[list[float], dict[tuple[Key, ...], Any]]:
    """The rates at the position and what the state keeps, for base rates times `factor` and the
    `values` of a recipe. The steps at the floor stay as many as they are.

    Raises SurgeryError for a state whose last rates this is not the formula of, UsageError for a
    peak or an end that NeMo refuses."""
    refuse_foreign(state, NAME, [rates(state)])
    new = {
        **state,
        "base_lrs": [float(rate) * factor for rate in state["base_lrs"]],
        "min_lr": float(values.get("min_lr", state["min_lr"])),
        "warmup_steps": values.get("warmup", state["warmup_steps"]),
        "max_steps": values.get("decay", state["max_steps"]),
        "last_epoch": values.get("position", state["last_epoch"]),
    }
    if values.keys() & {"warmup", "decay"}:
        new["decay_steps"] = new["max_steps"] - new["warmup_steps"] - (state["constant_steps"] or 0)
        if new["decay_steps"] <= 0:
            raise UsageError(
                f"decay {new['max_steps']} leaves no step after warmup {new['warmup_steps']} and "
                f"{state['constant_steps'] or 0} at min_lr",
                next="decay is the scheduler's max_steps: above the sum of both",
            )
    for base in new["base_lrs"]:
        refuse_low_peak(base, new["min_lr"], ", and NeMo refuses that at the next step")
    out = rates(new)
    keys = ("base_lrs", "min_lr", "warmup_steps", "max_steps", "decay_steps")
    return out, {**{(key,): new[key] for key in keys}, ("_last_lr",): out}


def decaying(state: State, decay: Decay, base: Sequence[float]) -> dict[str, Any]:
    """What makes it go from `base` at its position to `decay.to` along half a cosine."""
    refuse_foreign(state, NAME, [rates(state)])
    now = state["last_epoch"]
    return {
        "warmup_steps": now, "constant_steps": 0, "decay_steps": decay.steps,
        "max_steps": now + decay.steps, "min_lr": decay.to, "base_lrs": list(base),
    }  # fmt: skip


def is_alike(state: State) -> bool:
    """Whether it may be any of the five, and all of them make the same of another lr."""
    return not state["min_lr"]


def refuse_other_kinds(state: State) -> None:
    """Raise SurgeryError for a state whose last rates none of the five gives."""
    step, end, warmup = state["last_epoch"], state["max_steps"], state["warmup_steps"]
    base = [float(rate) for rate in state["base_lrs"]]
    if warmup > 0 and step <= warmup:
        shares = [(step + 1) / (warmup + 1)]
    elif end is not None and step > end:
        shares = [0.0]
    else:
        shares = [1.0, math.sqrt((warmup + 1) / (step + 1))]
        if end is not None:
            done = (step - warmup) / ((end - warmup) or 1)
            shares += [(1 - done) ** 2, math.sqrt(1 - step / (end or 1)), 1 - done]
    given = [[rate * share for rate in base] for share in shares]
    first = [[base[0] * share] * len(base) for share in shares]  # as WarmupAnnealing does
    refuse_foreign(state, f"{ALIKE} of NeMo", [*given, *first])
