"""Cuts the event files of one log folder at a step; the cut branch stays as a run of its own."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError, count, share
from ckptsurgeon.hints import again
from ckptsurgeon.logs import lineage
from ckptsurgeon.logs.lineage import Lineage
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.segment import Flags
from ckptsurgeon.logs.tensorboard import event_file
from ckptsurgeon.logs.tensorboard.event_file import BORN, Index
from ckptsurgeon.logs.tensorboard.graft import grafts
from ckptsurgeon.logs.tensorboard.message import FILE_VERSION
from ckptsurgeon.plans.edits import AnyChange, Aside, Content, Rewrite, Span, relative
from ckptsurgeon.plans.log_fields import TENSORBOARD


def truncate(
    logdir: Path,
    root: Path,
    marks: Marks,
    *,
    keep_as: str | None,
    salvage: bool = False,
    branch: Collection[str] = (),
    order: str | None = None,
    axes: Mapping[str, str] | None = None,
) -> tuple[list[AnyChange], list[str]]:
    """Changes after which the event files directly in `logdir` hold iterations up to N only, and
    warnings. With `keep_as`, what is cut becomes a run of its own in that new folder; branches that
    overlap a newer one get folders of their own (`keep_as`-2, …).

    Whole records are copied; only a TF1 event that becomes the first of its tag gets the metadata
    of the one before it (graft.py). A second call finds nothing to change. Raises
    SurgeryError when the lineage can't be proven and DamagedFile on a bad record (see `lineage`
    and `event_file.scan` for `branch`, `order`, `axes` and `salvage`)."""
    indexes = [event_file.scan(path, salvage=salvage) for path in event_file.files(logdir)]
    traced = lineage.trace(indexes, marks, branch=branch, order=order, axes=axes)
    names, warnings = _names(indexes, traced)
    changes: list[AnyChange] = []
    for index, flags, name in zip(indexes, traced.flags, names, strict=True):
        same_name = name == index.path.name
        if flags.all() and not index.torn and same_name:
            continue
        file = relative(index.path, root)
        stays = bool(flags.any()) or not len(index)
        if not stays or not same_name:
            changes.append(Aside(file, TENSORBOARD))
        if stays:
            stay = share(int(flags.sum()), len(index), "event", "stays", "stay")
            note = f"{stay}, to step {marks.iteration}"
            new = relative(logdir / name, root)
            content = _content(file, index, flags)
            changes.append(Rewrite(new, TENSORBOARD, content, note, new_file=not same_name))
        warnings += _damage(index)
    if keep_as is not None:
        changes += _cut_branches(indexes, traced, logdir / keep_as, root)
    return changes, [*traced.warnings, *warnings]


def copies(
    logdir: Path, folder: Path, root: Path, marks: Marks
) -> tuple[dict[str, Rewrite | None], list[str]]:
    """What `truncate` would leave of the event files directly in `logdir`, as files of these names
    in `folder`, which is of the run at `root`; None for one that is there already. `logdir` itself
    is only read."""
    indexes = [event_file.scan(path) for path in event_file.files(logdir)]
    traced = lineage.trace(indexes, marks)
    names, warnings = _names(indexes, traced)
    made: dict[str, Rewrite | None] = {}
    for index, flags, name in zip(indexes, traced.flags, names, strict=True):
        warnings += _damage(index)
        if not flags.any():
            continue
        path, content = folder / name, _content(relative(index.path, root), index, flags)
        known = path.stat() if disk.exists(path) else None
        note = f"{share(int(flags.sum()), len(index), 'event')}, to step {marks.iteration}"
        rewrite = Rewrite(relative(path, root), TENSORBOARD, content, note, new_file=known is None)
        same = known and (known.st_size, known.st_mtime_ns) == (content.size, content.mtime_ns)
        made[name] = None if same else rewrite
    return made, [*traced.warnings, *warnings]


def _names(indexes: Sequence[Index], traced: Lineage) -> tuple[list[str], list[str]]:
    """The names under which TensorBoard, which reads by name, reads the files of each training in
    the order in which they were written; and warnings where it will not.

    Only a file whose writer had a wrong clock gets another name: the same with the right time."""
    names = [index.path.name for index in indexes]
    warnings = []
    for training in traced.trainings:
        order = [i for i in training.order if traced.flags[i].any()]
        if all(names[a] < names[b] for a, b in pairwise(order)):
            continue
        right = list(names)
        for i in order:
            seconds = round(training.behind[i])
            if seconds:
                right[i] = BORN.sub(lambda m: str(int(m[0]) + seconds), names[i], count=1)  # noqa: B023
        if len(set(right)) == len(right) and all(right[a] < right[b] for a, b in pairwise(order)):
            names = right
        else:
            files = ", ".join(names[i] for i in order)
            warnings.append(f"TensorBoard reads by name, but these were written in order: {files}")
    return names, warnings


def _content(file: str, index: Index, flags: Flags, start: bytes = b"") -> Content:
    """The records with a flag. The mtime goes back with the last event, so that the distance
    between both clocks, by which skew is found, stays what it was."""
    where = flags.nonzero()[0]
    back = index.walls[-1] - index.walls[int(where[-1])] if len(where) else 0.0
    pieces: list[bytes | Span] = [start] if start else []
    at = 0
    for record, data in sorted(grafts(index, flags).items()):
        begin, end = index.span(record)
        pieces += _spans(file, index, flags, at, begin)
        pieces.append(data)
        at = end
    pieces += _spans(file, index, flags, at, index.end)
    return Content(tuple(pieces), index.mtime_ns - max(0, int(back * 1e9)))


def _spans(file: str, index: Index, flags: Flags, start: int, stop: int) -> list[Span]:
    """The records with a flag between two record borders."""
    return [
        Span(file, max(a, start), min(b, stop))
        for a, b in event_file.spans(index, flags)
        if a < stop and b > start
    ]


def _damage(index: Index) -> list[str]:
    name = index.path.name
    sentences = [
        f"{name}: {count(end - start, 'damaged byte')} at {start} left out"
        for start, end in index.dropped()
    ]
    if index.torn:
        sentences.append(
            f"{name}: the unfinished event at the end is cut, {count(index.torn, 'byte')}"
        )
    return sentences


def _cut_branches(
    indexes: Sequence[Index], traced: Lineage, folder: Path, root: Path
) -> list[AnyChange]:
    """Files of the kept branches, with the records that the run loses. TensorBoard shows one of two
    branches that overlap in one run, so the newest gets `folder` and each older one its own."""
    import numpy as np

    folders = dict.fromkeys(range(len(indexes)), folder)
    for training in traced.trainings:
        begins: list[int] = []
        for i in reversed(training.order):
            if i not in training.lost:
                continue
            lo, hi = training.lost[i]
            number = next((k for k, first in enumerate(begins) if hi < first), len(begins))
            begins[number : number + 1] = [lo]
            folders[i] = folder if not number else folder.with_name(f"{folder.name}-{number + 1}")
    changes: list[AnyChange] = []
    for i, (index, flags) in enumerate(zip(indexes, traced.flags, strict=True)):
        kinds = np.frombuffer(bytes(index.kinds), np.uint8)
        cut = ~flags & (kinds != event_file.DROPPED)
        if not (cut & (kinds != FILE_VERSION)).any():
            continue
        if disk.exists(folders[i]):
            names = (f"{folder.name}-{n}" for n in itertools.count(2))
            free = next(name for name in names if not disk.exists(folder.with_name(name)))
            raise UsageError(
                f"{folders[i]} exists, so a cut branch can't be kept there",
                next=again(
                    "--keep-tb",
                    free,
                    setting=f"tensorboard.keep_as={free}",
                    otherwise=f"give {folders[i]} another name",
                ),
            )
        first = int(cut.argmax())
        headed = kinds[first] == FILE_VERSION
        start = b"" if headed else event_file.version_record(index.walls[first])
        content = _content(relative(index.path, root), index, cut, start)
        file = relative(folders[i] / index.path.name, root)
        note = f"the cut branch, {count(int(cut.sum()), 'event')}"
        changes.append(Rewrite(file, TENSORBOARD, content, note, new_file=True))
    return changes
