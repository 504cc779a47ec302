"""Courses of a loss that rises and is healthy: one that swings, and one that begins at 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptsurgeon.look.advise.rises import NOISES, SHORT
from ckptsurgeon.look.advise.rules import Floats, noise
from ckptsurgeon.look.advise.signs import Spike

SWINGS = 2
"""Other rises, as high and as long, that came back, where a rise is the course of the run."""
ALIKE = 1.5
"""How many times as long, and as high, a rise is at most that is like another."""


def from_nought(values: Floats) -> bool:
    """Whether a loss begins at 0 and was never lower. So does the loss of a policy (GRPO, PPO),
    which grows with its distance from where it began: training does not lower it."""
    import numpy as np

    first = values[: 2 * SHORT]
    if len(first) < 2 * SHORT or first.min() > 0:
        return False
    scatter = noise(values[:64])
    means = np.convolve(values, np.full(SHORT, 1 / SHORT), "valid")
    return bool(abs(np.median(first[:SHORT])) <= scatter and means.min() >= -NOISES * scatter)


def swings(rises: Sequence[Spike], newest: int, top: Callable[[Spike], float]) -> list[Spike]:
    """The slow rises, none of which is malignant that is like SWINGS others that came back: the
    losses of two models that play against each other swing so. Of one that is open, and like one
    other alone, it is too early to tell."""

    def long(spike: Spike) -> int:
        return (newest if spike.last is None else spike.last) - spike.first

    def like(spike: Spike, other: Spike) -> bool:
        assert spike.level is not None and other.level is not None
        high, before = top(spike) - spike.level, top(other) - spike.level
        return long(spike) <= ALIKE * long(other) and high <= ALIKE * before

    out = []
    slow = [spike for spike in rises if spike.slow and not spike.shift and spike.level is not None]
    for spike in rises:
        if spike in slow and spike.malignant and spike.broken is None:
            others = [o for o in slow if o is not spike and o.last is not None and like(spike, o)]
            if len(others) >= SWINGS:
                spike = replace(spike, malignant=False)
            elif others and spike.last is None:
                spike = replace(spike, malignant=None)
        out.append(spike)
    return out
