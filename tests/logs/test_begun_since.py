"""A law: whichever logs a training begins after a rollback, an undo leaves every file, link and
folder as it was before, and a redo puts all of it back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.tensorboard import SummaryWriter

from ckptsurgeon import Run, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.mlruns import log_to_mlruns
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run
from tests.support.tracker_databases import START
from tests.support.wandb_files import write_run

EVERY, STEPS = 4, 8


def _events(root: Path, steps: range, start: int) -> None:
    """A folder for each start, and one that holds another, as hyperparameters have it."""
    with SummaryWriter(str(root / "tensorboard" / str(start))) as writer:
        for step in steps:
            writer.add_scalar("loss", 2 / step, step)
        writer.add_hparams({"lr": start}, {"last": 1.0})


def _table(root: Path, steps: range, start: int) -> None:
    folder = root / "csv" / f"version_{start}"
    folder.mkdir(parents=True)
    rows = "".join(f"{step},{2 / step}\n" for step in steps)
    (folder / "metrics.csv").write_text(f"step,loss\n{rows}")


def _lines(root: Path, steps: range, start: int) -> None:
    """One file, which every start goes on with."""
    with (root / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "loss": 2 / step}) + "\n" for step in steps)


def _wandb(root: Path, steps: range, start: int) -> None:
    """With the folders and links that its library makes (`tests/formats/test_wandb.py` has it)."""
    folder = write_run(root, steps, time=int(START) + 10_000 * start).parent
    for inner in ("files", "logs", "tmp/code"):
        (folder / inner).mkdir(parents=True)
    (folder / "logs/debug.log").write_text("started\n")
    for name, inner in (("latest-run", ""), ("debug.log", "/logs/debug.log")):
        link = root / "wandb" / name
        link.unlink(missing_ok=True)
        link.symlink_to(f"{folder.name}{inner}")


def _mlruns(root: Path, steps: range, start: int) -> None:
    points = [(step, {"loss": 2 / step, "train/rate": 0.1}) for step in steps]
    log_to_mlruns(
        root / "mlruns", points, run=f"{start:032x}", name=f"{start}", time=START + 10_000 * start
    )


LOGS: dict[str, Callable[[Path, range, int], None]] = {
    "event files": _events, "table": _table, "lines": _lines, "W&B": _wandb, "MLflow": _mlruns,
}  # fmt: skip
logs = st.sets(st.sampled_from(sorted(LOGS)))


def back_and_forth(root: Path, before: set[str], starts: list[set[str]]) -> None:
    make_run(root, (EVERY, STEPS))
    for name in sorted(before):
        LOGS[name](root, range(1, STEPS + 1), 0)
    was = snapshot(root)
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data({"rollback": {"to": 4}})))
    for start, names in enumerate(starts, 1):
        for name in sorted(names):
            LOGS[name](root, range(EVERY + 1, STEPS + start), start)
        make_run(root, (STEPS * (start + 1),))
    then = snapshot(root)
    for _ in range(2):
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
        assert snapshot(root) == was
        surgery.apply(Run.open(root), surgery.plan_redo(Run.open(root)))
        assert snapshot(root) == then
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == was


def law(examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
    )
    @example(set(LOGS), [set(LOGS)])
    @example(set(), [{"W&B", "MLflow"}])
    @given(logs, st.lists(logs, min_size=1, max_size=2))
    def holds(before: set[str], starts: list[set[str]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            back_and_forth(Path(folder, "run"), before, starts)

    holds()


@pytest.mark.long
def test_an_undo_leaves_no_folder_of_what_was_begun_since() -> None:
    law(8)


@pytest.mark.slow
def test_an_undo_leaves_no_folder_whatever_was_begun_since() -> None:
    law(100)


def test_a_run_of_wandb_with_event_files_goes_without_its_folder(tmp_path: Path) -> None:
    """TensorBoard would load them from an attic that has the whole folder."""
    root = make_run(tmp_path / "run", (EVERY, STEPS))
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data({"rollback": {"to": 4}})))
    _wandb(root, range(EVERY + 1, STEPS), 1)
    (folder,) = root.glob("wandb/offline-run-*")
    with SummaryWriter(str(folder / "files")) as writer:
        writer.add_scalar("loss", 1.0, 5)
    then = snapshot(root)
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert not list(root.rglob("*tfevents*")) and list(root.rglob("run-abc.wandb"))
    surgery.apply(Run.open(root), surgery.plan_redo(Run.open(root)))
    assert {k: v for k, v in snapshot(root).items() if v[0] != "folder"} == {
        k: v for k, v in then.items() if v[0] != "folder"
    }
