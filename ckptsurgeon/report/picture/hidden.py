"""Branches of which one line would hide another: a run that was repeated bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ckptsurgeon.logs.curves import Curve

Dashes: TypeAlias = tuple[int, tuple[int, int]]
LONG = 3
"""Points, as matplotlib counts the length of a dash."""
CLOSE = 1e-3
"""Relative distance of two losses of which the lines are one."""


def dashes(losses: Sequence[Curve]) -> list[Dashes | None]:
    """For each line how it is dashed, so that all are seen where they are one; None for a line that
    lies on none before it."""
    found = [any(_one(losses[k], other) for other in losses[:k]) for k in range(len(losses))]
    count = sum(found)
    out: list[Dashes | None] = []
    for k, hidden in enumerate(found):
        place = sum(found[:k])
        out.append((LONG * place, (LONG, LONG * count)) if hidden else None)
    return out


def _one(curve: Curve, other: Curve) -> bool:
    """Whether most of `curve` lies on the other."""
    import numpy as np

    _, mine, theirs = np.intersect1d(curve.steps, other.steps, return_indices=True)
    alike = np.isclose(curve.values[mine], other.values[theirs], rtol=CLOSE, atol=0.0)
    return bool(2 * np.count_nonzero(alike) > len(curve) > 0)
