"""What else a database has of a run goes with its points: traces, metrics of models, outputs,
uploads that wait; what can't go is named."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from ckptsurgeon import Run, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support import tracker_databases as made
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

MLFLOW, TRACKIO = "mlflow.db", "trackio/p.db"
POINTS = [(step, {"loss": 1 / step}) for step in range(1, 11)]
AGAIN = [(step, {"loss": 0.5 / step}) for step in range(5, 9)]
RECIPE = {"rollback": {"to": 6}, "tensorboard": {"note": False}}


def back(root: Path) -> None:
    run = Run.open(root)
    surgery.apply(run, surgery.plan(run, from_data(RECIPE)))


def undo(root: Path) -> None:
    run = Run.open(root)
    surgery.apply(run, surgery.plan_undo(run))


_TRACES_OF_MLFLOW = """
CREATE TABLE trace_info (request_id VARCHAR(50) PRIMARY KEY, timestamp_ms BIGINT NOT NULL);
CREATE TABLE trace_request_metadata (key VARCHAR(250) NOT NULL, value VARCHAR(8000),
    request_id VARCHAR(50) NOT NULL, PRIMARY KEY (request_id, key));
CREATE TABLE entity_associations (association_id VARCHAR(36) NOT NULL,
    source_type VARCHAR(36) NOT NULL, source_id VARCHAR(36) NOT NULL,
    destination_type VARCHAR(36) NOT NULL, destination_id VARCHAR(36) NOT NULL,
    PRIMARY KEY (source_type, source_id, destination_type, destination_id));
"""


def _of_models(path: Path, run: str) -> None:
    """A metric of a model and an output at steps 3 and 9, and a trace half a second before each
    point, of ten."""
    with made.opened(path) as database:
        database.executescript(_TRACES_OF_MLFLOW)
        for step in (3, 9):
            time = int((made.START + step - 1) * 1000)
            database.execute(
                "INSERT INTO logged_model_metrics VALUES ('m-1', 'loss', ?, ?, ?, 1, ?)",
                (time, step, 1 / step, run),
            )
            values = (f"i{step}", run, f"m-{step}", step)
            database.execute(
                "INSERT INTO inputs VALUES (?, 'RUN_OUTPUT', ?, 'MODEL_OUTPUT', ?, ?)", values
            )
        for step in range(1, 11):
            time = int((made.START + step - 1.5) * 1000)
            database.execute("INSERT INTO trace_info VALUES (?, ?)", (f"tr-{step}", time))
            row = ("mlflow.sourceRun", run, f"tr-{step}")
            database.execute("INSERT INTO trace_request_metadata VALUES (?, ?, ?)", row)
            row = (f"a{step}", f"tr-{step}", run)
            database.execute(
                "INSERT INTO entity_associations VALUES (?, 'trace', ?, 'run', ?)", row
            )


def _whose(path: Path, id: str, query: str) -> dict[str, list[object]]:
    """What the run has, and what others have."""
    found: dict[str, list[object]] = {"run": [], "branch": []}
    with made.opened(path) as database:
        for value, run in database.execute(query):
            found["run" if run == id else "branch"].append(value)
    return found


def test_metrics_of_models_outputs_and_traces_go_with_their_points(tmp_path: Path) -> None:
    root, path, run = make_run(tmp_path / "run", (6,)), tmp_path / "run" / MLFLOW, "a" * 32
    made.log_to_mlflow(path, POINTS)
    _of_models(path, run)
    before = snapshot(root)
    back(root)
    metrics = "SELECT metric_step, run_id FROM logged_model_metrics ORDER BY metric_step"
    outputs = "SELECT step, source_id FROM inputs ORDER BY step"
    traces = "SELECT request_id, value FROM trace_request_metadata ORDER BY rowid"
    links = "SELECT source_id, destination_id FROM entity_associations ORDER BY rowid"
    assert _whose(path, run, metrics) == {"run": [3], "branch": [9]}
    assert _whose(path, run, outputs) == {"run": [3], "branch": [9]}
    for query in (traces, links):
        assert _whose(path, run, query) == {
            "run": [f"tr-{step}" for step in range(1, 7)],
            "branch": [f"tr-{step}" for step in range(7, 11)],
        }
    undo(root)
    assert snapshot(root) == before


def test_traces_of_what_is_thrown_away_stay_and_are_named(tmp_path: Path) -> None:
    root, path, run = make_run(tmp_path / "run", (6,)), tmp_path / "run" / MLFLOW, "a" * 32
    made.log_to_mlflow(path, POINTS)
    _of_models(path, run)
    opened = Run.open(root)
    recipe = {"rollback": {"to": 6}, "tensorboard": {"note": False, "keep": False}}
    plan = surgery.plan(opened, from_data(recipe))
    assert f"{MLFLOW}: 4 traces of train that were made after step 6 stay with it" in plan.warnings
    surgery.apply(opened, plan)
    metrics = "SELECT metric_step, run_id FROM logged_model_metrics"
    assert _whose(path, run, metrics) == {"run": [3], "branch": []}
    traces = _whose(path, run, "SELECT request_id, value FROM trace_request_metadata")
    assert len(traces["run"]) == 10


def test_traces_and_uploads_that_wait_go_with_their_points(tmp_path: Path) -> None:
    """Of Trackio; where one has no step, its time says it."""
    root, path = make_run(tmp_path / "run", (6,)), tmp_path / "run" / TRACKIO
    made.log_to_trackio(path, POINTS)
    made.log_to_trackio(path, AGAIN, time=made.START + 1000)
    with made.opened(path) as database:
        database.executescript(
            """
            CREATE TABLE traces (id TEXT PRIMARY KEY, run_id TEXT NOT NULL,
                timestamp TEXT NOT NULL, run_name TEXT NOT NULL, step INTEGER NOT NULL);
            CREATE TABLE pending_uploads (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT,
                run_name TEXT, step INTEGER, file_path TEXT NOT NULL, created_at TEXT NOT NULL);
            """
        )
        starts = [(range(1, 11), made.START), (range(5, 9), made.START + 1000)]
        for number, (steps, time) in enumerate(starts):
            for i, step in enumerate(steps):
                at = datetime.fromtimestamp(time + i, timezone.utc).isoformat()
                trace = (f"{number}-{step}", "b" * 32, at, "train", step)
                database.execute("INSERT INTO traces VALUES (?, ?, ?, ?, ?)", trace)
                for known in (step, None):
                    upload = ("b" * 32, "train", known, f"{number}-{step}", at)
                    database.execute(
                        "INSERT INTO pending_uploads (run_id, run_name, step, file_path, "
                        "created_at) VALUES (?, ?, ?, ?, ?)",
                        upload,
                    )
    back(root)
    mine = [*(f"0-{step}" for step in range(1, 5)), "1-5", "1-6"]
    with made.opened(path) as database:
        traces = "SELECT id FROM traces WHERE run_name = 'train' ORDER BY rowid"
        assert [id for (id,) in database.execute(traces)] == mine
        for known in ("IS NULL", "IS NOT NULL"):
            uploads = (
                f"SELECT file_path FROM pending_uploads WHERE run_name = 'train' AND step {known} "
                "ORDER BY id"
            )
            assert [file for (file,) in database.execute(uploads)] == mine
