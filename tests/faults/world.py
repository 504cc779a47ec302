"""A scenario of the fault harnesses, and the snapshots that its outcome is judged by.

To drive another surgery, give a `Scenario` its four functions; every sweep takes it from there.
They run in other processes too, so they are functions of a module, or `functools.partial` of one.
The world is a directory that holds the run and all else the surgery may touch.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.snapshot import Snapshot, differs, walk


@dataclass(frozen=True)
class Scenario:
    """`build` fills an empty world, `act` is the command under test, `recover` what the user runs
    after exit 5: both raise what the command raises. `read` opens the world as a trainer does and
    returns what is wrong with it, or None; it is called at every boundary, before `recover`."""

    name: str
    build: Callable[[Path], object]
    act: Callable[[Path], object]
    recover: Callable[[Path], object]
    read: Callable[[Path], str | None]


@dataclass(frozen=True)
class Point:
    """One case of a sweep: where, the exit code of the command, and what was violated, if so."""

    where: str
    code: int
    violation: str | None


@dataclass
class Report:
    """What a sweep found."""

    points: int = 0
    violations: list[str] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)

    def note(self, point: Point) -> None:
        self.points += 1
        self.codes[point.code] = self.codes.get(point.code, 0) + 1
        if point.violation is not None:
            self.violations.append(f"{point.where}, exit {point.code}: {point.violation}")


@contextmanager
def workplace() -> Iterator[Path]:
    """An empty directory, in memory where there is one: a sweep makes many thousand files. The
    variable FAULTS_IN names another file system."""
    shared = Path(os.environ.get("FAULTS_IN", "/dev/shm"))
    parent = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=parent) as name:
        yield Path(name)


def neither(found: Snapshot, *wanted: Snapshot) -> str | None:
    """How `found` differs from every one of the wanted states, or None when it is one of them."""
    said = [differs(found, one, times=False) for one in wanted]
    return None if None in said else " and ".join(str(one) for one in said)


def _bytes(path: str, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


Saved = list[tuple[str, os.stat_result, bytes]]


def save(world: Path) -> Saved:
    """A world in memory: names, rights, times, hard links, bytes, and what links say."""
    return [(name, info, _held(f"{world}/{name}", info)) for name, info in walk(world, own=True)]


def restore(saved: Saved, target: Path) -> None:
    """Write a saved world; what was at `target` is removed first."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    linked: dict[int, str] = {}
    folders: list[tuple[str, os.stat_result]] = []
    for name, info, data in saved:
        path = f"{target}/{name}"
        if stat.S_ISDIR(info.st_mode):
            os.mkdir(path)  # noqa: PTH102 (half the time of a sweep is spent here)
            folders.append((path, info))
        elif info.st_ino in linked:
            os.link(linked[info.st_ino], path, follow_symlinks=False)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.fsdecode(data), path)  # noqa: PTH211 (as above)
            if info.st_nlink > 1:
                linked[info.st_ino] = path
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(path, flags, stat.S_IMODE(info.st_mode))
            os.write(descriptor, data)
            os.utime(descriptor, ns=(info.st_atime_ns, info.st_mtime_ns))
            os.close(descriptor)
            if info.st_nlink > 1:
                linked[info.st_ino] = path
    for path, info in reversed(folders):
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def _held(path: str, info: os.stat_result) -> bytes:
    if stat.S_ISLNK(info.st_mode):
        return os.fsencode(os.readlink(path))  # noqa: PTH115 (as above)
    return _bytes(path, info.st_size) if stat.S_ISREG(info.st_mode) else b""
