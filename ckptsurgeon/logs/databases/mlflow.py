"""The runs of MLflow that a SQLite database has.

Tables and columns are those of `mlflow/store/tracking/dbmodels/models.py`, 1.30 to 3.17.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from ckptsurgeon.errors import count
from ckptsurgeon.logs import metrics
from ckptsurgeon.logs.databases import mlflow_traces
from ckptsurgeon.logs.databases.database import MOST, Database, End, Parted
from ckptsurgeon.logs.databases.reading import columns
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.metrics import SYSTEM
from ckptsurgeon.logs.points import Points
from ckptsurgeon.logs.source import Subject
from ckptsurgeon.logs.tracked import TrackedRun
from ckptsurgeon.plans.edits import relative
from ckptsurgeon.plans.queries import Statement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TABLES = ("runs", "metrics", "latest_metrics", "tags", "params")
"""What a database of MLflow has, among others."""
CUT = "ckptsurgeon.cut_from"
"""The tag of a run that a surgery made; its value is the run that it was cut from."""
NAME = "mlflow.runName"
METRIC = "key, value, timestamp, step, is_nan"
# The order in which MLflow itself calls one point later than another.
_BEST = (
    "SELECT rowid FROM metrics WHERE run_uuid = ? AND key = l.key "
    "ORDER BY step DESC, timestamp DESC, value DESC LIMIT 1"
)
_LATEST = (
    f"INSERT OR REPLACE INTO latest_metrics ({METRIC}, run_uuid) "
    "SELECT m.key, m.value, m.timestamp, m.step, m.is_nan, m.run_uuid "
    f"FROM latest_metrics l JOIN metrics m ON m.rowid = ({_BEST}) WHERE l.run_uuid = ?"
)
_OF_METRIC = (
    "EXISTS (SELECT 1 FROM metrics m WHERE m.key = metric_name AND m.timestamp = "
    "metric_timestamp_ms AND m.step = metric_step AND m.run_uuid = ? AND m.rowid BETWEEN ? AND ?)"
)


class MLflow(Database):
    """The tables `metrics` and `latest_metrics`, and of models that were logged with their run
    their metrics and the step at which they are its output. Parameters, tags and artifacts stay;
    a cut branch has the first two as well."""

    kind: ClassVar[str] = "mlflow"

    def runs(self, database: sqlite3.Connection) -> list[TrackedRun]:
        rows = database.execute(
            "SELECT r.run_uuid, r.name, max(CASE WHEN l.key LIKE 'system/%' THEN -1 ELSE l.step "
            "END), r.start_time, max(l.timestamp) FROM runs r JOIN latest_metrics l "
            "ON l.run_uuid = r.run_uuid WHERE r.lifecycle_stage = 'active' AND NOT EXISTS "
            "(SELECT 1 FROM tags t WHERE t.run_uuid = r.run_uuid AND t.key = ?) GROUP BY "
            "r.run_uuid",
            (CUT,),
        )
        return [
            TrackedRun(id, name or id, highest, (begun or 0) / 1000, ended / 1000)
            for id, name, highest, begun, ended in rows
        ]

    def has(self, database: sqlite3.Connection, id: str, name: str) -> bool:
        rows = database.execute("SELECT 1 FROM runs WHERE run_uuid = ?", (id,))
        return rows.fetchone() is not None

    def points_of(self, database: sqlite3.Connection, run: TrackedRun) -> Points:
        return Points.read(
            database.execute(
                "SELECT rowid, step, timestamp / 1000.0, key FROM metrics WHERE run_uuid = ? "
                "ORDER BY rowid",
                (run.id,),
            )
        )

    def steps_at(self, database: sqlite3.Connection, run: TrackedRun, end: End) -> list[int]:
        order = "DESC" if end == "last" else "ASC"
        rows = database.execute(
            "SELECT rowid, step, timestamp / 1000.0, key FROM metrics WHERE run_uuid = ? "
            f"ORDER BY rowid {order} LIMIT ?",
            (run.id, MOST),
        ).fetchall()
        points = Points.read(sorted(rows))
        steps: list[int] = points.steps[metrics.clock(points)].tolist()
        return steps

    def leading_to(self, points: Points, marks: Marks, what: Subject) -> NDArray[np.bool_]:
        return metrics.leading_to(points, marks, what)

    def parted(self, database: sqlite3.Connection, parted: Parted) -> Iterator[Statement]:
        old, new = parted.run.id, parted.id
        ranges = list(parted.points.ranges(~parted.stays))
        if parted.keep:
            yield from _copied(database, parted)
        of_models = bool(columns(database, "logged_model_metrics"))
        for first, last in ranges:
            if of_models and parted.keep:
                yield (
                    f"UPDATE logged_model_metrics SET run_id = ? WHERE run_id = ? AND {_OF_METRIC}",
                    (new, old, old, first, last),
                )
            elif of_models:
                yield (
                    f"DELETE FROM logged_model_metrics WHERE run_id = ? AND {_OF_METRIC}",
                    (old, old, first, last),
                )
            where = "WHERE run_uuid = ? AND rowid BETWEEN ? AND ?"
            if parted.keep:
                yield f"UPDATE metrics SET run_uuid = ? {where}", (new, old, first, last)
            else:
                yield f"DELETE FROM metrics {where}", (old, first, last)
        yield from mlflow_traces.parted(database, parted)
        if parted.keep:
            yield _LATEST, (new, old)
        yield _LATEST, (old, old)
        yield (
            "DELETE FROM latest_metrics WHERE run_uuid = ? AND NOT EXISTS (SELECT 1 FROM metrics m "
            "WHERE m.run_uuid = latest_metrics.run_uuid AND m.key = latest_metrics.key)",
            (old,),
        )
        if "step" in columns(database, "inputs"):
            where = "WHERE source_type = 'RUN_OUTPUT' AND source_id = ? AND step > ?"
            if parted.keep:
                yield f"UPDATE inputs SET source_id = ? {where}", (new, old, parted.step)
            else:
                yield f"DELETE FROM inputs {where}", (old, parted.step)

    def left(self, database: sqlite3.Connection, parted: Parted) -> Iterator[str]:
        if number := mlflow_traces.left(database, parted):
            yield (
                f"{relative(self.path, self.root)}: {count(number, 'trace')} of {parted.run.name} "
                f"that were made after step {parted.step} stay with it"
            )

    def whole_aside(self, database: sqlite3.Connection, parted: Parted) -> Iterator[Statement]:
        id = parted.run.id
        if not parted.keep:
            yield "UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid = ?", (id,)
            return
        yield "UPDATE runs SET name = ? WHERE run_uuid = ?", (parted.name, id)
        yield "UPDATE tags SET value = ? WHERE run_uuid = ? AND key = ?", (parted.name, id, NAME)
        yield "INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)", (CUT, id, id)

    def names(self, database: sqlite3.Connection) -> dict[str, int]:
        where, values = self._named(database)
        rows = database.execute(f"SELECT key, count(*) FROM metrics {where} GROUP BY key", values)
        return {key: number for key, number in rows if not key.startswith(SYSTEM)}

    def renamed(self, database: sqlite3.Connection, new: Mapping[str, str]) -> Iterator[Statement]:
        _, ids = self._named(database)
        tables = [("metrics", "key", "run_uuid"), ("latest_metrics", "key", "run_uuid")]
        if columns(database, "logged_model_metrics"):
            tables.append(("logged_model_metrics", "metric_name", "run_id"))
        for table, key, run in tables:
            at = f"AND {run} IN ({_marks(ids)})" if ids else ""
            # Through a name that nothing has: a and b may change places.
            for number, old in enumerate(new):
                change = f"UPDATE {table} SET {key} = ? WHERE {key} = ? {at}"
                yield change, (_between(number), old, *ids)
            for number, to in enumerate(new.values()):
                change = f"UPDATE OR REPLACE {table} SET {key} = ? WHERE {key} = ? {at}"
                yield change, (to, _between(number), *ids)
        for to in dict.fromkeys(new.values()):  # two names that became one
            at = f"AND l.run_uuid IN ({_marks(ids)})" if ids else ""
            best = _BEST.replace("run_uuid = ?", "run_uuid = l.run_uuid")
            yield (
                f"INSERT OR REPLACE INTO latest_metrics ({METRIC}, run_uuid) "
                "SELECT m.key, m.value, m.timestamp, m.step, m.is_nan, m.run_uuid FROM "
                f"latest_metrics l JOIN metrics m ON m.rowid = ({best}) WHERE l.key = ? {at}",
                (to, *ids),
            )

    def values(self, database: sqlite3.Connection, run: TrackedRun) -> Iterator[dict[str, float]]:
        rows = database.execute(
            "SELECT key, CASE WHEN is_nan THEN NULL ELSE value END, step, timestamp FROM metrics "
            "WHERE run_uuid = ? ORDER BY rowid",
            (run.id,),
        )
        values: dict[str, float] = {}
        for key, value, step, timestamp in rows:
            if key.startswith(SYSTEM):
                continue
            if values and (values["step"] != step or key in values):
                yield values
                values = {}
            values |= {"step": step, "timestamp": timestamp / 1000}
            values[key] = float("nan") if value is None else value
        if values:
            yield values

    def noted(self, run: TrackedRun, step: int, text: str, when: float) -> Iterator[Statement]:
        """A tag: the description of the run is its user's."""
        tag = f"ckptsurgeon.surgery.{when:.0f}"
        insert = "INSERT OR REPLACE INTO tags (key, value, run_uuid) VALUES (?, ?, ?)"
        yield insert, (tag, f"step {step}: {text}", run.id)

    def _named(self, database: sqlite3.Connection) -> tuple[str, tuple[str, ...]]:
        """A condition for metrics of the runs that the user named, and its values."""
        if not self.named:
            return "", ()
        ids = tuple(run.id for run in self._meant(self.runs(database)))
        return f"WHERE run_uuid IN ({_marks(ids)})", ids


def _marks(values: tuple[str, ...]) -> str:
    return ", ".join("?" for _ in values)


def _between(number: int) -> str:
    return f"\x01ckptsurgeon-{number}"


def _copied(database: sqlite3.Connection, parted: Parted) -> Iterator[Statement]:
    """The run of the cut branch: a copy without metrics, and with a folder of artifacts of its own,
    so that whoever deletes it deletes no other's. It began before the run, as a trainer that goes
    on in the newest one takes the one that began last."""
    own: dict[str, tuple[str, tuple[str | int | float | None, ...]]] = {
        "run_uuid": ("?", (parted.id,)),
        "name": ("?", (parted.name,)),
        "status": ("'FAILED'", ()),
        "start_time": ("start_time - 1", ()),
        "end_time": ("coalesce(end_time, ?)", (int(parted.run.ended * 1000),)),
        "artifact_uri": ("replace(artifact_uri, ?, ?)", (parted.run.id, parted.id)),
    }
    names = columns(database, "runs")
    parts = [own.get(name, (f'"{name}"', ())) for name in names]
    listed = ", ".join(f'"{name}"' for name in names)
    yield (
        f"INSERT INTO runs ({listed}) SELECT {', '.join(text for text, _ in parts)} FROM runs "
        "WHERE run_uuid = ?",
        (*(value for _, values in parts for value in values), parted.run.id),
    )
    yield (
        "INSERT INTO tags (key, value, run_uuid) SELECT key, CASE key WHEN ? THEN ? ELSE value END,"
        " ? FROM tags WHERE run_uuid = ?",
        (NAME, parted.name, parted.id, parted.run.id),
    )
    yield (
        "INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)",
        (CUT, parted.run.id, parted.id),
    )
    yield (
        "INSERT INTO params (key, value, run_uuid) SELECT key, value, ? FROM params WHERE "
        "run_uuid = ?",
        (parted.id, parted.run.id),
    )
