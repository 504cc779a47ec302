"""Files that are a copy of what lies elsewhere.

They are no part of a run, so no call here counts as a change of one (`calls`), and none is durable
but where it says so."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from ckptsurgeon.disk.presence import is_folder, is_link


def make_folder(path: Path) -> None:
    """The folder and those above it, for this user alone. Raises PermissionError where it belongs
    to another, who could put anything there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "not a folder of this user", str(path))


def locked(path: Path) -> int | None:
    """A descriptor that holds the lock of this name until it is closed; None while another process
    does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def make_hollow(path: Path, size: int, mtime_ns: int) -> None:
    """A file of so many bytes, all of them a hole, in place of what has that name."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(descriptor)


def fill(path: Path, offset: int, data: bytes, mtime_ns: int) -> None:
    """Write all of `data` at `offset`. The file keeps its time, but for a moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            count = os.pwrite(descriptor, view, offset)
            view, offset = view[count:], offset + count
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(descriptor)


def make_durable(path: Path) -> None:
    """The bytes of a file, to the device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """A durable file with these bytes, in place of what has that name; never a part of them."""
    beside = path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    beside.replace(path)


def remove(path: Path) -> None:
    """One file, or one empty folder; nothing where there is neither, or the folder has files."""
    with contextlib.suppress(FileNotFoundError):
        try:
            path.rmdir() if is_folder(path) and not is_link(path) else path.unlink()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
