"""One family of trainers: which files make up a step, and how the trainer is told what to load.

`advice` is what a user does in the trainer where a checkpoint does not decide.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.one_look import once
from ckptsurgeon.formats.advice import Advice
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.constants import ODD
from ckptsurgeon.formats.fields.values import Hazard, Rival
from ckptsurgeon.hints import shell
from ckptsurgeon.transaction import receipts


class Format(Advice, ABC):
    """One family of trainers. A layout says which files are a step; it overrides of the rest what
    differs from a trainer that goes by the names of its steps."""

    name: str
    copy_names_folder: ClassVar[bool] = False
    """Whether a pointer that is a copy names the folder of its step by a counter: then it stays as
    that was saved, whatever the counter is set to, unless the folder gets the new number too."""

    @abstractmethod
    def recognizes(self, run: Path) -> bool:
        """Whether the directory looks like the root of such a run."""

    @abstractmethod
    def steps(self, run: Path) -> list[int]:
        """The saved steps, ascending, complete or not."""

    @abstractmethod
    def directory(self, run: Path, step: int) -> Path:
        """The folder that step `step` is saved in."""

    @abstractmethod
    def entries(self, run: Path, step: int) -> list[Path]:
        """The files or folders that are step `step` and nothing else: what leaves when it goes."""

    @abstractmethod
    def files(self, run: Path, step: int) -> list[Path]:
        """Every file of step `step`, ascending: of its folders all, shards or not."""

    @abstractmethod
    def missing(self, run: Path, step: int) -> list[str]:
        """The names of the shards that must exist for the step to load, and do not."""

    @abstractmethod
    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> Checkpoint:
        """Read the trees of every shard of one saved step, but for those in `without`."""

    def strays(self, run: Path, step: int) -> list[str]:
        """A sentence for each name that belongs to no rank of this step."""
        return []

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """What the trainer would load in place of `step` although every pointer names that, or keep
        and remove newer ones for, by the command line that its checkpoints keep."""
        return []

    def pointer_files(self, run: Path) -> list[Path]:
        """The files that say where the trainer resumes, there or not; none for a trainer that goes
        by the names of its steps."""
        return []

    def pointers(self, run: Path, step: int) -> Mapping[Path, str | Path]:
        """Each file that must change to make the run resume at `step`, with its whole text, or with
        the shard of `step` that it must be a copy of."""
        return {}

    def pointed(self, pointer: Path) -> int | None:
        """The step that a pointer file names, or None when it is missing or names nothing."""
        return None


# --- what few families need to say ---------------------------------------------------------------


class FindsStep(ABC):
    """A trainer without pointer files that has a rule of its own. Others take the highest complete
    step."""

    @abstractmethod
    def resumes(self, run: Path) -> int | None:
        """The step that the trainer finds, complete or not; None where it finds none."""


class NamesElsewhere(ABC):
    """A trainer with files that name a step beside its pointers."""

    @abstractmethod
    def stale_pointers(self, run: Path, step: int) -> list[str]:
        """A sentence for each file that names another step still when `pointers` are written for
        `step`, with what to leave out of the relaunch."""


class HasHazards(ABC):
    """A trainer that can be led astray although every file is sound."""

    @abstractmethod
    def hazards(self, run: Path) -> list[Hazard]:
        """What leads a relaunch astray."""


class NamesMore(ABC):
    """A trainer whose files are not all known: some belong to a step by their names alone."""

    @abstractmethod
    def begun(self, run: Path, step: int) -> list[Path]:
        """What is of a step after `step` by its name, while nothing else of that step is saved."""

    @abstractmethod
    def unclear(self, run: Path, step: int) -> list[Path]:
        """What has the number of a saved step after `step` in its name, and may be of none."""

    def unnamed(self, run: Path, step: int, leave: Collection[Path]) -> list[str]:
        """What to know of what holds all of a step after `step`, and does not `leave` with it."""
        return []


class NeedsLinks(ABC):
    """A trainer that replaces symbolic links, and leaves a pointer that is a file as it is."""

    @abstractmethod
    def to_link(self, pointer: Path) -> bool:
        """Whether a pointer that is a file has to become a link."""


class SavesOver(ABC):
    """A trainer that may write a step over the one before it, under the same name."""

    @abstractmethod
    def saved_over(self, run: Path, step: int) -> list[Path]:
        """The files of `step` whose names are the same for each step."""

    def instead_of(self, run: Path, step: int) -> list[str]:
        """Why an older `step` is gone, which was saved over, and what helps who wants it."""
        return [""]


class CleansUp(ABC):
    """A trainer whose clean-up would count what lies in an attic under its own name."""

    @abstractmethod
    def kept_as(self, file: str) -> str:
        """The path of `file` in an attic."""


class NamesEpochs(ABC):
    """A trainer that has more of a step in the names of its files than its number."""

    @abstractmethod
    def common(self, file: str) -> str:
        """What the same file of each step is called, by the name of one."""


class CountsSaves(Format, ABC):
    """A trainer whose numbers of steps may count saves or epochs, or what its script counts."""

    @property
    def logs_counter(self) -> bool:
        """Whether it is known that its logs count what `counted` says."""
        return False

    def counted(self, checkpoint: Checkpoint) -> int:
        """What the trainer's own counter says of a step, which its logs may count."""
        return checkpoint.state().step

    @once
    def updates(self, run: Path, step: int) -> int | None:
        """How many updates `step` is after, by what it holds: the counter of a page or an engine;
        else that of the optimizer, or of a scheduler, which may count what was left out or batches.
        None where it holds none of them. A reset of the moments took earlier updates off the
        optimizer's."""
        try:
            checkpoint = self.open(run, step)
            state = checkpoint.state()
            positions = checkpoint.clear("position") if state.promise.adam_step is None else []
            counted = self.counted(checkpoint)
        except (SurgeryError, OSError, *ODD):
            return None
        if counted != step or self.logs_counter:
            return counted
        if state.promise.adam_step is None:
            return int(max(positions)) if positions else None
        return state.promise.adam_step + sum(
            receipt.before.adam_step or 0
            for receipt in receipts.standing(receipts.read(run))
            if "moments" in (receipt.recipe.get("reset") or ())
            and receipt.before is not None
            and (receipt.step or 0) <= step
        )


class KeepsOpaque(ABC):
    """A trainer that saves files which are known by name, and are not read here."""

    @abstractmethod
    def opaque(self, file: Path) -> bool:
        """Whether a file of a step is one of them."""


class LogsBeside(ABC):
    """A trainer that logs outside of the folder in which it saves."""

    @abstractmethod
    def log_folders(self, run: Path) -> Sequence[str]:
        """Where event files are looked for, from the run, if its settings do not say."""

    @property
    def log_files(self) -> Sequence[str]:
        """The paths there of other logs, whatever `*` stands for."""
        return ()

    @property
    def log_offset(self) -> int | None:
        """By how much the number of a step's last update in its logs is more than that of the step;
        None where nobody says it."""
        return None


class Paged(LogsBeside):
    """A format that a page describes."""

    @property
    @abstractmethod
    def numbers_inside(self) -> bool:
        """Whether the number of a step is in a file, for readers alone: its trainer counts anew
        whatever the files are called."""

    @property
    @abstractmethod
    def of_forks(self) -> Sequence[str]:
        """What a person must know of a fork of such a run, in sentences."""

    @abstractmethod
    def nameless(self, run: Path) -> str:
        """Why a file that could be a step by its name is none, in a sentence; "" without such."""

    @abstractmethod
    def forked(self, said: str, folder: Path) -> str:
        """What a pointer that says so must say in a fork of the run, which lies in `folder`."""

    @abstractmethod
    def idle_paths(self, run: Path, step: int) -> list[str]:
        """Key paths of the page which lead nowhere in this step."""


def numbered_inside(format: Format) -> bool:
    """Whether a step of the format has its number in its file, and not in a name."""
    return isinstance(format, Paged) and format.numbers_inside


def resumes(format: Format, run: Path) -> int | None:
    """The step that the trainer finds by a rule of its own; see `FindsStep`."""
    return format.resumes(run) if isinstance(format, FindsStep) else None


# --- symbolic links ------------------------------------------------------------------------------


def linked(format: Format, pointer: Path) -> bool:
    """Whether a pointer is a symbolic link to what `pointers` say, or has to become one."""
    return disk.is_link(pointer) or (isinstance(format, NeedsLinks) and format.to_link(pointer))


def leads_out(run: Path, path: Path) -> bool:
    """Whether `path` is a symbolic link to a name outside the run. What a name in the run leads to
    in turn is its own affair: a step may be a link."""
    if not disk.is_link(path):
        return False
    named = path.parent / path.readlink()
    return not (named.parent.resolve() / named.name).is_relative_to(run.resolve())


def leads_inside(run: Path, path: Path) -> bool:
    """Whether `path` is a symbolic link to what is in the run by another name, or to nothing."""
    return disk.is_link(path) and not (leads_out(run, path) and disk.exists(path))


def outside(step: int, link: Path, target: Path) -> Rival:
    """What the trainer loads by a link that leads out, and how to lead it to `target` instead."""
    here = os.path.relpath(target, link.parent)
    return Rival(
        step,
        f"{link.name} is a link to {link.readlink()}, outside the run",
        (),
        shell(["ln", "-sfn", here, link], why="then the same command again"),
    )
