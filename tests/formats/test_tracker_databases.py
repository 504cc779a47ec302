"""MLflow's and Trackio's own libraries log a training that crashes, is rolled back and goes on: one
curve by MLflow's REST API and by Trackio's reader, and both go on at the step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import surgery
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.launch import REPO
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

pytestmark = pytest.mark.formats
TRACKERS = REPO / ".venv/trackers"
MLFLOW = """
import sys, mlflow
folder, first, last, loss = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
mlflow.set_experiment("p")
ids = mlflow.search_runs(output_format="list")  # the one that began last is first
with mlflow.start_run(ids[0].info.run_id if ids else None, run_name="train"):
    mlflow.log_param("lr", 0.1)
    for step in range(first, last + 1):
        mlflow.log_metrics({"loss": loss / step, "lr": 0.1}, step=step)
        if step % 4 == 0:
            mlflow.log_metric("eval/loss", loss / step, step=step)
        if step % 5 == 0:
            mlflow.log_metric("accuracy", 1.0, step=step // 5)  # by epochs
    if "crash" in sys.argv:
        raise FloatingPointError("loss is NaN")
"""
MLFLOW_SAYS = """
import json, os, sys
uri = f"sqlite:///{sys.argv[1]}/mlflow.db"
os.environ |= {"_MLFLOW_SERVER_FILE_STORE": uri, "_MLFLOW_SERVER_REGISTRY_STORE": uri}
os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = f"{sys.argv[1]}/artifacts"
from mlflow.server import app
client = app.test_client()
path = "/api/2.0/mlflow"
found = client.post(f"{path}/runs/search", json={"experiment_ids": ["1"]}).json["runs"]
said = {}
for run in found:
    keys = [metric["key"] for metric in run["data"]["metrics"]]
    of = {"run_id": run["info"]["run_id"]}
    ask = lambda key: client.get(
        f"{path}/metrics/get-history", query_string={**of, "metric_key": key}
    ).json["metrics"]
    said[run["info"]["run_name"]] = {
        "curves": {key: [(m["step"], m["value"]) for m in ask(key)] for key in keys},
        "last": {m["key"]: (m["step"], m["value"]) for m in run["data"]["metrics"]},
        "lr": [param["value"] for param in run["data"]["params"]],
    }
print("SAID", json.dumps(said))
"""
TRACES = """
import sys, time, mlflow
mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}/mlflow.db")
mlflow.set_experiment("p")
with mlflow.start_run(run_name="train"):
    for step in range(1, 13):
        with mlflow.start_span(name=f"rollout {step}"):
            time.sleep(0.01)
        time.sleep(0.01)
        mlflow.log_metric("loss", 1 / step, step=step)
        time.sleep(0.01)
mlflow.flush_trace_async_logging()
"""
TRACES_SAID = """
import json, sys, mlflow
mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}/mlflow.db")
mlflow.set_experiment("p")
said = {}
for run in mlflow.search_runs(output_format="list"):
    traces = mlflow.search_traces(run_id=run.info.run_id, return_type="list")
    said[run.info.run_name] = sorted(int(trace.data.spans[0].name.split()[1]) for trace in traces)
print("SAID", json.dumps(said))
"""
TRACKIO = """
import sys, trackio
first, last, loss = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
trackio.init(project="p", name="train", resume="allow", config={"lr": 0.1})
for step in range(first, last + 1):
    trackio.log({"loss": loss / step}, step=step)
    if step % 4 == 0:
        trackio.log({"eval/loss": loss / step}, step=step)
        trackio.alert(f"at {step}", level=trackio.AlertLevel.INFO)
if "further" in sys.argv:
    trackio.log({"loss": -1.0})
if "crash" in sys.argv:
    raise FloatingPointError("loss is NaN")
trackio.finish()
"""
TRACKIO_SAYS = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
said = {}
for run in trackio.Api().runs("p"):
    logs = SQLiteStorage.get_logs("p", run.name, run_id=run.id)
    curve = lambda name: [(log["step"], log[name]) for log in logs if name in log]
    said[run.name] = {
        "curves": {name: curve(name) for name in ("loss", "eval/loss")},
        "alerts": sorted(alert["title"] for alert in run.alerts()),
        "lr": run.config["lr"],
    }
print("SAID", json.dumps(said))
"""


def process(code: str, root: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A process of this Python with the trackers' libraries."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(TRACKERS),
        "TRACKIO_DIR": str(root / "trackio"),
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    }
    return subprocess.run(
        [sys.executable, "-c", code, str(root), *map(str, words)],
        env=environment,
        cwd=root.parent,  # MLflow puts what traces hold into an `mlruns/` there
        capture_output=True,
        text=True,
    )


def said(code: str, root: Path) -> dict[str, Any]:
    """What a library says of each run, by name."""
    done = process(code, root)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert lines, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(lines[0].removeprefix("SAID "))
    return found


def rollback(root: Path, step: int) -> None:
    run = Run.open(root)
    surgery.apply(run, surgery.plan(run, from_data({"rollback": {"to": step}})))


def undo(root: Path) -> None:
    run = Run.open(root)
    surgery.apply(run, surgery.plan_undo(run))


def curve(first: int, last: int, loss: float = 1.0, each: int = 1) -> list[list[float]]:
    return [[step, loss / step] for step in range(first, last + 1) if step % each == 0]


@pytest.mark.parametrize(
    ("train", "says", "file"),
    [(MLFLOW, MLFLOW_SAYS, "mlflow.db"), (TRACKIO, TRACKIO_SAYS, "trackio/p.db")],
    ids=["MLflow", "Trackio"],
)
def test_a_run_that_crashed_and_went_on_is_one_curve(
    tmp_path: Path, train: str, says: str, file: str
) -> None:
    root = make_run(tmp_path / "run", (4, 8, 12))
    assert process(train, root, 1, 14, 1.0, "crash").returncode == 1
    before = snapshot(root)
    rollback(root, 8)
    clean = said(says, root)
    assert clean["train"]["curves"]["loss"] == curve(1, 8)
    assert clean["train"]["curves"]["eval/loss"] == curve(1, 8, each=4)
    assert clean["train-cut-0001"]["curves"]["loss"] == curve(9, 14)
    assert clean["train-cut-0001"]["curves"]["eval/loss"] == curve(9, 14, each=4)
    assert clean["train-cut-0001"]["lr"] == clean["train"]["lr"]
    _CHECKS[file](clean)
    again = process(train, root, 9, 12, 0.5)
    assert again.returncode == 0, again.stderr
    after = said(says, root)
    assert after["train"]["curves"]["loss"] == [*curve(1, 8), *curve(9, 12, 0.5)]
    assert after["train-cut-0001"] == clean["train-cut-0001"]
    whole = (root / file).read_bytes()
    rollback(root, 4)
    assert said(says, root)["train"]["curves"]["loss"] == curve(1, 4)
    undo(root)
    assert (root / file).read_bytes() == whole
    undo(root)
    assert snapshot(root)[file] == before[file]


def test_traces_go_with_the_points_that_they_were_made_for(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (8,))
    done = process(TRACES, root)
    assert done.returncode == 0, done.stderr
    assert said(TRACES_SAID, root) == {"train": list(range(1, 13))}
    rollback(root, 8)
    assert said(TRACES_SAID, root) == {
        "train": list(range(1, 9)),
        "train-cut-0001": list(range(9, 13)),
    }
    undo(root)
    assert said(TRACES_SAID, root) == {"train": list(range(1, 13))}


def _of_mlflow(clean: dict[str, Any]) -> None:
    """The last of each is that of the step, and what counts epochs has left with its time."""
    last = clean["train"]["last"]
    assert last == {"loss": [8, 1 / 8], "lr": [8, 0.1], "eval/loss": [8, 1 / 8], "accuracy": [1, 1]}
    assert clean["train-cut-0001"]["curves"]["accuracy"] == [[2, 1.0]]


def _of_trackio(clean: dict[str, Any]) -> None:
    assert clean["train"]["alerts"] == ["at 4", "at 8", "ckptsurgeon"]
    assert clean["train-cut-0001"]["alerts"] == ["at 12"]


_CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "mlflow.db": _of_mlflow,
    "trackio/p.db": _of_trackio,
}
