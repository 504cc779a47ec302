"""What happens in folders, as the kernel tells it: an attacker is woken by the very call that makes
a file."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

CREATED = 0x100
WRITTEN = 0x2 | 0x4 | 0x8  # its bytes, its rights or owner, closed after it was written to
MOVED_IN = 0x80
_EVENT = struct.Struct("iIII")


class Watch:
    """The files that are made in a folder, and in those that are made in it, at any depth."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_CLOEXEC)
        assert self._descriptor >= 0, os.strerror(ctypes.get_errno())
        self._folders: dict[int, Path] = {}
        self._add(folder)

    def files(self) -> Iterator[tuple[Path, bool]]:
        """Each file that is made or written to, and whether it was made just now; without end."""
        while True:
            data = os.read(self._descriptor, 1 << 16)
            while data:
                watch, mask, _, length = _EVENT.unpack_from(data)
                name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
                data = data[_EVENT.size + length :]
                if watch not in self._folders or not name:
                    continue
                path = self._folders[watch] / os.fsdecode(name)
                if _is_folder(path):
                    yield from ((inner, True) for inner in self._add(path))
                else:
                    yield path, bool(mask & (CREATED | MOVED_IN))

    def _add(self, folder: Path) -> list[Path]:
        """Watch it too; the files that were there already."""
        mask = CREATED | MOVED_IN | WRITTEN
        watch = self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), mask)
        if watch < 0:  # it is gone, or not his yet
            return []
        self._folders[watch] = folder
        found = []
        with contextlib.suppress(OSError):
            for path in sorted(folder.iterdir()):
                found += self._add(path) if _is_folder(path) else [path]
        return found


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:  # it is gone, or lies where he may not look yet
        return False
