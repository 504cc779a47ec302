"""Traces of a run that a database of MLflow has: each has a time, and names its run.

Columns are those of MLflow 2.14 to 3.17. What a trace holds stays as it is.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator

from ckptsurgeon.logs.databases.database import Parted
from ckptsurgeon.logs.databases.reading import columns
from ckptsurgeon.plans.queries import Statement

RUN = "mlflow.sourceRun"
"""The key of a trace's metadata whose value is the run that made it."""
_THEN = "(SELECT request_id FROM trace_info WHERE timestamp_ms > ? AND timestamp_ms < ?)"
_OF_RUN = f"key = '{RUN}' AND value = ? AND request_id IN {_THEN}"
_LINKED = (
    "source_type = 'trace' AND destination_type = 'run' AND destination_id = ? "
    f"AND source_id IN {_THEN}"
)


def parted(database: sqlite3.Connection, parted: Parted) -> Iterator[Statement]:
    """Those that were made with the points that do not stay become the branch's, and stay what they
    are where that is thrown away: MLflow keeps their bodies elsewhere."""
    if not parted.keep:
        return
    linked = bool(columns(database, "entity_associations"))
    for low, high in _times(database, parted):
        values = (parted.id, parted.run.id, low, high)
        yield f"UPDATE trace_request_metadata SET value = ? WHERE {_OF_RUN}", values
        if linked:
            yield f"UPDATE entity_associations SET destination_id = ? WHERE {_LINKED}", values


def left(database: sqlite3.Connection, parted: Parted) -> int:
    """How many stay with the run though their points go."""
    if parted.keep or not parted.stays.any():
        return 0
    count = f"SELECT count(*) FROM trace_request_metadata WHERE {_OF_RUN}"
    return sum(
        int(database.execute(count, (parted.run.id, low, high)).fetchone()[0])
        for low, high in _times(database, parted)
    )


def _times(database: sqlite3.Connection, parted: Parted) -> list[tuple[float, float]]:
    """From when to when, in MLflow's milliseconds, the points were made that do not stay: after the
    point before them, and before the trainer went on. Empty where the run has no trace."""
    if not columns(database, "trace_request_metadata"):
        return []
    some = f"SELECT 1 FROM trace_request_metadata WHERE key = '{RUN}' AND value = ? LIMIT 1"
    if database.execute(some, (parted.run.id,)).fetchone() is None:
        return []
    walls, times = parted.points.walls, []
    for first, after in parted.points.stretches(~parted.stays):
        low = float(walls[first - 1]) * 1000 if first else 0.0
        high = float(walls[after - 1] + walls[after]) * 500 if after < len(walls) else math.inf
        times.append((low, high if math.isfinite(high) else float(1 << 62)))
    return times
