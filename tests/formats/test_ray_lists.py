"""Runs of Ray Train: folders named by their dates, and the list by which a start resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, plan_undo, report, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.described.draft import draft
from ckptsurgeon.formats.described.ray_list import NAME
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.style import Style
from ckptsurgeon.surgery.fork import fork
from tests.support.described_runs import stepped_cosine
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate

STEPS = (2, 4, 6, 8)
INSIDE = ("state.pt", "checkpoint/optimizer.pt", "checkpoint.ckpt")
"""A loop of one's own; as of its callbacks for the Trainer of transformers, and for Lightning."""


def folder(step: int) -> str:
    """The seconds begin again at the third."""
    return f"checkpoint_2026-11-30_15-2{step // 6}-{40 - 7 * (step // 6)}.{900000 - 7 * step:06}"


def result(step: int) -> dict[str, Any]:
    score = float("nan") if step == 4 else 1 / step
    metrics = {"loss": score, "text": "ß"}
    return {"version": 0, "checkpoint_dir_name": folder(step), "metrics": metrics}


def run(root: Path, order: tuple[int, ...] = STEPS, inside: str = INSIDE[0]) -> Path:
    """A run whose list has the steps in this order, as it is that of their scores."""
    make(root, order, inside)
    describe(root)
    return root


def describe(root: Path) -> None:
    """By the page that is drafted."""
    page = root.parent / f"{root.name}.yaml"
    page.write_text(report.draft_page(draft(root)))
    (root / "ckptsurgeon.yaml").write_text(f"format: {page}\n")


def make(root: Path, order: tuple[int, ...] = STEPS, inside: str = INSIDE[0]) -> None:
    for step in STEPS:
        adam, schedule = stepped_cosine(torch.nn.Linear(4, 2), step)
        tree = {"opt": adam.state_dict(), "sched": schedule.state_dict(), "global_step": step}
        file = root / folder(step) / inside
        file.parent.mkdir(parents=True)
        torch.save(tree if file.parent.name == folder(step) else tree["opt"], file)
        if file.parent.name != folder(step):
            torch.save(schedule.state_dict(), file.with_name("scheduler.pt"))
            state = {"global_step": step, "log_history": [{"step": step - 1}], "max_steps": 9}
            file.with_name("trainer_state.json").write_text(json.dumps(state))
    held = {
        "ray_version": "2.60.0",
        "checkpoint_results": [result(step) for step in order],
        "checkpoint_report_indices": [STEPS.index(step) for step in order],
        "latest_checkpoint_result": result(STEPS[-1]),
        "pending_training_results": [result(8), result(2)],
        "pending_validation_specs": [True, False],
        "current_report_index": len(STEPS),
        "validated_checkpoint_dir_names": [folder(6), folder(4)],
    }
    text = json.dumps(held, separators=(",", ":"), ensure_ascii=False)
    (root / NAME).write_text(text)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    to=st.sampled_from(STEPS[:-1]),
    order=st.permutations(STEPS).map(tuple),
    inside=st.sampled_from(INSIDE),
)
def test_a_rollback_leads_the_list_to_the_step(
    tmp_path: Path, to: int, order: tuple[int, ...], inside: str
) -> None:
    """A start ends where the list names a folder that is not there, or has no latest in it."""
    root = run(tmp_path / f"run{len(list(tmp_path.iterdir()))}", order, inside)
    opened = Run.open(root)
    assert opened.steps() == [*STEPS] and opened.latest() == STEPS[-1]
    before = snapshot(root)
    made = plan(opened, from_data({"rollback": {"to": to}, "set": {"beta2": 0.9}}))
    assert "characters" in report.plan(made, "ray", Style(100))
    surgery.apply(opened, made)
    held = json.loads((root / NAME).read_text())
    left = [step for step in order if step <= to]
    named = [each["checkpoint_dir_name"] for each in held["checkpoint_results"]]
    assert named == [folder(step) for step in left]
    assert all((root / name / inside).is_file() for name in named)
    assert sorted(path.name for path in root.glob("checkpoint_2*")) == sorted(named)
    assert held["checkpoint_report_indices"] == [STEPS.index(step) for step in left]
    assert held["latest_checkpoint_result"]["checkpoint_dir_name"] == folder(to)
    assert len(held["pending_training_results"]) == len(held["pending_validation_specs"]) == 1
    assert held["pending_validation_specs"] == [False]
    validated = [folder(step) for step in (6, 4) if step <= to]
    assert held["validated_checkpoint_dir_names"] == validated
    assert Run.open(root).latest() == to
    surgery.apply(Run.open(root), plan_undo(Run.open(root)))
    assert snapshot(root) == before


def test_a_fork_has_a_list_of_its_one_step(tmp_path: Path) -> None:
    root = run(tmp_path / "run")
    fork(Run.open(root), 4, tmp_path / "fork", from_data({}), "copy")
    held = json.loads((tmp_path / "fork" / NAME).read_text())
    assert [each["checkpoint_dir_name"] for each in held["checkpoint_results"]] == [folder(4)]
    assert held["latest_checkpoint_result"]["checkpoint_dir_name"] == folder(4)


def test_the_run_may_be_the_folder_above(tmp_path: Path) -> None:
    """As `storage_path`, where the folder of the list has the name of the run."""
    make(tmp_path / "storage" / "exp")
    describe(tmp_path / "storage")
    before = snapshot(tmp_path)
    operate(tmp_path / "storage", {"rollback": {"to": 6}})
    held = json.loads((tmp_path / "storage" / "exp" / NAME).read_text())
    assert held["latest_checkpoint_result"]["checkpoint_dir_name"] == folder(6)
    assert len(held["checkpoint_results"]) == 3
    surgery.apply(Run.open(tmp_path / "storage"), plan_undo(Run.open(tmp_path / "storage")))
    assert snapshot(tmp_path) == before


def test_a_list_with_a_folder_that_is_gone_is_not_ready(tmp_path: Path) -> None:
    """As after the undo of a rollback where Ray removed an older one since (`num_to_keep`)."""
    root = run(tmp_path / "run")
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"rollback": {"to": 6}})))
    shutil.rmtree(root / folder(2))
    surgery.apply(Run.open(root), plan_undo(Run.open(root)))
    with pytest.raises(SurgeryError, match=NAME) as refused:
        Run.open(root).latest()
    assert "repair-latest" in str(refused.value.next[0])
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"repair_latest": {}})))
    assert Run.open(root).latest() == 8
    held = json.loads((root / NAME).read_text())
    assert [each["metrics"]["loss"] for each in held["checkpoint_results"]][1:] == [1 / 6, 1 / 8]


def test_a_step_that_the_list_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    """A start would not find it, whatever the folder is called."""
    root = run(tmp_path / "run", (2, 6, 8))
    before = snapshot(root)
    with pytest.raises(SurgeryError, match=f"does not know {folder(4)}"):
        plan(Run.open(root), from_data({"rollback": {"to": 4}}))
    assert snapshot(root) == before


def test_what_is_edited_is_what_the_list_names_and_not_the_highest_step(tmp_path: Path) -> None:
    root = run(tmp_path / "run")
    held = json.loads((root / NAME).read_text())
    (root / NAME).write_text(json.dumps({**held, "latest_checkpoint_result": result(6)}))
    assert Run.open(root).latest() == 6
