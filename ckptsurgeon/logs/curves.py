"""What a training logged, as curves: the history that leads to its newest step, and the rest.

Of TensorBoard's files the lineage (lineage.py) says which events are which; in a file of rows or
lines training went back where the step does.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptsurgeon.errors import count
from ckptsurgeon.logs import lineage, signals
from ckptsurgeon.logs.axis import ITERATION, SAMPLES, axis, partner
from ckptsurgeon.logs.signals import GRAD_NORM, LOSS
from ckptsurgeon.logs.tensorboard import event_file
from ckptsurgeon.logs.tensorboard.event_file import DROPPED, Index
from ckptsurgeon.logs.tensorboard.frame import Opened
from ckptsurgeon.logs.tensorboard.scalars import column
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.transaction.home import NOTE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Ints: TypeAlias = "NDArray[np.int64]"
Floats: TypeAlias = "NDArray[np.float64]"


@frozen
class Curve:
    """One signal over the steps, which ascend. `walls` are the times at which it was logged, NaN
    where the log has none."""

    steps: Ints
    values: Floats
    walls: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def spacing(self) -> int:
        """How many steps it is from one point to the next."""
        return max(int(self.steps[-1] - self.steps[0]) // max(1, len(self) - 1), 1)

    def at(self, step: int) -> float | None:
        """Its last value up to `step`."""
        import numpy as np

        k = int(np.searchsorted(self.steps, step, "right"))
        return float(self.values[k - 1]) if k else None

    def time(self, step: int) -> float | None:
        """When its last point up to `step` was logged."""
        import numpy as np

        k = int(np.searchsorted(self.steps, step, "right"))
        return float(self.walls[k - 1]) if k and math.isfinite(self.walls[k - 1]) else None


Branch: TypeAlias = "Mapping[str, Curve]"
"""The curves of one stretch of training, by signal."""


@frozen
class Curves:
    """`kept` leads to the newest step; each of `left` was trained and left again, oldest first.
    `notes` are sentences about what could not be read, `sources` the files or folders, and `names`
    the tags in them where none is known to be the loss."""

    kept: Branch
    left: tuple[Branch, ...] = ()
    notes: tuple[str, ...] = ()
    sources: tuple[Path, ...] = ()
    names: tuple[str, ...] = ()


# --- event files ---------------------------------------------------------------------------------


@dataclass
class _Log:
    """The event files of one folder, and the tags of the signals in them."""

    folder: Path
    files: list[Index]
    tags: Mapping[str, str] = field(default_factory=dict)

    def span(self) -> tuple[float, float]:
        """The times of the first and the last event."""
        walls = [(index.walls[0], index.walls[-1]) for index in self.files if len(index)]
        return min(a for a, _ in walls), max(b for _, b in walls)

    def points(self) -> int:
        """How many events give the loss."""
        import numpy as np

        count = 0
        for index in self.files:
            numbers = [i for i, group in enumerate(index.names) if self.tags.get(LOSS) in group]
            count += int(np.isin(np.asarray(index.tags, np.int32), numbers).sum())
        return count


def of_folders(
    folders: Sequence[Path],
    own: Mapping[str, str],
    *,
    branch: Collection[str] = (),
    order: str | None = None,
    per_step: int | None = None,
) -> Curves:
    """The curves in the event files directly in `folders`; damaged records are left out and named.
    A loss that is logged over samples alone, as DeepSpeed's monitor does, is read where each step
    trains `per_step` of them.

    `own` gives the tags of signals that their names don't tell. Folders that follow one another in
    time are one training, whenever a surgery put a note into one of them; of those that were
    written at the same time the one with most points of the loss is read. Raises SurgeryError when
    the lineage can't be proven (see `lineage`)."""
    logs = []
    for folder in folders:
        written = [path for path in event_file.files(folder) if not path.name.endswith(NOTE)]
        files = [event_file.scan(path, salvage=True) for path in written]
        files = [index for index in files if len(index)]
        logs.append(_Log(folder, files, _tags(files, own, ITERATION)))
    having = [log for log in logs if LOSS in log.tags]
    if not having and per_step is not None:
        for log in logs:
            log.tags = _tags(log.files, own, SAMPLES)
        having = [log for log in logs if LOSS in log.tags]
    if not having:
        alone = any(LOSS in _tags(log.files, own, SAMPLES) for log in logs)
        note = "the loss is logged over samples, and how many a step takes is not known"
        groups = (group for log in logs for index in log.files for group in index.names)
        names = () if alone else tuple(sorted({tag for group in groups for tag in group}))
        notes_ = (note,) if alone else ()
        return Curves({}, notes=notes_, sources=tuple(folders), names=names)
    notes = [
        f"{index.path.name}: {count(end - start, 'damaged byte')} at {start} left out"
        for log in having
        for index in log.files
        for start, end in index.dropped()
    ]
    in_time = sorted(having, key=_Log.span)
    apart = all(a.span()[1] <= b.span()[0] for a, b in pairwise(in_time))
    chosen = in_time if apart else [max(having, key=_Log.points)]
    notes += [f"{log.folder} is not read: {chosen[0].folder} has more points"
              for log in having if log not in chosen]  # fmt: skip
    tags = {signal: tag for log in chosen for signal, tag in log.tags.items()}
    indexes = [index for log in chosen for index in log.files]
    marks = lineage.newest(indexes, tags[LOSS], per_step or 1)
    traced = lineage.trace(indexes, marks, branch=branch, order=order)
    kept, left = _split(indexes, traced, tags, per_step or 1)
    return Curves(kept, left, (*notes, *traced.warnings), tuple(log.folder for log in chosen))


def of_cut(paths: Sequence[Path], own: Mapping[str, str], after: int) -> Branch:
    """The curves after step `after` in these event files, the last point of a step first asked:
    what a surgery cut from them. Damaged records are left out."""
    import numpy as np

    indexes = [event_file.scan(path, salvage=True) for path in paths]
    tags = _tags(indexes, own, ITERATION)
    flags = [np.asarray(index.steps, np.int64) > after for index in indexes]
    return _branch(indexes, flags, tags)


def after(branch: Branch, step: int) -> Branch:
    """Its points after a step; a signal without one is left out."""
    import numpy as np

    found = {}
    for signal, curve in branch.items():
        k = int(np.searchsorted(curve.steps, step, "right"))
        if k < len(curve):
            found[signal] = Curve(curve.steps[k:], curve.values[k:], curve.walls[k:])
    return found


def _tags(files: Sequence[Index], own: Mapping[str, str], over: str) -> dict[str, str]:
    """Signal → its tag among those that are logged over `over`."""
    names = {tag for index in files for group in index.names for tag in group}
    mine = {partner(tag) or tag: tag for tag in sorted(names) if axis(tag, {}) == over}
    given = {signal: partner(tag) or tag for signal, tag in own.items()}
    return {signal: mine[name] for signal, name in signals.found(mine, given).items()}


def _split(
    indexes: Sequence[Index], traced: lineage.Lineage, tags: Mapping[str, str], per_step: int
) -> tuple[Branch, tuple[Branch, ...]]:
    kept = _branch(indexes, traced.flags, tags, per_step)
    order = [i for training in traced.trainings for i in training.order]
    left = [_branch([indexes[i]], [~traced.flags[i]], tags, per_step) for i in order]
    return kept, tuple(item for item in left if LOSS in item)


def _branch(
    indexes: Sequence[Index], flags: Sequence[Any], tags: Mapping[str, str], per_step: int = 1
) -> Branch:
    """The curves of the records with a flag; `per_step` samples are a step."""
    import numpy as np

    parts: dict[str, list[tuple[Ints, Floats, Floats]]] = {}
    for index, flag in zip(indexes, flags, strict=True):
        numbers = np.asarray(index.tags, np.int32)
        good = flag & (np.frombuffer(bytes(index.kinds), np.uint8) != DROPPED)
        shared: tuple[Ints, Floats] | None = None
        with Opened(index.path) as (data, _):
            for signal, tag in tags.items():
                series = [i for i, group in enumerate(index.names) if tag in group]
                rows = np.flatnonzero(np.isin(numbers, series) & good)
                if len(rows):
                    values = column(index, data, tag, rows)
                    steps = np.asarray(index.steps, np.int64)[rows]
                    if axis(tag, {}) == SAMPLES:
                        steps //= per_step
                    walls = np.asarray(index.walls, np.float64)[rows]
                    if shared and all(map(np.array_equal, shared, (steps, walls))):
                        steps, walls = shared  # most signals are logged together
                    shared = steps, walls
                    parts.setdefault(signal, []).append((steps, values, walls))
    joined: dict[str, Curve] = {}
    for signal in list(parts):  # each is let go of before the next: a long log has many points
        items = parts.pop(signal)
        joined[signal] = _curve(*map(np.concatenate, zip(*items, strict=True)))
    return _unfiltered(joined)


def _curve(steps: Ints, values: Floats, walls: Floats) -> Curve:
    """Points by step; of several at one step the last one."""
    import numpy as np

    if (steps[1:] > steps[:-1]).all():
        return Curve(steps, values, walls)
    order = np.argsort(steps, kind="stable")
    last = np.append(np.diff(steps[order]) > 0, True)
    chosen = order[last]
    return Curve(steps[chosen], values[chosen], walls[chosen])


# --- rows and lines ------------------------------------------------------------------------------

Row: TypeAlias = "tuple[int, Mapping[str, float], float]"
"""Step, numbers by signal, and the time or NaN."""


def of_rows(rows: Iterable[Row], source: Path) -> Curves:
    """The curves of rows in the order in which they were written."""
    kept, left = trained(rows)
    return Curves(_of(kept), tuple(map(_of, left)), sources=(source,))


def trained(rows: Iterable[Row]) -> tuple[list[Row], list[list[Row]]]:
    """The rows that lead to the newest step, and those that were left, oldest first: where the
    step goes back, what was logged from there on is left, but for what is said of that step before
    alone: who evaluates at each start logs the step again that was loaded."""
    stretches: list[list[Row]] = []
    last = None
    for row in rows:
        if last is None or row[0] < last:
            stretches.append([])
        stretches[-1].append(row)
        last = row[0]
    kept: list[Row] = []
    left: list[list[Row]] = []
    for stretch in stretches:
        lo = stretch[0][0]
        start = bisect_left(kept, lo, key=lambda row: row[0])
        again = {name for row in stretch if row[0] == lo for name in row[1]}
        while start < len(kept) and kept[start][0] == lo and again.isdisjoint(kept[start][1]):
            start += 1
        left += [kept[start:]] if start < len(kept) else []
        kept[start:] = stretch
    return kept, left


def _unfiltered(branch: dict[str, Curve]) -> Branch:
    """The loss as NaN where it is exactly 0 beside a gradient norm that is no number: the Hugging
    Face Trainer logs 0 in place of a NaN (`logging_nan_inf_filter`, on unless it is told off)."""
    import numpy as np

    loss, norm = branch.get(LOSS), branch.get(GRAD_NORM)
    if loss is None or norm is None:
        return branch
    zero, lost = loss.steps[loss.values == 0], norm.steps[~np.isfinite(norm.values)]
    hidden = np.isin(loss.steps, np.intersect1d(zero, lost))
    if hidden.any():
        branch[LOSS] = Curve(loss.steps, np.where(hidden, np.nan, loss.values), loss.walls)
    return branch


def _of(rows: Sequence[Row]) -> Branch:
    import numpy as np

    names = dict.fromkeys(name for _, values, _ in rows for name in values)
    out = {}
    for name in names:
        own = [(step, values[name], wall) for step, values, wall in rows if name in values]
        steps, values, walls = zip(*own, strict=True)
        out[name] = _curve(np.array(steps, np.int64), np.array(values, float), np.array(walls))
    return _unfiltered(out)
