"""A database of a tracker as a log of a run: which of its runs are meant, what becomes of them."""

from __future__ import annotations

import sqlite3
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.logs.databases.points import Points
from ckptsurgeon.logs.databases.reading import opened
from ckptsurgeon.logs.history import NEAR
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.new_names import Counts, namer, two_into_one
from ckptsurgeon.logs.source import Cut, LogSource, NewNames, Stream, keep_in_the_attic
from ckptsurgeon.plans.edits import AnyChange, Rewrite, relative
from ckptsurgeon.plans.log_fields import LOGS
from ckptsurgeon.plans.queries import Queries, Statement
from ckptsurgeon.transaction.databases import refuse_live

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NOTED = 64 << 20
"""Bytes up to which a database is copied for a note."""
ROOM = 64 << 10
MOST = 2000
"""Rows at either end of a run in which its first and its last step are looked for."""
End: TypeAlias = Literal["first", "last"]


@dataclass(frozen=True)
class TrackedRun:
    """One run of a database: the highest step that it has, and the times of its first and its last
    point, in seconds."""

    id: str
    name: str
    highest: int
    begun: float
    ended: float


@dataclass(frozen=True)
class Parted:
    """Which points of a run stay, and what the others become: a run with this id and name, or
    nothing."""

    run: TrackedRun
    points: Points
    stays: NDArray[np.bool_]
    keep: bool
    id: str
    name: str
    step: int


class Database(LogSource):
    """A run is cut that has points after the step: the newest one that led there, and those that
    were begun after it from a later step, or all that `named` names. What is cut becomes a run of
    its own beside it; a run of which nothing stays gets that name itself."""

    kind: ClassVar[str]

    def __init__(self, path: Path, root: Path, named: Sequence[str] = ()) -> None:
        super().__init__(path, root)
        self.named = named

    # --- what each tracker says ------------------------------------------------------------------

    @abstractmethod
    def runs(self, database: sqlite3.Connection) -> list[TrackedRun]:
        """Those that are there, without what surgeries kept and what the user deleted."""

    @abstractmethod
    def has(self, database: sqlite3.Connection, id: str, name: str) -> bool:
        """Whether there is a run of this id, or of this name where names tell runs apart."""

    @abstractmethod
    def points_of(self, database: sqlite3.Connection, run: TrackedRun) -> Points:
        """All points of a run."""

    @abstractmethod
    def steps_at(self, database: sqlite3.Connection, run: TrackedRun, end: End) -> list[int]:
        """The steps of its first or its last points, in the order in which they were logged."""

    @abstractmethod
    def leading_to(self, points: Points, marks: Marks, what: str) -> NDArray[np.bool_]:
        """Which of the points are of the history of a step."""

    @abstractmethod
    def parted(self, database: sqlite3.Connection, parted: Parted) -> Iterator[Statement]:
        """What takes the points that do not stay to their run, or away."""

    @abstractmethod
    def whole_aside(self, database: sqlite3.Connection, parted: Parted) -> Iterator[Statement]:
        """The same of a run of which nothing stays."""

    @abstractmethod
    def names(self, database: sqlite3.Connection) -> dict[str, int]:
        """What is logged, and how many points each has."""

    @abstractmethod
    def renamed(self, database: sqlite3.Connection, new: Mapping[str, str]) -> Iterator[Statement]:
        """What gives new names."""

    @abstractmethod
    def values(self, database: sqlite3.Connection, run: TrackedRun) -> Iterator[dict[str, float]]:
        """The numbers of each point by name."""

    @abstractmethod
    def noted(self, run: TrackedRun, step: int, text: str, when: float) -> Iterator[Statement]:
        """What makes a note of a run."""

    # --- a log of a run --------------------------------------------------------------------------

    def streams(self) -> list[Stream]:
        name = relative(self.path, self.root)
        with opened(self.path) as database:
            run = self._newest(database)
            if run is None:
                return [Stream.of(name, self.kind, [])]
            return [
                Stream.of(f"{name}: {run.name}", self.kind, self.steps_at(database, run, "last"))
            ]

    def points(self) -> Iterator[dict[str, float]]:
        with opened(self.path) as database:
            run = self._newest(database)
            if run is not None:
                yield from self.values(database, run)

    def cut(self, cut: Cut) -> tuple[list[AnyChange], list[str]]:
        file = relative(self.path, self.root)
        refuse_live(self.path)
        changes: list[AnyChange] = []
        with opened(self.path) as database:
            for run in self._after(database, cut.marks):
                points = self.points_of(database, run)
                stays = self.leading_to(points, cut.marks, f"{file}: {run.name}")
                if not stays.all():
                    changes.append(self._parted(database, run, points, stays, cut))
                if stays.any() and not self.named:
                    break
        return changes, []

    def rename_keys(self, names: NewNames) -> tuple[list[AnyChange], Counts]:
        name, used = namer(names.pairs, names.regex)
        with opened(self.path) as database:
            counts = self.names(database)
            new = {old: name(old) for old in counts}
            for old, to in new.items():
                if not to:
                    raise UsageError(
                        f"{self.path}: the new name of {old!r} would be empty",
                        next="give it a name",
                    )
            sources: dict[str, str] = {}
            for old, to in new.items():
                if sources.setdefault(to, old) != old and not names.allow_merge:
                    both = f"{sources[to]!r} and {old!r} would both be {to!r}"
                    raise two_into_one(f"{self.path}: {both}")
            changed = {old: to for old, to in new.items() if old != to}
            statements = tuple(self.renamed(database, changed)) if changed else ()
        events = {(old, to): counts[old] for old, to in changed.items()}
        unmatched = tuple(key for key in names.pairs if key not in used)
        result = Counts(events, unmatched, tags=frozenset(counts))
        if not statements:
            return [], result
        refuse_live(self.path)
        return [self._rewrite(statements, f"{sum(events.values())} numbers get new names")], result

    def note(self, step: int, text: str, when: float) -> list[AnyChange]:
        """Not where the database is so large that a note is not worth a copy."""
        if self.path.stat().st_size > NOTED:
            return []
        with opened(self.path) as database:
            run = self._newest(database)
            if run is None:
                return []
            statements = tuple(self.noted(run, step, text, when))
        return [self._rewrite(statements, f"a note at step {step}")]

    # --- which runs ------------------------------------------------------------------------------

    def _newest(self, database: sqlite3.Connection) -> TrackedRun | None:
        runs = self._meant(self.runs(database))
        return max(runs, key=lambda run: run.ended, default=None)

    def _meant(self, runs: Sequence[TrackedRun]) -> list[TrackedRun]:
        """Those that the user named, or all."""
        if not self.named:
            return list(runs)
        return [run for run in runs if run.id in self.named or run.name in self.named]

    def _after(self, database: sqlite3.Connection, marks: Marks) -> list[TrackedRun]:
        """Those with points after a step, the newest first. Raises SurgeryError where they may be
        two trainings, of which nothing says whose the step is."""
        step = marks.iteration
        runs = [run for run in self._meant(self.runs(database)) if run.highest > step]
        runs.sort(key=lambda run: run.ended, reverse=True)
        if self.named:
            return runs
        for later, earlier in pairwise(runs):
            if later.begun < earlier.ended:
                why = f"were logged to at the same time, and both have points after step {step}"
                raise self._two_trainings(earlier, later, why)
        passed = [
            run for run in runs if min(self.steps_at(database, run, "first"), default=step) <= step
        ]
        if len(passed) > 1 and not _saved_during(passed[0], marks.saved_at):
            why = f"both passed step {step}, whose checkpoint was not saved while the newer one ran"
            raise self._two_trainings(passed[1], passed[0], why)
        return runs

    def _two_trainings(self, earlier: TrackedRun, later: TrackedRun, why: str) -> SurgeryError:
        return SurgeryError(
            f"{relative(self.path, self.root)}: the runs {earlier.name!r} ({earlier.id}) and "
            f"{later.name!r} ({later.id}) {why}",
            next=f"tracker_runs: [{later.id}] in ckptsurgeon.yaml says which are this run's",
        )

    # --- changes ---------------------------------------------------------------------------------

    def _parted(
        self,
        database: sqlite3.Connection,
        run: TrackedRun,
        points: Points,
        stays: NDArray[np.bool_],
        cut: Cut,
    ) -> Rewrite:
        import uuid

        name = f"{run.name}-{cut.keep_as}"
        id = uuid.uuid5(uuid.NAMESPACE_OID, f"{run.id}-{cut.keep_as}").hex
        step = cut.marks.iteration
        parted = Parted(run, points, stays, cut.keep_as is not None, id, name, step)
        if self.has(database, id, name):
            raise UsageError(
                f"{self.path} has a run {name}, so a cut branch can't be kept as that",
                next=keep_in_the_attic(f"the run {name}"),
            )
        whole = not stays.any()
        statements = self.whole_aside if whole else self.parted
        note = f"{int(stays.sum())} of {len(stays)} points of {run.name} stay, to step {step}"
        if parted.keep:
            note += f"; {'it becomes' if whole else 'the others become'} the run {name}"
        return self._rewrite(tuple(statements(database, parted)), note)

    def _rewrite(self, statements: Sequence[Statement], note: str) -> Rewrite:
        file, size = relative(self.path, self.root), self.path.stat().st_size
        queries = Queries(file, tuple(statements), size + size // 8 + ROOM)
        return Rewrite(file, LOGS, queries, note)


def _saved_during(run: TrackedRun, saved_at: float | None) -> bool:
    return saved_at is not None and run.begun - NEAR <= saved_at <= run.ended + NEAR
