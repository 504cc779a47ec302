"""In which order the files of one training were written, and which of them lead to step N.

Restarts, crashes and earlier rollbacks leave overlapping files. A stretch that starts at `lo` was
resumed from an earlier one that had reached `lo` - 1: walking back from the one that holds N gives
each the step up to which it is part of the history.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import command
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.segment import Segment, at, pairs

SKEW = 3600.0
"""Seconds between a file's mtime and its last event's wall time, beyond which one of both clocks
is not to be trusted."""
FLUSH = 600.0
"""Seconds of events that a killed writer may take with it (torch flushes every 120 s)."""
NEAR = 60.0
"""Seconds by which a writer's clock may differ from the file server's without a sign of it."""
OVERLAP = 5.0
"""Seconds that two jobs may overlap before they are two trainings in one directory."""


class Ended(str):
    """A sentence that files go no further than `last` on the way to `point`, where an event follows
    another by `interval`. It holds for the files of one folder, and may not hold for the run: each
    start may log into a folder of its own."""

    last: int
    interval: int
    point: int

    def __new__(cls, text: str, furthest: Segment, point: int) -> Ended:
        self = super().__new__(cls, text)
        self.last, self.interval, self.point = furthest.hi, furthest.interval, point
        return self

    def before(self, step: int) -> str:
        """What is missing where the first event after it is at `step`."""
        return _missing(self.last, step - 1, "in any log folder")


@dataclass
class History:
    """Segments in the order in which they were written, the ones that lead to N with their bounds
    (newest first), and sentences for the plan."""

    order: list[Segment]
    chain: list[tuple[Segment, int]]
    warnings: list[str]


# --- order ---------------------------------------------------------------------------------------


def read(
    stretches: Mapping[int, list[Segment]],
    point: int,
    marks: Marks,
    branch: Collection[str],
    order: str | None,
) -> History:
    """The history that the evidence allows, or a refusal.

    Writers' clocks and the file server's clock (mtimes) are two witnesses. A file whose mtime lies
    before its last event had a writer with a wrong clock. One whose mtime lies after it had either
    that or a copy made of it: both readings are tried, one without contradictions is taken, and
    two that cut differently are refused."""
    per_file = [segments for segments in stretches.values() if segments]
    if order == "name":
        return _walk([s for i in sorted(stretches) for s in stretches[i]], point, marks, branch)
    lags = [_lag(segments[0]) for segments in per_file]
    ahead = [min(lag, 0.0) for lag in lags]
    off = [lag if lag > SKEW else shift for lag, shift in zip(lags, ahead, strict=True)]
    agree = max(lags) - min(lags) < SKEW  # then the file server's clock differs from all writers'
    trusted = {None: [off] if agree else [ahead, off], "wall": [[0.0] * len(off)]}
    options = [(_sorted(per_file, shifts), shifts) for shifts in trusted.get(order, [off])]
    against: list[list[str]] = []
    for whole, shifts in options:
        _shift(per_file, shifts)
        against.append([] if order else [*_overlaps(whole), *([] if agree else _inversions(whole))])
    least = sorted(against, key=len)[0]
    if least:
        raise refused("the order of the files is in doubt", least)
    histories = []
    for (whole, shifts), doubts in zip(options, against, strict=True):
        if not doubts:
            _shift(per_file, shifts)
            histories.append((_walk(whole, point, marks, branch), shifts))
    history, shifts = histories[0]
    if any(_bounds(history) != _bounds(other) for other, _ in histories):
        raise refused(
            "the clocks of the files disagree, and the history differs by which is right",
            [_two_clocks(segments[0], lag) for segments, lag in zip(per_file, lags, strict=True)],
        )
    _shift(per_file, shifts)
    for segments, shift in zip(per_file, shifts, strict=True):
        if abs(shift) > SKEW and not agree:
            history.warnings.append(
                f"{segments[0].name}: the clock of its writer was {abs(shift) / 3600:.1f} h "
                f"{'behind' if shift > 0 else 'ahead'}; it is ordered by its file's time"
            )
    return history


def _lag(segment: Segment) -> float:
    index = segment.events.index
    return index.mtime_ns / 1e9 - index.walls[-1]


def _shift(per_file: Sequence[list[Segment]], shifts: Sequence[float]) -> None:
    for segments, shift in zip(per_file, shifts, strict=True):
        for segment in segments:
            segment.shift = shift


def _sorted(per_file: Sequence[list[Segment]], shifts: Sequence[float]) -> list[Segment]:
    """All segments by time; those of one file stay in its order."""
    _shift(per_file, shifts)
    return sorted((s for segments in per_file for s in segments), key=lambda s: s.first + s.shift)


def _overlaps(order: Sequence[Segment]) -> list[str]:
    overlaps = []
    for a, b in pairwise(order):
        seconds = a.last + a.shift - b.first - b.shift
        if seconds > OVERLAP:
            overlaps.append(
                f"two trainings at the same time: {a.name} ends {seconds:.0f} s after "
                f"{b.name} begins"
            )
    return overlaps


def _inversions(order: Sequence[Segment]) -> list[str]:
    """What speaks against this order: a history begins with its lowest step."""
    lowest = min(order, key=lambda s: s.lo)
    if order[0].lo == lowest.lo:
        return []
    return [
        f"{order[0].name} starts at {order[0].lo}, before {lowest.name}, "
        f"which starts at {lowest.lo}"
    ]


def _bounds(history: History) -> dict[tuple[str, int], int]:
    return {(s.name, s.start): min(bound, s.hi) for s, bound in history.chain}


# --- branches ------------------------------------------------------------------------------------


def _walk(order: list[Segment], point: int, marks: Marks, branch: Collection[str]) -> History:
    """From the segment that holds `point` back to the first one."""
    history = History(order, [], [])
    earlier = _Earlier(order, branch)
    head = _head(earlier, point, marks, history)
    bound = point
    while head is not None:
        history.chain.append((head, bound))
        bound = head.lo - 1
        what = f"{head.name} (from {head.lo})"
        head = _holder(earlier, earlier.place(head), bound, head.interval, what, history)
    if not history.chain and order:
        history.warnings.append(
            f"{order[0].name} has only events after step {point}: all of it is cut"
        )
    return history


class _Earlier:
    """The segments in their order, and which of them are before one. Thousands of restarts are
    walked back in as many looks, not in the square of them."""

    def __init__(self, order: Sequence[Segment], branch: Collection[str]) -> None:
        self.order = order
        self.places = {id(segment): i for i, segment in enumerate(order)}
        self.furthest = list(accumulate((segment.hi for segment in order), max))
        self.named = [segment for segment in order if segment.name in branch] if branch else []

    def place(self, segment: Segment) -> int:
        return self.places[id(segment)]

    def below(self, end: int, point: int, reached: int) -> Iterator[Segment]:
        """Backwards, those before place `end` that begin up to `point`, as long as one of them may
        have got to `reached`, but always the newest."""
        newest = True
        for i in range(end - 1, -1, -1):
            if not newest and self.furthest[i] < reached:
                return
            if self.order[i].lo <= point:
                yield self.order[i]
                newest = False


def _head(earlier: _Earlier, point: int, marks: Marks, history: History) -> Segment | None:
    """The segment whose pass through `point` is the checkpoint's."""
    order = earlier.order
    holders = [s for s in order if s.lo <= point <= s.hi]
    named = [s for s in earlier.named if s.lo <= point <= s.hi]
    if named:
        _check_counters(named[-1], point, marks)
        return named[-1]
    chosen = holders
    clock = order[0].clock
    for word, value in marks.counters().items():
        if word != clock and len(chosen) > 1:
            logged = [at(s, point, word) for s in chosen]
            same = [s for s, x in zip(chosen, logged, strict=True) if x in (None, int(value))]
            chosen = same or chosen
    if marks.saved_at is not None:
        chosen, reached = _by_time(earlier, chosen, point, marks.saved_at)
        if reached is not None:
            if reached.hi + reached.interval <= point:
                gap = _gap(reached, point, f"after {reached.name}")
                history.warnings.append(Ended(gap, reached, point))
            return reached
    elif chosen:
        later = order[earlier.place(chosen[-1]) + 1 :]
        chosen = chosen + [s for s in later if s.lo <= point and _could_reach(s, point)]
        if len(chosen) > 1:
            raise refused(f"{len(chosen)} branches may hold step {point}", map(_branch, chosen))
    if chosen:
        _check_counters(chosen[-1], point, marks)
        return chosen[-1]
    if not any(s.lo <= point for s in order):
        return None
    return _holder(earlier, len(order), point, 1, f"step {point}", history)


def _by_time(
    earlier: _Earlier, chosen: list[Segment], point: int, saved_at: float
) -> tuple[list[Segment], Segment | None]:
    """The candidates whose event `point` precedes the save; and, if there is one, the segment that
    ran when the checkpoint was saved but lost its events on the way to `point`."""
    late = {id(s): s.reached(point) + s.shift - saved_at for s in chosen}
    before = [s for s in chosen if late[id(s)] <= OVERLAP]
    perhaps = [s for s in chosen if OVERLAP < late[id(s)] <= (FLUSH if s.shift else NEAR)]
    place = earlier.place
    if before and perhaps and place(perhaps[-1]) > place(before[-1]):
        raise refused(
            f"step {point} was saved at {_day(saved_at)}, which two branches fit",
            map(_branch, (before[-1], perhaps[-1])),
        )
    started = [s for s in earlier.order if s.first + s.shift <= saved_at]
    last = started[-1] if started else None
    if (
        last is not None
        and (not before or place(last) > place(before[-1]))
        and last.lo <= point
        and last.hi < point
        and saved_at - last.last - last.shift < FLUSH
    ):
        return before, last
    return before or perhaps or chosen, None


def _could_reach(segment: Segment, point: int) -> bool:
    """Whether it may have gone on to `point` in the time whose events a killed job loses."""
    pace = (segment.last - segment.first) / max(1, segment.hi - segment.lo)
    return pace * (point - segment.hi) <= FLUSH


def _check_counters(head: Segment, point: int, marks: Marks) -> None:
    """The log and the checkpoint must count alike at N, or this is not its log."""
    steps = head.steps()
    for word, value in marks.counters().items():
        if word == head.clock:
            continue
        for series, rows, own in pairs(head, word):
            k = min(len(rows), len(own))
            x, clock = steps[rows[:k]], steps[own[:k]]
            stay, cut = x[clock <= point], x[clock > point]
            # The writer drops the fraction of an x, so in a small run N + 1 may be written as N is.
            floor = value if isinstance(value, int) else int(value) - 1
            if (len(stay) and int(stay.max()) > value) or (len(cut) and int(cut.min()) <= floor):
                tag = ", ".join(head.events.index.names[series])
                near = int(stay.max()) if len(stay) else int(cut.min())
                raise SurgeryError(
                    f"{head.events.index.path}: at step {point} the checkpoint counts "
                    f"{value:.0f} {word}, the log {near} (tag {tag})",
                    next=(
                        command(
                            "rollback", "--to", "STEP", "--no-truncate", why="leave the logs alone"
                        ),
                        command(
                            "truncate-tb-events",
                            "--tb",
                            "DIR",
                            "--after",
                            "N",
                            why="trust only the log",
                        ),
                    ),
                )


def _holder(
    earlier: _Earlier,
    end: int,
    point: int,
    interval: int,
    what: str,
    history: History,
) -> Segment | None:
    """The segment from which one was resumed that goes on after `point`, of those before place
    `end`: the newest that was at `point` before. None: the history starts there."""
    reached = point + 1 - interval
    newest = next(earlier.below(end, point, reached), None)
    if newest is None:
        return None
    named = [s for s in earlier.named if earlier.place(s) < end and s.lo <= point]
    if newest.hi < reached and any(s is newest for s in named):
        return newest
    if holding := [s for s in named if s.hi >= reached]:
        return holding[-1]
    if newest.hi >= reached:
        return newest
    holder = next((s for s in earlier.below(end, point, reached) if s.hi >= reached), None)
    furthest = holder or _furthest(earlier, end, point, newest)
    if _could_reach(newest, point) and furthest is not newest and furthest.hi > newest.hi:
        raise refused(
            f"{what} was resumed at {point}, and it is not known from which file",
            map(_branch, (furthest, newest)),
        )
    if holder is None:
        last = earlier.furthest[-1]
        ends = f"the logs end at step {last}: nothing in them is after step {point}"
        history.warnings.append(
            Ended(ends, furthest, point)
            if last < point
            else _gap(furthest, point, f"before {what}")
        )
    return furthest


def _furthest(earlier: _Earlier, end: int, point: int, newest: Segment) -> Segment:
    """Of those before place `end` that begin up to `point`, the newest of those that got
    furthest."""
    furthest = newest
    while further := next(
        (s for s in earlier.below(end, point, furthest.hi + 1) if s.hi > furthest.hi), None
    ):
        furthest = further
    return furthest


# --- words ---------------------------------------------------------------------------------------


def _day(moment: float) -> str:
    when = datetime.datetime.fromtimestamp(moment, datetime.timezone.utc)
    return when.strftime("%Y-%m-%d %H:%M UTC")


def _gap(segment: Segment, point: int, where: str) -> str:
    """What is missing, and what may be why: the logs do not tell it. A file that was cut looks like
    one whose writer was killed."""
    return _missing(segment.hi, point, where)


def _missing(last: int, point: int, where: str) -> str:
    return (
        f"no events from {last + 1} to {point} {where}: "
        "iterations that were skipped or not logged, or events that a killed job lost"
    )


def _branch(segment: Segment) -> str:
    return (
        f"{segment.name}: {segment.lo} to {segment.hi}, begun {_day(segment.first + segment.shift)}"
    )


def _two_clocks(segment: Segment, lag: float) -> str:
    return (
        f"{segment.name}: last event {_day(segment.events.index.walls[-1])}, "
        f"file changed {_day(segment.events.index.walls[-1] + lag)}"
    )


def refused(what: str, evidence: Iterable[str]) -> SurgeryError:
    return SurgeryError(
        f"the lineage of the logs can't be proven: {what}" + "".join(f"\n  {x}" for x in evidence),
        next=(
            "--branch FILE     name a file that is part of the history (repeatable)",
            "--order wall      trust the times of the events (or: mtime, name)",
        ),
    )
