"""The first and the last bytes of an open file, each read at once: of a small archive they hold the
pickle and the directory, and on a network file system each read is a round trip."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.remote import reads

FIRST, LAST = 1 << 14, 1 << 12
"""Bytes of the ends. What is first of a file in a bucket is fetched at once (`mirror.HEAD`)."""


class Ends:
    """Both ends of the `size` bytes from `start` on, as they were when this was made."""

    def __init__(self, path: Path, descriptor: int, start: int, size: int) -> None:
        self._before = max(0, size - LAST)
        self._last = reads.bytes_at(path, descriptor, start + self._before, size - self._before)
        self._first = self._last
        if self._before:
            self._first = reads.bytes_at(path, descriptor, start, min(FIRST, size))

    def get(self, offset: int, length: int) -> bytes | None:
        """These bytes, where one end has all of them."""
        for at, end in ((0, self._first), (self._before, self._last)):
            if 0 <= offset - at <= offset - at + length <= len(end):
                return end[offset - at : offset - at + length]
        return None
