"""A scenario of the fault harnesses, and the snapshots that its outcome is judged by.

To drive another surgery, give a `Scenario` its four functions; every sweep takes it from there.
The world is a directory that holds the run and all else the surgery may touch.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

HOME = ".ckptsurgeon"
T = TypeVar("T")

Snapshot = dict[str, tuple[str, bytes, int]]
"""Path → kind, bytes (or link text), and the modification time of a file of the run."""


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


@dataclass
class Report:
    """What a sweep found. Each violation names its point."""

    name: str
    points: int = 0
    violations: list[str] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)

    def note(self, point: str, code: int, violation: str | None) -> None:
        self.points += 1
        self.codes[code] = self.codes.get(code, 0) + 1
        if violation is not None:
            self.violations.append(f"{self.name} {point}: {violation}")


def isolated(call: Callable[..., T], *arguments: object) -> T:
    """Make the call in a fresh interpreter. A sweep forks at every point, and a fork of a process
    that has imported torch takes twenty times as long."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


@contextmanager
def workplace() -> Iterator[Path]:
    """An empty directory in memory where there is one: a sweep makes many thousand files."""
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=parent) as name:
        yield Path(name)


def snapshot(world: Path) -> Snapshot:
    """Everything in the world. A receipt is only known to be there: it holds the time."""
    found: Snapshot = {}
    for path in sorted(world.rglob("*")):
        name = path.relative_to(world).as_posix()
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()).encode(), 0)
        elif path.is_dir():
            found[name] = ("directory", b"", 0)
        elif path.name == "receipt.json":
            found[name] = ("receipt", b"", 0)
        else:
            time = 0 if HOME in path.parts else path.stat().st_mtime_ns
            found[name] = ("file", path.read_bytes(), time)
    return found


def differs(found: Snapshot, wanted: Snapshot, *, times: bool) -> str | None:
    """The first difference between two snapshots, or None."""
    for name in sorted({*found, *wanted}):
        if name not in found:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} is left behind"
        if found[name][:2] != wanted[name][:2]:
            return f"{name} has other bytes"
        if times and found[name][2] != wanted[name][2]:
            return f"{name} has another time"
    return None


def neither(found: Snapshot, *wanted: Snapshot) -> str | None:
    """How `found` differs from every one of the wanted states, or None when it is one of them."""
    said = [differs(found, one, times=False) for one in wanted]
    return None if None in said else " and ".join(str(one) for one in said)


def copy(source: Path, target: Path) -> None:
    """Copy a world with its hard links and times; `target` is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    names: dict[int, Path] = {}
    for path in sorted(source.rglob("*")):
        new = target / path.relative_to(source)
        info = path.lstat()
        if path.is_symlink():
            new.symlink_to(path.readlink())
        elif path.is_dir():
            new.mkdir()
        elif info.st_ino in names:
            new.hardlink_to(names[info.st_ino])
        else:
            new.write_bytes(path.read_bytes())
            new.chmod(info.st_mode & 0o777)
            os.utime(new, ns=(info.st_atime_ns, info.st_mtime_ns))
            if info.st_nlink > 1:
                names[info.st_ino] = new
