"""A training run on disk: its checkpoints, pointers, event files and launch settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptsurgeon import disk
from ckptsurgeon.errors import DamagedFile, SurgeryError, UsageError, first_few
from ckptsurgeon.files.text_file import text
from ckptsurgeon.formats import Checkpoint, Format, State
from ckptsurgeon.formats.layout import CleansUp, SavesOver, resumes
from ckptsurgeon.formats.optimizers import pages
from ckptsurgeon.formats.optimizers.table import TABLE, Known
from ckptsurgeon.formats.step_folders import is_link, number_of
from ckptsurgeon.hints import Hint, again, command
from ckptsurgeon.plans.edits import Move, relative
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.plans.plan import Fingerprint, Receipt
from ckptsurgeon.remote import reads
from ckptsurgeon.run import moved, search, step_names, writers
from ckptsurgeon.run.condition import Conditions
from ckptsurgeon.run.log_folders import LogFolders
from ckptsurgeon.run.only_logs import Logs
from ckptsurgeon.transaction import entry, lock, receipts
from ckptsurgeon.transaction.home import ATTIC, EVENTS, HOME, KEPT_EVENTS

if TYPE_CHECKING:
    from ckptsurgeon.logs.source import LogSource

CONFIG = "train.yaml"
"""The config that the bundled trainer leaves in its run."""


@held
class Run:
    """The run rooted at `root`, the folder of its checkpoints. Reads only; finds, never guesses.

    `settings` is the content of `ckptsurgeon.yaml` (name, tensorboard: [DIR], logs: [FILE],
    log_offset: NUMBER, relaunch: {command: [ARG]}, format: NAME or FILE), or empty."""

    root: Path
    format: Format
    settings: Mapping[str, Any]
    optimizer: str = ""
    """A page that describes its optimizer (see `optimizers.pages`), given or in the settings."""
    given: str = ""
    """The format that `open` was given, or "" where the files or the settings said it."""
    resuming: bool = False
    """Whether a surgery that was cut off before its commit point is to be gone on with."""
    helping: bool = False
    """Whether it helps who holds its lock, whose surgery does not count until it is committed."""

    @classmethod
    def open(
        cls,
        start: str | os.PathLike[str],
        format: str = "",
        optimizer: str | os.PathLike[str] = "",
    ) -> Run:
        """The run at `start` or in the nearest folder above it, as git finds a repository. With
        `format` (see `detect.named`), or a `format` in the settings, the nearest one that this
        recognizes. `optimizer` is the path of a page, for one that the table does not have."""
        moved.refuse_moved(Path(start))
        here = Path(start).resolve()
        reads.refuse_hollow(here)
        if not disk.is_folder(here):
            raise UsageError(f"{start} is not a directory", next=search.meant(Path(start)))
        run = cls.around(here, format)
        if run is None:
            search.refuse_none(here, format)
        own = run.settings.get("optimizer")
        page = str(optimizer) or (str(run.root / str(own)) if own else "")
        return replace(run, optimizer=page, given=format)

    @classmethod
    def around(cls, folder: Path, format: str = "") -> Run | None:
        """The run that `folder` lies in, or is; None outside of all."""
        found = search.nearest(folder.resolve(), format)
        return None if found is None else cls(*found)

    @classmethod
    def of_logs(cls, folders: Sequence[Path]) -> Run:
        """Log directories without checkpoints; receipts and attic are kept in the first one."""
        paths = [folder.resolve() for folder in folders]
        for path, folder in zip(paths, folders, strict=True):
            if not disk.is_folder(path):
                raise UsageError(
                    f"{folder} is not a directory", next="--tb DIR, with *tfevents* files in it"
                )
            moved.refuse_moved(path)
            reads.refuse_hollow(path)
        run = cls(paths[0], Logs(), {"tensorboard": [str(path) for path in paths]})
        if not run.logs.all():
            raise UsageError(
                f"no event file in {', '.join(map(str, folders))}, nor below",
                next="--tb DIR, with *tfevents* files in it",
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

    @property
    def launchable(self) -> bool:
        """Whether anything in the run says how its trainer is started; not of one in a bucket."""
        said = self.settings.get("relaunch") is not None or disk.is_file(self.root / CONFIG)
        return said and reads.key(self.root) is None

    # --- paths -----------------------------------------------------------------------------------

    def relative(self, path: Path) -> str:
        """`path` as edits name it: POSIX, from the root, `..` when it lies outside."""
        return relative(path, self.root)

    def attic(self, file: str, id: str) -> str:
        """Where `file` is kept after surgery `id`: on its own file system, by a name that
        TensorBoard does not load and the trainer's clean-up does not count."""
        return self._aside(ATTIC, file, id)

    def staging(self, file: str, id: str) -> str:
        """Where the new bytes of `file` are written before the commit, by the same rules."""
        return self._aside("staging", file, id)

    def _aside(self, kind: str, file: str, id: str) -> str:
        """Below the root; for a log folder elsewhere, below that folder."""
        for root in self.logs.roots():
            home = self.relative(root)
            if file.startswith("../") and file.startswith(f"{home}/"):
                inner = file[len(home) + 1 :].replace(EVENTS, KEPT_EVENTS)
                return f"{home}/{HOME}/{kind}/{id}/{inner}"
        kept = self.format.kept_as(file) if isinstance(self.format, CleansUp) else file
        return f"{HOME}/{kind}/{id}/{kept.replace(EVENTS, KEPT_EVENTS)}"

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

    def step(self, name: str) -> int:
        """The step that people mean by `name`: `latest`, or what its file or folder is called, or a
        copy of it, or the path to one."""
        if name == "latest":
            return self.latest()
        step = step_names.named(self.format, self.root, name)
        if step is not None:
            return step
        last = [path.name for path, _ in step_names.names(self.format, self.root)][-1:]
        raise UsageError(
            f"{name!r} is not a step of {self.root}: give its number, its name"
            + (f" ({last[0]})" if last else "")
            + ", or latest",
            next=command("status", why="list the saved steps"),
        )

    def directory(self, step: int) -> Path:
        """The folder that `step` is saved in."""
        return self.format.directory(self.root, step)

    def entries(self, step: int) -> list[Path]:
        """The files or folders that are `step` and nothing else."""
        return self.format.entries(self.root, step)

    def complete(self, step: int) -> bool:
        """Whether every shard of `step` is there; contents are not read."""
        return self.conditions.of(step) == "complete"

    def _in_attic(self, step: int) -> list[Hint]:
        """Where a step is that a surgery in force took away, as a hint."""
        in_force = receipts.standing(self.receipts())
        for receipt in reversed(in_force):
            moves = (edit for edit in receipt.inverse if isinstance(edit, Move))
            kept = (edit for edit in moves if disk.exists(self.root / edit.src))  # not pruned
            if any(number_of(Path(edit.dst).name) == step for edit in kept):
                words = ("undo", receipt.id) if receipt is in_force[-1] else ("log",)
                return [command(*words, why=f"{receipt.id} moved step {step} to the attic")]
        return []

    def complete_among(self, steps: Iterable[int]) -> list[int]:
        """Those of the steps that are complete."""
        found = self.conditions.of_each(steps)
        return [step for step, condition in found.items() if condition == "complete"]

    @cached_property
    def conditions(self) -> Conditions:
        """Which of its steps are complete, incomplete or damaged."""
        return Conditions(self.root, self.format)

    def linked(self, step: int) -> bool:
        """Whether `step`, or a part of it, is a symbolic link to elsewhere: it is read, and no edit
        goes through it."""
        return any(is_link(path) for path in self.entries(step))

    def checkpoint(self, step: int, before: int | None = None) -> Checkpoint:
        """Open `step`. Raises if it is not saved or lacks a shard; names the nearest `before`."""
        steps = self.steps()
        if step not in steps:
            others = (s for s in steps if before is None or s < before)
            near = sorted(others, key=lambda other: (abs(other - step), other))[:2]
            hints = self._in_attic(step) + [
                again(swapped=(step, other), why=f"step {other} is saved") for other in sorted(near)
            ]
            why, instead = "", list[str]()
            if isinstance(self.format, SavesOver):
                why, *instead = self.format.instead_of(self.root, step)
            raise UsageError(
                f"step {step} is not saved in {self.root}{why}",
                next=[*instead, *hints, command("status", why="list all steps")],
            )
        with _damage_at(step):
            missing = self.format.missing(self.root, step)
        if missing:
            complete = self.complete_among(other for other in steps if other < step)
            why = "the newest complete one before it"
            back = [command("rollback", "--to", other, why=why) for other in complete[-1:]]
            raise SurgeryError(
                f"step {step} is incomplete: missing: {first_few(missing)}",
                next=[*back, command("status", why="list the complete steps")],
            )
        with _damage_at(step), reads.files_at_once(self.root):
            checkpoint = self.format.open(self.root, step)
        if self.optimizer:
            checkpoint.known = self.known
        return checkpoint

    @cached_property
    def known(self) -> Known:
        """What its page says of its optimizer, besides the table."""
        return Known(pages.read(Path(self.optimizer))) if self.optimizer else TABLE

    def state(self, step: int) -> State:
        """`step` as its trainer would see it, with what the surgeries here said of its values."""
        return self.with_caveats(self.checkpoint(step).state())

    def with_caveats(self, state: State) -> State:
        """`state` with what the surgeries here said of its values."""
        return replace(state, promise=receipts.with_caveats(self.receipts(), state.promise))

    def pointers(self) -> dict[str, int | None]:
        """Pointer file → the step it names, or None when it is missing or names nothing."""
        return {
            self.relative(path): self.format.pointed(path)
            for path in self.format.pointer_files(self.root)
        }

    def latest(self) -> int:
        """The step that every pointer names, or, for a trainer that has none, the one that it would
        resume. Raises when they disagree or name no saved step, when no step is complete, and when
        such a trainer would resume one that is not."""
        if self.bare:
            self.format.open(self.root, 0)
        named = self.pointers()
        if not named:
            return self._resumed()
        for file, step in named.items():
            if step is None:
                raise self._pointless(
                    f"{file} is missing or names no step{_held(self.root / file)}"
                )
            if step not in self.steps():
                raise self._pointless(f"{file} names step {step}, which is not saved")
        if len(set(named.values())) > 1:
            pairs = ", ".join(f"{file} → {step}" for file, step in named.items())
            raise self._pointless(f"the pointers disagree: {pairs}")
        return next(step for step in named.values() if step is not None)

    def _pointless(self, what: str) -> SurgeryError:
        """The refusal where the pointers name no one step."""
        if not self.complete_among(self.steps()):
            return SurgeryError(what, next=self.none_complete().hints)
        why = "make every pointer name the newest complete step"
        return SurgeryError(what, next=command("repair-latest", why=why))

    def _resumed(self) -> int:
        """What a trainer without pointers takes."""
        newest = next(filter(self.complete, reversed(self.steps())), None)
        if newest is None:
            raise self.none_complete()
        resumed = resumes(self.format, self.root)
        if resumed is not None and resumed > newest:
            raise SurgeryError(
                f"step {resumed} is {self.conditions.why(resumed)}, and its trainer, which keeps "
                "no pointer, would resume it",
                next=command("rollback", "--to", newest, why="moves it to the attic"),
            )
        return newest

    def none_complete(self) -> SurgeryError:
        """The refusal where no saved step is complete: no command of this run makes one, but undo
        where a surgery moved it aside."""
        steps = self.steps()
        hints: list[Hint] = [f"restore a step from a copy into {self.root}/"]
        for receipt in receipts.standing(self.receipts())[-1:]:
            if any(isinstance(e, Move) and disk.exists(self.root / e.src) for e in receipt.inverse):
                hints.insert(0, command("undo", receipt.id, why="brings back what it moved aside"))
        lacking = f": step {steps[-1]} is {self.conditions.why(steps[-1])}" if steps else ""
        return SurgeryError(f"no complete checkpoint in {self.root}{lacking}", next=hints)

    # --- surgeries -------------------------------------------------------------------------------

    def receipts(self) -> list[Receipt]:
        """The surgeries done so far, oldest first, without those of `damaged_receipts`."""
        return receipts.read(self.root)

    def damaged_receipts(self) -> dict[str, str]:
        """Id → what is wrong with the receipt, of each surgery that can't be undone for that."""
        return receipts.damaged(self.root)

    def under_way(self) -> str | None:
        """What a surgery that is alive does, where and since when; or whose lock is not removed."""
        return None if (holder := lock.alive(self.root)) is None else str(holder)

    def interrupted(self) -> str | None:
        """The title of a surgery that was cut off and waits for `recover`."""
        return None if self.under_way() else entry.interrupted(self.root)

    def committed(self) -> bool | None:
        """Whether `recover` will finish what was cut off; None where that can't be told."""
        return entry.committed(self.root)

    def next_id(self) -> str:
        """The id of the next surgery, or of the one that is gone on with."""
        begun = (self.resuming or self.helping) and entry.cut_off(self.root)
        return begun or receipts.next_id(self.root)

    def refuse_interrupted(self) -> None:
        """Raise while a surgery is under way, InterruptedSurgery while one waits for `recover`,
        unless it is to be gone on with."""
        if self.helping and self.committed() is not True:
            return
        lock.refuse_held(self.root)
        if not self.resuming or self.committed() is not False:
            entry.refuse_waiting(self.root)

    def refuse_busy(self) -> None:
        """Raise when a surgery waits for `recover`, or a trainer is alive in this run."""
        self.refuse_interrupted()
        alive = self.trainer()
        if alive is not None:
            raise SurgeryError(alive, next=writers.end_it(self.root, alive))

    # --- logs and writers ------------------------------------------------------------------------

    @property
    def logs(self) -> LogFolders:
        """Where its logs are."""
        return LogFolders(self.root, self.format, self.settings)

    def log_sources(self) -> list[LogSource]:
        """Each of its logs, as what cuts, renames and notes."""
        return self.logs.sources()

    def trainer(self) -> str | None:
        """That a trainer is alive in this run, with the first evidence of it; None without any."""
        alive = self.writers()
        return f"a trainer is alive in this run: {alive[0]}" if alive else None

    def writers(self) -> list[str]:
        """Evidence of trainers that are alive and write to this run, see `run.writers`."""
        logs = self.logs.all()
        with reads.files_at_once(self.root):
            return writers.evidence(self.root, self.format, logs, self.pointers())


def _held(pointer: Path) -> str:
    """What a pointer says, where that is a line of less than 80 characters."""
    line = (text(pointer) or "").strip() if disk.is_file(pointer) else ""
    return f": it says {line!r}" if line.isprintable() and 0 < len(line) < 80 else ""


@contextmanager
def _damage_at(step: int) -> Iterator[None]:
    """Damage that is met here is looked up at `step`, which need not be the latest."""
    try:
        yield
    except DamagedFile as error:
        error.hints = (command("verify", step, why="list every damaged file"),)
        raise
