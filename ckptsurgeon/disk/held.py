"""Files that stay open for writing from one round of a surgery to the next."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptsurgeon.disk.files import opened
from ckptsurgeon.disk.names import Folders

SECOND = 1_000_000_000


class Held:
    """Files of a run that are opened once and stay so, up to half of the descriptors that a process
    may have; the others are opened each time.

    One whose name leads to another file meanwhile is written to as it was: whoever wrote calls
    `refuse_renamed` before it counts. What somebody else writes to, held or not, is `known` no
    longer."""

    def __init__(self, files: Iterable[Path]) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        names = list(dict.fromkeys(files))
        self._wanted = set(names if soft == resource.RLIM_INFINITY else names[: soft // 2])
        self._open: dict[Path, int] = {}
        self._known: dict[Path, os.stat_result] = {}

    def know(self, path: Path, status: os.stat_result) -> None:
        """Take the bytes of one for known from this `status` on."""
        self._known[path] = status

    def known(self, path: Path, status: os.stat_result) -> bool:
        """Whether it is the same file by its `status` now, and nobody has written to it since."""
        before = self._known.get(path)
        return before is not None and _unwritten(before, status)

    @contextlib.contextmanager
    def opened(self, path: Path, within: Folders) -> Iterator[int]:
        """What `disk.opened` gives, the same each time where it is held."""
        if (descriptor := self._open.get(path)) is not None:
            yield descriptor
            return
        with opened(path, within=within) as descriptor:
            if path in self._wanted:
                self._open[path] = os.dup(descriptor)
            yield descriptor

    def refuse_renamed(self, path: Path, within: Folders) -> None:
        """Raise OSError where the name of one that is held leads to another file by now, or to
        none."""
        if (descriptor := self._open.get(path)) is not None:
            with within.above(path) as (name, folder):
                there = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not os.path.samestat(there, os.fstat(descriptor)):
                raise OSError(errno.ESTALE, "another file took its place", str(path))

    def close(self) -> None:
        """Let go of all."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _unwritten(before: os.stat_result, now: os.stat_result) -> bool:
    """Whether a file is the same and has the bytes that it had: nobody can set its ctime back. No
    where its times are whole seconds, as two writes in one second look alike: then its bytes must
    be compared. Elsewhere two do within one tick of the kernel's clock, which is about as long as
    it takes to compare and then to write."""
    return now.st_ctime_ns % SECOND != 0 and _written(before) == _written(now)


def _written(status: os.stat_result) -> tuple[int, ...]:
    file = status.st_dev, status.st_ino
    return *file, status.st_size, status.st_mtime_ns, status.st_ctime_ns
