"""A branch of a run in a bucket: the objects of one step under another prefix, copied by the store.

A store has no rename, so the branch fills up under its own name. Until all is there an object says
that it is not, and no command edits the branch.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.hints import again, shell
from ckptsurgeon.operations.section import Recipe
from ckptsurgeon.remote import reads
from ckptsurgeon.remote.writes import Changed
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.fork import LAUNCH, Fork, files_of, forked, operated, outlined
from ckptsurgeon.transaction.bucket.place import Place, at_once
from ckptsurgeon.transaction.bucket.redo import marked
from ckptsurgeon.transaction.entry import FORKING
from ckptsurgeon.transaction.home import HOME


def fork(
    run: Run, step: int, folder: Path, recipe: Recipe, *, allow_globals: Collection[str] = ()
) -> Fork:
    """Make the objects below `folder`, which is one of the mirror, a run that holds `step` alone,
    as `recipe` wants it. The run is only read, and no byte of it passes through here.

    Raises SurgeryError where the store can't do it; then no object is below `folder`, or, where the
    store does not take that back either, one says that the branch is not whole."""
    refuse_taken(run, folder)
    branch = Place.of(folder)
    assert branch is not None
    run.checkpoint(step)
    files = files_of(run, step)
    own = (path for name in LAUNCH if disk.is_file(path := run.root / name))
    targets, texts = {run.relative(path): path for path in (*files, *own)}, {}
    for path, source in run.format.pointers(run.root, step).items():
        if isinstance(source, Path):
            targets.setdefault(run.relative(path), source)
        else:
            texts[run.relative(path)] = forked(run, source, folder)
    done = Fork(folder, step, len(files), sum(path.stat().st_size for path in files))
    name = f"{HOME}/{FORKING}"
    _begin(branch, name)
    try:
        marks, others = marked(targets)
        for names in (others, marks):
            at_once(lambda target: _copy(branch, targets[target], target), names)
        for pointer, text in texts.items():
            branch.writes.put(branch.key(pointer), text.encode(), match="")
        branch.delete([name])
        branch.mirror.refresh()
        done = operated(done, replace(run, root=folder), recipe, allow_globals)
    except BaseException:
        with contextlib.suppress(SurgeryError):
            _remove(branch, name)
        raise
    return done


def planned(run: Run, step: int, folder: Path, recipe: Recipe) -> Fork:
    """What `fork` would make, as `surgery.fork.planned` says it. Reads only."""
    refuse_taken(run, folder)
    return outlined(run, step, folder, recipe)


def _begin(branch: Place, name: str) -> None:
    """Say that the branch is not whole. Raises UsageError where another fork was first."""
    mine = secrets.token_bytes(16)
    try:
        branch.writes.put(branch.key(name), mine)
    except Changed:
        found = branch.writes.read(branch.key(name))
        if found is None or found[0] != mine:  # else the answer to our own got lost
            raise _taken(branch.root) from None


def _copy(branch: Place, source: Path, name: str) -> None:
    """The object of this file, under the branch's own name."""
    known = branch.mirror.object(key := branch.mirror.key(source))
    head = branch.writes.head(key)
    if head is None or known is None or head.etag != known.etag:
        raise SurgeryError(f"s3://{branch.writes.bucket}/{key} changed meanwhile", next=again())
    branch.writes.copy(key, head, branch.key(name))


def _remove(branch: Place, name: str) -> None:
    """All objects below the branch; the one that says that it is not whole goes last."""
    last = branch.key(name)
    with contextlib.suppress(Changed):  # another fork may have begun there
        branch.writes.put(last, b"")
    below = [key for key in branch.below(".") if key != last]
    at_once(branch.writes.delete, below)
    branch.writes.delete(last)


def refuse_taken(run: Run, folder: Path) -> None:
    """Raise UsageError where the branch would lie in the run, or around it, or objects are there.
    Of other runs in the bucket nothing is known."""
    if folder.is_relative_to(run.root) or run.root.is_relative_to(folder):
        raise UsageError(
            f"{folder} lies inside the run {run.root}, or around it",
            next="name a prefix beside that of the run",
        )
    reads.have_listed([folder])
    if any(folder.iterdir()):
        raise _taken(folder)


def _taken(folder: Path) -> UsageError:
    if disk.is_file(folder / HOME / FORKING):
        return UsageError(
            f"{folder} has objects: an earlier fork was cut off there, or is still running",
            next=shell(["aws", "s3", "rm", "--recursive", folder], why="if no fork is running"),
        )
    return UsageError(f"{folder} has objects already", next="choose a new prefix")
