"""The staged bytes of all shards, read for one after the other."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

AHEAD = 1 << 18
"""Bytes that are read at once: the shards of one step have a few KiB each, one after the other."""


class Staged:
    """The open file of staged bytes, in one round of writes. What is read ahead is kept until the
    next bytes are, so each round reads the file anew. For several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._at, self._data = 0, b""

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end). Raises OSError where they are not all there."""
        data = self._some(start, end)
        while len(data) < end - start:
            if not (more := os.pread(self._descriptor, end - start - len(data), start + len(data))):
                raise OSError(errno.EIO, "a read ended early", str(self.path))
            data += more
        return data

    def digest(self, start: int, end: int) -> str:
        """sha256 of the bytes [start, end); nothing where they are not all there."""
        digest = hashlib.sha256()
        while start < end and (data := self._some(start, min(end, start + AHEAD))):
            digest.update(data)
            start += len(data)
        return digest.hexdigest() if start >= end else ""

    def _some(self, start: int, end: int) -> bytes:
        """Some of them; none where the file ends. Who is behind the others reads for itself."""
        with self._lock:
            if self._at <= start and end > self._at + len(self._data) and end - start <= AHEAD:
                self._at, self._data = start, os.pread(self._descriptor, AHEAD, start)
            if self._at <= start < self._at + len(self._data):
                return self._data[start - self._at : end - self._at]
        return os.pread(self._descriptor, end - start, start)

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)
