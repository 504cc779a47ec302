"""A database of MLflow of 2 GB: cut by the command, against a copy of the file.

Half of the points of its run leave, and become a run of their own: SQLite changes each of their
rows in three indexes. The memory is that of the process, of which the points' columns are the most.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.event_files import cpu
from bench.process import python
from bench.row import Row

SIZE, SLICE = 2 << 30, 20
METRICS = 20
"""Numbers of a point."""
RUN = "a" * 32
EACH = 500
"""Steps in one transaction."""
SCHEMA = """
CREATE TABLE runs (run_uuid VARCHAR(32) PRIMARY KEY, name VARCHAR(250), status VARCHAR(9),
    start_time BIGINT, end_time BIGINT, lifecycle_stage VARCHAR(20), artifact_uri VARCHAR(200));
CREATE TABLE metrics ("key" VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT NOT NULL,
    run_uuid VARCHAR(32) NOT NULL, step BIGINT NOT NULL, is_nan BOOLEAN NOT NULL,
    PRIMARY KEY ("key", timestamp, step, run_uuid, value, is_nan));
CREATE INDEX index_metrics_run_uuid ON metrics (run_uuid);
CREATE INDEX index_metrics_run_uuid_key_step ON metrics (run_uuid, "key", step);
CREATE TABLE latest_metrics ("key" VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT,
    step BIGINT NOT NULL, is_nan BOOLEAN NOT NULL, run_uuid VARCHAR(32) NOT NULL,
    PRIMARY KEY ("key", run_uuid));
CREATE TABLE params ("key" VARCHAR(250), value VARCHAR(8000), run_uuid VARCHAR(32));
CREATE TABLE tags ("key" VARCHAR(250), value VARCHAR(8000), run_uuid VARCHAR(32));
"""


def make_database(path: Path, size: int) -> int:
    """A database of so many bytes, with one run; the step in its middle."""
    path.parent.mkdir(parents=True)
    step = 0
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("PRAGMA cache_size = -262144")
        database.executescript(SCHEMA)
        run = (RUN, "train", "FAILED", 1_700_000_000_000, None, "active", "/artifacts")
        database.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?)", run)
        while path.stat().st_size < size:
            database.execute("BEGIN")
            insert = "INSERT INTO metrics VALUES (?, ?, ?, ?, ?, 0)"
            database.executemany(insert, _rows(step + 1, step + EACH))
            database.execute("COMMIT")
            step += EACH
        for row in _rows(step, step):
            database.execute("INSERT INTO latest_metrics VALUES (?, ?, ?, ?, 0, ?)", _latest(row))
    return step // 2


def _rows(first: int, last: int) -> Iterator[tuple[str, float, int, str, int]]:
    for step in range(first, last + 1):
        for i in range(METRICS):
            name = "train/loss" if i == 0 else f"train/metric_{i}"
            yield name, i + 1 / step, 1_700_000_000_000 + 1000 * step, RUN, step


def _latest(row: tuple[str, float, int, str, int]) -> tuple[str, float, int, int, str]:
    key, value, timestamp, run, step = row
    return key, value, timestamp, step, run


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """CPU seconds of both, of which other load takes nothing away."""
    root = folder / "tracked"
    say("writing the database")
    path = root / "mlflow.db"
    middle = make_database(path, SIZE // SLICE if quick else SIZE)
    size = path.stat().st_size / 2**20

    def copy() -> None:
        with path.open("rb") as source, (folder / "copy").open("wb") as target:
            while data := source.read(1 << 20):
                target.write(data)
            os.fsync(target.fileno())

    bare = cpu(copy)
    say("cutting it")
    at = ("ckptsurgeon", "truncate-logs", "--tb", root, "--yes", "--after")
    kept = python(*at, middle, "--keep-tb", "cut")
    dropped = python(*at, middle // 2, "--no-keep-tb")
    shutil.rmtree(root)
    (folder / "copy").unlink()
    what = f"MLflow's database: cut of {size:.0f} MB"
    return [
        Row(f"{what} / copy, CPU", kept.cpu / bare, "×", note=f"{kept.cpu:.1f} s CPU"),
        Row(f"{what}, not kept / copy, CPU", dropped.cpu / bare, "×", note=f"{dropped.cpu:.1f} s"),
        Row(f"{what}: peak RSS", max(kept.peak_mb, dropped.peak_mb), "MB", 700),
    ]
