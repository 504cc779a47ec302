"""Power cuts by a model: which states a disk may show after a cut at each point of a command.

The recorded calls are replayed on a model of inodes. A cut keeps what is durable by then, and any
allowed part of the rest:

* strict (POSIX): bytes are durable after fsync of their file, a name after fsync of its directory;
  of everything else any part may be there: all, none, one, all but one, a prefix, data without
  names, names without data, half of a write, zeros in place of a write.
* ext4: names, sizes and links go in order (one journal), any fsync makes all earlier ones durable,
  and only bytes may be missing.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptsurgeon.transaction import process
from tests.faults.inject import exited, hooked, outcome
from tests.faults.sweep import Stage
from tests.faults.world import Point, neither
from tests.support.snapshot import Snapshot, snapshot

NAMES = ("link", "make_directory", "symlink", "rename", "unlink")


@dataclass(frozen=True)
class Effect:
    """One change to the model, or a barrier (`sync`, `sync names`).

    `inode` is the file or directory it is about; for names, `folder` and `name` say where."""

    kind: str
    inode: int
    folder: int = 0
    name: str = ""
    old_folder: int = 0
    old_name: str = ""
    offset: int = 0
    data: bytes = b""

    @property
    def is_name(self) -> bool:
        return self.kind in NAMES


@dataclass
class Disk:
    """Bytes of files, names in directories and texts of links, by inode. Inode 0 is the world."""

    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    links: dict[int, str] = field(default_factory=dict)
    next: int = 1

    @classmethod
    def of(cls, world: Path) -> Disk:
        disk = cls()
        seen: dict[int, int] = {}

        def scan(path: Path, folder: int) -> None:
            for item in sorted(path.iterdir()):
                number = item.lstat().st_ino
                inode = seen.setdefault(number, disk.new())
                disk.folders[folder][item.name] = inode
                if item.is_symlink():
                    disk.links[inode] = str(item.readlink())
                elif item.is_dir():
                    disk.folders[inode] = {}
                    scan(item, inode)
                else:
                    disk.files[inode] = item.read_bytes()

        scan(world, 0)
        return disk

    def new(self) -> int:
        self.next += 1
        return self.next - 1

    def copy(self) -> Disk:
        folders = {inode: dict(names) for inode, names in self.folders.items()}
        return Disk(dict(self.files), folders, dict(self.links), self.next)

    def find(self, parts: Sequence[str]) -> tuple[int, str, int]:
        """The folder and name of a path, and its inode (-1 when it is not there)."""
        folder = 0
        for part in parts[:-1]:
            folder = self.folders[folder][part]
        name = parts[-1] if parts else ""
        return folder, name, self.folders[folder].get(name, -1) if parts else 0

    def apply(self, effect: Effect) -> None:
        """What is lost on the way to an effect is made up: a name of a lost directory is lost."""
        names = self.folders.setdefault(effect.folder, {}) if effect.is_name else {}
        if effect.kind in ("link", "make_directory", "symlink"):
            names[effect.name] = effect.inode
            if effect.kind == "make_directory":
                self.folders.setdefault(effect.inode, {})
            elif effect.kind == "symlink":
                self.links[effect.inode] = effect.data.decode()
        elif effect.kind == "unlink":
            names.pop(effect.name, None)
        elif effect.kind == "rename":
            old = self.folders.get(effect.old_folder, {})
            if old.get(effect.old_name) == effect.inode:
                del old[effect.old_name]
            names[effect.name] = effect.inode
        elif effect.kind == "write":
            data = self.files.get(effect.inode, b"").ljust(effect.offset, b"\0")
            end = effect.offset + len(effect.data)
            self.files[effect.inode] = data[: effect.offset] + effect.data + data[end:]
        elif effect.kind == "size":
            data = self.files.get(effect.inode, b"")
            self.files[effect.inode] = data[: effect.offset].ljust(effect.offset, b"\0")

    def write_out(self, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        made: dict[int, Path] = {}

        def put(inode: int, path: Path) -> None:
            if inode in self.folders:
                path.mkdir()
                for name, child in self.folders[inode].items():
                    put(child, path / name)
            elif inode in self.links:
                path.symlink_to(self.links[inode])
            elif inode in made:
                path.hardlink_to(made[inode])
            else:
                made[inode] = path
                path.write_bytes(self.files.get(inode, b""))

        put(0, target)


# --- recording -----------------------------------------------------------------------------------


class Recorder:
    """A hook that turns each disk call into effects on the model."""

    def __init__(self, world: Path) -> None:
        self.world = os.path.realpath(world)
        self.disk = Disk.of(world)
        self.effects: list[Effect] = []

    def __call__(self, operation: str, path: str, details: Mapping[str, Any]) -> None:
        folder, name, inode = self.disk.find(self._parts(path))
        if operation in ("create", "make_directory", "symlink"):
            kind = "link" if operation == "create" else operation
            text = str(details.get("text", "")).encode()
            self._add(Effect(kind, self.disk.new(), folder, name, data=text))
        elif operation in ("link", "rename"):
            to, new, _ = self.disk.find(self._parts(details["target"]))
            self._add(Effect(operation, inode, to, new, folder, name))
        elif operation in ("remove_file", "remove_directory"):
            self._add(Effect("unlink", inode, folder, name))
        elif operation == "write":
            self._add(Effect("write", inode, offset=details["offset"], data=bytes(details["data"])))
        elif operation == "copy":
            start, end = details["start"], details["end"]
            data = Path(details["source"]).read_bytes()[start:end]
            self._add(Effect("write", inode, offset=details["offset"], data=data))
        elif operation == "truncate":
            self._add(Effect("size", inode, offset=details["size"]))
        elif operation in ("fsync_file", "fsync_data"):
            self._add(Effect("sync", inode))
        elif operation == "fsync_directory":
            self._add(Effect("sync names", inode))
        elif operation not in ("set_times", "set_mode", "set_owner"):
            raise NotImplementedError(operation)

    def _add(self, effect: Effect) -> None:
        self.disk.apply(effect)
        self.effects.append(effect)

    def _parts(self, path: str) -> list[str]:
        """`path` from the world on, without `..` (no directory of a scenario is a link)."""
        relative = os.path.relpath(os.path.normpath(path), self.world)
        return [] if relative == "." else relative.split("/")


# --- states --------------------------------------------------------------------------------------


def durable(effects: Sequence[Effect], rules: str) -> set[int]:
    """The effects that a cut after the last one can't take away."""
    safe: set[int] = set()
    for at, barrier in enumerate(effects):
        if not barrier.kind.startswith("sync"):
            continue
        for number, effect in enumerate(effects[:at]):
            if rules == "ext4" and (effect.is_name or effect.kind == "size"):
                safe.add(number)
            same = effect.folder if effect.is_name else effect.inode
            if same == barrier.inode and effect.is_name == (barrier.kind == "sync names"):
                safe.add(number)
    return safe


def states(effects: Sequence[Effect], rules: str) -> Iterator[tuple[int, tuple[Effect, ...]]]:
    """For a cut after each prefix: its length, and the effects that survive. No state twice."""
    seen: set[tuple[Effect, ...]] = set()
    for length in range(len(effects) + 1):
        prefix = effects[:length]
        safe = durable(prefix, rules)
        done = [n for n, effect in enumerate(prefix) if not effect.kind.startswith("sync")]
        loose = [n for n in done if n not in safe]
        for lost, torn in _losses(prefix, loose, rules):
            kept = tuple(torn.get(n, prefix[n]) for n in done if n not in lost)
            key = (*kept, Effect("returned", 0)) if length == len(effects) else kept
            if key not in seen:
                seen.add(key)
                yield length, kept


def _losses(
    effects: Sequence[Effect], loose: Sequence[int], rules: str
) -> Iterator[tuple[set[int], dict[int, Effect]]]:
    """Which loose effects are lost, and which are there in part."""
    names = [n for n in loose if effects[n].is_name or effects[n].kind == "size"]
    data = [n for n in loose if effects[n].kind == "write"]
    yield set(), {}
    if rules == "ext4":
        for length in range(len(names) + 1):
            late = set(names[length:])
            yield late, {}
            yield late | set(data), {}
            for n in data:
                yield late | {n}, {}
        return
    yield set(loose), {}
    for n in loose:
        yield {n}, {}
        yield {*loose} - {n}, {}
        yield set(loose[loose.index(n) :]), {}
    yield set(data), {}
    yield set(names), {}
    for n in data:
        yield from (({*()}, {n: part}) for part in _torn(effects[n]))


def _torn(effect: Effect) -> Iterable[Effect]:
    half = effect.data[: len(effect.data) // 2]
    for data in (half, bytes(len(effect.data)), half.ljust(len(effect.data), b"\0")):
        yield Effect("write", effect.inode, offset=effect.offset, data=data)


# --- the sweep -----------------------------------------------------------------------------------


def cuts(stage: Stage, rules: str) -> Iterator[Point]:
    """Cut the power after each call, in every way that the rules allow; then read and recover."""
    yield from _cuts(stage, _record(stage, sys.maxsize), rules)


def cuts_in_recovery(stage: Stage, rules: str, every: int = 1, at: str = "") -> Iterator[Point]:
    """Kill the command at every `every`-th call whose name starts with `at`, then cut the power
    after each call of recover."""
    kills = [number for number, call in enumerate(stage.calls, 1) if call.startswith(at)]
    for kill in kills[::every]:
        yield from _cuts(stage, _record(stage, kill), rules)


@dataclass(frozen=True)
class Record:
    """The disk before the command, and all effects of the command up to `killed`, then of recover;
    `end` is what the world is when the last of them returned."""

    before: Disk
    effects: tuple[Effect, ...]
    killed: int
    end: Snapshot


class _Killed(BaseException):
    pass


def _record(stage: Stage, kill: int) -> Record:
    """Runs in this process, as if in another boot: the cut ends whatever holds the lock."""
    stage.reset()
    recorder = Recorder(stage.world)
    before = recorder.disk.copy()
    calls = 0

    def hook(operation: str, path: str, details: Mapping[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls >= kill:
            raise _Killed
        recorder(operation, path, details)

    boot, process.boot = process.boot, lambda: "the boot before the cut"
    try:
        with hooked(hook):
            stage.scenario.act(stage.world)
        killed = 0
    except _Killed:
        killed = len(recorder.effects)
        with hooked(recorder), exited():
            stage.scenario.recover(stage.world)
    finally:
        process.boot = boot
    return Record(before, tuple(recorder.effects), killed, snapshot(stage.world, own=True))


def _cuts(stage: Stage, record: Record, rules: str) -> Iterator[Point]:
    for length, kept in states(record.effects, rules):
        if length < record.killed:
            continue
        state = record.before.copy()
        for effect in kept:
            state.apply(effect)
        state.write_out(stage.world)
        wanted = [record.end] if length == len(record.effects) else [stage.before, stage.after]
        where = f"killed after {record.killed}, cut after {length}, {len(kept)} effects kept"
        yield Point(where, 0, _judge(stage, wanted))


def _judge(stage: Stage, wanted: Sequence[Snapshot]) -> str | None:
    violation = stage.read()
    if violation is not None:
        return violation
    ended = outcome(lambda: stage.scenario.recover(stage.world))
    if ended.code != 0:
        return f"recover: exit {ended.code}: {ended.told}"
    return neither(snapshot(stage.world, own=True), *wanted) or stage.read()
