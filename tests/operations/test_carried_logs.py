"""The logs of a run up to its step come along in a fork and in a transplant."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.fork import fork, planned
from tests.support.event_logs import write_log
from tests.support.mlruns import log_to_mlruns
from tests.support.snapshot import exact_snapshot, snapshot
from tests.support.tiny_run import make_run
from tests.support.tracker_databases import log_to_mlflow
from tests.support.wandb_files import unframed, write_run

STEPS, AT = 12, 8
HISTORY = 2 << 3 | 2


def source(root: Path) -> Path:
    """A run that logs in every way, crashed at 12 and was resumed from 8, to 10."""
    make_run(root, (4, AT))
    write_log(root / "tensorboard", [2.0] * STEPS, tag="loss")
    rows = [(step, 2.0) for step in (*range(1, STEPS + 1), 9, 10)]
    (root / "metrics.csv").write_text("step,loss\n" + "".join(f"{s},{v}\n" for s, v in rows))
    (root / "logs").mkdir()
    lines = (json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in rows)
    (root / "logs/metrics.jsonl").write_text("".join(lines))
    write_run(root, range(1, STEPS + 1))
    return root


def steps(root: Path) -> dict[str, list[int]]:
    """The steps in each log of a run that has one of each kind."""
    log = EventAccumulator(str(root / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    table = (root / "metrics.csv").read_text().splitlines()[1:]
    lines = (root / "logs/metrics.jsonl").read_text().splitlines()
    (offline,) = root.glob("wandb/offline-run-*/*.wandb")
    points = [item for item in unframed(offline.read_bytes()) if item[0] == HISTORY]
    return {
        "events": [event.step for event in log.Scalars("loss")],
        "table": [int(row.partition(",")[0]) for row in table],
        "lines": [json.loads(line)["step"] for line in lines],
        "wandb": list(range(1, len(points) + 1)),
    }


def each(of: Iterable[int]) -> dict[str, list[int]]:
    return {log: list(of) for log in ("events", "table", "lines", "wandb")}


def test_a_fork_begins_with_the_logs_up_to_its_step(tmp_path: Path) -> None:
    root = source(tmp_path / "run")
    before = exact_snapshot(root)
    recipe = from_data({"logs": {"of": str(root)}, "set": {"lr": 1e-4}})
    done = fork(Run.open(root), AT, tmp_path / "branch", recipe, "copy")
    assert exact_snapshot(root) == before
    assert done.receipt is not None
    assert steps(tmp_path / "branch") == each(range(1, AT + 1))
    (offline,) = (tmp_path / "branch").glob("wandb/*/*.wandb")
    assert offline.name == "run-abc-branch.wandb"
    with (tmp_path / "branch/metrics.csv").open("a") as file:  # its trainer goes on
        file.write("9,1\n10,1\n")
    branch = Run.open(tmp_path / "branch")
    surgery.apply(branch, surgery.plan_undo(branch))
    assert not list((tmp_path / "branch").glob("*/*/*.wandb"))


def test_a_dry_run_says_which_logs_come_and_where_they_end(tmp_path: Path) -> None:
    root = source(tmp_path / "run")
    log_to_mlflow(root / "mlflow.db", [(step, {"loss": 1.0}) for step in range(1, STEPS)])
    run, branch = Run.open(root), tmp_path / "branch"
    recipe = from_data({"logs": {"of": str(root)}, "tensorboard": {"note": False}})
    before = exact_snapshot(tmp_path)
    said = planned(run, AT, branch, recipe)
    assert exact_snapshot(tmp_path) == before
    assert all(f"to step {AT}" in getattr(change, "note", "") for change in said.changes)
    assert {Path(change.file).suffix for change in said.changes} >= {".csv", ".jsonl", ".wandb"}
    assert [sentence for sentence in said.warnings if "mlflow.db is not carried" in sentence]
    done = fork(run, AT, branch, recipe, "copy")
    assert (done.changes, done.warnings) == (said.changes, said.warnings)
    assert steps(branch) == each(range(1, AT + 1))


def test_a_log_of_both_runs_is_not_cut_for_one(tmp_path: Path) -> None:
    """A fork beside the run, whose settings name a folder beside both."""
    root, logs = make_run(tmp_path / "run", (4, AT)), tmp_path / "logs"
    logs.mkdir()
    (logs / "metrics.csv").write_text("step,loss\n" + "".join(f"{s},1\n" for s in range(1, 13)))
    (root / "ckptsurgeon.yaml").write_text("tensorboard: [../logs]\n")
    before = snapshot(tmp_path)
    recipe, refusal = from_data({"logs": {"of": str(root)}}), "csv is a log of .*run and of branch"
    with pytest.raises(SurgeryError, match=refusal):
        planned(Run.open(root), AT, tmp_path / "branch", recipe)
    with pytest.raises(SurgeryError, match=refusal):
        fork(Run.open(root), AT, tmp_path / "branch", recipe, "copy")
    assert snapshot(tmp_path) == before


def test_the_logs_of_another_run_take_the_place_of_its_own(tmp_path: Path) -> None:
    """As in a transplant: what was logged before is of updates that the step no longer has."""
    root, run = source(tmp_path / "run"), make_run(tmp_path / "new", (AT,))
    (run / "metrics.csv").write_text("step,loss\n1,5\n")
    write_run(run, range(1, 3))
    write_log(run / "tensorboard", [7.0], tag="loss")
    before = snapshot(run)
    opened = Run.open(run)
    recipe = from_data({"logs": {"of": str(root)}, "tensorboard": {"note": False}})
    surgery.apply(opened, surgery.plan(opened, recipe))
    assert steps(run) == each(range(1, AT + 1))
    assert Run.open(run).log_sources()
    again = surgery.plan(Run.open(run), recipe)
    assert not again.changes and not [text for text in again.warnings if "no logs" in text]
    opened = Run.open(run)
    surgery.apply(opened, surgery.plan_undo(opened))
    assert snapshot(run) == before


def test_what_can_not_be_carried_is_named(tmp_path: Path) -> None:
    root, run = source(tmp_path / "run"), make_run(tmp_path / "new", (AT,))
    log_to_mlflow(root / "mlflow.db", [(step, {"loss": 1.0}) for step in range(1, STEPS)])
    log_to_mlruns(root / "mlruns", [(step, {"loss": 1.0}) for step in range(1, STEPS)])
    (root / "own.jsonl").write_text('{"step": 1, "loss": 1}\n')
    (root / "ckptsurgeon.yaml").write_text("logs: [own.jsonl]\n")
    (synced,) = root.glob("wandb/*/*.wandb")
    synced.with_name(f"{synced.name}.synced").touch()
    made = surgery.plan(Run.open(run), from_data({"logs": {"of": str(root)}}))
    told = "\n".join(made.warnings)
    for log in ("mlflow.db", "mlruns", "own.jsonl"):
        assert f"{root / log} is not carried" in told
    assert "a server has it" in told and "fork_from" in told
    new = {Path(change.file).name for change in made.changes if getattr(change, "new_file", False)}
    assert not new & {"mlflow.db", "own.jsonl"} and not [n for n in new if n.endswith(".wandb")]


def test_a_log_that_proves_nothing_stops_it(tmp_path: Path) -> None:
    root, run = source(tmp_path / "run"), make_run(tmp_path / "new", (AT,))
    (log,) = root.glob("wandb/*/*.wandb")
    data = bytearray(log.read_bytes())
    data[40] ^= 0xFF
    log.write_bytes(data)
    before = exact_snapshot(run)
    with pytest.raises(SurgeryError, match="checksum"):
        surgery.plan(Run.open(run), from_data({"logs": {"of": str(root)}}))
    assert exact_snapshot(run) == before


def test_it_is_no_cut_and_not_of_the_run_itself(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="would cut or rename"):
        from_data({"logs": {"of": "x", "after": 3}})
    with pytest.raises(UsageError, match="would cut or rename"):
        from_data({"logs": {"of": "x"}, "rollback": {"to": 3}})
    root = source(tmp_path / "run")
    with pytest.raises(UsageError, match="the run that would get them"):
        surgery.plan(Run.open(root), from_data({"logs": {"of": str(root)}}))
