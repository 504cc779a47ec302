"""The names of files and folders: made, renamed, removed and made durable, with their times.

No call follows a symbolic link in any part of the path that it changes: each folder on the way is
opened from the one above it (`above`), so one that becomes a link between the check and the call is
an error. Callers resolve what a user named.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptsurgeon.disk import mount, owners
from ckptsurgeon.disk.calls import act

FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC

HELD = 64
"""Folders that are open at once: a process may have few descriptors, and a step many folders."""

NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""What `link` ends with where a file can have no second name there."""
_NO_DIRECTORY_FSYNC = (errno.EINVAL, errno.ENOTSUP)


def can_not_link(error: OSError, folder: Path) -> bool:
    """Whether a `link` into the folder ended so because a file can have no second name there. An
    I/O error says so on a network's file system alone, as in a mount of rclone: a local disk that
    ends with one fails."""
    return error.errno in NO_HARD_LINKS or (error.errno == errno.EIO and mount.is_network(folder))


@contextlib.contextmanager
def above(path: Path) -> Iterator[tuple[str, int]]:
    """The last name in `path`, and the folder that it is in as a descriptor. Raises OSError with
    ENOTDIR if a part of the way is a symbolic link."""
    *folders, name = path.parts
    start = folders.pop(0) if path.is_absolute() and folders else "."
    descriptor = os.open(start, FOLDER)
    try:
        for folder in folders:
            inner = os.open(folder, FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield name, descriptor
    finally:
        os.close(descriptor)


class Folders:
    """Folders of a run that are open, so that the way to them is walked once for all their files:
    those of several of the files, up to HELD.

    One that is moved away meanwhile is written to where it went: whoever wrote calls
    `refuse_moved` before it counts."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._open: dict[Path, int] = {}
        each = Counter(file.parent for file in files).most_common(HELD)
        try:
            for path, number in each:
                # One that can't be entered is not held: each of its files says so.
                if number > 1:
                    with contextlib.suppress(OSError), above(path / "_") as (_, folder):
                        self._open[path] = os.dup(folder)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def above(self, path: Path) -> Iterator[tuple[str, int]]:
        """What `above` gives, without a walk where the folder is held."""
        if (folder := self._open.get(path.parent)) is not None:
            yield path.name, folder
        else:
            with above(path) as found:
                yield found

    def refuse_moved(self) -> None:
        """Raise OSError where the way to one of them leads to another by now, or to none."""
        for path, descriptor in self._open.items():
            with above(path / "_") as (_, folder):
                if not os.path.samestat(os.fstat(folder), os.fstat(descriptor)):
                    raise OSError(errno.ESTALE, "another folder took its place", str(path))

    def close(self) -> None:
        """Let go of all."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Folders:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder outside of every run, removed in the end with all that is in it."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ckptsurgeon-") as folder:
        yield Path(folder)


def make_directory(path: Path) -> None:
    """Create one directory. Raises FileExistsError or FileNotFoundError as mkdir(2) does."""

    def make(_: int | None) -> None:
        with above(path) as (name, folder):
            owner = owners.owner_of(folder)
            os.mkdir(name, 0o777 if owner is None else 0o700, dir_fd=folder)
            if owner is not None:
                owners.give_folder(name, folder, owner)

    act("make_directory", path, make)


def remove_directory(path: Path) -> None:
    """Remove one empty directory."""

    def remove(_: int | None) -> None:
        with above(path) as (name, folder):
            os.rmdir(name, dir_fd=folder)

    act("remove_directory", path, remove)


def remove_file(path: Path) -> None:
    """Remove one name of a file."""

    def remove(_: int | None) -> None:
        with above(path) as (name, folder):
            os.unlink(name, dir_fd=folder)

    act("remove_file", path, remove)


def rename(source: Path, target: Path) -> None:
    """rename(2): an existing target file is replaced in one step."""

    def move(_: int | None) -> None:
        with above(source) as (old, here), above(target) as (new, there):
            os.rename(old, new, src_dir_fd=here, dst_dir_fd=there)

    act("rename", source, move, target=str(target))


def link(source: Path, target: Path) -> None:
    """A second name for `source` (for the link itself when it is symbolic)."""

    def add(_: int | None) -> None:
        with above(source) as (old, here), above(target) as (new, there):
            os.link(old, new, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)

    act("link", source, add, target=str(target))


def symlink(text: str, path: Path) -> None:
    """A symbolic link that says `text`."""

    def make(_: int | None) -> None:
        with above(path) as (name, folder):
            os.symlink(text, name, dir_fd=folder)
            if (owner := owners.owner_of(folder)) is not None:
                owners.give_link(name, folder, owner, text)

    act("symlink", path, make, text=text)


def fsync_directory(path: Path) -> None:
    """Make the names in `path` durable; a file system that has no such call is left to itself."""

    def sync(_: int | None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with above(path) as (name, folder):
            descriptor = os.open(name, flags, dir_fd=folder)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_FSYNC:
                raise
        finally:
            os.close(descriptor)

    act("fsync_directory", path, sync)


def set_times(path: Path, mtime_ns: int, descriptor: int | None = None) -> None:
    """Set the modification time, of a file that is open by its descriptor; the access time stays as
    it is. Only the owner of a file may: for anybody else who writes to it, both stay (EPERM of
    utimensat(2))."""

    def set(_: int | None) -> None:
        if descriptor is not None:
            os.utime(descriptor, ns=(os.fstat(descriptor).st_atime_ns, mtime_ns))
            return
        with above(path) as (name, folder):
            access = os.stat(name, dir_fd=folder, follow_symlinks=False).st_atime_ns
            os.utime(name, ns=(access, mtime_ns), dir_fd=folder, follow_symlinks=False)

    try:
        act("set_times", path, set, mtime_ns=mtime_ns)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
