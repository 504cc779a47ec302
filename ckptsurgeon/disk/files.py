"""The bytes of one file, by its descriptor: made, written in place, cut, and made durable."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ckptsurgeon.disk import calls, owners
from ckptsurgeon.disk.calls import act
from ckptsurgeon.disk.names import Folders, above
from ckptsurgeon.plans.spans import Spans, rows, total, windows

WRITTEN_AT_ONCE = 1 << 20
LONG = 4 << 20
"""Bytes of a row of spans that are written past the page cache."""


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """The descriptor of a new, empty file. Raises FileExistsError when the name is taken.

    What root makes in somebody else's folder is for root alone until it is made durable, or is
    closed: then it is given to the owner of the folder, unless it got other rights before."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

    def create(_: int | None) -> int:
        with above(path) as (name, folder):
            owner = owners.owner_of(folder)
            mode = 0o666 if owner is None else 0o600
            descriptor = os.open(name, flags, mode, dir_fd=folder)
            if owner is not None:
                owners.to_give[descriptor] = (owner, 0o666 & ~owners.umask())
            return descriptor

    descriptor = act("create", path, create)
    try:
        yield descriptor
        owners.give(descriptor)
    finally:
        owners.to_give.pop(descriptor, None)
        os.close(descriptor)


@contextlib.contextmanager
def opened(path: Path, access: int = os.O_RDWR, within: Folders | None = None) -> Iterator[int]:
    """The descriptor of an existing regular file, open for writing in place; `within` may have the
    folder that it is in open."""
    flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with above(path) if within is None else within.above(path) as (name, folder):
        descriptor = os.open(name, flags, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def write_at(descriptor: int, path: Path, offset: int, data: bytes | memoryview) -> None:
    """Write all of `data` at `offset`, in as many calls as the kernel asks for."""
    view = memoryview(data)
    while view:
        rest = view

        def write(limit: int | None, rest: memoryview = rest, offset: int = offset) -> int:
            return os.pwrite(descriptor, rest if limit is None else rest[:limit], offset)

        count = act("write", path, write, offset=offset, data=rest)
        if count == 0:
            raise OSError(errno.EIO, "nothing could be written", str(path))
        view = view[count:]
        offset += count


def write_each(descriptor: int, path: Path, data: bytes, spans: Spans, gap: int) -> None:
    """Write the bytes of `data`, one after the other, to the [start, end) of `spans`, which ascend.
    Zeros of up to `gap` bytes between two are written with them: an edit of 10,000 tensors has
    10,000 spans. A long row of spans goes past the page cache, where the file system allows that:
    its pages would cost more than all else does, and push out those of others."""
    rest = memoryview(data)
    room: memoryview | None = None  # of memory that a direct write can begin at
    for row in rows(spans, gap):
        if len(row) == 1:
            ((start, end),) = row
            size = end - start
            _write_alone(descriptor, path, start, rest[:size])
        else:
            size = total(row)
            room = room or memoryview(mmap.mmap(-1, WRITTEN_AT_ONCE))
            _write_row(descriptor, path, rest[:size], row, room)
        rest = rest[size:]


def _write_row(
    descriptor: int,
    path: Path,
    data: memoryview,
    spans: Spans,
    room: memoryview,
) -> None:
    direct = spans[-1][1] - spans[0][0] >= LONG
    try:
        for start, window in windows(room, data, spans):
            if len(window) < len(room):  # the first or the last
                past_the_cache(descriptor, False)
            elif direct and (direct := past_the_cache(descriptor, True)):
                try:
                    write_at(descriptor, path, start, window)
                    continue
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                direct = past_the_cache(descriptor, False)
            write_at(descriptor, path, start, window)
    finally:
        past_the_cache(descriptor, False)


def past_the_cache(descriptor: int, direct: bool) -> bool:
    """Have reads and writes go past the page cache, or through it; whether they go past it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    if wanted != flags:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
        except OSError:  # a file system that has nothing but its cache
            return False
    return direct


def _write_alone(descriptor: int, path: Path, offset: int, data: memoryview) -> None:
    """As `write_at`; what nobody watches goes to the kernel at once, as there may be thousands."""
    try:
        count = os.pwrite(descriptor, data, offset) if calls.hook is None else 0
    except OSError as error:
        error.filename = str(path)
        raise
    if count < len(data):
        write_at(descriptor, path, offset + count, data[count:])


def write_new(path: Path, data: bytes) -> None:
    """A new file with these bytes, which are durable; its name is not until its directory is."""
    with created(path) as descriptor:
        write_at(descriptor, path, 0, data)
        fsync_file(descriptor, path)


def truncate(descriptor: int, path: Path, size: int) -> None:
    """Cut the file, or extend it with a hole, to `size` bytes."""
    act("truncate", path, lambda _: os.ftruncate(descriptor, size), size=size)


def fsync_file(descriptor: int, path: Path) -> None:
    """Make data, size, times and rights of one file durable."""
    owners.give(descriptor)
    act("fsync_file", path, lambda _: os.fsync(descriptor))


def fsync_data(descriptor: int, path: Path) -> None:
    """Make data and size of one file durable."""
    act("fsync_data", path, lambda _: os.fdatasync(descriptor))
