"""MLflow's own library logs into its file store a training that crashes, is rolled back and goes
on: one curve by its REST API, and it goes on at the step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
TRAIN = """
import sys, mlflow
from mlflow.entities import LoggedModelOutput
folder, first, last, loss = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
mlflow.set_tracking_uri(f"file://{folder}/mlruns")
mlflow.set_experiment("p")
ids = mlflow.search_runs(output_format="list")  # the one that began last is first
with mlflow.start_run(ids[0].info.run_id if ids else None, run_name="train") as run:
    if "params" in sys.argv:
        mlflow.log_param("lr", 0.1)
    model = mlflow.initialize_logged_model(name="m") if "model" in sys.argv else None
    for step in range(first, last + 1):
        mlflow.log_metrics({"train/loss": loss / step, "lr": 0.1}, step=step)
        if step % 4 == 0:
            mlflow.log_metric("eval/loss", loss / step, step=step)
            if model is not None:
                mlflow.log_metric("quality", 1.0 / step, step=step, model_id=model.model_id)
        if step % 5 == 0:
            mlflow.log_metric("accuracy", 1.0, step=step // 5)  # by epochs
    if model is not None:
        output = LoggedModelOutput(model.model_id, last)
        mlflow.tracking.MlflowClient().log_outputs(run.info.run_id, [output])
    if "crash" in sys.argv:
        raise FloatingPointError("loss is NaN")
"""
SAYS = """
import json, os, sys
uri = f"file://{sys.argv[1]}/mlruns"
os.environ |= {"_MLFLOW_SERVER_FILE_STORE": uri, "_MLFLOW_SERVER_REGISTRY_STORE": uri}
os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = uri
import mlflow
from mlflow.server import app
mlflow.set_tracking_uri(uri)
client = app.test_client()
path = "/api/2.0/mlflow"
(experiment,) = [e for e in mlflow.search_experiments() if e.name == "p"]
found = client.post(f"{path}/runs/search", json={"experiment_ids": [experiment.experiment_id]})
said = {}
for run in found.json["runs"]:
    id = run["info"]["run_id"]
    (again,) = [client.get(f"{path}/runs/get", query_string={"run_id": id}).json["run"]]
    keys = [metric["key"] for metric in run["data"].get("metrics", [])]
    ask = lambda key: client.get(
        f"{path}/metrics/get-history", query_string={"run_id": id, "metric_key": key}
    ).json["metrics"]
    said[run["info"]["run_name"]] = {
        "curves": {key: [(m["step"], m["value"]) for m in ask(key)] for key in keys},
        "last": {m["key"]: (m["step"], m["value"]) for m in again["data"].get("metrics", [])},
        "lr": [p["value"] for p in again["data"].get("params", []) if p["key"] == "lr"],
        "outputs": [m["step"] for m in again.get("outputs", {}).get("model_outputs", [])],
        "artifacts": [
            file["path"] for file in client.get(
                f"{path}/artifacts/list", query_string={"run_id": id}
            ).json.get("files", [])
        ],
    }
for model in mlflow.search_logged_models(
    experiment_ids=[experiment.experiment_id], output_format="list"
):
    names = {r["info"]["run_id"]: r["info"]["run_name"] for r in found.json["runs"]}
    said["model"] = sorted((m.step, names[m.run_id]) for m in model.metrics)
print("SAID", json.dumps(said))
"""


def process(code: str, root: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A process of this Python with MLflow, which has to be told that files are wanted."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(TRACKERS),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    }
    command = [sys.executable, "-c", code, str(root), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def said(root: Path) -> dict[str, Any]:
    """What MLflow says of each run, by name."""
    done = process(SAYS, root)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert lines, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(lines[0].removeprefix("SAID "))
    return found


def operate(root: Path, **recipe: Any) -> None:
    run = Run.open(root)
    surgery.apply(run, surgery.plan(run, from_data(recipe)))


def undo(root: Path) -> None:
    run = Run.open(root)
    surgery.apply(run, surgery.plan_undo(run))


def curve(first: int, last: int, loss: float = 1.0, each: int = 1) -> list[list[float]]:
    return [[step, loss / step] for step in range(first, last + 1) if step % each == 0]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("params", [["params"], []], ids=["with parameters", "without"])
def test_a_run_that_crashed_and_went_on_is_one_curve(tmp_path: Path, params: list[str]) -> None:
    root = make_run(tmp_path / "run", (4, 8, 12))
    done = process(TRAIN, root, 1, 14, 1.0, "model", "crash", *params)
    assert done.returncode == 1 and "loss is NaN" in done.stderr, done.stderr
    before = snapshot(root)
    operate(root, rollback={"to": 8})
    clean = said(root)
    run, cut = clean["train"], clean["train-cut-0001"]
    assert run["curves"]["train/loss"] == curve(1, 8)
    assert run["curves"]["eval/loss"] == curve(1, 8, each=4)
    assert cut["curves"]["train/loss"] == curve(9, 14)
    assert cut["curves"]["eval/loss"] == curve(9, 14, each=4)
    assert run["last"]["train/loss"] == [8, 1 / 8] and run["last"]["accuracy"] == [1, 1]
    assert cut["curves"]["accuracy"] == [[2, 1.0]]
    assert cut["lr"] == run["lr"] == (["0.1"] if params else [])
    assert (run["outputs"], cut["outputs"]) == ([], [14])
    assert cut["artifacts"] == ["cut-from.txt"]
    assert clean["model"] == [[12, "train-cut-0001"]]  # MLflow says the last alone
    (lines_of_model,) = root.glob("mlruns/*/models/*/metrics/quality")
    runs = [line.split()[3] for line in lines_of_model.read_text().splitlines()]
    assert [runs[0] == run for run in runs] == [True, True, False]
    again = process(TRAIN, root, 9, 12, 0.5)
    assert again.returncode == 0, again.stderr
    after = said(root)
    assert after["train"]["curves"]["train/loss"] == [*curve(1, 8), *curve(9, 12, 0.5)]
    assert after["train-cut-0001"] == cut
    operate(root, rollback={"to": 4})
    assert said(root)["train"]["curves"]["train/loss"] == curve(1, 4)
    undo(root)
    assert said(root) == after
    undo(root)
    restored = snapshot(root)
    lines = [file for file in before if "/metrics/" in file]
    assert lines
    assert all(restored[file] == before[file] for file in lines)


def test_names_are_new_and_may_change_places(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    assert process(TRAIN, root, 1, 8, 1.0, "model").returncode == 0
    before, first = snapshot(root), said(root)["train"]["curves"]
    new = {"train/loss": "lr", "lr": "train/loss", "quality": "q/quality"}
    operate(root, logs={"rename": new})
    second = said(root)["train"]["curves"]
    assert second == {new.get(key, key): curve for key, curve in first.items()}
    undo(root)
    assert snapshot(root) == before


def test_what_is_cut_can_be_thrown_away(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (8,))
    assert process(TRAIN, root, 1, 14, 1.0, "model").returncode == 0
    operate(root, rollback={"to": 8}, tensorboard={"keep": False})
    clean = said(root)
    assert clean["train"]["curves"]["train/loss"] == curve(1, 8)
    assert clean["model"] == [[8, "train"]]
    assert set(clean) == {"train", "model"}
