"""Which databases are a tracker's, by their tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.logs.databases import mlflow, trackio
from ckptsurgeon.logs.databases.mlflow import MLflow
from ckptsurgeon.logs.databases.reading import columns, is_database, opened
from ckptsurgeon.logs.databases.trackio import Trackio
from ckptsurgeon.logs.new_names import Counts
from ckptsurgeon.logs.source import Cut, LogSource, NewNames, Stream
from ckptsurgeon.plans.edits import AnyChange, relative
from ckptsurgeon.transaction.databases import is_live, refuse_live

USUAL = ("mlflow.db", "mlruns.db")
"""How MLflow calls its database where nobody names it."""


def found(paths: Iterable[Path], root: Path, named: Sequence[str]) -> list[LogSource]:
    """The logs among these files; `named` are the runs in them that the user says are this
    run's."""
    sources = (_source(path, root, named) for path in paths)
    return [source for source in sources if source is not None]


def is_log(path: Path) -> bool:
    """Whether it is one."""
    return _source(path, path.parent, ()) is not None


def _source(path: Path, root: Path, named: Sequence[str]) -> LogSource | None:
    tables: set[str] = set()
    metrics: set[str] = set()
    if is_database(path):
        try:
            with opened(path) as database:
                rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                tables = {name for (name,) in rows}
                metrics = set(columns(database, "metrics"))
        except DamagedFile:  # nothing says that it is a log
            return None
    if tables.issuperset(mlflow.TABLES):
        return MLflow(path, root, named)
    if tables.issuperset(trackio.TABLES) and metrics.issuperset(trackio.COLUMNS):
        return Trackio(path, root, named)
    known = path.name in USUAL or disk.exists(path.with_suffix(".lock"))
    return Unread(path, root) if known and not tables and is_live(path) else None


class Unread(LogSource):
    """A database of which everything is still in the log beside it (WAL): which tracker's it is,
    and whether a step was passed, nobody can say yet."""

    def streams(self) -> list[Stream]:
        return [Stream.of(relative(self.path, self.root), "database", [])]

    def cut(self, cut: Cut) -> tuple[list[AnyChange], list[str]]:
        refuse_live(self.path)
        return [], []

    def rename_keys(self, names: NewNames) -> tuple[list[AnyChange], Counts]:
        refuse_live(self.path)
        return [], Counts({}, tuple(names.pairs))
