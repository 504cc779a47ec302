"""Reads long ranges of files once, past the page cache where the file system allows that.

A page of the cache that was not used lately costs a virtual machine more than the disk does, and a
read into pages that lie apart costs it three times one into a huge page. What is read back comes
from the device: no page of the cache can stand in for it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from ckptsurgeon import disk

ALIGN = 4096
"""What position, size and memory of a direct read are multiples of. A device with larger blocks
refuses it, and is read through the cache."""
LONG = 1 << 20
"""Bytes of a range that is worth reads of its own: a shorter one shares the kernel's read-ahead
with what lies beside it."""
ROOM = 1 << 21
"""Bytes that are read at once, at most: one huge page."""


class Rooms(threading.local):
    """Memory to read into, in huge pages where there are some. Each thread has its own and keeps
    it: fresh memory costs more than what is done with it."""

    def __init__(self) -> None:
        self._whole = memoryview(b"")

    def get(self, count: int, size: int) -> list[memoryview]:
        """So many rooms of this size or some bytes more, until the next call in this thread. A
        page takes memory from its first use."""
        size = -(-size // ALIGN) * ALIGN
        if len(self._whole) < count * size:
            memory = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel that has no huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._whole = memoryview(memory)
        return [self._whole[at : at + size] for at in range(0, count * size, size)]


class Reader:
    """The bytes [start, end) of a file, ascending, in memory that it is given: enough for `most`,
    the size of the largest part that is asked for, twice, each rounded up, and ALIGN more.

    `once`: nobody reads them again soon, so they leave no trace in the page cache."""

    def __init__(
        self, path: Path, start: int, end: int, room: memoryview, most: int = 0, once: bool = True
    ) -> None:
        self._start, self._end = start, end
        self._ahead = -(-most // ALIGN) * ALIGN
        """Where in the room the kernel reads to; before it is what was not yet asked for."""
        self._room, self._once = room, once
        self._at = self._stop = self._ahead
        self._descriptor, self._direct = _opened(path, once and end - start >= LONG)
        self._position = start // ALIGN * ALIGN if self._direct else start

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def next(self, size: int) -> memoryview:
        """So many bytes more, until the next call; fewer where the range or the file ends."""
        if self._stop - self._at < size:
            self._fill()
        part = self._room[self._at : min(self._stop, self._at + size)]
        self._at += len(part)
        return part

    def all(self) -> Iterator[memoryview]:
        """All that is left, as it comes; each part until the next one."""
        while part := self.next(len(self._room) - self._ahead):
            yield part

    def _fill(self) -> None:
        """Read on. What is left moves before it."""
        left = self._stop - self._at
        self._room[self._ahead - left : self._ahead] = self._room[self._at : self._stop]
        self._at, self._stop = self._ahead - left, self._ahead
        before, self._position = self._position, self._read(self._position)
        begin = max(before, self._start)
        self._at += begin - before  # 0, but for the first time
        self._stop += max(begin, min(self._position, self._end)) - before
        if not self._direct and self._position > max(before, self._start):
            self._hint()

    def _read(self, position: int) -> int:
        """Fill the room from `position`, up to the end of the range; where that ended."""
        rest = self._room[self._ahead :]
        while rest and position < self._end:
            size = self._end - position
            size = -(-size // ALIGN) * ALIGN if self._direct else size
            try:
                done = os.preadv(self._descriptor, [rest[:size]], position)
            except OSError as error:
                if not self._direct or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                self._through_the_cache()
                continue
            if not done:
                break
            rest, position = rest[done:], position + done
            if self._direct and done % ALIGN:
                self._through_the_cache()
        return position

    def _through_the_cache(self) -> None:
        self._direct = disk.past_the_cache(self._descriptor, False)

    def _hint(self) -> None:
        """Ask for what comes next. What came before leaves the cache."""
        if self._once:
            forget(self._descriptor, self._start, self._position)
        size = min(len(self._room), self._end - self._position)
        if size > 0:
            os.posix_fadvise(self._descriptor, self._position, size, os.POSIX_FADV_WILLNEED)


def _opened(path: Path, direct: bool) -> tuple[int, bool]:
    """A descriptor, and whether it reads past the page cache."""
    if direct:
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False


def forget(descriptor: int, start: int, end: int) -> None:
    """Start to write bytes [start, end) to the device, and drop those from the page cache that are
    there: so a surgery leaves its memory to others, and its fsync has little left to do. A hint."""
    os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
