"""All bytes of a small file, whoever put it there: no wait for a writer, and a limit."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_RECORD = 512 << 20
"""Bytes of a receipt, a journal or a plan: the longest known, of 10,000 shards, have a tenth."""

UNLIKE = (errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.EAGAIN, errno.ENXIO)
"""The errors that say of a FIFO, a device, a link or a file without end that it is no such file."""

MAX_POINTER = 1 << 20
PIECE = 1 << 16
"""Bytes by which a file may have grown, or of one whose size the kernel does not say."""


@contextmanager
def regular(path: Path, *, follow: bool = True) -> Iterator[int]:
    """The descriptor of a regular file, for reading without a wait; unless `follow`, of no link.
    Raises OSError: EINVAL for a FIFO, a device or a folder."""
    more = 0 if follow else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | more)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def read(path: Path, most: int, *, follow: bool = True) -> bytes:
    """The bytes of a regular file; unless `follow`, of no link. Raises OSError: EINVAL for a FIFO,
    a device or a folder, EFBIG for more than `most` bytes, EAGAIN for what would have to be waited
    for, as some files of /proc."""
    with regular(path, follow=follow) as descriptor:
        return of(descriptor, path, most)


def of(descriptor: int, path: Path, most: int) -> bytes:
    """All bytes of the file at `path` that was opened, as `read` gives them; in memory once, where
    the kernel gives them in one piece."""
    pieces, left = [], most + 1
    rest = os.fstat(descriptor).st_size
    if rest <= most:
        try:
            while left and (piece := os.read(descriptor, min(left, rest + PIECE))):
                pieces.append(piece)
                left -= len(piece)
                rest = max(rest - len(piece), 0)
        except OSError as error:
            error.filename = str(path)
            raise
        if left:
            return b"".join(pieces)
    raise OSError(errno.EFBIG, f"more than {most} B", str(path))


def text(path: Path) -> str | None:
    """What a pointer says, whose bytes may be any; None where there is none. Raises OSError as
    `read` does."""
    try:
        return read(path, MAX_POINTER).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
