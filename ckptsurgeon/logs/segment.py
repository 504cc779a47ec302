"""A stretch of one event file in which training went only forwards, and what of it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptsurgeon.logs.axis import LOOSE, POSITION, TRAINING, axis, partner
from ckptsurgeon.logs.tensorboard.event_file import DROPPED, Index
from ckptsurgeon.logs.tensorboard.message import FILE_VERSION
from ckptsurgeon.plans.frozen import frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Ints: TypeAlias = "NDArray[np.int64]"
Flags: TypeAlias = "NDArray[np.bool_]"

Series = tuple[str, ...]
"""What one kind of event logs: a tag, or the tags of an event with several values."""

NEVER = -(1 << 63)


@frozen
class Events:
    """The index of one file as arrays, with the axis of each of its series."""

    index: Index
    steps: Ints
    walls: NDArray[np.float64]
    tags: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    axes: tuple[str, ...]
    counts: tuple[int, ...]


@dataclass
class Segment:
    """Records [start, stop) of one file. `lo` and `hi` are the first and last value of the clock
    in it, `first` and `last` the wall times of its first and last event on a training axis;
    `firsts` is the lowest x of each series."""

    events: Events
    start: int
    stop: int
    clock: str
    reference: int
    lo: int
    hi: int
    interval: int
    first: float
    last: float
    firsts: dict[Series, int]
    strays: set[int] = field(default_factory=set)
    shift: float = 0.0

    @property
    def name(self) -> str:
        return self.events.index.path.name

    def rows(self, series: int) -> Ints:
        """The records of a series, as offsets from `start`."""
        import numpy as np

        return np.flatnonzero(self.events.tags[self.start : self.stop] == series)

    def steps(self) -> Ints:
        return self.events.steps[self.start : self.stop]

    def reached(self, point: int) -> float:
        """The wall time of the last event on the clock up to `point`, or of the first one."""
        import numpy as np

        axes = self.events.axes
        clocks = [i for i, word in enumerate(axes) if word == self.clock and i not in self.strays]
        rows = np.flatnonzero(np.isin(self.events.tags[self.start : self.stop], clocks))
        up_to = rows[self.steps()[rows] <= point]
        return float(self.events.walls[self.start + int(up_to[-1] if len(up_to) else rows[0])])


def arrays(index: Index, overrides: Mapping[str, str]) -> Events:
    """The arrays of an index, without a copy."""
    import numpy as np

    def series_axis(group: Series) -> str:
        axes = [axis(tag, overrides) for tag in group]
        for word in (*TRAINING, LOOSE):
            if word in axes:
                return word
        return POSITION

    def view(values: Any, kind: Any) -> Any:
        return np.frombuffer(values, kind) if len(values) else np.empty(0, kind)

    tags = view(index.tags, np.int32)
    return Events(
        index,
        steps=view(index.steps, np.int64),
        walls=view(index.walls, np.float64),
        tags=tags,
        kinds=view(index.kinds, np.uint8),
        axes=tuple(series_axis(group) for group in index.names),
        counts=tuple(np.bincount(tags[tags >= 0], minlength=len(index.names)).tolist()),
    )


# --- finding them --------------------------------------------------------------------------------


def segments(events: Events, clock: str, preferred: Sequence[Series]) -> list[Segment]:
    """The segments of a file, in file order; none when nothing in it is on the clock.

    A file is split where its reference series goes back: that is the first of `preferred` that the
    file has. Equal steps do not split: a last evaluation may log a step twice."""
    import numpy as np

    names = events.index.names
    reference = next((names.index(s) for s in preferred if s in names), None)
    if reference is None:
        return []
    rows = np.flatnonzero(events.tags == reference)
    back = np.flatnonzero(np.diff(events.steps[rows]) < 0)
    borders = [0]
    for i in back.tolist():
        borders.append(_border(events, int(rows[i]), int(rows[i + 1])))
    borders.append(len(events.steps))
    stretches = [_segment(events, a, b, clock, reference) for a, b in pairwise(borders)]
    return [segment for segment in stretches if segment is not None]


def _border(events: Events, before: int, after: int) -> int:
    """The first record of the new stretch, between two records of the reference series: the first
    one whose own series goes back, or that opens a writer (a file_version record)."""
    last: dict[int, int] = {}
    look = max(0, before - 4096)
    for i in range(look, before + 1):
        last[int(events.tags[i])] = int(events.steps[i])
    for i in range(before + 1, after):
        tag = int(events.tags[i])
        if events.kinds[i] == FILE_VERSION:
            return i
        if tag >= 0 and events.axes[tag] in TRAINING:
            if int(events.steps[i]) < last.get(tag, NEVER):
                return i
            last[tag] = int(events.steps[i])
    return after


def _segment(events: Events, start: int, stop: int, clock: str, reference: int) -> Segment | None:
    import numpy as np

    steps, tags = events.steps[start:stop], events.tags[start:stop]
    rows = np.flatnonzero(tags == reference)
    if not len(rows):
        return None
    base = steps[rows]
    jumps = np.diff(base)
    jumps = jumps[jumps > 0]
    interval = int(np.median(jumps)) if len(jumps) else 1
    lo, hi = int(base[0]), int(base[-1])
    firsts: dict[Series, int] = {}
    strays: set[int] = set()
    ends = [int(rows[0]), int(rows[-1])]
    for series, word in enumerate(events.axes):
        if word not in TRAINING:
            continue
        here = rows if series == reference else np.flatnonzero(tags == series)
        if not len(here):
            continue
        x = steps[here]
        monotone = bool((np.diff(x) >= 0).all())
        if not monotone or (word == clock and not _in_step(x, here, base, rows, interval)):
            strays.add(series)
            continue
        ends += (int(here[0]), int(here[-1]))
        firsts[events.index.names[series]] = int(x[0])
        if word == clock and 2 * len(here) >= len(rows):
            lo, hi = min(lo, int(x[0])), max(hi, int(x[-1]))
    walls = events.walls[start:stop]
    return Segment(
        events,
        start=start,
        stop=stop,
        clock=clock,
        reference=reference,
        lo=lo,
        hi=hi,
        interval=interval,
        first=float(walls[min(ends)]),
        last=float(walls[max(ends)]),
        firsts=firsts,
        strays=strays,
    )


def _in_step(x: Ints, here: Ints, base: Ints, rows: Ints, interval: int) -> bool:
    """Whether a series counts the same as the reference series: each x lies between its neighbours
    in the file, give or take an interval. A tag over epochs does not."""
    import numpy as np

    after = np.searchsorted(rows, here)
    lower = base[np.maximum(after - 1, 0)] - interval
    upper = base[np.minimum(after, len(rows) - 1)] + interval
    inside = ((after == 0) | (x >= lower)) & ((after == len(rows)) | (x <= upper))
    return bool(inside.mean() > 0.9)


def at(segment: Segment, clock: int, word: str) -> int | None:
    """The x on axis `word` that the segment logged at exactly this value of the clock."""
    import numpy as np

    steps = segment.steps()
    for _, rows, own in pairs(segment, word):
        k = int(np.searchsorted(steps[own], clock, "right"))
        if 0 < k <= len(rows) and int(steps[own[k - 1]]) == clock:
            return int(steps[rows[k - 1]])
    return None


def pairs(segment: Segment, only: str | None = None) -> list[tuple[int, Ints, Ints]]:
    """(series off the clock, its records, the records of its partner on the clock), where the k-th
    of one was logged with the k-th of the other: the counts differ by one at most and the records
    alternate. Of all axes, or `only` of one."""
    import numpy as np

    events = segment.events
    names = events.index.names
    known = {names[i]: i for i, word in enumerate(events.axes) if word == segment.clock}
    out = []
    for series, word in enumerate(events.axes):
        if word == segment.clock or word not in TRAINING or (only and word != only):
            continue
        own = known.get(tuple(partner(tag) or "" for tag in names[series]))
        if own is None or own in segment.strays:
            continue
        a, b = segment.rows(series), segment.rows(own)
        k = min(len(a), len(b))
        if not k or abs(len(a) - len(b)) > 1:
            continue
        if k > 1 and not (np.all(a[1:k] > b[: k - 1]) and np.all(b[1:k] > a[: k - 1])):
            continue
        out.append((series, a, b))
    return out


# --- cutting them --------------------------------------------------------------------------------


def keep(
    segment: Segment, bound: int, caps: Mapping[Series, int], marks: Mapping[str, float]
) -> tuple[Flags, list[str]]:
    """Which records of the segment belong to clock values up to `bound`, and the tags that could be
    placed by their position only.

    `caps` are the lowest clock values of each series in later segments: from there on it was logged
    again. `marks` are the counters of the checkpoint, when `bound` is its own step."""
    import numpy as np

    events, steps = segment.events, segment.steps()
    tags = events.tags[segment.start : segment.stop]
    names = events.index.names
    limits = np.full(len(names) + 1, NEVER, np.int64)  # the last one is for tag -1
    tied = np.zeros(len(names) + 1, bool)
    for series, word in enumerate(events.axes):
        if series in segment.strays:
            continue
        if word == segment.clock:
            cap = caps.get(names[series])
            limits[series] = bound if cap is None else min(bound, cap - 1)
            tied[series] = True
        elif word == LOOSE:
            limits[series] = bound
    flags: Flags = steps <= limits[tags]
    guessed = _off_clock(segment, flags, bound, marks)
    placed = {i for i, word in enumerate(events.axes) if word == POSITION} | segment.strays
    where = np.flatnonzero((tags < 0) | np.isin(tags, list(placed)))
    if len(where):
        anchors = np.flatnonzero(tied[tags])
        before = np.searchsorted(anchors, where) - 1
        flags[where] = np.where(before >= 0, flags[anchors[np.maximum(before, 0)]], True)
    flags &= events.kinds[segment.start : segment.stop] != DROPPED
    guessed += [", ".join(names[i]) for i in sorted(segment.strays)]
    return flags, guessed


def _off_clock(segment: Segment, flags: Flags, bound: int, marks: Mapping[str, float]) -> list[str]:
    """Set `flags` for the series on other axes; the tags whose position had to decide."""
    events, steps = segment.events, segment.steps()
    paired: set[int] = set()
    learnt: dict[str, list[tuple[Ints, Ints]]] = {}
    for series, rows, own in pairs(segment):
        count = int(flags[own].sum())
        k = min(len(rows), len(own))
        flags[rows[:count]] = True
        if len(rows) > k and count == k:
            flags[rows[k:]] = bound > segment.hi
        paired.add(series)
        if series not in segment.strays:
            learnt.setdefault(events.axes[series], []).append((steps[rows[:k]], steps[own[:k]]))
    guessed = []
    for series, word in enumerate(events.axes):
        if word not in TRAINING or word == segment.clock or series in paired | segment.strays:
            continue
        rows = segment.rows(series)
        if len(rows):
            open_rows = _by_value(rows, steps, flags, bound, learnt.get(word, []), marks.get(word))
            if len(open_rows):
                _by_position(segment, flags, open_rows)
                guessed.append(", ".join(events.index.names[series]))
    return guessed


def _by_value(
    rows: Ints,
    steps: Ints,
    flags: Flags,
    bound: int,
    learnt: list[tuple[Ints, Ints]],
    mark: float | None,
) -> Ints:
    """Decide by x, from what paired series say about this axis or from the checkpoint's counter.
    Returns the records that lie in the dark between both sides."""
    import numpy as np

    x = steps[rows]
    known = [pair for pair in learnt if np.isin(x, pair[0]).mean() >= 0.5]
    if not known and learnt:
        return rows  # the same axis by name, but other values: another counter
    if not known:
        if mark is None:
            return rows
        flags[rows] = x <= mark
        return rows[:0]
    below = max((int(a[b <= bound].max()) for a, b in known if (b <= bound).any()), default=NEVER)
    above = min((int(a[b > bound].min()) for a, b in known if (b > bound).any()), default=-NEVER)
    if any((b == bound).any() for _, b in known):
        above = below + 1  # the bound itself was logged: whatever comes after it is past it
    if mark is not None and below <= mark < above:
        flags[rows] = x <= mark
        return rows[:0]
    flags[rows] = x <= below
    return rows[(x > below) & (x < above)]


def _by_position(segment: Segment, flags: Flags, rows: Ints) -> None:
    """Each record goes the way of the event on the clock that is nearer in time."""
    import numpy as np

    tags = segment.events.tags[segment.start : segment.stop]
    walls = segment.events.walls[segment.start : segment.stop]
    anchors = np.flatnonzero(tags == segment.reference)
    after = np.searchsorted(anchors, rows)
    previous = anchors[np.maximum(after - 1, 0)]
    following = anchors[np.minimum(after, len(anchors) - 1)]
    nearer = walls[rows] - walls[previous] <= walls[following] - walls[rows]
    nearer = (nearer & (after > 0)) | (after == len(anchors))
    flags[rows] = np.where(nearer, flags[previous], flags[following])
