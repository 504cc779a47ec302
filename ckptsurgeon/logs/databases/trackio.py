"""The runs of Trackio in the SQLite database of a project.

Tables and columns are those of `trackio/sqlite_storage.py`, 0.43; before 0.24 a run had no id but
its name.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, ClassVar

from ckptsurgeon.logs import signals, trail
from ckptsurgeon.logs.databases.database import MOST, Database, End, Parted
from ckptsurgeon.logs.databases.reading import columns
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.points import Points
from ckptsurgeon.logs.source import Subject
from ckptsurgeon.logs.tracked import TrackedRun
from ckptsurgeon.plans.queries import Statement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TABLES = ("metrics", "configs")
"""What a project's database has, among others; `COLUMNS` are some of its metrics."""
COLUMNS = ("id", "timestamp", "run_name", "step", "metrics")
BY_TIME = ("traces", "alerts", "system_metrics", "pending_uploads")
"""What else is of a run and a time, and mostly of a step."""
CUT = "_CutFrom"
"""The key in the config of a run that a surgery made; its value is the run that it was cut from."""
OWN = "step"


class Trackio(Database):
    """The points, and the traces, alerts, system metrics and waiting uploads that came with them. A
    point's step is what the trainer says in it, as `train/global_step`; Trackio's own, which counts
    calls, where no point says one."""

    kind: ClassVar[str] = "trackio"

    def runs(self, database: sqlite3.Connection) -> list[TrackedRun]:
        id = _id(database)
        runs: list[TrackedRun] = []
        last = ""
        while True:  # from one to the next by the index: the table may be long
            ((next,),) = database.execute(f"SELECT min({id}) FROM metrics WHERE {id} > ?", (last,))
            if next is None:
                return runs
            last = next
            if _cut_from(database, id, next):
                continue
            most = f"SELECT max(step) FROM metrics WHERE {id} = ?"
            first = f"SELECT min(timestamp) FROM metrics WHERE {id} = ?"
            end = f"SELECT max(timestamp) FROM metrics WHERE {id} = ?"
            ((highest, begun, ended),) = database.execute(
                f"SELECT ({most}), ({first}), ({end})", (next, next, next)
            )
            ((name,),) = database.execute(
                f"SELECT run_name FROM metrics WHERE {id} = ? LIMIT 1", (next,)
            )
            run = TrackedRun(next, name, highest, _seconds(begun), _seconds(ended))
            steps = self.steps_at(database, run, "last")
            runs.append(replace(run, highest=max([highest, *steps])))

    def has(self, database: sqlite3.Connection, id: str, name: str) -> bool:
        column = _id(database)
        wanted = name if column == "run_name" else id
        rows = database.execute(f"SELECT 1 FROM metrics WHERE {column} = ?", (wanted,))
        return rows.fetchone() is not None

    def points_of(self, database: sqlite3.Connection, run: TrackedRun) -> Points:
        rows = database.execute(
            f"SELECT id, step, timestamp, metrics FROM metrics WHERE {_id(database)} = ? "
            "ORDER BY id",
            (run.id,),
        )
        return _points(rows)

    def steps_at(self, database: sqlite3.Connection, run: TrackedRun, end: End) -> list[int]:
        order = "DESC" if end == "last" else "ASC"
        rows = database.execute(
            f"SELECT id, step, timestamp, metrics FROM metrics WHERE {_id(database)} = ? "
            f"ORDER BY id {order} LIMIT ?",
            (run.id, MOST),
        )
        points = _points(sorted(rows.fetchall()))
        steps: list[int] = points.steps[points.steps != trail.NONE].tolist()
        return steps

    def leading_to(self, points: Points, marks: Marks, what: Subject) -> NDArray[np.bool_]:
        losses = [frozenset(name.split("\n")) - {""} for name in points.names]
        told = trail.Told(points.of.astype("q"), losses)
        return trail.leading_to(points.steps, points.walls, marks, what, told)

    def parted(self, database: sqlite3.Connection, parted: Parted) -> Iterator[Statement]:
        if parted.keep:
            yield _config(database, parted)
        for first, after in parted.points.stretches(~parted.stays):
            for table in BY_TIME:
                yield from self._beside(database, table, parted, first, after)
        for first, last in parted.points.ranges(~parted.stays):
            yield _taken(database, "metrics", parted, "id BETWEEN ? AND ?", (first, last))

    def _beside(
        self, database: sqlite3.Connection, table: str, parted: Parted, first: int, after: int
    ) -> Iterator[Statement]:
        """The rows of another table that came with points [first, after): with a step that is not
        below theirs, or else after the time of the point before them; and written before the
        trainer went on. A point has the time at which it was sent, so what was logged with it may
        be older."""
        names = columns(database, table)
        time = "created_at" if table == "pending_uploads" else "timestamp"
        if time not in names:
            return
        rows, walls = parted.points.rows, parted.points.walls
        later = "1"
        values: list[str | int] = []
        if first > 0:
            later = f"{time} > (SELECT timestamp FROM metrics WHERE id = ?)"
            values.append(int(rows[first - 1]))
        where = later
        if "step" in names:
            lowest = (
                f"SELECT min(step) FROM metrics WHERE id BETWEEN ? AND ? AND {_id(database)} = ?"
            )
            where = f"CASE WHEN step IS NULL THEN {later} ELSE step >= ({lowest}) END"
            values += [int(rows[first]), int(rows[after - 1]), parted.run.id]
        if after < len(rows) and math.isfinite(between := (walls[after - 1] + walls[after]) / 2):
            where = f"{where} AND {time} < ?"
            went_on = datetime.fromtimestamp(between, timezone.utc)
            values.append(went_on.isoformat(timespec="microseconds"))
        yield _taken(database, table, parted, where, tuple(values))

    def whole_aside(self, database: sqlite3.Connection, parted: Parted) -> Iterator[Statement]:
        id = _id(database)
        parted = replace(parted, id=parted.run.id)  # under which it has artifacts, too
        yield f"DELETE FROM configs WHERE {id} = ?", (parted.run.id,)
        if parted.keep:
            yield _config(database, parted)
        for table in ("metrics", *BY_TIME):
            if "run_name" in columns(database, table):
                yield _taken(database, table, parted, "1", ())

    def names(self, database: sqlite3.Connection) -> dict[str, int]:
        counts: dict[str, int] = {}
        for metrics in self._named(database):
            for name in _object(metrics):
                counts[name] = counts.get(name, 0) + 1
        stays = signals.step_name(counts, None)
        return {name: count for name, count in counts.items() if name != stays}

    def renamed(self, database: sqlite3.Connection, new: Mapping[str, str]) -> Iterator[Statement]:
        id = _id(database)
        ids = [run.id for run in self._meant(self.runs(database))] if self.named else [None]
        for run in ids:
            at, values = ("", ()) if run is None else (f"WHERE {id} = ?", (run,))
            pairs = json.dumps(dict(new))
            yield f"UPDATE metrics SET metrics = keys_renamed(metrics, ?) {at}", (pairs, *values)

    def values(self, database: sqlite3.Connection, run: TrackedRun) -> Iterator[dict[str, float]]:
        rows = database.execute(
            f"SELECT metrics, step, timestamp FROM metrics WHERE {_id(database)} = ? ORDER BY id",
            (run.id,),
        )
        for metrics, step, timestamp in rows:
            yield {"_step": step, "timestamp": _seconds(timestamp), **_numbers(metrics)}

    def noted(self, run: TrackedRun, step: int, text: str, when: float) -> Iterator[Statement]:
        """An alert, which Trackio shows beside the curves."""
        time = datetime.fromtimestamp(when, timezone.utc).isoformat()
        values = (time, run.name, "ckptsurgeon", text, "info", step)
        yield (
            "INSERT INTO alerts (run_id, timestamp, run_name, title, text, level, step) VALUES "
            "(?, ?, ?, ?, ?, ?, ?)",
            (run.id, *values),
        )

    def _named(self, database: sqlite3.Connection) -> Iterator[str | bytes]:
        """What each point of the runs says that are meant."""
        id = _id(database)
        wanted = [run.id for run in self._meant(self.runs(database))] if self.named else None
        for run, metrics in database.execute(f"SELECT {id}, metrics FROM metrics"):
            if wanted is None or run in wanted:
                yield metrics


def _id(database: sqlite3.Connection) -> str:
    """The column that tells runs apart."""
    return "run_id" if "run_id" in columns(database, "metrics") else "run_name"


def _taken(
    database: sqlite3.Connection,
    table: str,
    parted: Parted,
    where: str,
    values: tuple[str | int, ...],
) -> Statement:
    """These rows of the run go to the cut branch, or away."""
    id = _id(database)
    where = f"WHERE {id} = ? AND {where}"
    if not parted.keep:
        return f"DELETE FROM {table} {where}", (parted.run.id, *values)
    if id == "run_name":
        change = f"UPDATE {table} SET run_name = ? {where}"
        return change, (parted.name, parted.run.id, *values)
    change = f"UPDATE {table} SET run_id = ?, run_name = ? {where}"
    return change, (parted.id, parted.name, parted.run.id, *values)


def _config(database: sqlite3.Connection, parted: Parted) -> Statement:
    """The config of the cut branch: that of the run, and what it was cut from."""
    id = _id(database)
    found = database.execute(
        f"SELECT config, created_at FROM configs WHERE {id} = ?", (parted.run.id,)
    ).fetchone()
    begun = datetime.fromtimestamp(parted.run.begun, timezone.utc).isoformat()
    config, created = found or ("{}", begun)
    text = json.dumps({**_object(config), CUT: parted.run.id})
    if id == "run_name":
        insert = "INSERT INTO configs (run_name, config, created_at) VALUES (?, ?, ?)"
        return insert, (parted.name, text, created)
    insert = "INSERT INTO configs (run_id, run_name, config, created_at) VALUES (?, ?, ?, ?)"
    return insert, (parted.id, parted.name, text, created)


def _cut_from(database: sqlite3.Connection, id: str, run: str) -> bool:
    """Whether a surgery made the run."""
    found = database.execute(f"SELECT config FROM configs WHERE {id} = ?", (run,)).fetchone()
    return found is not None and CUT in _object(found[0])


def _points(rows: Iterable[tuple[int, int, str, str | bytes]]) -> Points:
    """The points of these rows by what counts updates in them; of one that says nothing of it the
    step is `trail.NONE`, where another says it. The name of each are those of its losses."""
    import numpy as np

    known: dict[str, dict[int, float]] = {}

    def each() -> Iterator[tuple[int, int, float, str]]:
        for at, (number, step, time, metrics) in enumerate(rows):
            numbers = _numbers(metrics)
            for name, value in numbers.items():
                if signals.step_name([name], None) is not None and 0 <= value < 1 << 60:
                    known.setdefault(name, {})[at] = value
            yield number, step, _seconds(time), "\n".join(sorted(trail.losses(numbers)))

    points = Points.read(each())
    named = signals.step_name(dict.fromkeys(known), None)
    if named is not None:
        points.steps = np.full(len(points.rows), trail.NONE, np.int64)
        points.steps[list(known[named])] = [int(step) for step in known[named].values()]
    return points


def _seconds(text: str) -> float:
    try:
        time = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return math.nan
    return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()


def _object(text: str | bytes) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _numbers(text: str | bytes) -> dict[str, float]:
    """The numbers of a point by name."""
    numbers = {name: signals.number(value) for name, value in _object(text).items()}
    return {name: value for name, value in numbers.items() if value is not None}
