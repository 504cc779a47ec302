"""The steps of `redo` that change names: a file is replaced, a file or a folder is moved.

What is moved is known by its inode number or its time: so what somebody else puts at its new name
before that is refused, and not taken for it. All else is known by the names alone. What somebody
else puts at the old name in place of it is moved, and an undo brings it back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.plans.edits import Move, Replace
from ckptsurgeon.transaction.kept import at
from ckptsurgeon.transaction.unlike import unlike
from ckptsurgeon.workers import each


def replace(root: Path, group: Sequence[Replace], jobs: int) -> None:
    """Do, or finish, these, durably: the old files are kept before the first one is replaced."""
    each(lambda step: _keep(root, step), group, jobs)
    _fsync_parents(root, (step.kept for step in group), jobs)
    each(lambda step: _swap(root, step), group, jobs)
    _fsync_parents(root, (name for step in group for name in (step.file, step.staged)), jobs)


def _keep(root: Path, step: Replace) -> None:
    file, target = root / step.file, root / step.kept
    if is_kept(root, step):
        return
    try:
        disk.link(file, target)
    except OSError as error:
        if not disk.is_there(file):
            raise unlike(file, "it is gone") from error
        if not disk.can_not_link(error, target.parent):
            raise
        _copy(file, target)


def is_kept(root: Path, step: Replace) -> bool:
    """Whether the old file is in the attic. Raises InterruptedSurgery where the new one is gone."""
    if disk.is_there(root / step.kept):
        return True
    if not disk.is_there(root / step.staged):
        raise unlike(root / step.staged, "neither the new file nor the one in the attic exists")
    return False


def _copy(file: Path, target: Path) -> None:
    """What link(2) does, where there is none: `target` appears complete or not at all."""
    part = target.with_name(f"{target.name}.part")
    if disk.is_there(part):
        disk.remove_file(part)
    if disk.is_link(file):
        disk.symlink(str(file.readlink()), part)
    else:
        info = file.stat()
        with disk.created(part) as descriptor:
            disk.copy_at(descriptor, part, 0, file, 0, info.st_size)
            disk.copy_rights(descriptor, part, info)
            disk.set_times(part, info.st_mtime_ns)
            disk.fsync_file(descriptor, part)
    disk.rename(part, target)


def _swap(root: Path, step: Replace) -> None:
    if disk.is_there(root / step.staged):
        disk.rename(root / step.staged, root / step.file)


def move(root: Path, group: Sequence[Move]) -> None:
    """Do, or finish, these moves in their order, durably."""
    freed: set[str] = set()
    for step in group:
        if step.dst in freed:
            # What bears this name now must have its new name durably before it loses the old one.
            _fsync_parents(root, (name for step in group for name in (step.src, step.dst)), 1)
        freed.add(step.src)
        if not is_moved(root, step):
            disk.rename(root / step.src, root / step.dst)
    _fsync_parents(root, (name for step in group for name in (step.src, step.dst)), 1)


def is_moved(root: Path, step: Move, freed: Collection[str] = ()) -> bool:
    """Whether it is done. Raises InterruptedSurgery where its file is gone, or another has its new
    name; one that is in `freed` goes before it."""
    source, target = root / step.src, root / step.dst
    if not disk.is_there(target):
        if not disk.is_there(source):
            raise unlike(source, f"neither it nor {target} exists")
        return False
    if not is_taken(source, target, step):
        return True
    if step.dst not in freed:
        raise unlike(target, f"it was made since, and {source} gets this name", "move it away")
    return False


def is_taken(source: Path, target: Path, step: Move) -> bool:
    """Whether another file has the new name, and the one that gets it still has the old one."""
    return _bears(source, step) and not _bears(target, step)


def _bears(path: Path, step: Move) -> bool:
    """Whether what lies there is what the step moves: the same file or folder, or where the run was
    copied since, one of its time. Any is, where the journal does not say."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if step.mtime_ns is None or status.st_ino == step.ino:
        return True
    return at(status.st_mtime_ns, step.mtime_ns)


def known(path: Path, step: Move) -> Move:
    """The step, with that by which what lies there now is known."""
    status = path.lstat()
    return dataclasses.replace(step, ino=status.st_ino, mtime_ns=status.st_mtime_ns)


def _fsync_parents(root: Path, names: Iterable[str], jobs: int) -> None:
    parents = sorted({(root / name).parent for name in names})
    each(disk.fsync_directory, [parent for parent in parents if disk.is_folder(parent)], jobs)
