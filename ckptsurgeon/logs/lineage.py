"""Which events of a log directory belong to iterations up to N: the lineage of step N.

Files that log common tags are one training; the history of each training (history.py) says which
stretches of its files lead to N and how far each counts, and segment.py cuts them there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import command
from ckptsurgeon.logs.axis import ITERATION, LOOSE, SAMPLES, TRAINING
from ckptsurgeon.logs.axis import axis as axis_of
from ckptsurgeon.logs.history import History, read
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.origin import Numbers
from ckptsurgeon.logs.segment import (
    Events,
    Flags,
    Segment,
    Series,
    arrays,
    keep,
    segments,
)
from ckptsurgeon.logs.tensorboard.event_file import DROPPED, Index
from ckptsurgeon.logs.tensorboard.message import FILE_VERSION, SUMMARY

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass
class Training:
    """Files of one training, in the order in which they were written, with how many seconds the
    clock of each writer was behind. `lost` are the first and last step that a file loses."""

    order: list[int]
    behind: dict[int, float]
    lost: dict[int, tuple[int, int]]


@dataclass
class Lineage:
    """`flags[i][k]` says whether record k of file i belongs to the history up to N; `warnings` are
    sentences for the plan."""

    flags: list[Flags]
    trainings: list[Training] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def trace(
    files: Sequence[Index],
    marks: Marks,
    *,
    branch: Collection[str] = (),
    order: str | None = None,
    axes: Mapping[str, str] | None = None,
) -> Lineage:
    """The lineage of step N through the files of one TensorBoard run.

    `branch` names files that are part of it, for when several could be; `order` says what to trust
    for the order of the files (`wall`, `mtime` or `name`); `axes` gives the axis of tags that their
    name does not tell. Raises SurgeryError when the lineage can't be proven, with the candidates.
    """
    import numpy as np

    known = [arrays(index, axes or {}) for index in files]
    result = Lineage([np.ones(len(index), bool) for index in files])
    for group in _groups(known):
        members = [known[i] for i in group]
        clock, preferred = _clock(members)
        if clock is None:
            for i in group:
                result.flags[i] = _loose(known[i], marks.iteration)
            continue
        point = marks.counters().get(clock)
        if clock == ITERATION and marks.clocks:
            if preferred[0] not in marks.clocks:
                continue  # nobody knows what it counts, and all of it stays
            point = marks.clocks[preferred[0]]
        if point is None:
            raise SurgeryError(
                f"{members[0].index.path}: its tags count {clock}, not iterations, "
                f"and the {clock} at step {marks.iteration} are not known",
                next=command(
                    "truncate-tb-events", "--after", marks.iteration, f"--{clock}", "COUNT"
                ),
            )
        stretches: dict[int, list[Segment]] = {
            i: segments(known[i], clock, preferred) for i in group
        }
        history = read(stretches, int(point), marks, branch, order)
        result.warnings += history.warnings
        result.trainings.append(_training(group, known, history))
        for i in group:
            result.flags[i][:] = False
        _cut(result, known, history, marks if clock == ITERATION else None)
        for i in group:
            if not stretches[i]:
                _without_clock(known[i], clock, result)
    for flags, index in zip(result.flags, files, strict=True):
        if flags.any() and index.kinds[0] == FILE_VERSION:
            flags[0] = True
    return result


def clocks(files: Sequence[Index]) -> dict[Series, Numbers]:
    """The series that each training in the files is cut by, where it counts iterations or something
    that is no other axis, with its numbers in the order in which the files were begun."""
    import numpy as np

    known = sorted((arrays(index, {}) for index in files if len(index)), key=lambda e: e.walls[0])
    found = {}
    for group in _groups(known):
        members = [known[i] for i in group]
        clock, preferred = _clock(members)
        if clock == ITERATION:
            rows = [_rows_of(events, preferred[0]) for events in members]
            steps, walls = (np.concatenate(columns) for columns in zip(*rows, strict=True))
            found[preferred[0]] = Numbers(steps, walls)
    return found


def _rows_of(events: Events, series: Series) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    import numpy as np

    names = events.index.names
    rows = np.flatnonzero(events.tags == (names.index(series) if series in names else -2))
    return events.steps[rows], events.walls[rows]


def newest(files: Sequence[Index], tag: str, per_step: int = 1) -> Marks:
    """The last step that `tag` was logged at, and when: where the history ends as it stands. A tag
    over samples has `per_step` of them in a step. Raises ValueError where no file has it."""
    import numpy as np

    ends = []
    for index in files:
        numbers = [i for i, group in enumerate(index.names) if tag in group]
        rows = np.flatnonzero(np.isin(np.asarray(index.tags, np.int32), numbers))
        if len(rows):
            ends.append((float(index.walls[int(rows[-1])]), int(index.steps[int(rows[-1])])))
    wall, x = max(ends)
    if axis_of(tag, {}) == SAMPLES:
        return Marks(x // per_step, samples=x, saved_at=wall)
    return Marks(x, saved_at=wall)


def _training(group: Sequence[int], known: Sequence[Events], history: History) -> Training:
    training = Training([], {}, {})
    bounds = {id(segment): bound for segment, bound in history.chain}
    numbers = {id(known[i]): i for i in group}
    for segment in history.order:
        i = numbers[id(segment.events)]
        if i not in training.behind:
            training.order.append(i)
            training.behind[i] = segment.shift
        first = max(segment.lo, bounds.get(id(segment), segment.lo - 1) + 1)
        if first <= segment.hi:
            lo, hi = training.lost.get(i, (first, segment.hi))
            training.lost[i] = min(lo, first), max(hi, segment.hi)
    return training


def _groups(known: Sequence[Events]) -> list[list[int]]:
    """Files that log at least one common tag on a training axis, directly or through others: one
    training. Writers with other tags have a lineage of their own."""
    groups: list[tuple[set[Series], list[int]]] = []
    for i, events in enumerate(known):
        series = {
            name
            for name, axis in zip(events.index.names, events.axes, strict=True)
            if axis in TRAINING
        }
        alike = [group for group in groups if not series.isdisjoint(group[0])]
        whole: tuple[set[Series], list[int]] = alike[0] if alike else (set(), [])
        for other in alike[1:]:
            whole[0].update(other[0])
            whole[1].extend(other[1])
        whole[0].update(series)
        whole[1].append(i)
        groups = [group for group in groups if group not in alike[1:]]
        groups += [] if alike else [whole]
    return sorted(sorted(members) for _, members in groups)


def _clock(members: Sequence[Events]) -> tuple[str | None, list[Series]]:
    """The axis that orders this training, and its series, the most frequent first."""
    totals: dict[str, dict[Series, int]] = {}
    for events in members:
        for name, axis, count in zip(events.index.names, events.axes, events.counts, strict=True):
            if axis in TRAINING and count:  # salvage may have left out all that a tag had
                series = totals.setdefault(axis, {})
                series[name] = series.get(name, 0) + count
    for axis in TRAINING:
        if axis in totals:
            series = totals[axis]
            return axis, sorted(series, key=lambda name: -series[name])
    return None, []


def _loose(events: Events, iteration: int) -> Flags:
    """A file of only texts, hparams or layouts: what is written for later iterations goes."""
    import numpy as np

    limits = np.full(len(events.axes) + 1, 1 << 62, np.int64)
    for i, axis in enumerate(events.axes):
        if axis == LOOSE:
            limits[i] = iteration
    flags: Flags = events.steps <= limits[events.tags]
    flags &= events.kinds != DROPPED
    values = events.kinds == SUMMARY
    if values.any() and not flags[values].any():
        flags[:] = False
    return flags


def _without_clock(events: Events, clock: str, result: Lineage) -> None:
    name = events.index.path.name
    if sum(events.counts) > 16:
        raise SurgeryError(
            f"{events.index.path}: none of its events gives the {clock}, so which of them "
            "belong to the history is unknown",
            next="say what a tag counts: --axis 'TAG=iteration' (samples, tokens, gigaflos)",
        )
    result.warnings.append(
        f"{name}: all of it is cut, because none of its events gives the {clock}"
    )


def _cut(result: Lineage, known: Sequence[Events], history: History, marks: Marks | None) -> None:
    caps: dict[Series, int] = {}
    guessed: dict[str, None] = {}
    numbers = {id(events): i for i, events in enumerate(known)}
    for number, (segment, bound) in enumerate(history.chain):
        counters = marks.counters() if marks and number == 0 else {}
        flags, tags = keep(segment, bound, caps, counters)
        result.flags[numbers[id(segment.events)]][segment.start : segment.stop] = flags
        if not flags.all():
            guessed.update(dict.fromkeys(tags))
        for name, x in segment.firsts.items():
            caps[name] = min(x, caps.get(name, x))
    if guessed:
        result.warnings.append(
            "cut by position in the file, because the x of these tags does not give the iteration: "
            + ", ".join(guessed)
        )
