"""Many metrics of a run, each logged by itself: which of their points lead to a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptsurgeon.logs import signals, trail
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.points import Points
from ckptsurgeon.logs.source import Subject

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SYSTEM = "system/"
"""How the names begin that MLflow's own monitor logs: their steps count its samples."""


def leading_to(points: Points, marks: Marks, what: Subject) -> NDArray[np.bool_]:
    """Those of the history of a step, where the points are in the order in which they were logged:
    the loss says which; what counts the same steps is compared by its own, and all else goes the
    way of the point of the loss before it."""
    ticks = clock(points)
    others = _counting_alike(points, ticks)
    return trail.beside_clock(points.steps, points.walls, ticks, others, marks, what)


def clock(points: Points) -> NDArray[np.bool_]:
    """The points of what is logged in order of the steps: the loss, else what has most points."""
    import numpy as np

    counts = np.bincount(points.of, minlength=len(points.names))
    known = {
        name: int(count)
        for name, count in zip(points.names, counts, strict=True)
        if not name.startswith(SYSTEM)
    }
    losses = signals.commonest(known, {}).get(signals.LOSS, [])
    name = losses[0] if losses else max(known, key=lambda name: known[name], default="")
    return np.asarray([each == name for each in points.names], bool)[points.of]


def _counting_alike(points: Points, clock: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The points of names that count the steps of the clock: most of them are at its own step, or
    not so late that it is twice as far. Others count epochs or samples, or have no step."""
    import numpy as np

    at = np.flatnonzero(clock)
    if not len(at):
        return np.zeros(len(clock), bool)
    steps = points.steps[at]
    jumps = np.diff(steps)
    each = int(np.median(jumps[jumps > 0])) if (jumps > 0).any() else 1
    near = np.zeros(len(points.names), np.int64)
    for start in range(0, len(clock), trail.BLOCK):
        here = slice(start, min(start + trail.BLOCK, len(clock)))
        before = np.searchsorted(at, np.arange(here.start, here.stop), "right") - 1
        last = steps[np.maximum(before, 0)]
        next = steps[np.minimum(before + 1, len(at) - 1)]
        low, high = np.minimum(last, next) - each, np.maximum(last, next) + each
        own = points.steps[here]
        close = points.of[here][(own * 2 >= low) & (own <= high)]
        near += np.bincount(close, minlength=len(near))
    alike = near * 2 > np.bincount(points.of, minlength=len(near))
    alike &= np.asarray([not name.startswith(SYSTEM) for name in points.names], bool)
    flags: NDArray[np.bool_] = alike[points.of]
    return flags
