"""A training run on disk: its checkpoints, pointers, event files and launch settings."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import Fingerprint, Move, Receipt
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.plain_yaml import unknown_key
from ckptsurgeon.formats import Checkpoint, Format, detect
from ckptsurgeon.formats.logs import Logs
from ckptsurgeon.run import writers
from ckptsurgeon.transaction import journal, lock
from ckptsurgeon.transaction.lock import HOME

SETTINGS = "ckptsurgeon.yaml"
NOTE = ".ckptsurgeon"
"""How the names of event files end that hold a note about a surgery."""


@dataclass(frozen=True)
class Run:
    """The run rooted at `root`, the folder of its checkpoints. Reads only; finds, never guesses.

    `settings` is the content of `ckptsurgeon.yaml` (name, tensorboard: [DIR], relaunch:
    {command: [ARG]}), or empty."""

    root: Path
    format: Format
    settings: Mapping[str, Any]

    @classmethod
    def open(cls, start: Path) -> Run:
        """The run at `start` or in the nearest folder above it, as git finds a repository."""
        here = start.resolve()
        if not here.is_dir():
            raise UsageError(f"{start} is not a directory", next="ckptsurgeon -C RUN status")
        for folder in (here, *here.parents):
            found = detect(folder)
            if found is not None:
                file = folder / SETTINGS
                return cls(folder, found, _settings(file) if file.is_file() else {})
            if (folder / HOME / "receipts").is_dir():
                return cls(folder, Logs(), {})
        raise UsageError(
            f"no training run in {here} or above (no global_step<N>, iter_<N> or step-<N> folder, "
            "no latest)",
            next="ckptsurgeon status -C RUN    with the folder that holds the checkpoints",
        )

    @classmethod
    def of_logs(cls, folders: Sequence[Path]) -> Run:
        """Log directories without checkpoints; receipts and attic are kept in the first one."""
        there = [folder.resolve() for folder in folders]
        for folder, given in zip(there, folders, strict=True):
            if not folder.is_dir():
                raise UsageError(f"{given} is not a directory", next="--tb DIR that is there")
        run = cls(there[0], Logs(), {"tensorboard": [str(folder) for folder in there]})
        if not run.logdirs():
            told = ", ".join(map(str, folders))
            raise UsageError(
                f"no event file in {told}, nor below", next="--tb DIR, with *tfevents* files in it"
            )
        return run

    @property
    def bare(self) -> bool:
        """Whether there are only logs here."""
        return isinstance(self.format, Logs)

    @property
    def name(self) -> str:
        """What the settings call it, else the folder's name."""
        return str(self.settings.get("name", self.root.name))

    # --- paths -----------------------------------------------------------------------------------

    def relative(self, path: Path) -> str:
        """`path` as edits name it: POSIX, from the root, `..` when it lies outside."""
        name, root = str(path), f"{self.root}/"
        if name.startswith(root) and "/.." not in name:
            return name[len(root) :]
        return Path(os.path.relpath(path, self.root)).as_posix()

    def attic(self, file: str, id: str) -> str:
        """Where `file` is kept after surgery `id`: on its own file system, by a name that
        TensorBoard does not load."""
        return self._aside("attic", file, id)

    def staging(self, file: str, id: str) -> str:
        """Where the new bytes of `file` are written before the commit, by the same rules."""
        return self._aside("staging", file, id)

    def _aside(self, kind: str, file: str, id: str) -> str:
        """Below the root; for a log folder elsewhere, below that folder."""
        for root in self.log_roots():
            home = self.relative(root)
            if file.startswith("../") and file.startswith(f"{home}/"):
                inner = file[len(home) + 1 :].replace("tfevents", "tf-events")
                return f"{home}/{HOME}/{kind}/{id}/{inner}"
        return f"{HOME}/{kind}/{id}/{file.replace('tfevents', 'tf-events')}"

    def log_roots(self) -> list[Path]:
        """Where event files are looked for: the folders of the settings, links among them
        resolved, or the root."""
        named = self.settings.get("tensorboard", ".")
        names = named if isinstance(named, list) else [named]
        return [Path(os.path.realpath(self.root / str(item))) for item in names]

    def fingerprint(self, file: str) -> Fingerprint:
        """What `file` is at this moment; an absent file has inode 0."""
        try:
            info = os.lstat(f"{self.root}/{file}")
        except FileNotFoundError:
            return Fingerprint(file, 0, 0, 0, 0)
        return Fingerprint(file, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)

    # --- checkpoints -----------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The saved steps, ascending, complete or not."""
        return self.format.steps(self.root)

    def directory(self, step: int) -> Path:
        """The folder that `step` is saved in."""
        return self.format.directory(self.root, step)

    def entries(self, step: int) -> list[Path]:
        """The files or folders that are `step` and nothing else."""
        return self.format.entries(self.root, step)

    def complete(self, step: int) -> bool:
        """Whether every shard of `step` is there (names and world sizes, not contents)."""
        try:
            return not self.format.missing(self.root, step)
        except SurgeryError:
            return False

    def checkpoint(self, step: int) -> Checkpoint:
        """Open `step`. Raises when it is not saved or lacks a shard, and names what is near."""
        steps = self.steps()
        if step not in steps:
            near = sorted(steps, key=lambda other: (abs(other - step), other))[:2]
            hints = [f"step {other} is saved" for other in sorted(near)]
            raise UsageError(
                f"step {step} is not saved in {self.root}",
                next=[*hints, "ckptsurgeon status    list all steps"],
            )
        missing = self.format.missing(self.root, step)
        if missing:
            complete = [other for other in steps if other < step and self.complete(other)]
            back = [
                f"ckptsurgeon rollback --to {s}    the newest complete one before it"
                for s in complete[-1:]
            ]
            names = ", ".join(missing[:3])
            names += f" … ({len(missing)})" if len(missing) > 3 else ""
            raise SurgeryError(
                f"step {step} is incomplete: missing: {names}",
                next=[*back, "ckptsurgeon status    list the complete steps"],
            )
        return self.format.open(self.root, step)

    def pointers(self) -> dict[str, int | None]:
        """Pointer file → the step it names, or None when it is missing or names nothing."""
        return {
            self.relative(path): self.format.pointed(path)
            for path in self.format.pointers(self.root, 0)
        }

    def latest(self) -> int:
        """The step that every pointer names, or, for a trainer that has none, the one that it would
        resume. Raises when they disagree or name no saved step, when no step is complete, and when
        such a trainer would resume one that is not."""
        if self.bare:
            self.format.open(self.root, 0)
        named = self.pointers()
        if not named:
            return self._found()
        fix = "ckptsurgeon repair-latest    point them at the newest complete step"
        for file, step in named.items():
            if step is None:
                raise SurgeryError(f"{file} is missing or names no step", next=fix)
            if step not in self.steps():
                raise SurgeryError(f"{file} names step {step}, which is not saved", next=fix)
        if len(set(named.values())) > 1:
            told = ", ".join(f"{file} → {step}" for file, step in named.items())
            raise SurgeryError(f"the pointers disagree: {told}", next=fix)
        return next(step for step in named.values() if step is not None)

    def _found(self) -> int:
        """What a trainer without pointers takes."""
        complete = [step for step in self.steps() if self.complete(step)]
        found = self.format.pointed(self.root)
        if not complete:
            told = [n for step in self.steps()[-1:] for n in self.format.missing(self.root, step)]
            raise SurgeryError(
                f"no complete checkpoint in {self.root}" + (f": no {told[0]}" if told else ""),
                next="ckptsurgeon status    what is missing",
            )
        if found is not None and found > complete[-1]:
            missing = ", ".join(self.format.missing(self.root, found)[:3])
            raise SurgeryError(
                f"step {found} is incomplete (no {missing}), and its trainer, which keeps no "
                "pointer, would resume it",
                next=f"ckptsurgeon rollback --to {complete[-1]}    moves it to the attic",
            )
        return complete[-1]

    # --- surgeries -------------------------------------------------------------------------------

    def receipts(self) -> list[Receipt]:
        """The surgeries done so far, oldest first."""
        return journal.receipts(self.root)

    def under_way(self) -> str | None:
        """What a surgery that is alive does, where and since when; or whose lock is not removed."""
        found = lock.alive(self.root)
        return None if found is None else str(found)

    def interrupted(self) -> str | None:
        """The title of a surgery that was cut off and waits for `recover`."""
        return None if self.under_way() else journal.interrupted(self.root)

    def refuse_interrupted(self) -> None:
        """Raise while a surgery is under way, InterruptedSurgery while one waits for `recover`."""
        lock.refuse_held(self.root)
        journal.refuse_waiting(self.root)

    def refuse_busy(self) -> None:
        """Raise when a surgery waits for `recover`, or a trainer is alive in this run."""
        self.refuse_interrupted()
        alive = self.writers()
        if alive:
            raise SurgeryError(
                f"a trainer is alive in this run: {alive[0]}",
                next="stop the trainer, wait until it is gone, then repeat the command",
            )

    # --- logs ------------------------------------------------------------------------------------

    def logdirs(self) -> list[Path]:
        """Folders with event files of this run: in those that the settings name, or else in the
        root, at any depth. One that a surgery made to keep a cut branch is not among them."""
        kept: set[Path] = set()
        for receipt in journal.receipts(self.root, mentioning="tfevents"):
            if receipt.undoes is None:
                kept |= self._kept_branches(receipt)
        found = {
            here: None
            for here, _, files in self._log_folders()
            if here not in kept and any("tfevents" in name for name in files)
        }
        return list(found)

    def linked_logs(self) -> list[str]:
        """Links to folders with event files: nothing follows them, as they may lead anywhere."""
        found = []
        for here, inner, _ in self._log_folders():
            for link in (here / name for name in inner):
                with contextlib.suppress(OSError):
                    if link.is_symlink() and any("tfevents" in n.name for n in link.iterdir()):
                        found.append(self.relative(link))
        return found

    def _log_folders(self) -> Iterator[tuple[Path, list[str], list[str]]]:
        """Folder, folders in it and files in it, wherever logs may be."""
        checkpoints = {path for step in self.steps() for path in self.entries(step)}
        for root in self.log_roots():
            for folder, inner, files in os.walk(root):
                here = Path(folder)
                inner[:] = sorted(n for n in inner if n != HOME and here / n not in checkpoints)
                yield here, inner, files

    def _kept_branches(self, receipt: Receipt) -> set[Path]:
        """Folders that a surgery made for cut branches. Where it also replaced a file or moved one
        aside, the run writes its logs: a cut file may get another name there."""
        made, written = set(), set()
        for edit in receipt.inverse:
            if isinstance(edit, Move) and "tfevents" in edit.src and not edit.src.endswith(NOTE):
                made.add(edit.src)
            elif "tfevents" in (file := edit.dst if isinstance(edit, Move) else edit.file):
                written.add(file)
        return {self._folder(file) for file in made} - {self._folder(file) for file in written}

    def _folder(self, file: str) -> Path:
        return Path(os.path.normpath(self.root / file)).parent

    def event_files(self) -> list[str]:
        """The files in those folders, but the notes of surgeries, relative to the root."""
        return [
            self.relative(item)
            for folder in self.logdirs()
            for item in sorted(folder.glob("*tfevents*"))
            if not item.name.endswith(NOTE)
        ]

    def writers(self) -> list[str]:
        """Evidence of trainers that are alive and write to this run.

        Signs are the bundled trainer's `trainer.pid` and event files that may still be written to.
        Another host's trainer can't be seen from here, only what it writes."""
        found = []
        record = self.root / "trainer.pid"
        if record.is_file():
            try:
                data = json.loads(record.read_text("utf-8"))
                pid, start = int(data["pid"]), int(data["start_time"])
                here = data["host"] == socket.gethostname()
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                here = False
            if here and writers.ticks(pid) == start:
                found.append(f"trainer.pid: process {pid} is running")
        for folder in self.logdirs():
            for item in sorted(folder.glob("*tfevents*")):
                sign = writers.written(item) if item.is_file() else None
                if sign:
                    found.append(f"{self.relative(item)}: {sign}")
        return found + self._saving()

    def _saving(self) -> list[str]:
        """Evidence that a step is being saved: a shard of the newest steps that somebody here has
        open, or a step beyond every pointer that was written to a moment ago, and after them."""
        named = [step for step in self.pointers().values() if step is not None]
        if not named:
            return []
        paths = [self.root / name for name in self.pointers()]
        pointed = max((p.stat().st_mtime for p in paths if p.is_file()), default=0.0)
        found = []
        for step in self.steps():
            if step < max(named):
                continue
            for item in self.format.files(self.root, step):
                if not item.is_file() or item.is_symlink():
                    continue
                saved = item.stat().st_mtime
                if writers.is_open(item):
                    found.append(f"{self.relative(item)}: somebody has it open for writing")
                elif step > max(named) and saved > pointed and (fresh := writers.fresh(saved)):
                    found.append(
                        f"{self.relative(item)}: written {fresh} and newer than what the pointers "
                        "name: a trainer may be saving it; it must be quiet for "
                        f"{writers.FLUSH_S} s"
                    )
        return found


def _settings(file: Path) -> dict[str, Any]:
    data = plain_yaml.read(file)
    for key in data:
        if key not in ("name", "tensorboard", "relaunch"):
            raise unknown_key(key, ("name", "tensorboard", "relaunch"), str(file))
    return data
