"""A branch of a run: a directory of its own that begins with one saved step, and shares its bytes.

The new directory appears under its name only when it is complete and edited; the run that it comes
from is only read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ckptsurgeon import disk, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats.layout import Paged, linked
from ckptsurgeon.formats.step_folders import files_below
from ckptsurgeon.hints import again, shell
from ckptsurgeon.operations.logs import Logs
from ckptsurgeon.operations.section import Recipe
from ckptsurgeon.plans.edits import AnyChange
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.recipe.file import to_data
from ckptsurgeon.run.run import CONFIG, Run
from ckptsurgeon.run.search import SETTINGS
from ckptsurgeon.transaction.home import HOME, PARTIAL
from ckptsurgeon.transaction.worker import as_owner

LAUNCH = (SETTINGS, CONFIG)
"""Files beside the checkpoints that say how the run is started; the branch gets copies."""
CANNOT_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS)
_LINK = again("--hard-link", why="shares files: never save this step again in the fork")
_COPY = again("--copy", without=["--hard-link"], why="shares nothing")


@frozen
class Fork:
    """The branch: its step, how many files and bytes it began with, and the surgery on them: its
    changes and what there is to say of them. The receipt is None where nothing was done."""

    folder: Path
    step: int
    files: int
    size: int
    receipt: Receipt | None = None
    changes: tuple[AnyChange, ...] = ()
    warnings: tuple[str, ...] = ()


def fork(
    run: Run,
    step: int,
    folder: Path,
    recipe: Recipe,
    how: str = "reflink",
    *,
    allow_globals: Collection[str] = (),
) -> Fork:
    """Make `folder` a run that holds `step` alone, as `recipe` wants it.

    `reflink` shares blocks until one side writes; `hard-link` shares files, so what writes into a
    file in place (a trainer that saves this very step again) changes both; `copy` shares nothing.
    A file of the step that is a link out of the run stays one. In a folder of the run's owner root
    works as that owner.
    Raises UsageError if the folder exists, SurgeryError if the file system can't do it."""
    folder = folder.parent.resolve() / folder.name
    refuse_place(run, folder)
    run.checkpoint(step)
    theirs = folder.parent.stat().st_uid == run.root.stat().st_uid
    with as_owner(run.root, []) if theirs else contextlib.nullcontext():
        partial = make_partial(folder, "fork")
    try:
        with as_owner(partial, []):
            files = _fill(run, step, folder, partial, how)
        done = Fork(folder, step, len(files), _size(files), warnings=told_of(run))
        done = operated(done, replace(run, root=partial), recipe, allow_globals)
        disk.rename(partial, folder)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(partial)
        raise
    disk.fsync_directory(folder.parent)
    return done


def operated(done: Fork, branch: Run, recipe: Recipe, allow_globals: Collection[str]) -> Fork:
    """What was made, once it is as the recipe wants it."""
    if not to_data(recipe):
        return done
    plan = surgery.plan(branch, recipe, allow_globals=allow_globals)
    receipt = None if plan.empty else surgery.apply(branch, plan)
    warnings = (*done.warnings, *plan.warnings)
    return replace(done, receipt=receipt, changes=plan.changes, warnings=warnings)


def told_of(run: Run) -> tuple[str, ...]:
    """What its page says of a fork."""
    return tuple(run.format.of_forks) if isinstance(run.format, Paged) else ()


def planned(run: Run, step: int, folder: Path, recipe: Recipe) -> Fork:
    """What `fork` would make, with the changes that bring its logs; those of other sections are
    not among them. Reads only, and raises what `fork` would raise for the place and the logs."""
    folder = folder.parent.resolve() / folder.name
    refuse_place(run, folder)
    return outlined(run, step, folder, recipe)


def outlined(run: Run, step: int, folder: Path, recipe: Recipe) -> Fork:
    """The same for a place that was checked."""
    checkpoint, logs, files = run.checkpoint(step), recipe[Logs], files_of(run, step)
    made, told = (
        ([], []) if logs.of is None else logs.changes(replace(run, root=folder), recipe, checkpoint)
    )
    told = [*told_of(run), *told]
    return Fork(folder, step, len(files), _size(files), None, tuple(made), tuple(told))


def _size(files: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def refuse_place(run: Run, folder: Path) -> None:
    """Raise when `folder` can't be made to hold a fork or an export of `run`: it would lie in a
    run, which would take what is written there for its own; or its name is taken, or its parent
    is not there."""
    parent = folder.parent.resolve()
    there = next(each for each in (parent, *parent.parents) if disk.is_folder(each))
    around = run if parent.is_relative_to(run.root) else Run.around(there)
    if around is not None or HOME in (folder.name, *parent.parts):
        what = "what ckptsurgeon keeps" if around is None else f"the run {around.root}"
        raise UsageError(
            f"{folder} lies inside {what}, and no command writes into a run that it does not edit",
            next=f"name a directory outside of {run.root if around is None else around.root}",
        )
    if disk.is_there(folder):
        raise UsageError(f"{folder} already exists", next="choose a new directory")
    if not disk.is_folder(folder.parent):
        raise UsageError(
            f"{folder.parent} is not a directory",
            next=shell(["mkdir", "-p", folder.parent], why="then the same command again"),
        )


def make_partial(folder: Path, what: str) -> Path:
    """The directory that is filled before it gets the name `folder`. Raises UsageError when an
    earlier fork or export (`what`) has left one, SurgeryError when it can't be made."""
    partial = folder.with_name(f"{folder.name}{PARTIAL}")
    if disk.exists(partial):
        raise UsageError(
            f"{partial} exists: an earlier {what} was cut off there, or is still running",
            next=shell(["rm", "-r", partial], why=f"if no {what} is running"),
        )
    try:
        disk.make_directory(partial)
    except OSError as error:
        raise SurgeryError(
            f"{folder} can't be made: {error.strerror}",
            next="name a DIR in a folder that this user may write to",
        ) from None
    return partial


def files_of(run: Run, step: int) -> list[Path]:
    """Every file that a fork of `step` begins with: also what is the step's by its name alone."""
    more = [
        below
        for path in run.entries(step)
        for below in (files_below(path) if disk.is_folder(path) else [path])
    ]
    return list(dict.fromkeys([*run.format.files(run.root, step), *more]))


def _fill(run: Run, step: int, folder: Path, partial: Path, how: str) -> list[Path]:
    files = files_of(run, step)
    folders = {partial}

    def made(source: Path) -> Path:
        """Where `source` comes to lie, in a folder that is there."""
        below = source.relative_to(run.root)
        for parent in reversed(below.parents[:-1]):
            if partial / parent not in folders:
                disk.make_directory(partial / parent)
                folders.add(partial / parent)
        return partial / below

    own = [run.root, *(path.resolve() for path in run.entries(step))]
    pointers = run.format.pointers(run.root, step)
    links = {p for p, text in pointers.items() if p != text and linked(run.format, p)}
    for source in files:
        if source in links:
            continue
        if _leads_out(source, own):
            disk.symlink(os.path.realpath(source), made(source))
        else:
            _share(source, made(source), how)
    for name in LAUNCH:
        if disk.is_file(run.root / name) and not _leads_out(run.root / name, own):
            _share(run.root / name, partial / name, "copy")
    for pointer, text in pointers.items():
        if isinstance(text, str):
            disk.write_new(made(pointer), forked(run, text, folder).encode())
        elif pointer in links:
            disk.symlink(os.path.relpath(text, pointer.parent), made(pointer))
        elif pointer not in files and not _leads_out(text, own):
            _share(text, made(pointer), how)
    for folder in sorted(folders, reverse=True):
        disk.fsync_directory(folder)
    return files


def forked(run: Run, said: str, folder: Path) -> str:
    """What a pointer that says so must say in a fork at `folder`."""
    return run.format.forked(said, folder) if isinstance(run.format, Paged) else said


def _leads_out(file: Path, own: Sequence[Path]) -> bool:
    """Whether it is a link to what is in none of these folders: whoever made it need not be able to
    read that, and who forks may be."""
    return disk.is_link(file) and not any(map(file.resolve().is_relative_to, own))


def _share(source: Path, target: Path, how: str) -> None:
    source = source.resolve()  # a symbolic link may lead nowhere from there
    if how == "hard-link":
        try:
            disk.link(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise SurgeryError(
                f"{source.name}: no hard link leads to {target.parent}, on another file system",
                next=_COPY,
            ) from None
        return
    info = source.stat()
    with disk.created(target) as descriptor:
        if not info.st_mode & stat.S_IROTH:
            disk.copy_mode(descriptor, target, info)
        if how == "reflink":
            try:
                disk.clone(descriptor, target, source)
            except OSError as error:
                if error.errno not in CANNOT_CLONE:
                    raise
                raise SurgeryError(
                    f"{source.name}: this file system can't share blocks with {target.parent} "
                    f"({error.strerror})",
                    next=(*([] if error.errno == errno.EXDEV else [_LINK]), _COPY),
                ) from None
        else:
            disk.copy_at(descriptor, target, 0, source, 0, info.st_size)
        disk.fsync_file(descriptor, target)
    disk.set_times(target, info.st_mtime_ns)


def remove(folder: Path) -> None:
    """Remove a branch with all that is in it."""
    for path in sorted(disk.below(folder), reverse=True):
        if disk.is_folder(path) and not disk.is_link(path):
            disk.remove_directory(path)
        else:
            disk.remove_file(path)
    disk.remove_directory(folder)
