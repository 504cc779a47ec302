"""Databases as MLflow 3.17 and Trackio 0.43 write them, without them: what `tests/formats/` has of
both, as far as a training logs it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

Point = Mapping[str, float]
START = 1_700_000_000.0
_OF_MLFLOW = """
CREATE TABLE IF NOT EXISTS runs (
    run_uuid VARCHAR(32) NOT NULL, name VARCHAR(250), status VARCHAR(9), start_time BIGINT,
    end_time BIGINT, lifecycle_stage VARCHAR(20), artifact_uri VARCHAR(200), experiment_id INTEGER,
    CONSTRAINT run_pk PRIMARY KEY (run_uuid),
    CHECK (status IN ('SCHEDULED', 'FAILED', 'FINISHED', 'RUNNING', 'KILLED')));
CREATE TABLE IF NOT EXISTS metrics (
    "key" VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT NOT NULL,
    run_uuid VARCHAR(32) NOT NULL, step BIGINT DEFAULT '0' NOT NULL,
    is_nan BOOLEAN DEFAULT '0' NOT NULL,
    CONSTRAINT metric_pk PRIMARY KEY ("key", timestamp, step, run_uuid, value, is_nan),
    FOREIGN KEY(run_uuid) REFERENCES runs (run_uuid), CHECK (is_nan IN (0, 1)));
CREATE INDEX IF NOT EXISTS index_metrics_run_uuid ON metrics (run_uuid);
CREATE INDEX IF NOT EXISTS index_metrics_run_uuid_key_step ON metrics (run_uuid, "key", step);
CREATE TABLE IF NOT EXISTS latest_metrics (
    "key" VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT, step BIGINT NOT NULL,
    is_nan BOOLEAN NOT NULL, run_uuid VARCHAR(32) NOT NULL,
    CONSTRAINT latest_metric_pk PRIMARY KEY ("key", run_uuid));
CREATE TABLE IF NOT EXISTS params (
    "key" VARCHAR(250) NOT NULL, value VARCHAR(8000) NOT NULL, run_uuid VARCHAR(32) NOT NULL,
    CONSTRAINT param_pk PRIMARY KEY ("key", run_uuid));
CREATE TABLE IF NOT EXISTS tags (
    "key" VARCHAR(250) NOT NULL, value VARCHAR(8000), run_uuid VARCHAR(32) NOT NULL,
    CONSTRAINT tag_pk PRIMARY KEY ("key", run_uuid));
CREATE TABLE IF NOT EXISTS logged_model_metrics (
    model_id VARCHAR(36) NOT NULL, metric_name VARCHAR(500) NOT NULL,
    metric_timestamp_ms BIGINT NOT NULL, metric_step BIGINT NOT NULL, metric_value FLOAT,
    experiment_id INTEGER NOT NULL, run_id VARCHAR(32) NOT NULL,
    PRIMARY KEY (model_id, metric_name, metric_timestamp_ms, metric_step, run_id));
CREATE TABLE IF NOT EXISTS inputs (
    input_uuid VARCHAR(36) NOT NULL, source_type VARCHAR(36) NOT NULL,
    source_id VARCHAR(36) NOT NULL, destination_type VARCHAR(36) NOT NULL,
    destination_id VARCHAR(36) NOT NULL, step BIGINT DEFAULT '0' NOT NULL,
    CONSTRAINT inputs_pk PRIMARY KEY (source_type, source_id, destination_type, destination_id));
"""
_OF_TRACKIO = """
CREATE TABLE IF NOT EXISTS metrics (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL,
    run_name TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL, log_id TEXT,
    space_id TEXT);
CREATE INDEX IF NOT EXISTS idx_metrics_run_step ON metrics(run_id, step);
CREATE INDEX IF NOT EXISTS idx_metrics_run_timestamp ON metrics(run_id, timestamp);
CREATE TABLE IF NOT EXISTS configs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, run_name TEXT NOT NULL,
    config TEXT NOT NULL, created_at TEXT NOT NULL, UNIQUE(run_id));
CREATE TABLE IF NOT EXISTS system_metrics (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL,
    run_name TEXT NOT NULL, metrics TEXT NOT NULL, log_id TEXT, space_id TEXT);
CREATE TABLE IF NOT EXISTS alerts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL,
    run_name TEXT NOT NULL, title TEXT NOT NULL, text TEXT, level TEXT NOT NULL DEFAULT 'warn',
    step INTEGER, alert_id TEXT);
"""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, committed and closed in the end."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        yield database


def log_to_mlflow(
    path: Path,
    points: Iterable[tuple[int, Point]],
    *,
    run: str = "a" * 32,
    name: str = "train",
    time: float = START,
) -> None:
    """Each point of a run, a second apart, as `mlflow.log_metrics` logs it."""
    with opened(path) as database:
        database.executescript(_OF_MLFLOW)
        if database.execute("SELECT 1 FROM runs WHERE run_uuid = ?", (run,)).fetchone() is None:
            uri = f"/artifacts/{run}/artifacts"
            values = (run, name, "RUNNING", time * 1000, None, "active", uri, 1)
            database.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            database.execute("INSERT INTO tags VALUES ('mlflow.runName', ?, ?)", (name, run))
            database.execute("INSERT INTO params VALUES ('lr', '0.1', ?)", (run,))
        for i, (step, values) in enumerate(points):
            at = int((time + i) * 1000)
            for key, value in values.items():
                row = (key, value, at, step, 0, run)
                into = "(key, value, timestamp, step, is_nan, run_uuid) VALUES (?, ?, ?, ?, ?, ?)"
                database.execute(f"INSERT INTO metrics {into}", row)
                old = database.execute(
                    "SELECT step, timestamp, value FROM latest_metrics WHERE key = ? AND "
                    "run_uuid = ?",
                    (key, run),
                ).fetchone()
                if old is None or (step, at, value) > old:
                    database.execute(f"INSERT OR REPLACE INTO latest_metrics {into}", row)


def log_to_trackio(
    path: Path,
    points: Iterable[tuple[int, Point]],
    *,
    run: str = "b" * 32,
    name: str = "train",
    time: float = START,
) -> None:
    """The same as `trackio.log(..., step=...)` does, with a sample of the system after each."""
    path.parent.mkdir(exist_ok=True)
    with opened(path) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript(_OF_TRACKIO)
        config = (run, name, '{"lr": 0.1}', _at(time))
        database.execute(
            "INSERT OR IGNORE INTO configs (run_id, run_name, config, created_at) "
            "VALUES (?, ?, ?, ?)",
            config,
        )
        for i, (step, values) in enumerate(points):
            data = json.dumps(values, separators=(",", ":")).encode()
            row = (run, _at(time + i), name, step, data)
            database.execute(
                "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) "
                "VALUES (?, ?, ?, ?, ?)",
                row,
            )
            database.execute(
                "INSERT INTO system_metrics (run_id, timestamp, run_name, metrics) "
                "VALUES (?, ?, ?, ?)",
                (run, _at(time + i + 0.5), name, b'{"cpu":1}'),
            )


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def mlflow_curves(path: Path, key: str = "loss") -> dict[str, list[tuple[int, float]]]:
    """Name of each run → steps and values of one metric, in the order of the rows."""
    curves: dict[str, list[tuple[int, float]]] = {}
    with opened(path) as database:
        for name, step, value in database.execute(
            "SELECT r.name, m.step, m.value FROM metrics m JOIN runs r USING (run_uuid) "
            "WHERE m.key = ? ORDER BY m.rowid",
            (key,),
        ):
            curves.setdefault(name, []).append((step, value))
    return curves


def mlflow_latest(path: Path) -> dict[tuple[str, str], tuple[int, float]]:
    """Name of a run and metric → step and value that MLflow says are the last."""
    with opened(path) as database:
        rows = database.execute(
            "SELECT r.name, l.key, l.step, l.value FROM latest_metrics l JOIN runs r "
            "USING (run_uuid)"
        )
        return {(name, key): (step, value) for name, key, step, value in rows}


def trackio_curves(path: Path, key: str = "loss") -> dict[str, list[tuple[int, float]]]:
    """Name of each run → steps and values of one metric, in the order of the rows."""
    curves: dict[str, list[tuple[int, float]]] = {}
    with opened(path) as database:
        for name, step, metrics in database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ):
            values = json.loads(metrics)
            if key in values:
                curves.setdefault(name, []).append((step, values[key]))
    return curves
