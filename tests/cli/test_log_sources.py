"""Every log of a run in one transaction: event files, tables, JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ckptsurgeon import Run
from ckptsurgeon.look.logged import own
from ckptsurgeon.look.timeline import timeline_of
from ckptsurgeon.transaction.home import ROWS
from tests.cli.conftest import Surgeon, hints
from tests.support.event_logs import spiked, write_log
from tests.support.mlruns import log_to_mlruns, mlruns_curves
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run
from tests.support.tracker_databases import log_to_mlflow, log_to_trackio
from tests.support.wandb_files import framed, history, unframed, write_run

STEPS = 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run saved every 10 steps whose trainer logs the same loss in three ways."""
    run = make_run(tmp_path / "run", range(10, STEPS + 1, 10))
    write_log(run / "tensorboard", (2 / s for s in range(1, STEPS + 1)), tag="loss")
    rows = "".join(f"{s},{2 / s}\n" for s in range(1, STEPS + 1))
    (run / "metrics.csv").write_text(f"step,loss\n{rows}")
    objects = ({"step": s, "loss": 2 / s} for s in range(1, STEPS + 1))
    (run / "logs").mkdir()
    lines = "".join(json.dumps(item) + "\n" for item in objects)
    (run / "logs/metrics.jsonl").write_text(lines)
    write_run(run, range(1, STEPS + 1))
    return run


def ends(root: Path) -> list[int]:
    """The last step of each log, by TensorBoard and by what is in the others."""
    log = EventAccumulator(str(root / "tensorboard"))
    log.Reload()
    last = json.loads((root / "logs/metrics.jsonl").read_text().splitlines()[-1])
    table = (root / "metrics.csv").read_text().splitlines()[-1]
    offline = root.glob("wandb/offline-run-*/*.wandb")
    (run,) = (path for path in offline if "-cut-" not in path.name)
    points = [item for item in unframed(run.read_bytes()) if item[0] == 2 << 3 | 2]
    ends = [log.Scalars("loss")[-1].step, int(table.partition(",")[0]), last["step"]]
    return [*ends, len(points)]


def test_a_rollback_cuts_all_and_its_undo_brings_all_back(surgeon: Surgeon, root: Path) -> None:
    before = snapshot(root)
    done = surgeon("rollback", "--to", 20, "--yes", "-C", root)
    assert done.exit_code == 0, done.stderr
    assert "20 of 40 rows stay, to step 20" in done.stdout
    assert ends(root) == [20] * 4
    kept = (root / "logs/cut-0001/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == list(range(21, 41))
    assert surgeon("rollback", "--to", 20, "-C", root, "--yes").stdout.startswith("nothing to do")
    with (root / "logs/metrics.jsonl").open("a") as file:  # the trainer goes on
        file.write('{"step": 21, "loss": 1}\n')
    assert surgeon("undo", "--yes", "-C", root).exit_code == 0
    assert snapshot(root) == before


def test_logs_are_left_alone_on_request(surgeon: Surgeon, root: Path) -> None:
    assert surgeon("rollback", "--to", 20, "--no-truncate", "--yes", "-C", root).exit_code == 0
    assert ends(root) == [40] * 4


@pytest.mark.parametrize(
    "words",
    [
        ["rollback", "--to", "20"],
        ["truncate-logs", "--after", "20"],
        ["apply", "recipe.yaml"],
    ],
    ids=lambda words: words[0],
)
def test_a_log_that_cannot_be_cut_comes_with_a_way_around_it(
    surgeon: Surgeon, root: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    Path("recipe.yaml").write_text("rollback: {to: 20}\n")
    (log,) = root.glob("wandb/offline-run-*-abc/*.wandb")
    data = bytearray(log.read_bytes())
    data[40] ^= 0xFF
    log.write_bytes(data)
    refused = surgeon(*words, "--yes", "-C", root)
    assert refused.exit_code == 1, refused.output
    for hint in hints(refused.stderr):
        assert surgeon(*hint).exit_code == 0
        return
    assert f"move {log.parent} out of the run's log folders" in refused.stderr
    log.rename(root.with_name("away.wandb"))
    assert surgeon(*words, "--yes", "-C", root).exit_code == 0


def test_status_lists_each_with_its_last_step(surgeon: Surgeon, root: Path) -> None:
    said = surgeon("status", "-C", root).stdout
    assert "tensorboard/" in said and "1 file, to step 40" in said
    assert "metrics.csv" in said and "logs/metrics.jsonl" in said
    for log in (next((root / "tensorboard").iterdir()), root / "metrics.csv"):
        os.utime(log, (1e9, 1e9))
    said = surgeon("status", "-C", root).stdout
    assert said.count("to step 40, written 2001-09-09T01:46:40+00:00\n") == 2
    document = json.loads(surgeon("status", "--json", "-C", root).stdout)
    assert document["logs"] == [
        {"name": "tensorboard/", "last_step": 40},
        {"name": "metrics.csv", "last_step": 40},
        {"name": "logs/metrics.jsonl", "last_step": 40},
        {"name": "wandb/offline-run-1700000000-abc/run-abc.wandb", "last_step": 40},
    ]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("folder", [".", "logs", "logs/csv/version_0", "a/b/c/d"])
def test_what_a_rollback_would_cut_is_read(
    surgeon: Surgeon, tmp_path: Path, folder: str, name: str
) -> None:
    """Wherever a table or lines lie in the run: the loss of `status` and `doctor` is there."""
    root = make_run(tmp_path / "run", range(10, STEPS + 1, 10))
    (root / folder).mkdir(parents=True, exist_ok=True)
    table = name.endswith(".csv")
    rows = [f"{s},2.5" if table else f'{{"step": {s}, "loss": 2.5}}' for s in range(1, STEPS + 1)]
    (root / folder / name).write_text("\n".join([*(["step,loss"] * table), *rows]) + "\n")
    said = surgeon("rollback", "--to", 20, "-n", "-C", root).stdout
    assert "20 of 40 rows stay, to step 20" in said
    assert own(Run.open(root), {}).kept["loss"].steps[-1] == STEPS
    assert "no logs were found" not in surgeon("doctor", "-C", root).stdout
    assert "2.5" in surgeon("status", "-C", root).stdout


def test_doctor_says_when_they_end_apart_and_how_to_cut_them(surgeon: Surgeon, root: Path) -> None:
    assert "different steps" not in surgeon("doctor", "-C", root).stdout
    surgeon("rollback", "--to", 20, "--no-truncate", "--yes", "-C", root)
    surgeon("truncate-tb-events", "--after", 20, "--yes", "-C", root)
    assert ends(root) == [20, 40, 40, 40]
    told = surgeon("doctor", "-C", root).stdout
    assert "the logs end at different steps: tensorboard/ at 20, metrics.csv at 40" in told
    (cut,) = (words for words in hints(told) if "truncate-logs" in words)
    assert surgeon(*cut, "--yes").exit_code == 0
    assert ends(root) == [20] * 4
    assert "different steps" not in surgeon("doctor", "-C", root).stdout


def test_all_are_cut_and_renamed_by_themselves(surgeon: Surgeon, root: Path) -> None:
    before = snapshot(root)
    where = ("--yes", "-C", root)
    assert surgeon("truncate-logs", "--after", 7, "--no-keep-tb", *where).exit_code == 0
    assert ends(root) == [7] * 4
    done = surgeon("rename-logs", "loss", "train/loss", *where)
    assert done.exit_code == 0, done.stderr
    assert (root / "metrics.csv").read_text().startswith("step,train/loss\n1,")
    log = EventAccumulator(str(root / "tensorboard"))
    log.Reload()
    assert len(log.Scalars("train/loss")) == 7
    assert '"train/loss"' in (root / "logs/metrics.jsonl").read_text()
    assert surgeon("rename-logs", "loss", "train/loss", *where).stdout.startswith("nothing to do")
    told = surgeon("rename-logs", "los", "x", *where)
    assert told.exit_code == 2
    assert hints(told.stderr)[0][-3:] == ["rename-logs", "train/loss", "x"]
    for _ in range(2):
        assert surgeon("undo", *where).exit_code == 0
    assert snapshot(root) == before


def test_rows_alone_need_no_event_files(surgeon: Surgeon, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n1,3\n2,2\n3,1\n")
    done = surgeon("truncate-logs", "--after", 2, "--tb", tmp_path, "--yes")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,3\n2,2\n"


def test_a_diff_says_which_logs_differ(surgeon: Surgeon, root: Path) -> None:
    surgeon("rollback", "--to", 20, "--yes", "-C", root)
    told = surgeon("diff", "--receipt", "0001", "-C", root)
    assert "logs" in told.stdout, told.stdout + told.stderr


def test_advice_is_by_the_only_log_that_has_the_loss(surgeon: Surgeon, tmp_path: Path) -> None:
    """An offline run of W&B that nothing else was logged beside: it diverged, was resumed from 200
    and diverged again."""
    root = make_run(tmp_path / "run", range(50, 401, 50))
    folder = root / "wandb/offline-run-1-abc"
    folder.mkdir(parents=True)
    losses = dict(enumerate(spiked(400, 250), 1))
    points = [{"train/loss": losses[s], "train/global_step": s, "_step": s} for s in losses]
    again = [{**point, "_step": 400 + i} for i, point in enumerate(points[200:])]
    (folder / "run-abc.wandb").write_bytes(framed(map(history, [*points, *again])))
    told = json.loads(surgeon("advise", "--json", "-C", root).stdout)
    assert told["verdict"] == "diverged"
    assert "diverged at step 250" in surgeon("doctor", "-C", root).stdout


@pytest.mark.parametrize("name", ["mlflow.db", "p.db", "mlruns", "metrics.csv", "wandb"])
@pytest.mark.long
def test_the_only_log_shows_what_was_left_and_what_is_wrong(
    surgeon: Surgeon, tmp_path: Path, name: str
) -> None:
    """A loss that leaves its course at 250, in one kind of log alone: `advise` finds it, and after
    a rollback `report` draws the branch that was left."""
    root = make_run(tmp_path / "run", range(50, 401, 50))
    losses = list(enumerate(spiked(400, 250), 1))
    points = [(step, {"loss": loss}) for step, loss in losses]
    if name == "metrics.csv":
        rows = "".join(f"{step},{loss}\n" for step, loss in losses)
        (root / name).write_text(f"step,loss\n{rows}")
    elif name == "wandb":
        folder = root / "wandb/offline-run-1-abc"
        folder.mkdir(parents=True)
        values = [{"loss": loss, "global_step": step, "_step": step} for step, loss in losses]
        (folder / "run-abc.wandb").write_bytes(framed(map(history, values)))
    else:
        log = {"mlflow.db": log_to_mlflow, "p.db": log_to_trackio, "mlruns": log_to_mlruns}
        log[name](root / name, points)
    status = json.loads(surgeon("status", "--json", "-C", root).stdout)
    assert [log["last_step"] for log in status["logs"]] == [400]
    assert json.loads(surgeon("advise", "--json", "-C", root).stdout)["verdict"] == "diverged"
    assert surgeon("rollback", "--to", 200, "--yes", "-C", root).exit_code == 0
    assert json.loads(surgeon("advise", "--json", "-C", root).stdout)["verdict"] != "diverged"
    run = Run.open(root)
    (left,) = timeline_of(own(run, {}), run).left
    assert (left.receipt, left.to) == ("0001", 200)
    assert left.curves["loss"].steps.tolist() == list(range(201, 401))
    assert surgeon("report", "-C", root, "-o", tmp_path / "picture.svg").exit_code == 0
    assert "0001" in surgeon("diff", "--receipt", "0001", "-C", root).stdout


def test_doctor_names_the_database_that_ends_apart(surgeon: Surgeon, tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (20,))
    log_to_mlflow(root / "mlflow.db", [(step, {"loss": 2 / step}) for step in range(1, 41)])
    rows = "".join(f"{s},{2 / s}\n" for s in range(1, 21))
    (root / "metrics.csv").write_text(f"step,loss\n{rows}")
    said = surgeon("doctor", "-C", root).stdout
    assert "metrics.csv at 20, mlflow.db: train at 40" in " ".join(said.split())
    assert "truncate-logs --after 20" in " ".join(said.split())
    assert surgeon("truncate-logs", "--after", 20, "--yes", "-C", root).exit_code == 0
    assert "end at different steps" not in surgeon("doctor", "-C", root).stdout


def test_a_store_beside_the_run_is_cut_where_the_settings_name_it(
    surgeon: Surgeon, tmp_path: Path
) -> None:
    """MLflow's store is where the trainer was started; its undo leaves what others logged."""
    root, store = make_run(tmp_path / "run", (20,)), tmp_path / "mlruns"
    log_to_mlruns(store, [(step, {"train/loss": 2 / step}) for step in range(1, 41)])
    before = snapshot(store)
    (root / "ckptsurgeon.yaml").write_text("tensorboard: [., ../mlruns]\n")
    done = surgeon("rollback", "--to", 20, "--yes", "-C", root)
    assert done.exit_code == 0, done.stderr
    assert "train: 20 of 40 points stay" in done.stdout
    curves = mlruns_curves(store, "train/loss")
    assert [step for step, _ in curves["train"]] == list(range(1, 21))
    assert [step for step, _ in curves["train-cut-0001"]] == list(range(21, 41))
    assert surgeon("undo", "--yes", "-C", root).exit_code == 0
    assert {name: state for name, state in snapshot(store).items() if name in before} == before


def test_a_fork_brings_its_logs_on_request(surgeon: Surgeon, root: Path, tmp_path: Path) -> None:
    done = surgeon("fork", tmp_path / "bare", "--step", 20, "--copy", "-C", root)
    assert done.exit_code == 0, done.stderr
    assert Run.open(tmp_path / "bare").log_sources() == []
    words = ("fork", tmp_path / "branch", "--step", 20, "--copy", "--logs", "-n", "-C", root)
    said = surgeon(*words)
    assert said.exit_code == 0 and said.stdout.count("to step 20") >= 3, said.stdout
    assert f"ckptsurgeon fork {tmp_path / 'branch'}" in said.stdout
    document = json.loads(surgeon(*words, "--json").stdout)
    assert {change["field"] for change in document["changes"]} <= {"logs", "tensorboard"}
    assert all("to step 20" in change["note"] for change in document["changes"])
    assert not (tmp_path / "branch").exists()
    done = surgeon("fork", tmp_path / "branch", "--step", 20, "--copy", "--logs", "-C", root)
    assert done.exit_code == 0, done.stderr
    assert ends(tmp_path / "branch") == [20] * 4
