"""A rollback in a run with every kind of log, as scenarios for faults."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.faults.surgeries import scenarios
from tests.faults.world import Scenario
from tests.support.event_logs import write_log
from tests.support.mlruns import log_to_mlruns, mlruns_curves
from tests.support.tiny_run import make_run
from tests.support.tracker_databases import (
    log_to_mlflow,
    log_to_trackio,
    mlflow_curves,
    trackio_curves,
)
from tests.support.wandb_files import unframed, write_run

STEPS, BACK = 4, 2
RECIPE = {"rollback": {"to": BACK}, "tensorboard": {"note": False}}  # a note has the time
TIME = 1_700_000_000_000_000_000


def make(root: Path) -> Path:
    """Two saved steps, and their logs."""
    make_run(root, (BACK, STEPS))
    events = write_log(root / "tensorboard", [2.0] * STEPS, tag="loss")
    events.rename(events.with_name("events.out.tfevents.1700000000.elsewhere.1.0"))
    (root / "metrics.csv").write_text("step,loss\n1,4\n2,3\n3,2\n4,1\n")
    rows = ({"step": step, "loss": 2.0} for step in range(1, STEPS + 1))
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_run(root, range(1, STEPS + 1))
    points = [(step, {"loss": 2.0}) for step in range(1, STEPS + 1)]
    log_to_mlflow(root / "mlflow.db", points)
    log_to_trackio(root / "p.db", points)
    log_to_mlruns(root / "mlruns", points)
    for path in root.rglob("*"):
        os.utime(path, ns=(TIME, TIME))
    return root


def surgeries(original: Path) -> tuple[Scenario, Scenario]:
    """Apply and undo on copies of `original`."""
    return scenarios(original, RECIPE, read)[:2]


def read(world: Path) -> str | None:
    """A log that somebody reads meanwhile is whole, before or after the cut."""
    root = world / "run"
    table = (root / "metrics.csv").read_text().splitlines()[1:]
    steps = [json.loads(row)["step"] for row in (root / "metrics.jsonl").read_text().splitlines()]
    (run,) = root.glob("wandb/offline-run-*-abc/*.wandb")
    points = [item for item in unframed(run.read_bytes()) if item[0] == 2 << 3 | 2]
    databases = (mlflow_curves(root / "mlflow.db"), trackio_curves(root / "p.db"))
    stores = (*databases, mlruns_curves(root / "mlruns"))
    tracked = [len(curves["train"]) for curves in stores]
    for rows in (len(table), len(steps), len(points), *tracked):
        if rows not in (BACK, STEPS):
            return f"{rows} rows"
    return None
