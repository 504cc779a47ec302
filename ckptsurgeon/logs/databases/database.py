"""A database of a tracker as a log of a run: which of its runs are meant, what becomes of them."""

from __future__ import annotations

import sqlite3
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from ckptsurgeon.logs import new_names, tracked
from ckptsurgeon.logs.databases.reading import opened
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.new_names import Counts, namer
from ckptsurgeon.logs.points import Points
from ckptsurgeon.logs.source import Cut, NewNames, Stream, Subject
from ckptsurgeon.logs.tracked import TrackedRun, TrackedRuns
from ckptsurgeon.plans.edits import AnyChange, Rewrite, relative
from ckptsurgeon.plans.frozen import frozen
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


@frozen
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


class Database(TrackedRuns):
    """Its runs, by statements of SQL."""

    kind: ClassVar[str]

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
    def leading_to(self, points: Points, marks: Marks, what: Subject) -> NDArray[np.bool_]:
        """Which of the points are of the history of a step."""

    @abstractmethod
    def parted(self, database: sqlite3.Connection, parted: Parted) -> Iterator[Statement]:
        """What takes the points that do not stay to their run, or away."""

    def left(self, database: sqlite3.Connection, parted: Parted) -> Iterator[str]:
        """What of a run stays with it though its points go, a sentence each."""
        return iter(())

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
        refuse_live(self.path)
        changes: list[AnyChange] = []
        warnings: list[str] = []
        with opened(self.path) as database:
            first = partial(self.steps_at, database, end="first")
            for run in self._passed(self.runs(database), cut.marks, first):
                points = self.points_of(database, run)
                stays = self.leading_to(points, cut.marks, self._subject(run))
                if not stays.all():
                    parted = self._part(database, run, points, stays, cut)
                    changes.append(self._changed(database, parted, cut))
                    warnings += self.left(database, parted)
                if stays.any() and not self.named:
                    break
        return changes, warnings

    def rename_keys(self, names: NewNames) -> tuple[list[AnyChange], Counts]:
        name, used = namer(names.pairs, names.regex)
        with opened(self.path) as database:
            counts = self.names(database)
            new = new_names.each(counts, name, self.path, names.allow_merge)
            changed = {old: to for old, to in new.items() if old != to}
            statements = tuple(self.renamed(database, changed)) if changed else ()
        events = {(old, to): counts[old] for old, to in changed.items()}
        unmatched = tuple(key for key in names.pairs if key not in used)
        result = Counts(events, unmatched, tags=frozenset(counts))
        if not statements:
            return [], result
        refuse_live(self.path)
        return [self._rewrite(statements, new_names.noted(sum(events.values())))], result

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

    def _newest(self, database: sqlite3.Connection) -> TrackedRun | None:
        return self._newest_of(self.runs(database))

    # --- changes ---------------------------------------------------------------------------------

    def _part(
        self,
        database: sqlite3.Connection,
        run: TrackedRun,
        points: Points,
        stays: NDArray[np.bool_],
        cut: Cut,
    ) -> Parted:
        id, name = tracked.branch(run, cut)
        if self.has(database, id, name):
            raise self._there_is(name)
        return Parted(run, points, stays, cut.keep_as is not None, id, name, cut.marks.iteration)

    def _changed(self, database: sqlite3.Connection, parted: Parted, cut: Cut) -> Rewrite:
        stays = parted.stays
        statements = self.parted if stays.any() else self.whole_aside
        note = tracked.note(int(stays.sum()), len(stays), parted.run, cut)
        return self._rewrite(tuple(statements(database, parted)), note)

    def _rewrite(self, statements: Sequence[Statement], note: str) -> Rewrite:
        file, size = relative(self.path, self.root), self.path.stat().st_size
        queries = Queries(file, tuple(statements), size + size // 8 + ROOM)
        return Rewrite(file, LOGS, queries, note)
