"""W&B's own library writes an offline run that crashes, is rolled back and goes on, and uploads it
to a server on this host: one curve, whose summary is that of its last step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import surgery
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.launch import REPO
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run
from tests.support.wandb_server import Uploaded, server

pytestmark = pytest.mark.formats
TRACKERS = REPO / ".venv/trackers"
TRAIN = """
import sys, wandb
folder, first, last, loss = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
settings = wandb.Settings(x_stats_sampling_interval=0.1, console="off")
run = wandb.init(
    project="p", id="abc", mode="offline", resume="allow", dir=folder, settings=settings
)
run.define_metric("loss", step_metric="train/global_step")
for step in range(first, last + 1):
    run.log({"loss": loss / step, "train/global_step": step})
    if step % 4 == 0:
        run.log({"eval/loss": loss / step, "train/global_step": step})
if "crash" in sys.argv:
    raise FloatingPointError("loss is NaN")
run.finish()
"""


def wandb(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
    """A process of this Python with W&B's library."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment = {**kept, "PYTHONPATH": str(TRACKERS), "WANDB_SILENT": "true", **more}
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True
    )


def train(root: Path, first: int, last: int, loss: float, *more: str) -> int:
    return wandb("-c", TRAIN, root, first, last, loss, *more).returncode


def sync(root: Path) -> Uploaded:
    """What `wandb sync` sends of every offline run in `root`."""
    with server() as here:
        for path in sorted(root.glob("wandb/offline-run-*/*.wandb")):
            done = wandb(
                "-m", "wandb", "sync", path.parent,
                WANDB_BASE_URL=here.address, WANDB_API_KEY="0" * 40, WANDB_DIR=str(root),
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
        return here


def uploaded(root: Path) -> Uploaded:
    """The same of a copy: what has been sent is marked, and then no surgery edits it."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(root / "wandb", Path(copy, "wandb"), symlinks=True)
        return sync(Path(copy))


def curve(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Steps and values of one name, in the order in which they were sent."""
    return [(row["train/global_step"], row[name]) for row in rows if name in row]


def rollback(root: Path, step: int) -> None:
    run = Run.open(root)
    surgery.apply(run, surgery.plan(run, from_data({"rollback": {"to": step}})))


def test_a_run_that_crashed_and_went_on_is_one_curve(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (4, 8, 12))
    assert train(root, 1, 14, 1.0, "crash") == 1
    before = snapshot(root)
    mixed = uploaded(root)
    assert len(mixed.history["abc"]) == 17
    rollback(root, 8)
    clean = uploaded(root)
    first = [(step, 1 / step) for step in range(1, 9)]
    assert curve(clean.history["abc"], "loss") == first
    assert curve(clean.history["abc"], "eval/loss") == [(4, 1 / 4), (8, 1 / 8)]
    assert clean.summary["abc"]["train/global_step"] == 8
    assert clean.summary["abc"]["loss"] == clean.summary["abc"]["eval/loss"] == 1 / 8
    cut = curve(clean.history["abc-cut-0001"], "loss")
    assert cut == [(step, 1 / step) for step in range(9, 15)]
    assert train(root, 9, 12, 0.5) == 0
    after = uploaded(root)
    second = [(step, 0.5 / step) for step in range(9, 13)]
    assert curve(after.history["abc"], "loss") == [*first, *second]
    assert after.summary["abc"]["loss"] == 0.5 / 12
    rollback(root, 4)  # into the first file; the second one leaves
    assert curve(uploaded(root).history["abc"], "loss") == first[:4]
    for _ in range(2):
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before


def test_an_undo_leaves_nothing_of_what_the_library_began_since(tmp_path: Path) -> None:
    """Its folders and links as well; a redo puts all of it back, and the library goes on in it."""
    root = make_run(tmp_path / "run", (4, 8))
    assert train(root, 1, 9, 1.0, "crash") == 1
    before = snapshot(root)
    rollback(root, 4)
    assert train(root, 5, 8, 0.5) == 0
    then = snapshot(root)
    for _ in range(2):
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
        assert snapshot(root) == before
        surgery.apply(Run.open(root), surgery.plan_redo(Run.open(root)))
        assert snapshot(root) == then
    clean = curve(uploaded(root).history["abc"], "loss")
    assert clean == [*((s, 1 / s) for s in range(1, 5)), *((s, 0.5 / s) for s in range(5, 9))]


def test_a_name_that_is_new_reaches_the_server(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (4,))
    assert train(root, 1, 4, 1.0) == 0
    run = Run.open(root)
    wanted = from_data({"logs": {"rename": {"loss": "train/loss"}}})
    surgery.apply(run, surgery.plan(run, wanted))
    sent = uploaded(root)
    assert curve(sent.history["abc"], "train/loss") == [(s, 1 / s) for s in range(1, 5)]
    assert sent.summary["abc"]["train/loss"] == 1 / 4
    assert not any("loss" in row for row in sent.history["abc"])


def test_what_was_uploaded_stays_as_it_is(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (4, 8))
    assert train(root, 1, 8, 1.0) == 0
    sync(root)
    (path,) = root.glob("wandb/offline-run-*/*.wandb")
    before = path.read_bytes()
    run = Run.open(root)
    plan = surgery.plan(run, from_data({"rollback": {"to": 4}}))
    (said,) = (sentence for sentence in plan.warnings if "a server has it" in sentence)
    assert 'WANDB_FORK_FROM="abc?_step=4"' in said
    read = "import os, wandb; s = wandb.Settings(); s.update_from_env_vars(dict(os.environ)); "
    show = read + "print(s.fork_from.run, s.fork_from.value)"
    assert wandb("-c", show, WANDB_FORK_FROM="abc?_step=4").stdout.split() == ["abc", "4"]
    surgery.apply(run, plan)
    assert path.read_bytes() == before
