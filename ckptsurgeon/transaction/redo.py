"""Carries out the edits of a committed surgery, from whatever point an earlier attempt reached.

Each kind of edit sees from the disk alone what is done already, so doing all of them again is the
same as doing them once. Edits go in plan order; neighbours of one kind go side by side.

What a reader of all shards sees. It gets the old bytes of every shard, the new bytes of every
shard, or an error from at least one of them; the same holds after a power cut at any moment:

1. Before anything else, every appended file is extended by a hole up to its last write, durably;
   one that an earlier attempt finished is cut back to there. The end record that a reader looks
   for is not in reach: it fails loudly.
2. The other writes of all files follow, and are durable before the first last write begins.
3. The last writes make the files valid again, one after the other. Until all are, no reader
   accepts one of them.

Truncation runs the same way back: every last write is cut off, durably, before any file gets its
old size, and that comes after all other edits. So replaced shards do not mix with appended ones
either, when the plan names them before the appended ones (an undo names them after).

Limits: it holds for a reader that opens its shards at one moment, not for one that read a shard
before the surgery and the next one after it. A plan that replaces several shards and appends to
none must make one of them unreadable itself: replace it first with what no reader accepts, and
once more, with the new bytes, after the others. A file that a plan names twice is a barrier.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from ckptsurgeon import disk
from ckptsurgeon.errors import count
from ckptsurgeon.plans.edits import Move, Replace, Tail, Truncate
from ckptsurgeon.plans.spans import SHORT_GAP, total
from ckptsurgeon.transaction import renames
from ckptsurgeon.transaction.digests import anchored, digest_of
from ckptsurgeon.transaction.entry import Step
from ckptsurgeon.transaction.home import HOME
from ckptsurgeon.transaction.staged import Staged
from ckptsurgeon.transaction.unlike import unlike
from ckptsurgeon.workers import each, side_by_side

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""What opening a file ends with whose name leads to none, or to a link."""

T = TypeVar("T")


def redo(
    root: Path,
    steps: Sequence[Step],
    tails: Path,
    held: disk.Held,
    jobs: int,
    done: Callable[[int], None],
) -> None:
    """Do, or finish, all steps, durably. `held` has, as far as they are open and known, the files
    that are edited in place. `done` gets the number of files finished since last time.

    Raises OSError, or InterruptedSurgery when a file is neither before nor after its step."""
    appended = [step for step in steps if isinstance(step, Tail)]
    truncated = [step for step in steps if isinstance(step, Truncate)]
    times = _folder_times(root, steps)
    if appended:
        with Staged(tails) as staged, _folders(root, appended) as folders:
            each(lambda step: _check_tail(root, step, staged, held, folders), appended, jobs)
            each(lambda step: _silence(root, step, held, folders), appended, jobs)
            folders.refuse_moved()
    for group in groups(steps):
        first = group[0]
        if isinstance(first, Tail):
            _append(root, _only(group, Tail), tails, held, jobs, done)
        elif isinstance(first, Truncate):
            with _folders(root, _only(group, Truncate)) as folders:
                each(lambda step: _cut(root, step, held, folders), _only(group, Truncate), jobs)
                folders.refuse_moved()
        elif isinstance(first, Replace):
            renames.replace(root, _only(group, Replace), jobs)
            done(len(group))
        else:
            renames.move(root, _only(group, Move))
            done(len(group))
    with _folders(root, truncated) as folders:
        each(lambda step: _restore(root, step, held, folders), truncated, jobs, done)
        folders.refuse_moved()
    for folder, mtime_ns in times.items():
        if disk.is_folder(folder) and folder.stat().st_mtime_ns != mtime_ns:
            disk.set_times(folder, mtime_ns)


def known(root: Path, steps: Iterable[Step]) -> tuple[Step, ...]:
    """The same steps; each move says which file it is."""

    def with_file(step: Step) -> Step:
        return renames.known(root / step.src, step) if isinstance(step, Move) else step

    return tuple(side_by_side(with_file, steps))


def _folders(root: Path, steps: Iterable[Tail | Truncate]) -> disk.Folders:
    """Those of the files that are edited in place. None is held from one round of writes to the
    next, which all files must have made: each begins with a walk, and ends with another."""
    return disk.Folders(root / step.file for step in steps)


def _folder_times(root: Path, steps: Sequence[Step]) -> dict[Path, int]:
    """The time of each folder below `root` in which a name changes: it stays, as trainers take the
    newest folder for the newest step when they resume and when they clean up. After a crash it is
    that of the crash."""
    names = [name for step in steps if isinstance(step, Move) for name in (step.src, step.dst)]
    names += [step.file for step in steps if isinstance(step, Replace)]
    folders = dict.fromkeys((root / name).parent for name in names if _is_below(name))
    return {folder: folder.stat().st_mtime_ns for folder in folders if disk.is_folder(folder)}


def _is_below(name: str) -> bool:
    """Whether the file lies in a folder of the run, and of the run alone."""
    return "/" in name and name.partition("/")[0] not in (HOME, "..")


def groups(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Neighbours of one kind. A file that is replaced twice stands alone each time."""
    names = Counter(step.file for step in steps if isinstance(step, Replace))

    def key(numbered: tuple[int, Step]) -> tuple[str, int]:
        number, step = numbered
        alone = isinstance(step, Replace) and names[step.file] > 1
        return type(step).__name__, number if alone else -1

    for _, group in groupby(enumerate(steps), key):
        yield [step for _, step in group]


def _only(group: Iterable[Step], kind: type[T]) -> list[T]:
    return [step for step in group if isinstance(step, kind)]


@contextmanager
def _opened(held: disk.Held, path: Path, folders: disk.Folders) -> Iterator[int]:
    try:
        with held.opened(path, folders) as descriptor:
            yield descriptor
    except OSError as error:
        if error.errno not in GONE:
            raise
        raise unlike(path, f"it is gone: {error.strerror}") from error


def refuse_unlike(root: Path, steps: Sequence[Step], tails: Path) -> None:
    """Raise what `redo` would, for each file that it finds as it is now; reads only."""
    appended, truncated = _only(steps, Tail), _only(steps, Truncate)
    with disk.Held(()) as held, _folders(root, [*appended, *truncated]) as folders:
        if appended:
            with Staged(tails) as staged:
                for step in appended:
                    _check_tail(root, step, staged, held, folders)
                    with _opened(held, root / step.file, folders) as descriptor:
                        _refuse_other_names(descriptor, root / step.file)
        for cut in truncated:
            with _opened(held, root / cut.file, folders) as descriptor:
                _check_cut(descriptor, root / cut.file, cut, held)
    for replaced in _only(steps, Replace):
        if not renames.is_kept(root, replaced) and not disk.is_there(root / replaced.file):
            raise unlike(root / replaced.file, "it is gone")
    made: set[str] = set()
    freed: set[str] = set()
    for move in _only(steps, Move):
        if move.src not in made and not renames.is_moved(root, move, freed):
            freed.add(move.src)
        made.add(move.dst)


# --- append --------------------------------------------------------------------------------------


def _check_tail(
    root: Path, step: Tail, staged: Staged, held: disk.Held, folders: disk.Folders
) -> None:
    """Refuse to write bytes that are not ours, or after bytes that are not those of the plan."""
    path = root / step.file
    if staged.digest(step.at, step.at + step.size) != step.digest:
        raise unlike(staged.path, f"the staged bytes of {step.file} are damaged")
    with _opened(held, path, folders) as descriptor:
        status = os.fstat(descriptor)
        if not step.old_size <= (size := status.st_size) <= step.spans[-1][1]:
            raise unlike(
                path, f"it has {count(size, 'byte')}; it should have {step.old_size} or more"
            )
        if not held.known(path, status):
            _refuse_other_bytes(descriptor, path, step)
            held.know(path, status)


@contextmanager
def _writable(
    root: Path, step: Tail, held: disk.Held, folders: disk.Folders
) -> Iterator[tuple[int, int]]:
    """The shard that was checked, open for writing, and its size. Its bytes are compared again
    unless nobody wrote to it since but whoever got this. So refused is what came to lead to its
    name where that is opened anew, as a name can at any time; of one that is held, whoever writes
    asks the name afterwards."""
    path = root / step.file
    with _opened(held, path, folders) as descriptor:
        status = os.fstat(descriptor)
        _refuse_other_names(descriptor, path)
        if not held.known(path, status):
            _refuse_other_bytes(descriptor, path, step)
        yield descriptor, status.st_size


def _silence(root: Path, step: Tail, held: disk.Held, folders: disk.Folders) -> None:
    path = root / step.file
    with _writable(root, step, held, folders) as (descriptor, size):
        if size != step.cut:
            disk.truncate(descriptor, path, step.cut)
        held.know(path, os.fstat(descriptor))
        # What comes next may be a rename that a power cut keeps while it loses this.
        disk.fsync_data(descriptor, path)


def _refuse_other_bytes(descriptor: int, path: Path, step: Tail) -> None:
    if digest_of(descriptor, anchored(step.old_size)) != step.anchor:
        raise unlike(path, "it is another file than the one that the surgery began with")


def _refuse_other_names(descriptor: int, path: Path) -> None:
    names = os.fstat(descriptor).st_nlink
    if names > 1:
        raise unlike(path, f"it has {names} names (hard links), and an edit would change them all")


def _append(
    root: Path,
    group: Sequence[Tail],
    tails: Path,
    held: disk.Held,
    jobs: int,
    done: Callable[[int], None],
) -> None:
    """The name of each file is asked twice: before the first last write begins, when no reader
    accepts any file, and right before its own."""

    def write(step: Tail, first: int, last: int, staged: Staged, folders: disk.Folders) -> None:
        path = root / step.file
        spans = step.spans[first:last]
        at = step.at + total(step.spans[:first])
        data = staged.read(at, at + total(spans))
        with _writable(root, step, held, folders) as (descriptor, size):
            if size != step.cut:
                raise unlike(path, f"it has {count(size, 'byte')}; it should have {step.cut}")
            if last == len(step.spans):
                held.refuse_renamed(path, folders)
            disk.write_each(descriptor, path, data, spans, SHORT_GAP)
            held.know(path, os.fstat(descriptor))  # before it is durable, which takes long
            if last == len(step.spans) and step.new_mtime_ns is not None:
                disk.set_times(path, step.new_mtime_ns, descriptor)
                disk.fsync_file(descriptor, path)
            else:
                disk.fsync_data(descriptor, path)
            if last < len(step.spans):
                held.refuse_renamed(path, folders)

    def early(step: Tail, staged: Staged, folders: disk.Folders) -> None:
        write(step, 0, len(step.spans) - 1, staged, folders)

    def last(step: Tail, staged: Staged, folders: disk.Folders) -> None:
        write(step, len(step.spans) - 1, len(step.spans), staged, folders)

    with Staged(tails) as staged, _folders(root, group) as folders:
        each(lambda step: early(step, staged, folders), group, jobs)
        folders.refuse_moved()
    with Staged(tails) as staged, _folders(root, group) as folders:
        each(lambda step: last(step, staged, folders), group, jobs, done)
        folders.refuse_moved()


# --- truncate ------------------------------------------------------------------------------------


def _cut(root: Path, step: Truncate, held: disk.Held, folders: disk.Folders) -> None:
    path = root / step.file
    end_record = step.spans[-1][0]
    with _opened(held, path, folders) as descriptor:
        if _check_cut(descriptor, path, step, held) > end_record:
            disk.truncate(descriptor, path, end_record)
        disk.fsync_file(descriptor, path)


def _check_cut(descriptor: int, path: Path, step: Truncate, held: disk.Held) -> int:
    """The size of the file. Refuse to cut off bytes that are not ours."""
    _refuse_other_names(descriptor, path)
    status = os.fstat(descriptor)
    size = status.st_size
    if size not in (step.old_size, step.spans[-1][0], step.new_size):
        raise unlike(path, f"it has {count(size, 'byte')}; it should have {step.new_size}")
    known = size != step.new_size or held.known(path, status)
    if not known and digest_of(descriptor, step.spans) != step.digest:
        what = f"the bytes after {step.old_size} are not those that the surgery wrote"
        raise unlike(path, what)
    return size


def _restore(root: Path, step: Truncate, held: disk.Held, folders: disk.Folders) -> None:
    path = root / step.file
    with _opened(held, path, folders) as descriptor:
        held.refuse_renamed(path, folders)
        _refuse_other_names(descriptor, path)
        size = os.fstat(descriptor).st_size
        if size not in (step.old_size, step.spans[-1][0]):
            raise unlike(path, f"it has {count(size, 'byte')}; it should have {step.old_size}")
        if size > step.old_size:
            disk.truncate(descriptor, path, step.old_size)
        disk.set_times(path, step.mtime_ns, descriptor)
        disk.fsync_file(descriptor, path)
