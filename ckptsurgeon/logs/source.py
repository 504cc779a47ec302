"""A log of a run, whatever wrote it: how far it goes, and how it is cut, renamed and noted in.

Every answer is changes for a plan: a log is edited in the transaction of the surgery, never before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import Hint, again
from ckptsurgeon.logs import signals
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.new_names import Counts
from ckptsurgeon.logs.origin import Numbers
from ckptsurgeon.plans.edits import AnyChange, Content, Rewrite, relative
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.log_fields import LOGS
from ckptsurgeon.transaction.home import EVENTS, PARTIAL

Kind: TypeAlias = "tuple[str, tuple[str, ...]]"


@frozen
class Stream:
    """What one log holds of the training: its path or name, the step of its last point, None where
    no point of it has one, and how many steps it is from one point to the next. Logs of one `kind`
    follow one another: a trainer that is started again may begin a new one."""

    name: str
    kind: str
    last: int | None
    each: int = 1

    @classmethod
    def of(cls, name: str, kind: str, steps: Sequence[int]) -> Stream:
        """By the steps of its last points, in the order of the log."""
        jumps = sorted(b - a for a, b in pairwise(steps) if b > a)
        each = jumps[len(jumps) // 2] if jumps else 1
        return cls(name, kind, steps[-1] if steps else None, each)


@frozen
class Counted:
    """A log whose points are numbered alike: of event files those of tags that one `clock` counts,
    its most frequent series. Where a store has several runs, `points` are of the newest."""

    stream: Stream
    points: Numbers
    clock: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """What logs have in common that follow one another."""
        return self.stream.kind, self.clock


def leave(log: object, holds: str) -> Hint:
    """What to do where `log` can't be cut: leave the logs alone, or this one out, with what it
    `holds`."""
    return again(
        "--no-truncate",
        why="leaves the logs alone",
        setting="tensorboard.truncate=false",
        otherwise=f"move {log} out of the run's log folders    its {holds} stay as they are",
    )


@frozen
class Subject:
    """What a refusal is about, a log or one run of it, and what to do `instead` of cutting it."""

    name: str
    instead: Hint

    def __str__(self) -> str:
        return self.name


def keep_in_the_attic(place: object) -> Hint:
    """What to do where a cut branch can't be kept because something is in its place."""
    return again(
        "--no-keep-tb",
        why="keeps it in the attic alone",
        setting="tensorboard.keep=false",
        otherwise=f"give {place} another name",
    )


@frozen
class Cut:
    """Where logs are cut, and what decides which of their points lead there.

    `keep_as` names the run that what is cut becomes; None throws it away, but for the attic.
    `branch`, `order` and `axes` are the user's word where event files prove nothing (see
    `lineage.trace`); with `salvage` damaged records are left out."""

    marks: Marks
    keep_as: str | None = None
    salvage: bool = False
    branch: Collection[str] = ()
    order: str | None = None
    axes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises UsageError for a `keep_as` that names no folder, or that TensorBoard would load
        as an event file."""
        name = self.keep_as
        if name is not None and (name in ("", ".", "..") or "/" in name or EVENTS in name):
            raise UsageError(
                f"{name!r} is not the name of a folder for the cut branch",
                next="give one plain name, such as tb-7k-glitch",
            )


@frozen
class Carry:
    """Where the history of a step is carried: into logs of the run at `root`, in the `folder` there
    for one of the run that has them."""

    root: Path
    marks: Marks
    folder: Callable[[Path], Path]

    @property
    def name(self) -> str:
        """Of the run, which a fork fills before it has its name."""
        return self.root.name.removesuffix(PARTIAL)


def rewrite(path: Path, carry: Carry, content: Content, note: str) -> Rewrite | None:
    """The file that gets what is carried; None where it has that already."""
    known = path.stat() if disk.exists(path) else None
    if known and (known.st_size, known.st_mtime_ns) == (content.size, content.mtime_ns):
        return None
    return Rewrite(relative(path, carry.root), LOGS, content, note, new_file=known is None)


@frozen
class NewNames:
    """Old → new name of what is logged, all at once. With `regex` a key is a pattern for a whole
    name; with `allow_merge` two names may become one."""

    pairs: Mapping[str, str]
    regex: bool = False
    allow_merge: bool = False


class LogSource(ABC):
    """One log at `path`, a file or a folder, of the run at `root`. It reads, and never writes."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.root = root

    @abstractmethod
    def streams(self) -> list[Stream]:
        """What it holds. What is read is bounded, however long the log is."""

    @abstractmethod
    def cut(self, cut: Cut) -> tuple[list[AnyChange], list[str]]:
        """Changes after which it holds the history of the step alone, and warnings; what is cut is
        kept as `cut.keep_as` says. A second call finds nothing to change.

        Raises SurgeryError where it is not known which points led to the step."""

    @abstractmethod
    def rename_keys(self, names: NewNames) -> tuple[list[AnyChange], Counts]:
        """Changes that give what is logged new names, in one pass. Raises UsageError where two
        would become one and may not."""

    def counts_epochs(self) -> bool:
        """Whether nothing but epochs counts its points."""
        return False

    def carried(self, carry: Carry) -> tuple[dict[Path, Rewrite | None], list[str]]:
        """What `cut` would leave of it, as new files of another run, None for one that is there
        already; and why it is not carried, where it is not. It is only read itself."""
        return {}, [
            f"{self.path} is not carried: it is a store of many runs, and the next start may log "
            "into it as well"
        ]

    def points(self) -> Iterator[Mapping[str, float]]:
        """The numbers of each point by name, in the order in which they were logged, where only the
        log itself can say them."""
        return iter(())

    def counted(self) -> list[Counted]:
        """What it holds, with all of its numbers. The whole log is read."""
        import numpy as np

        found = [signals.point(point) for point in self.points()]
        known = [(step, wall) for step, wall in found if step is not None]
        steps = np.array([step for step, _ in known], np.int64)
        points = Numbers(steps, np.array([wall for _, wall in known], float))
        streams = self.streams()
        last = max(streams, key=lambda stream: stream.last or 0, default=None)
        none = Numbers(points.steps[:0], points.walls[:0])
        return [Counted(each, points if each is last else none) for each in streams]

    def note(self, step: int, text: str, when: float) -> list[AnyChange]:
        """A note at `step` that shows `text`, where this kind of log has a place for one."""
        return []
