"""Writes the new bytes of a plan beside the run's files, reads them back, and removes them.

The names are known before the first of them is made, and stand in the journal: so whatever an
interruption leaves is found and removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import (
    Append,
    Checksum,
    Computed,
    Content,
    Edit,
    Link,
    Move,
    Replace,
    Span,
    Tail,
    Truncate,
)
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.plans.queries import Queries
from ckptsurgeon.progress import Progress, silent
from ckptsurgeon.transaction import computing, inverse, job_list, kept, read_back, receipts
from ckptsurgeon.transaction.computing import Place, Sum
from ckptsurgeon.transaction.content import batches, placed, spans
from ckptsurgeon.transaction.digests import read_anchors
from ckptsurgeon.transaction.entry import Entry, Step
from ckptsurgeon.transaction.home import HOME, jobs_file, staged_name
from ckptsurgeon.transaction.reading import Rooms, forget
from ckptsurgeon.workers import each, side_by_side


def tails_file(id: str) -> str:
    """Where the appended bytes of all shards are staged, one after the other, in plan order."""
    return staged_name(id, "tails")


def tails(root: Path, entry: Entry) -> Path:
    """The file with the bytes that this entry appends."""
    if entry.back is None:
        return root / tails_file(entry.id)
    return inverse.cut_off(root, entry.id)


def staged_files(plan: Plan, recorded: bool = False) -> tuple[str, ...]:
    """Every file that is written before the commit; `recorded`: by jobs that leave records."""
    files = [staged.name for staged in _staged(plan.edits, plan.id)]
    if any(isinstance(edit, Append) for edit in plan.edits):
        files.append(tails_file(plan.id))
    return (*files, *[jobs_file(plan.id)] * recorded, *receipts.records(plan.id))


def directories(root: Path, plan: Plan) -> tuple[str, ...]:
    """The directories that the plan fills or empties: those to be made, parents first, and those
    that may be left empty: below `.ckptsurgeon`, and in an undo those that the surgery made."""
    filled = [*staged_files(plan), *receipts.records(plan.id).values()]
    emptied = []
    for edit in plan.edits:
        if isinstance(edit, Move):
            filled.append(edit.dst)
            emptied.append(edit.src)
        elif isinstance(edit, Replace):
            filled.append(edit.kept)
            emptied.append(edit.staged)
    needed = {str(parent) for name in filled for parent in _parents(name)}
    missing = {name for name in needed if not disk.is_folder(root / name)}
    inside = {str(p) for name in emptied for p in _parents(name) if HOME in p.parts}
    if plan.undoes is not None:
        inside |= {str(parent) for name in emptied for parent in _parents(name)}
    return _parents_first(missing | inside)


def folders_of(names: Iterable[str]) -> tuple[str, ...]:
    """Every directory of `.ckptsurgeon` on the way to these names, parents first."""
    return _parents_first({str(p) for name in names for p in _parents(name) if HOME in p.parts})


def _parents_first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (name.count("/"), name)))


def make_directories(root: Path, names: Iterable[str]) -> None:
    """Make the missing ones, and every name on the way to them durable."""
    missing = [root / name for name in names if not disk.is_folder(root / name)]
    for path in missing:
        disk.make_directory(path)
    for parent in sorted({path.parent for path in missing}):
        disk.fsync_directory(parent)


def write(
    root: Path,
    plan: Plan,
    receipt: Receipt,
    jobs: int,
    workers: Executor | None = None,
    resumed: bool = False,
    progress: Progress = silent,
) -> None:
    """Write every staged file, make it durable, and read it back. With `workers`, what is computed
    or copied is a list of jobs for them. Of an attempt that is `resumed`, those jobs count as done
    that read back, where it had the same list and all sources are as they were."""
    staged = _staged(plan.edits, plan.id)
    tails = tuple(edit.data for edit in _appends(plan.edits))
    if tails:
        staged.append(_Staged(tails_file(plan.id), Content(tails)))
    if workers is None:
        _write(root, staged, jobs)
    else:
        _write_on(root, jobs_file(plan.id), staged, jobs, workers, resumed, progress)
    contents = receipts.contents(receipt, kept.document(root, plan.edits))
    records = [_Staged(name, Content((data,))) for name, data in contents.items()]
    if resumed:
        remove(root, list(contents), [])
    _write(root, records, jobs)
    folders = {(root / item.name).parent for item in (*staged, *records)}
    each(disk.fsync_directory, sorted(folders), jobs)


def jobs(root: Path, plan: Plan) -> list[job_list.Job]:
    """What workers have to do of a plan, the same list in each process that makes the same plan."""
    staged = [
        item._replace(content=job_list.copied(item.content))
        for item in _staged(plan.edits, plan.id)
    ]
    return job_list.of(root, root / jobs_file(plan.id), _places(root, staged))


def remove(root: Path, files: Sequence[str], directories: Sequence[str]) -> None:
    """Remove these files, then those of the directories that are empty. At the end it is durable
    that they are gone, whoever removed them."""
    for name in files:
        if disk.is_there(root / name):
            disk.remove_file(root / name)
    for name in reversed(directories):
        path = root / name
        if disk.is_folder(path) and not any(path.iterdir()):
            disk.remove_directory(path)
    parents = {(root / name).parent for name in (*files, *directories)}
    for parent in sorted(parents):
        if disk.is_folder(parent):
            disk.fsync_directory(parent)


def timed(root: Path, edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """The edits, with the time that each appended file gets: now, and later than it was. An undo
    knows by it that nobody wrote to the file since. Only its owner may set it."""
    now, user = time.time_ns(), os.geteuid()

    def with_time(edit: Edit) -> Edit:
        if not isinstance(edit, Append) or edit.new_mtime_ns is not None:
            return edit
        if user != 0 and user != (root / edit.file).stat().st_uid:
            return edit
        return replace(edit, new_mtime_ns=max(now, edit.mtime_ns + 1))

    return tuple(side_by_side(with_time, edits))


def steps(
    root: Path, edits: Iterable[Edit], anchors: Mapping[str, str] | None = None
) -> tuple[Step, ...]:
    """The edits as the journal keeps them: appended bytes by their place in the tails file.
    `anchors` are what `check_edits` returned, if it read the files themselves."""
    out: list[Step] = []
    at = 0
    edits = list(edits)
    anchors = read_anchors(root, _appends(edits)) if anchors is None else anchors
    for edit in edits:
        if isinstance(edit, Append):
            tail = Tail(
                edit.file,
                old_size=edit.old_size,
                spans=edit.spans,
                at=at,
                digest=edit.digest,
                anchor=anchors[edit.file],
                new_mtime_ns=edit.new_mtime_ns,
            )
            out.append(tail)
            at += len(edit.data)
        elif isinstance(edit, Truncate):
            out.append(edit)
        else:
            out.append(replace(edit, content=None))  # the staged file holds it
    return tuple(out)


# --- contents ------------------------------------------------------------------------------------


class _Staged(NamedTuple):
    """A file to be staged; it gets the rights of the file `like`."""

    name: str
    content: Content | Link | Queries
    like: str | None = None
    kept: Sequence[tuple[Truncate, Tail]] = ()
    """Of the file that has the bytes that an undo cuts off: all of them."""


def _staged(edits: Sequence[Edit], id: str) -> list[_Staged]:
    """The files that the edits of surgery `id` take, each written before the commit."""
    out = []
    for edit in edits:
        if isinstance(edit, Move) and edit.content is not None:
            kept = inverse.kept(edits, id) if edit.dst == inverse.kept_tails(id) else ()
            out.append(_Staged(edit.src, edit.content, edit.like, kept))
        elif isinstance(edit, Replace) and edit.content is not None:
            out.append(_Staged(edit.staged, edit.content, edit.file))
    return out


def _write(root: Path, staged: Sequence[_Staged], jobs: int) -> None:
    """Write these files, make them durable, and read them back; what is computed in all of them
    side by side."""
    each(partial(_begin, root), staged, jobs)
    sums = computing.write(root, _places(root, staged), jobs)
    _seal_all(root, staged, sums, jobs)
    parts = [(path, part) for path, found in sums.items() for part in found]
    rooms = Rooms()
    each(lambda part: read_back.check_sum(rooms, *part), parts, jobs)


def _write_on(
    root: Path,
    record: str,
    staged: Sequence[_Staged],
    jobs: int,
    workers: Executor,
    resumed: bool,
    progress: Progress,
) -> None:
    """The same by jobs of `workers`, as far as those of an attempt that is `resumed` are not
    done."""
    staged = [item._replace(content=job_list.copied(item.content)) for item in staged]
    places = _places(root, staged)
    todo = job_list.of(root, root / record, places)
    kept: set[Path] = set()
    if resumed and job_list.is_of(root / record, todo):
        kept = {place.path for place in places}
    if resumed:
        # The record first: a worker that is left of that attempt writes only while it is there.
        old = [record] if not kept else []
        remove(root, [*old, *(item.name for item in staged if root / item.name not in kept)], [])
    each(lambda item: _begin(root, item, root / item.name in kept), staged, jobs)
    if todo and not kept:
        job_list.begin(todo)
    todo = job_list.done(todo, workers, progress)
    _seal_all(root, staged, job_list.sums(todo), jobs)
    job_list.refuse_unlike(todo, workers, progress)


def _places(root: Path, staged: Sequence[_Staged]) -> list[Place]:
    return [
        Place(root / item.name, at, piece)
        for item in staged
        if isinstance(item.content, Content)
        for at, piece in placed(item.content)
        if isinstance(piece, Computed)
    ]


def _seal_all(
    root: Path, staged: Sequence[_Staged], sums: Mapping[Path, Sequence[Sum]], jobs: int
) -> None:
    begun = [item for item in staged if root / item.name in sums]
    each(lambda item: _finish(root, item, sums[root / item.name]), begun, jobs)


def _begin(root: Path, staged: _Staged, kept: bool = False) -> None:
    """Make the file, of its full size, with all that is known; finish one that nothing is computed
    for. One that is `kept` is there, if an earlier attempt came so far."""
    path, content = root / staged.name, staged.content
    if isinstance(content, Link):
        disk.symlink(content.target, path)
        if str(path.readlink()) != content.target:
            raise job_list.unlike(path, 0)
        return
    if isinstance(content, Queries):
        from ckptsurgeon.transaction import databases  # SQLite, which few surgeries need

        databases.stage(root, path, content, staged.like)
        return
    there = kept and disk.is_there(path)
    with disk.opened(path) if there else disk.created(path) as descriptor:
        if os.fstat(descriptor).st_nlink > 1:
            raise SurgeryError(f"{path} has other names (hard links)", next=command("recover"))
        for offset, data in batches(root, path, content):
            disk.write_at(descriptor, path, offset, data)
        side_by_side(lambda spans: _copy(descriptor, path, root, spans), spans(content))
        if os.fstat(descriptor).st_size != content.size:  # a hole is last
            disk.truncate(descriptor, path, content.size)
        if not any(isinstance(piece, Computed) for piece in content.pieces):
            _seal(descriptor, root, staged, content, ())


def _copy(descriptor: int, path: Path, root: Path, spans: Sequence[tuple[int, Span]]) -> None:
    """Copy spans of one file to their offsets, and start to write each leap of one to the
    device."""

    def leaps() -> Iterator[tuple[int, int, int]]:
        for offset, span in spans:
            for start in range(span.start, span.end, read_back.LEAP):
                end, at = min(start + read_back.LEAP, span.end), start + offset - span.start
                yield at, start, end
                forget(descriptor, offset, end + offset - span.start)

    disk.copy_each(descriptor, path, root / spans[0][1].file, leaps())


def _finish(root: Path, staged: _Staged, sums: Sequence[Sum]) -> None:
    with disk.opened(root / staged.name) as descriptor:
        assert isinstance(staged.content, Content)
        _seal(descriptor, root, staged, staged.content, sums)


def _seal(
    descriptor: int, root: Path, staged: _Staged, content: Content, sums: Sequence[Sum]
) -> None:
    """Write the checksums, make the file durable, and read back all that was not computed."""
    path, like = root / staged.name, staged.like
    known = {
        at: computing.resolved(piece, at, sums, partial(_read_at, descriptor))
        for at, piece in placed(content)
        if isinstance(piece, Checksum)
    }
    for at, data in known.items():
        disk.write_at(descriptor, path, at, data)
    if like is not None and disk.is_file(root / like):  # a link may lead nowhere
        disk.copy_rights(descriptor, path, (root / like).stat())
    if content.mtime_ns is not None:
        disk.set_times(path, content.mtime_ns, descriptor)
    disk.fsync_file(descriptor, path)
    if staged.kept:
        read_back.check_kept(path, root, staged.kept)
    else:
        read_back.compare(path, root, content, known)


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    return os.pread(descriptor, size, offset)


# --- appends -------------------------------------------------------------------------------------


def _appends(edits: Iterable[Edit]) -> Iterator[Append]:
    return (edit for edit in edits if isinstance(edit, Append))


def _parents(name: str) -> list[PurePosixPath]:
    """Every directory on the way to `name`, but `..` and the root itself."""
    parents = PurePosixPath(os.path.normpath(name)).parents
    return [parent for parent in parents if parent.name not in ("", "..")]
