"""Which points of a log lead to step N, where they stand in the order in which they were written.

A log that one writer appends to needs no more: training went back where the step does. What several
event files say of one training, `lineage` puts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.logs.history import NEAR
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.source import Subject
from ckptsurgeon.plans.frozen import frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NONE = -1
"""The step of a record that names none: it goes the way of the one before it."""

BLOCK = 1 << 20
"""Points that are compared at once: a long log has millions."""


@frozen
class _Stretch:
    """Points [start, stop), over which the step never goes back, from `lo` to `hi`."""

    start: int
    stop: int
    lo: int
    hi: int
    interval: int


@frozen
class Told:
    """Of each point which of the `losses` it has."""

    of: NDArray[np.int64]
    losses: Sequence[frozenset[str]]

    @classmethod
    def joined(cls, parts: Sequence[Told]) -> Told:
        """Of the points of several files, one after the other."""
        import numpy as np

        known: dict[frozenset[str], int] = {}
        own = [[known.setdefault(each, len(known)) for each in part.losses] for part in parts]
        of = [np.array(new, np.int64)[part.of] for new, part in zip(own, parts, strict=True)]
        return cls(np.concatenate(of), [*known])


def losses(names: Iterable[str]) -> frozenset[str]:
    """Those of the names that a loss has, in training or not."""
    return frozenset(name for name in names if "loss" in name.lower())


def leading_to(
    steps: NDArray[np.int64],
    walls: NDArray[np.float64],
    marks: Marks,
    what: Subject,
    told: Told | None = None,
) -> NDArray[np.bool_]:
    """The points of the history up to N, a flag each; `walls` are their times, NaN where the log
    has none, and `what` is the log.

    The newest stretch that holds N is the one that led there, of those that did before the
    checkpoint was saved, where both times are known. Who evaluates at each start logs the step
    again that was loaded: by what is `told`, its loss in training stays. Raises SurgeryError where
    a later one may have got to N as well, after its last point, and no time tells them apart."""
    import numpy as np

    known = np.flatnonzero(steps != NONE)
    flags = np.zeros(len(steps), bool)
    if not len(known):
        return ~flags
    own = steps[known]
    told = None if told is None else Told(told.of[known], told.losses)
    flags[known] = own <= _bounds(own, walls[known], marks, what, told)
    before = np.searchsorted(known, np.arange(len(steps)), "right") - 1
    none = steps == NONE
    flags[none] = np.where(before[none] < 0, True, flags[known[np.maximum(before[none], 0)]])
    return flags


def beside_clock(
    steps: NDArray[np.int64],
    walls: NDArray[np.float64],
    clock: NDArray[np.bool_],
    others: NDArray[np.bool_],
    marks: Marks,
    what: Subject,
) -> NDArray[np.bool_]:
    """The same, where only the points with the flag `clock` are known to be logged in order of
    their steps. One of `others` counts the same steps and may come late: it is of the history as
    far as its step is in that of the clock there. All else goes the way of the clock before it."""
    import numpy as np

    at = np.flatnonzero(clock)
    if not len(at):
        return np.ones(len(steps), bool)
    times = steps[at]
    bounds = _bounds(times, walls[at], marks, what)
    flags = np.empty(len(steps), bool)
    for start in range(0, len(steps), BLOCK):
        here = slice(start, min(start + BLOCK, len(steps)))
        before = np.searchsorted(at, np.arange(here.start, here.stop), "right") - 1
        bound, time = bounds[np.maximum(before, 0)], times[np.maximum(before, 0)]
        own = clock[here] | others[here]
        flags[here] = np.where(own, steps[here] <= bound, (before < 0) | (time <= bound))
    return flags


def _bounds(
    steps: NDArray[np.int64],
    walls: NDArray[np.float64],
    marks: Marks,
    what: Subject,
    told: Told | None = None,
) -> NDArray[np.int64]:
    """Of each point, the last step that counts in its stretch, -1 where none does."""
    import numpy as np

    bounds = np.full(len(steps), -1, np.int64)
    after: _Stretch | None = None
    for stretch, bound in _chain(_stretches(steps), steps, walls, marks, what):
        bounds[stretch.start : stretch.stop] = bound
        if told is not None and after is not None:
            for i in _alone(stretch, after, steps, told):
                bounds[i] = after.lo
        after = stretch
    return bounds


def _alone(
    before: _Stretch, after: _Stretch, steps: NDArray[np.int64], told: Told
) -> Iterator[int]:
    """The points at the step where `after` begins whose losses it does not have there."""
    import numpy as np

    def there(stretch: _Stretch) -> list[int]:
        here = steps[stretch.start : stretch.stop]
        first, end = np.searchsorted(here, after.lo), np.searchsorted(here, after.lo, "right")
        return [*range(stretch.start + int(first), stretch.start + int(end))]

    again = {name for i in there(after) for name in told.losses[told.of[i]]}
    for i in there(before):
        losses = told.losses[told.of[i]]
        if losses and again.isdisjoint(losses):
            yield i


def _stretches(steps: NDArray[np.int64]) -> list[_Stretch]:
    import numpy as np

    borders = [0, *(np.flatnonzero(np.diff(steps) < 0) + 1).tolist(), len(steps)]
    out = []
    for start, stop in pairwise(borders):
        jumps = np.diff(steps[start:stop])
        jumps = jumps[jumps > 0]
        interval = int(np.median(jumps)) if len(jumps) else 1
        out.append(_Stretch(start, stop, int(steps[start]), int(steps[stop - 1]), interval))
    return out


def _chain(
    stretches: Sequence[_Stretch],
    steps: NDArray[np.int64],
    walls: NDArray[np.float64],
    marks: Marks,
    what: Subject,
) -> list[tuple[_Stretch, int]]:
    """The stretch that got to N and those that it was resumed from, newest first, each with the
    last step that counts of it."""
    chain = []
    bound = marks.iteration
    head = _head(stretches, steps, walls, marks, what)
    while head is not None:
        chain.append((head, bound))
        bound = head.lo - 1
        head = _before(stretches[: stretches.index(head)], bound)
    return chain


def _head(
    stretches: Sequence[_Stretch],
    steps: NDArray[np.int64],
    walls: NDArray[np.float64],
    marks: Marks,
    what: Subject,
) -> _Stretch | None:
    import numpy as np

    point, saved_at = marks.iteration, marks.saved_at

    def late(stretch: _Stretch) -> bool:
        """Whether it got to N after the checkpoint was there."""
        here = slice(stretch.start, stretch.stop)
        at = int(np.searchsorted(steps[here], point, "right")) - 1
        wall = float(walls[here][at])
        return saved_at is not None and wall > saved_at + NEAR

    holders = [s for s in stretches if s.lo <= point <= s.hi]
    holders = [s for s in holders if not late(s)] or holders
    if not holders:
        return _before(stretches, point)
    head = holders[-1]
    unsure = [
        s
        for s in stretches[stretches.index(head) + 1 :]
        if s.lo <= point and s.hi < point < s.hi + s.interval and not late(s)
    ]
    if unsure and saved_at is not None and not np.isnan(walls[unsure[-1].stop - 1]):
        return unsure[-1]
    if unsure:
        raise SurgeryError(
            f"{what}: two branches may hold step {point}: one goes from {head.lo} to {head.hi}, a "
            f"later one from {unsure[-1].lo} to {unsure[-1].hi}, and nothing says when",
            next=what.instead,
        )
    return head


def _before(stretches: Sequence[_Stretch], point: int) -> _Stretch | None:
    """The newest that got to `point`, give or take a logged point; else the one that got furthest,
    as a killed job loses its last points."""
    begun = [s for s in stretches if s.lo <= point]
    reached = [s for s in begun if s.hi + s.interval > point]
    if reached:
        return reached[-1]
    return max(reversed(begun), key=lambda s: s.hi, default=None)
