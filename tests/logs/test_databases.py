"""Stores of MLflow and Trackio: one run of them is cut along the history of a step."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.plans.edits import Replace
from ckptsurgeon.plans.queries import Queries
from ckptsurgeon.recipe.file import from_data
from tests.support import tracker_databases as made
from tests.support.mlruns import log_to_mlruns, mlruns_curves
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

Curves = dict[str, list[tuple[int, float]]]
MLFLOW, TRACKIO, MLRUNS = "mlflow.db", "trackio/p.db", "mlruns"
LOG = {MLFLOW: made.log_to_mlflow, TRACKIO: made.log_to_trackio, MLRUNS: log_to_mlruns}
CURVES: dict[str, Callable[[Path], Curves]] = {
    MLFLOW: made.mlflow_curves,
    TRACKIO: made.trackio_curves,
    MLRUNS: mlruns_curves,
}
BOTH = pytest.mark.parametrize("name", [MLFLOW, TRACKIO])
EACH = pytest.mark.parametrize("name", [MLFLOW, TRACKIO, MLRUNS])


def losses(steps: Iterable[int], scale: float = 1.0) -> list[tuple[int, dict[str, float]]]:
    return [(step, {"loss": scale / step, "lr": 0.1}) for step in steps]


def curve(steps: Iterable[int], scale: float = 1.0) -> list[tuple[int, float]]:
    return [(step, scale / step) for step in steps]


def operate(root: Path, recipe: dict[str, object]) -> None:
    run = Run.open(root)
    surgery.apply(run, surgery.plan(run, from_data(recipe)))


def back(root: Path, step: int, **more: object) -> None:
    operate(root, {"rollback": {"to": step}, "tensorboard": {"note": False, **more}})


def undo(root: Path) -> None:
    run = Run.open(root)
    surgery.apply(run, surgery.plan_undo(run))


@EACH
def test_a_crash_a_restart_and_a_rollback(tmp_path: Path, name: str) -> None:
    """Ten steps; a restart from 4 got to 8. Back at 6, the first keeps four and the second two."""
    root = make_run(tmp_path / "run", (2, 6))
    LOG[name](root / name, losses(range(1, 11)))
    LOG[name](root / name, losses(range(5, 9), 0.5), time=made.START + 1000)
    back(root, 6)
    assert CURVES[name](root / name) == {
        "train": [*curve(range(1, 5)), *curve((5, 6), 0.5)],
        "train-cut-0001": [*curve(range(5, 11)), *curve((7, 8), 0.5)],
    }
    LOG[name](root / name, losses((7, 8), 2.0), time=made.START + 2000)
    back(root, 2)
    assert CURVES[name](root / name)["train"] == curve((1, 2))


@EACH
def test_undo_is_bit_for_bit_and_redo_the_same(tmp_path: Path, name: str) -> None:
    root = make_run(tmp_path / "run", (2, 6))
    LOG[name](root / name, losses(range(1, 11)))
    before = snapshot(root)
    back(root, 6)
    after = snapshot(root)
    undo(root)
    assert snapshot(root) == before
    run = Run.open(root)
    surgery.apply(run, surgery.plan_redo(run))
    assert snapshot(root) == after


@EACH
def test_what_is_cut_can_be_thrown_away(tmp_path: Path, name: str) -> None:
    root = make_run(tmp_path / "run", (2, 6))
    LOG[name](root / name, losses(range(1, 11)))
    back(root, 6, keep=False)
    assert CURVES[name](root / name) == {"train": curve(range(1, 7))}


@EACH
def test_a_run_of_which_nothing_stays_is_the_branch_itself(tmp_path: Path, name: str) -> None:
    """A restart from 6 under a new id: back at 4, all of it leaves, and the end of the first."""
    root = make_run(tmp_path / "run", (4,))
    LOG[name](root / name, losses(range(1, 9)))
    again = {"run": "c" * 32, "name": "again", "time": made.START + 1000}
    LOG[name](root / name, losses(range(7, 10), 0.5), **again)  # type: ignore[arg-type]
    back(root, 4)
    assert CURVES[name](root / name) == {
        "train": curve(range(1, 5)),
        "train-cut-0001": curve(range(5, 9)),
        "again-cut-0001": curve(range(7, 10), 0.5),
    }


@EACH
def test_of_two_trainings_at_the_same_time_one_must_be_named(tmp_path: Path, name: str) -> None:
    root = make_run(tmp_path / "run", (4,))
    LOG[name](root / name, losses(range(1, 9)))
    other = {"run": "c" * 32, "name": "other", "time": made.START + 2}
    LOG[name](root / name, losses(range(1, 9), 0.5), **other)  # type: ignore[arg-type]
    before = snapshot(root)
    with pytest.raises(SurgeryError, match="logged to at the same time") as refused:
        back(root, 4)
    assert "tracker_runs" in str(refused.value.hints[0])
    assert snapshot(root) == before
    (root / "ckptsurgeon.yaml").write_text("tracker_runs: [train]\n")
    back(root, 4)
    assert CURVES[name](root / name) == {
        "train": curve(range(1, 5)),
        "train-cut-0001": curve(range(5, 9)),
        "other": curve(range(1, 9), 0.5),
    }


@EACH
@pytest.mark.parametrize("saved", ["while the newer ran", "while the older ran", "later"])
def test_of_two_trainings_one_after_the_other_the_checkpoint_says_which(
    tmp_path: Path, name: str, saved: str
) -> None:
    """A colleague's run, or one from step 1 again, passes the step as well."""
    root = make_run(tmp_path / "run", (4,))
    LOG[name](root / name, losses(range(1, 9)))
    other = {"run": "c" * 32, "name": "other", "time": made.START + 1000}
    LOG[name](root / name, losses(range(1, 9), 0.5), **other)  # type: ignore[arg-type]
    times = {"while the newer ran": 1004, "while the older ran": 4, "later": 9000}
    for file in (root / "checkpoint-4").iterdir():
        os.utime(file, (made.START + times[saved],) * 2)
    before = snapshot(root)
    if saved == "while the newer ran":
        back(root, 4)
        cut = "other"
    else:
        with pytest.raises(SurgeryError, match="both passed step 4") as refused:
            back(root, 4)
        assert "tracker_runs" in str(refused.value.hints[0])
        assert snapshot(root) == before
        (root / "ckptsurgeon.yaml").write_text("tracker_runs: [train]\n")
        back(root, 4)
        cut = "train"
    curves = CURVES[name](root / name)
    assert len(curves[cut]) == len(curves[f"{cut}-cut-0001"]) == 4
    assert len(curves[{"train": "other", "other": "train"}[cut]]) == 8


def test_the_last_of_each_metric_is_that_of_the_step(tmp_path: Path) -> None:
    """Of equal steps the later one, as MLflow has it; what was first logged after the step is gone,
    and what has no step of its own goes the way of the loss before it."""
    root, path = make_run(tmp_path / "run", (6,)), tmp_path / "run" / MLFLOW
    made.log_to_mlflow(path, losses(range(1, 11)))
    points = [(step, {"loss": 0.5 / step, "system/cpu": float(step)}) for step in range(5, 9)]
    made.log_to_mlflow(path, points, time=made.START + 1000)
    late = [(6, {"eval": 6.0}), (8, {"eval": 8.0, "late": 1.0}), (0, {"test": 1.0})]
    made.log_to_mlflow(path, late, time=made.START + 2000)
    back(root, 6)
    latest = {
        key: value for (run, key), value in made.mlflow_latest(path).items() if run == "train"
    }
    assert latest == {
        "loss": (6, 0.5 / 6), "lr": (4, 0.1), "system/cpu": (6, 6.0), "eval": (6, 6.0),
    }  # fmt: skip
    cut = {key for run, key in made.mlflow_latest(path) if run == "train-cut-0001"}
    assert cut == {"loss", "lr", "system/cpu", "eval", "late", "test"}


def test_samples_of_the_system_leave_with_their_points(tmp_path: Path) -> None:
    root, path = make_run(tmp_path / "run", (6,)), tmp_path / "run" / TRACKIO
    made.log_to_trackio(path, losses(range(1, 11)))
    made.log_to_trackio(path, losses(range(5, 9), 0.5), time=made.START + 1000)
    with made.opened(path) as database:
        columns = "(run_id, run_name, title, timestamp, step)"
        alert = f"INSERT INTO alerts {columns} VALUES (?, ?, ?, ?, ?)"
        for step in (6, 7):
            time = f"2023-11-14T22:30:0{step}+00:00"
            database.execute(alert, ("b" * 32, "train", f"at {step}", time, step))
    back(root, 6)
    with made.opened(path) as database:
        count = "SELECT run_name, count(*) FROM system_metrics GROUP BY run_name"
        assert dict(database.execute(count).fetchall()) == {"train": 4, "train-cut-0001": 10}
        assert dict(database.execute("SELECT title, run_name FROM alerts").fetchall()) == {
            "at 6": "train", "at 7": "train-cut-0001",
        }  # fmt: skip


def test_the_step_of_the_trainer_wins_over_that_of_trackio(tmp_path: Path) -> None:
    root, path = make_run(tmp_path / "run", (60,)), tmp_path / "run" / TRACKIO
    points = [(i, {"loss": 1 / (i + 1), "train/global_step": 10.0 * (i + 1)}) for i in range(9)]
    made.log_to_trackio(path, points)
    back(root, 60)
    assert [step for step, _ in made.trackio_curves(path)["train"]] == list(range(6))


@EACH
def test_names_are_new_and_may_change_places(tmp_path: Path, name: str) -> None:
    root = make_run(tmp_path / "run")
    LOG[name](root / name, losses(range(1, 5)))
    before = snapshot(root)
    operate(root, {"logs": {"rename": {"loss": "lr", "lr": "loss"}}})
    assert CURVES[name](root / name)["train"] == [(step, 0.1) for step in range(1, 5)]
    if name != MLRUNS:
        with made.opened(root / name) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    undo(root)
    assert snapshot(root) == before
    with pytest.raises(UsageError, match="would both be"):
        operate(root, {"logs": {"rename": {"loss": "lr"}}})


LEAVES_A_LOG = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA journal_mode = WAL")
database.execute("UPDATE metrics SET step = step")
os.kill(os.getpid(), 9)
"""


@BOTH
def test_a_log_beside_the_database_is_refused_and_the_hint_finishes_it(
    tmp_path: Path, name: str
) -> None:
    root = make_run(tmp_path / "run", (2, 6))
    LOG[name](root / name, losses(range(1, 11)))
    subprocess.run([sys.executable, "-c", LEAVES_A_LOG, str(root / name)], check=False)
    assert (root / f"{name}-wal").stat().st_size
    with pytest.raises(SurgeryError, match="changes that are not in") as refused:
        back(root, 6)
    hint = str(refused.value.hints[0]).partition("   ")[0]
    subprocess.run(["bash", "-c", hint], check=True)
    back(root, 6)
    assert CURVES[name](root / name)["train"] == curve(range(1, 7))


@BOTH
def test_a_database_that_somebody_has_open_is_refused(tmp_path: Path, name: str) -> None:
    root = make_run(tmp_path / "run", (2, 6))
    LOG[name](root / name, losses(range(1, 11)))
    with contextlib.closing(sqlite3.connect(root / name)) as database:
        database.execute("SELECT * FROM metrics").fetchone()
        with pytest.raises(SurgeryError, match=r"open for writing|changes that are not in"):
            back(root, 6)


@pytest.mark.parametrize(
    "statement",
    [
        "ATTACH DATABASE '{beside}' AS other",
        "VACUUM INTO '{beside}'",
        "PRAGMA writable_schema = ON",
        "DROP TABLE metrics",
        "SELECT load_extension('{beside}')",
    ],
)
def test_a_plan_that_others_wrote_changes_rows_alone(tmp_path: Path, statement: str) -> None:
    root = make_run(tmp_path / "run", (2, 6))
    made.log_to_mlflow(root / MLFLOW, losses(range(1, 11)))
    before = snapshot(root)
    run = Run.open(root)
    plan = surgery.plan(run, from_data({"rollback": {"to": 6}, "tensorboard": {"note": False}}))
    text = statement.format(beside=tmp_path / "beside")
    edits = tuple(
        replace(edit, content=replace(edit.content, statements=((text, ()),)))
        if isinstance(edit, Replace) and isinstance(edit.content, Queries)
        else edit
        for edit in plan.edits
    )
    with pytest.raises(SurgeryError):
        surgery.apply(run, replace(plan, edits=edits))
    assert snapshot(root) == before
    assert not (tmp_path / "beside").exists()


def test_other_databases_are_left_alone(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (2, 6))
    with made.opened(root / "cache.db") as database:
        database.execute("CREATE TABLE metrics (step INTEGER)")
    (root / "odd.db").write_bytes(b"SQLite format 3\0" + bytes(100))
    (root / "text.db").write_text("no database")
    assert Run.open(root).log_sources() == []
