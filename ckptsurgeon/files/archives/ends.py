"""The first and the last bytes of an open file, each read at once: of a small archive they hold the
pickle and the directory, and on a network file system each read is a round trip. A short file is
read by one."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.remote import reads

FIRST, LAST = 1 << 14, 1 << 12
"""Bytes of the ends. What is first of a file in a bucket is fetched at once (`mirror.HEAD`)."""
SHORT = 1 << 16
"""Bytes that come sooner than a second answer. Model files without weights are shorter."""
MORE = 1 << 18
"""Bytes that are read ahead; more are read in parts, and none of them twice kept."""


class Ends:
    """Both ends of the `size` bytes from `start` on, as they were when this was made."""

    def __init__(self, path: Path, descriptor: int, start: int, size: int) -> None:
        self._path, self._descriptor, self._start = path, descriptor, start
        self._at, self._more = 0, b""
        self._before = max(0, size - LAST) if size > SHORT else 0
        self._last = reads.bytes_at(path, descriptor, start + self._before, size - self._before)
        self._first = self._last
        if self._before:
            self._first = reads.bytes_at(path, descriptor, start, min(FIRST, size))

    def expect(self, offset: int, length: int) -> None:
        """These bytes are asked for next, in parts: a record's header, and then what it holds."""
        if length <= MORE and self.get(offset, length) is None:
            at = self._start + offset
            self._more = reads.bytes_at(self._path, self._descriptor, at, length)
            self._at = offset

    def get(self, offset: int, length: int) -> bytes | None:
        """These bytes, where one end has all of them, or what was expected."""
        for at, end in (
            (0, self._first),
            (self._before, self._last),
            (self._at, self._more),
        ):
            if 0 <= offset - at <= offset - at + length <= len(end):
                return end[offset - at : offset - at + length]
        return None
