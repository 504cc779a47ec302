"""How the bytes of a mirror are read: none of them before it was fetched.

A file of a mirror has the size of its object, and a hole wherever nothing was fetched. Python tells
an audit hook of each file that it opens, whoever asks for it: one that lies in the mirror is
fetched whole, and then it is open. Only `opened` gives the descriptor of one that was not; its
caller says by `need` which bytes come next.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from ckptsurgeon import workers
from ckptsurgeon.errors import DamagedFile, UsageError, count

Range = tuple[int, int]
"""Bytes [start, end)."""
MIRROR = "ckptsurgeon-mirror"
"""A folder above every mirror."""


class Mirror(Protocol):
    """What fetches; `mirror.Mirror` is the one that there is."""

    root: str
    """Its folder, without a link on the way."""
    top: str
    """The folder above which nothing is known."""
    lock: threading.Lock
    """Held while the time of a file is not that of its object."""
    failure: Exception | None
    """What a fetch could not do."""

    def key(self, path: Path) -> str:
        """The key of the object that a path in the mirror stands for."""

    def fetch(self, path: str) -> None:
        """All bytes of the file at `path`, if it is one of the mirror."""

    def follow(self, path: str, inode: int) -> None:
        """The file at `path` is asked for by this inode from now on."""

    def follows(self, inode: int) -> bool:
        """Whether one is."""

    def need(self, inode: int, ranges: Iterable[Range]) -> None:
        """So many bytes of the file, as far as they are in it."""

    def look_below(self, folder: str) -> None:
        """The names below a folder, if it is one of the mirror."""

    def age(self, path: str) -> float | None:
        """How many seconds ago its object was written, by the store's clock."""


_mirror: Mirror | None = None
_hooked = False
_thread = threading.local()


@contextmanager
def through(mirror: Mirror) -> Iterator[None]:
    """What is opened inside, in any thread, and lies in the mirror is fetched first."""
    global _mirror, _hooked
    if not _hooked:  # a hook stays until the process ends
        sys.addaudithook(_before)
        _hooked = True
    _mirror = mirror
    try:
        yield
    finally:
        _mirror = None


def _before(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or _mirror is None or getattr(_thread, "unwatched", False):
        return
    if isinstance(arguments[0], (str, bytes, os.PathLike)):  # not a descriptor, which is open
        path = _absolute(arguments[0])
        if path.startswith(f"{_mirror.root}/"):
            _mirror.fetch(path)


def _absolute(path: str | bytes | os.PathLike[str]) -> str:
    """Without a look at the disk, as there is no link in a mirror."""
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100


@contextmanager
def unwatched() -> Iterator[None]:
    """What this thread opens inside is not fetched: it reads nothing else than what was."""
    before = getattr(_thread, "unwatched", False)
    _thread.unwatched = True
    try:
        yield
    finally:
        _thread.unwatched = before


def opened(path: Path, flags: int = 0) -> int:
    """The descriptor of a file for reading, with more flags of open(2). In a mirror it has holes
    where `need` was not called."""
    with unwatched():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    if _mirror is not None:
        _mirror.follow(_absolute(path), os.fstat(descriptor).st_ino)
    return descriptor


def opened_even_by_link(path: Path, flags: int = 0) -> tuple[int, bool]:
    """The same, and whether the name is a link. What is not a link is asked for once."""
    try:
        return opened(path, flags | os.O_NOFOLLOW), False
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    return opened(path, flags), True


def need(descriptor: int, ranges: Iterable[Range]) -> None:
    """Have these bytes of an open file fetched, where it lies in a mirror. A range that goes past
    the end of the file ends there."""
    if _mirror is not None:
        _mirror.need(os.fstat(descriptor).st_ino, ranges)


def holding(path: Path, ranges: Iterable[Range]) -> AbstractContextManager[None]:
    """Inside, whoever opens files reads these bytes of this one as they are, and nothing is
    fetched: no other byte of a mirror may be read there."""
    if _mirror is None:
        return nullcontext()
    descriptor = opened(path)
    try:
        need(descriptor, ranges)
    finally:
        os.close(descriptor)
    return unwatched()


def bytes_at(path: Path, descriptor: int, offset: int, length: int) -> bytes:
    """So many bytes of the open file from `offset` on. Raises DamagedFile where they are not all
    there."""
    if offset < 0 or length < 0:
        raise DamagedFile(str(path), 0, f"{count(length, 'byte')} at {offset} can't be read")
    need(descriptor, [(offset, offset + length)])
    data = os.pread(descriptor, length, offset)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            raise DamagedFile(str(path), offset + len(data), "the file is cut short")
        data += more
    return data


def seek(descriptor: int, offset: int, kind: int) -> int | None:
    """lseek(2) to the next data or the next hole, and past all bytes where none follows. None where
    nothing tells: a hole in a mirror is what was not fetched."""
    if _mirror is not None and _mirror.follows(os.fstat(descriptor).st_ino):
        return None
    try:
        return os.lseek(descriptor, offset, kind)
    except OSError as error:
        return sys.maxsize if error.errno == errno.ENXIO else None


def status(file: int | Path) -> os.stat_result:
    """stat(2) of a file or a descriptor, and in a mirror the time of the object: what is being
    written beside changes it for a moment."""
    with nullcontext() if _mirror is None else _mirror.lock:
        return os.fstat(file) if isinstance(file, int) else file.stat()


def have_listed(folders: Iterable[Path]) -> None:
    """What lies in folders of the same bucket is known from here on."""
    if _mirror is not None:
        for folder in folders:
            _mirror.look_below(_absolute(folder))


def key(path: Path) -> str | None:
    """What a file or folder of a mirror is called in its bucket; None on a disk."""
    if _mirror is None or not f"{_absolute(path)}/".startswith(f"{_mirror.root}/"):
        return None
    return _mirror.key(path)


def age(path: Path) -> float | None:
    """How many seconds ago the object of a file was written, by the clock of its store; None on a
    disk."""
    return None if _mirror is None else _mirror.age(_absolute(path))


def files_at_once(folder: Path, jobs: int | None = None) -> AbstractContextManager[None]:
    """Inside, `workers.side_by_side` has `jobs` threads, or as many as the file system of the
    folder bears. One for a mirror, which fetches side by side itself."""
    from ckptsurgeon.disk import mount

    threads = jobs or mount.threads(folder)
    return workers.files_at_once(1 if _mirror is not None else threads)


def current() -> Mirror | None:
    """The mirror that is read through now."""
    return _mirror


def refuse_hollow(folder: Path) -> None:
    """Raise UsageError for a folder in a mirror that is not read through it: most of it may be
    holes."""
    if _mirror is None and MIRROR in folder.parts:
        raise UsageError(
            f"{folder} is the mirror of a bucket, and has only what was read of it",
            next="-C s3://BUCKET/PREFIX    reads what is there",
        )


def top() -> Path | None:
    """The folder above which nothing of the mirror is known."""
    return None if _mirror is None else Path(_mirror.top)


def check() -> None:
    """Raise what a fetch could not do, if anything: who asked for the bytes may have gone on
    without them, as without a file that can't be read."""
    if _mirror is not None and _mirror.failure is not None:
        raise _mirror.failure
