"""Whether a log calls the first update 0 or 1, as far as its points and the saves prove it.

A log that calls it 0 has at the number of a saved step the update after it. Many that call it 1
have a point 0 as well, of an evaluation before the first update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckptsurgeon.plans.frozen import frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WHOLE = 4.0
"""Seconds from one update to the next, below which times in whole seconds prove nothing."""


@frozen
class Numbers:
    """The numbers of the points of a log that count, in the order in which they were written, and
    their times in seconds since 1970, NaN where the log has none."""

    steps: NDArray[np.int64]
    walls: NDArray[np.float64]

    @property
    def each(self) -> int:
        """How far it is from one number to the next."""
        import numpy as np

        jumps = np.diff(self.steps)
        jumps = jumps[jumps > 0]
        return int(np.median(jumps)) if len(jumps) else 1

    def begins(self) -> list[int]:
        """The first number of each stretch in which they never go back."""
        import numpy as np

        back = np.flatnonzero(np.diff(self.steps) < 0) + 1
        return [int(self.steps[i]) for i in (0, *back.tolist())]


def joined(logs: Sequence[Numbers]) -> Numbers:
    """The numbers of logs that follow one another, in the order of their first times, or as they
    are given."""
    import numpy as np

    inorder = [log for log in logs if len(log.steps)]
    if all(np.isfinite(log.walls).all() for log in inorder):
        inorder.sort(key=lambda log: float(log.walls[0]))
    if not inorder:
        return Numbers(np.empty(0, np.int64), np.empty(0))
    return Numbers(
        np.concatenate([log.steps for log in inorder]),
        np.concatenate([log.walls for log in inorder]),
    )


def first_update(points: Numbers, saves: Mapping[int, float]) -> int | None:
    """0 or 1, or None where it may be either. `saves` are the numbers of the saved steps, each with
    the time at which it was saved.

    A start that goes on after a saved step proves 1, and so does a point with the number of a step
    that was there when this was saved. For 0 there are two signs: the log begins with it, and its
    times or its end say the same. That a later start begins at the number of a saved step proves
    nothing: many evaluate at each start."""
    if not len(points.steps) or not saves:
        return 1
    every, begins, from_saves = points.each == 1, points.begins(), {0, *saves}
    after = [start for start in begins if start - 1 in from_saves and every]
    timed = _by_times(points, saves)
    if timed == 1 or any(start not in from_saves for start in after):
        return 1
    at = {start for start in begins if start == 0 or (every and start in saves)}
    if not at - {*after}:
        return 1 if timed is None or begins[0] <= points.each else None
    ended = every and int(points.steps.max()) == max(saves) - 1
    return 0 if 0 in at and (timed == 0 or ended) else None


def _by_times(points: Numbers, saves: Mapping[int, float]) -> int | None:
    """What the points around each save prove, 1 before 0. Times of a copied run prove nothing: no
    point, or many of them, lie behind each save."""
    import numpy as np

    steps, walls, each = points.steps, points.walls, points.each
    ahead = np.diff(steps) > 0
    if not np.isfinite(walls).all() or not ahead.any() or not (np.diff(walls) >= 0).all():
        return None
    pace = float(np.median(np.diff(walls)[ahead] / np.diff(steps)[ahead]))
    if pace < WHOLE and (walls == np.floor(walls)).all():
        return None
    found = set()
    for number, saved_at in saves.items():
        before = int(np.searchsorted(walls, saved_at, "right")) - 1
        if before < 0 or before + 1 == len(steps):
            continue
        if steps[before] == number:
            found.add(1)
        later = walls[before + 1] - saved_at
        if number - each <= steps[before] < number == steps[before + 1] and later >= pace / 2:
            found.add(0)
    return max(found, default=None)
