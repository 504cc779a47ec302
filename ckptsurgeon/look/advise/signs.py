"""Signs: points at which a rule says that a signal left its course; and the spikes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from ckptsurgeon.logs.curves import Branch
from ckptsurgeon.logs.signals import LOSS, LOSS_SCALE
from ckptsurgeon.look.advise.rules import RULES, falls
from ckptsurgeon.plans.frozen import frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Flags: TypeAlias = "NDArray[np.bool_]"


@frozen
class Sign:
    """A point at which a rule says that a signal left its course. `seen` is the step from which on
    it was there for sure: later than `step` for a slow rise, and for a scale that fell and fell."""

    signal: str
    step: int
    rule: str
    seen: int


@frozen
class Spike:
    """From the step `first`, at which `signal` moved by `rule`, to `last`, at which the loss was
    back, or None. `peak` is the highest value of the loss.

    `level` is the mean of the LONG points before. `slow` is a rise that no rule for spikes sees.
    `malignant` means that it was not back within PATIENCE, at a level that matters; None: the log
    ends before that can be told. `signs` are those of all signals, in order. After a `shift` the
    loss stays at a new level that is hardly higher, or falls again from it: other data would look
    like this. `broken` is the first step at which the loss was no number."""

    first: int
    last: int | None
    signal: str
    rule: str
    malignant: bool | None
    signs: tuple[Sign, ...]
    level: float | None = None
    peak: float | None = None
    shift: bool = False
    slow: bool = False
    broken: int | None = None


def signs(branch: Branch, rules: Sequence[str]) -> list[Sign]:
    """Those of all `rules` but `cusum`, whose rises are judged together (`spikes.py`), by step."""
    import numpy as np

    out: list[Sign] = []
    for name in rules:
        for signal in RULES[name].signals:
            curve = branch.get(signal)
            if curve is None or name == "cusum":
                continue
            finite = np.isfinite(curve.values)
            steps, values = curve.steps[finite], curve.values[finite]
            judge = RULES[name].judge
            if name == "nan":
                found = curve.steps[~finite] if signal == LOSS else curve.steps[:0]
            elif signal == LOSS_SCALE:
                out += [
                    Sign(signal, int(steps[a]), name, int(steps[b]))
                    for a, b in falls(steps, values)
                ]
                continue
            else:
                assert judge is not None
                flags = judge(steps, values)
                if name == "olmo-core" and "olmo2" in rules:
                    flags[1000:] = False
                found = steps[flags]
            out += [Sign(signal, step, name, step) for step in found.tolist()]
    return sorted(out, key=lambda sign: sign.step)
