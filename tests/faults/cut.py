"""Real power cuts: a loop-mounted file system that is shut down without a flush, and its journal
replayed by the kernel at the next mount. Needs root, mkfs and loop devices."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.faults.inject import Fault, outcome
from tests.faults.sweep import Stage
from tests.faults.world import Point, neither, restore
from tests.support.snapshot import snapshot

FS_IOC_SHUTDOWN, WITHOUT_FLUSH = 0x8004587D, 2
SIZE = {"ext4": 24 << 20, "xfs": 304 << 20}
"""The smallest image that mkfs takes."""


def unavailable(kind: str) -> str | None:
    """Why real cuts can't be made here, or None."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if shutil.which(f"mkfs.{kind}") is None:
        return f"mkfs.{kind} is not installed"
    with tempfile.TemporaryDirectory() as name:
        image, target = Path(name, "image"), Path(name, "mount")
        target.mkdir()
        try:
            format(image, kind)
            with mounted(image, target):
                _shut_down(target)
        except (OSError, subprocess.CalledProcessError) as error:
            return f"no loop mount of {kind} with a shutdown here: {error}"
    return None


def real_cuts(stage: Stage, kind: str, every: int = 1) -> Iterator[Point]:
    """Kill the command at each (or each `every`-th) call and cut the power at that moment; cut it
    also right after the command returned. Then mount again, read, recover."""
    place = stage.world.parent
    gold, image, target = place / "gold", place / "image", place / "mount"
    target.mkdir()
    format(gold, kind)
    with mounted(gold, target):
        restore(stage.template, target / "world")
    for at in [*range(1, len(stage.calls) + 1, every), sys.maxsize]:
        _run("cp", "--sparse=always", str(gold), str(image))
        with mounted(image, target):
            ended = outcome(lambda: stage.scenario.act(target / "world"), Fault("KILL", at))
            _shut_down(target)
        with mounted(image, target):
            violation = stage.scenario.read(target / "world")
            recovery = outcome(lambda: stage.scenario.recover(target / "world"))
            if recovery.code != 0:
                violation = violation or f"recover: exit {recovery.code}: {recovery.told}"
            wanted = [stage.after] if ended.code == 0 else [stage.before, stage.after]
            violation = violation or neither(snapshot(target / "world", own=True), *wanted)
        yield Point(f"{kind}: cut at call {at}", ended.code, violation)


def format(image: Path, kind: str) -> None:
    """An empty file system of this kind in a new image file."""
    with image.open("wb") as file:
        file.truncate(SIZE[kind])
    _run(f"mkfs.{kind}", "-q", str(image))


@contextmanager
def mounted(image: Path, target: Path) -> Iterator[None]:
    """`image`, mounted at `target`."""
    _run("mount", "-o", "loop", str(image), str(target))
    try:
        yield
    finally:
        with suppress(subprocess.CalledProcessError):
            _run("umount", str(target))


def _shut_down(target: Path) -> None:
    descriptor = os.open(target, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, FS_IOC_SHUTDOWN, struct.pack("I", WITHOUT_FLUSH))
    finally:
        os.close(descriptor)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
