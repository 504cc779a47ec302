"""How large Adam's first moment can be beside its second: a theorem about every history.

m = (1-b1) sum b1^(t-i) g_i and v = (1-b2) sum b2^(t-i) g_i^2. With r = b1^2 / b2 < 1, Cauchy and
Schwarz give |m| <= (1-b1) / sqrt(1-b2) * sqrt((1-r^t) / (1-r)) * sqrt(v) for any gradients. The
bias corrections of both sides cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptsurgeon.formats import Adam
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.plan import Receipt

TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 1.0, "float16": 1.0}
"""By how much rounding may lift the ratio, as a share of the bound. A mean that is kept in 16 bits
loses what is less than half a unit in its last place, at every update."""
QUANTIZED = 1.0
"""The same of moments of 8 bits, whose codes are widened besides (`codes`)."""
FLOOR = {"float64": 1e-30, "float32": 1e-30, "bfloat16": 1e-30, "float16": 1e-6}
"""The smallest v that is taken at its word: the square of a smaller gradient has no normal number
in fp32. What is below counts as this much."""


@frozen
class Edited:
    """Betas that a surgery replaced `updates` ago."""

    betas: tuple[float, float]
    updates: float


def limit(adam: Adam, edits: Sequence[Edited] = ()) -> float | None:
    """The largest |m| / sqrt(v); None where nothing can be said: an optimizer that is not Adam,
    betas that are unknown or with b1^2 >= b2, and within 1 / (1-b2) updates of the last of the
    `edits` of betas, which are given oldest first."""
    if not adam.lawful or adam.betas is None or len(adam.betas) != 2:
        return None
    now = (adam.betas[0], adam.betas[1])
    found = ratio(*now, adam.step)
    if not edits or found is None:
        return found
    if edits[-1].updates < 1 / (1 - now[1]):
        return None
    before = ratio(*edits[0].betas, None)
    for i, edit in enumerate(edits):
        last = i + 1 == len(edits)
        betas = now if last else edits[i + 1].betas
        updates = edit.updates - (0 if last else edits[i + 1].updates)
        alone = ratio(*betas, None)
        if before is None or alone is None or updates < 0:
            return None
        # What is left of the old means: m of them shrank by b1 an update, v by b2.
        before = math.hypot(alone, before * (betas[0] / math.sqrt(betas[1])) ** updates)
    return before


def ratio(beta1: float, beta2: float, step: float | None) -> float | None:
    """The bound after `step` updates, of ever so many if that is None; None where there is none."""
    if (
        not (0 <= beta1 < 1 and 0 < beta2 < 1)
        or beta1**2 >= beta2
        or (step is not None and step < 0)
    ):
        return None
    r = beta1**2 / beta2
    grown = 1.0 if step is None else 1 - r**step
    return (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt(grown / (1 - r))


def betas_edited(
    receipts: Sequence[Receipt], step: int, adam_step: float | None
) -> tuple[Edited, ...]:
    """The edits of betas by standing surgeries at `step` or before, oldest first. Of several param
    groups that were edited at once, the one with the widest bound before."""
    found = []
    for receipt in receipts:
        olds = [
            (float(change.old[0]), float(change.old[1]))
            for change in receipt.changes
            if isinstance(change, Change) and change.field.startswith("beta")
            if isinstance(change.old, (list, tuple)) and len(change.old) == 2
        ]
        if not olds or receipt.step is None or receipt.step > step:
            continue
        updates = float(step - receipt.step)
        then = None if receipt.promise is None else receipt.promise.adam_step
        if adam_step is not None and then is not None and adam_step >= then:
            updates = min(updates, adam_step - then)
        widest = max(olds, key=lambda old: ratio(old[0], old[1], None) or math.inf)
        found.append(Edited(widest, updates))
    return tuple(found)
