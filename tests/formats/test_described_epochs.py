"""Ultralytics YOLO and timm: pages by epochs, with a copy that a restart loads and the best of
them, and a table that has a row for each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.fork import fork
from tests.support.epoch_runs import UPDATES, YOLO, loaded, timm, ultralytics
from tests.support.own_runs import left
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back


def test_yolo_goes_back_to_its_best_epoch(tmp_path: Path) -> None:
    root = ultralytics(tmp_path / "train")
    run, before = Run.open(root), snapshot(root)
    assert run.format.name == "ultralytics"
    assert run.steps() == [0, 1, 3, 4] and run.latest() == 4
    recipe = from_data({"rollback": {"to": 1}, "set": {"beta2": 0.9}, "reset": ["moments"]})
    with pytest.raises(SurgeryError, match=f"names {re.escape(YOLO)}, not known to") as refused:
        surgery.plan(run, recipe)
    assert "torch.nn" not in refused.value.what  # its layers are known
    plan = surgery.plan(run, recipe, allow_globals=[YOLO])
    assert plan.promise is not None and "lr" in plan.promise.not_known
    surgery.apply(run, plan)
    assert left(root / "results.csv") == [
        1,
        2,
    ]  # it counts epochs from 1, and the checkpoints from 0
    assert left(root / "cut-0001" / "results.csv") == [3, 4, 5]
    assert Run.open(root).latest() == 1 and not (root / "weights" / "epoch3.pt").exists()
    last = loaded(root / "weights" / "last.pt")
    assert last["epoch"] == 1 and last["updates"] == UPDATES
    assert [group["betas"] for group in last["optimizer"]["param_groups"]] == [(0.9, 0.9)]
    for state in last["optimizer"]["state"].values():
        assert state["step"] == 0 and not state["exp_avg"].any()
        assert state["exp_avg"].dtype == torch.float16
    take_back(root, before)


def test_an_epoch_that_is_left_in_last_alone_is_called_so(tmp_path: Path) -> None:
    """Without save_period that is each but the best one; the run's own name is no epoch's."""
    run = Run.open(ultralytics(tmp_path / "train"))
    assert run.entries(4) == [] and run.step("last.pt") == 4
    assert run.step(str(run.root / "weights" / "last.pt")) == 4
    assert (run.step("best.pt"), run.step("epoch3.pt")) == (1, 3)
    with pytest.raises(UsageError, match=r"its name \(epoch3\.pt\), or latest"):
        run.step("train")


def test_a_fork_is_told_where_it_saves(tmp_path: Path) -> None:
    """By train_args in the file, which are those of the first run."""
    done = fork(
        Run.open(ultralytics(tmp_path / "train")), 1, tmp_path / "branch", from_data({}), "copy"
    )
    assert "give it save_dir=DIR of the fork" in done.warnings[0]


def test_its_rate_is_that_of_the_first_start(tmp_path: Path) -> None:
    run = Run.open(ultralytics(tmp_path / "train"))
    with pytest.raises(SurgeryError, match="does not decide lr") as refused:
        surgery.plan(run, from_data({"set": {"lr": 1e-4}}), allow_globals=[YOLO])
    assert "train anew from the weights" in refused.value.next[0]
    assert "lr0=0.0001" in refused.value.next[0]


def test_the_summary_of_timm_is_cut_with_its_epochs(tmp_path: Path) -> None:
    root = timm(tmp_path / "train")
    before = snapshot(root)
    plan = operate(root, {"rollback": {"to": 1}})
    assert left(root / "summary.csv") == [0, 1]
    assert left(root / "cut-0001" / "summary.csv") == [2, 3]
    again = surgery.plan(Run.open(root), from_data({"rollback": {"to": 1}}))
    assert again.empty and not [each for each in (*plan.warnings, *again.warnings) if "csv" in each]
    done = fork(
        Run.open(root), 1, tmp_path / "branch", from_data({"logs": {"of": str(root)}}), "copy"
    )
    assert left(tmp_path / "branch" / "summary.csv") == [0, 1], done.warnings
    take_back(root, before)
