"""MLflow's file store: what is its own beside what tests/logs/test_databases.py has of all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import UsageError
from ckptsurgeon.recipe.file import from_data
from tests.support.mlruns import EXPERIMENT, log_to_mlruns, mlruns_curves
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run
from tests.support.tracker_databases import START


def operate(root: Path, **recipe: object) -> None:
    run = Run.open(root)
    surgery.apply(run, surgery.plan(run, from_data(recipe)))


def undo(root: Path) -> None:
    run = Run.open(root)
    surgery.apply(run, surgery.plan_undo(run))


def back(root: Path, step: int, **more: object) -> None:
    operate(root, rollback={"to": step}, tensorboard={"note": False, **more})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", (6, 10))


def test_each_metric_is_cut_by_what_it_counts(root: Path) -> None:
    """What counts epochs, or the samples of MLflow's own monitor, goes the way of the loss."""
    store = root / "mlruns"
    epochs = [(step, {"loss": 1 / step, "lr": 0.1}) for step in range(1, 11)]
    log_to_mlruns(store, [*epochs[:5], (1, {"accuracy": 0.5}), *epochs[5:], (2, {"accuracy": 1.0})])
    points = [(step, {"loss": 0.5 / step, "system/cpu": float(step)}) for step in range(5, 9)]
    log_to_mlruns(store, points, time=START + 1000)
    back(root, 6)
    assert mlruns_curves(store, "accuracy") == {
        "train-cut-0001": [(1, 0.5), (2, 1.0)],
    }  # the first was logged at step 5, of which the second start has another one
    assert mlruns_curves(store, "lr")["train"] == [(step, 0.1) for step in range(1, 5)]
    assert mlruns_curves(store, "system/cpu")["train"] == [(5, 5.0), (6, 6.0)]


def test_a_line_that_was_cut_short_goes_the_way_of_the_one_before(root: Path) -> None:
    store = root / "mlruns"
    log_to_mlruns(store, [(step, {"loss": 1 / step}) for step in range(1, 11)])
    (file,) = store.glob("*/*/metrics/loss")
    file.write_bytes(whole := file.read_bytes() + b"17000")
    back(root, 6)
    (cut,) = set(store.glob("*/*/metrics/loss")) - {file}
    assert file.read_bytes() + cut.read_bytes() == whole


def test_an_undo_brings_back_what_the_cut_left_whole_and_takes_what_came_since(root: Path) -> None:
    """An evaluation before the step is not cut, but the trainer goes on in its file; and another
    metric and another run are new."""
    store = root / "mlruns"
    log_to_mlruns(store, [(4, {"eval": 1.0}), *((s, {"loss": 1 / s}) for s in range(1, 11))])
    before = snapshot(root)
    back(root, 6)
    log_to_mlruns(store, [(8, {"eval": 2.0, "loss": 1.0, "new": 1.0})], time=START + 2000)
    log_to_mlruns(store, [(7, {"loss": 1.0})], run="d" * 32, name="other", time=START + 3000)
    undo(root)
    after = snapshot(root)
    assert {name for name in after if "/metrics/" in name or name.endswith("meta.yaml")} == {
        name for name in before if "/metrics/" in name or name.endswith("meta.yaml")
    }
    assert all(after[name] == state for name, state in before.items() if "/metrics/" in name)


def test_a_deleted_run_is_not_looked_at(root: Path) -> None:
    store = root / "mlruns"
    log_to_mlruns(store, [(step, {"loss": 1 / step}) for step in range(1, 11)])
    meta = store / EXPERIMENT / ("a" * 32) / "meta.yaml"
    meta.write_text(meta.read_text().replace("lifecycle_stage: active", "lifecycle_stage: deleted"))
    trash = store / ".trash/7" / ("e" * 32)
    (store / EXPERIMENT / ("a" * 32)).rename(store / EXPERIMENT / ("b" * 32))
    log_to_mlruns(store, [(step, {"loss": 1 / step}) for step in range(1, 11)], run="e" * 32)
    trash.parent.mkdir(parents=True)
    (store / EXPERIMENT / ("e" * 32)).rename(trash)
    before = snapshot(store)
    back(root, 6)
    assert snapshot(store) == before


def test_two_metrics_become_one_in_the_order_of_time(root: Path) -> None:
    store = root / "mlruns"
    log_to_mlruns(store, [(step, {"loss": 1.0}) for step in (1, 2)])
    log_to_mlruns(store, [(step, {"a/old": 2.0}) for step in (3, 4)], time=START + 10)
    log_to_mlruns(store, [(step, {"loss": 3.0}) for step in (5, 6)], time=START + 20)
    before = snapshot(root)
    operate(root, logs={"rename": {"a/old": "loss"}, "allow_merge": True})
    steps = [step for step, _ in mlruns_curves(store)["train"]]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert not mlruns_curves(store, "a/old")
    undo(root)
    assert snapshot(root) == before


@pytest.mark.parametrize(
    "names",
    [
        {"loss": "../../x"}, {"loss": "/x"}, {"loss": "a//b"}, {"loss": "a,b"}, {"loss": "."},
        {"loss": "lr/x"}, {"lr": "a"}, {"loss": "x", "lr": "x/y"},
    ],
    ids=str,
)  # fmt: skip
def test_a_name_that_mlflow_has_no_file_for_is_refused(
    root: Path, names: Mapping[str, str]
) -> None:
    log_to_mlruns(root / "mlruns", [(1, {"loss": 1.0, "lr": 1.0, "a/b": 1.0})])
    before = snapshot(root.parent)
    with pytest.raises(UsageError, match=r"has no file for|can't be beside"):
        operate(root, logs={"rename": names})
    assert snapshot(root.parent) == before


def test_a_run_whose_metadata_can_not_be_read_is_left_alone(root: Path) -> None:
    store = root / "mlruns"
    log_to_mlruns(store, [(step, {"loss": 1 / step}) for step in range(1, 11)])
    (store / EXPERIMENT / ("a" * 32) / "meta.yaml").write_text("run_id: [")
    before = snapshot(store)
    back(root, 6)
    assert snapshot(store) == before


def test_its_traces_are_named_as_what_stays(root: Path) -> None:
    store = root / "mlruns"
    log_to_mlruns(store, [(step, {"loss": 1 / step}) for step in range(1, 11)])
    for name, run in (("tr-1", "a" * 32), ("tr-2", "a" * 32), ("tr-3", "b" * 32)):
        folder = store / EXPERIMENT / "traces" / name / "request_metadata"
        folder.mkdir(parents=True)
        (folder / "mlflow.sourceRun").write_text(run)
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 6}}))
    assert "mlruns: train: its 2 traces stay with it, whenever made" in plan.warnings
