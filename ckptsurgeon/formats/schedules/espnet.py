"""ESPnet's WarmupLR, which is of torch's kind: a rise to the peak, then a fall by the step's root.

Source: `espnet2/schedulers/warmup_lr.py` of espnet 202511.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptsurgeon.plans.edits import Key

NAME = "WarmupLR of ESPnet"
KEYS = frozenset({"warmup_steps"})
"""What its state has beside that of every scheduler of torch."""
KEPT = frozenset({"lr", "warmup", "position"})


def recomputed(
    state: Mapping[str, Any], factor: float, values: Mapping[str, Any]
) -> tuple[list[float], dict[tuple[Key, ...], Any]]:
    """The rates at the position and what the state keeps, for base rates times `factor`."""
    warmup = values.get("warmup", state["warmup_steps"])
    step = values.get("position", state["last_epoch"]) + 1
    share = warmup**0.5 * min(step**-0.5, step * warmup**-1.5)
    base = [float(rate) * factor for rate in state["base_lrs"]]
    rates = [rate * share for rate in base]
    return rates, {("base_lrs",): base, ("warmup_steps",): warmup, ("_last_lr",): rates}
