"""Steps that are symbolic links, as people leave them who move old checkpoints to another disk."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.fork import fork
from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.formats.matrix import hugging_face
from tests.support import nemo_files
from tests.support.snapshot import differs, exact_snapshot, snapshot

RESET = {"reset": ["moments"]}


@pytest.fixture
def moved(trained: Trained, tmp_path: Path) -> tuple[Path, Path]:
    """A run of steps 2 to 8, and the folder of another disk that its steps 6 and 8 lead to."""
    root, disk = trained(), tmp_path / "cheap disk"
    disk.mkdir()
    for name in ("global_step6", "global_step8"):
        away(root / name, disk)
    return root, disk


def away(step: Path, disk: Path) -> None:
    disk.mkdir(exist_ok=True)
    step.rename(disk / step.name)
    step.symlink_to(disk / step.name)


def test_a_rollback_past_a_linked_step_moves_the_link(moved: tuple[Path, Path]) -> None:
    root, disk = moved
    before, there = snapshot(root), exact_snapshot(disk)
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"rollback": {"to": 4}, **RESET})))
    assert Run.open(root).steps() == [2, 4] and look.verify(Run.open(root)).findings == ()
    kept = root / ".ckptsurgeon" / "attic" / "0001" / "global_step8"
    assert kept.is_symlink() and exact_snapshot(disk) == there
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before and exact_snapshot(disk) == there
    assert (root / "global_step8").is_symlink() and Run.open(root).latest() == 8


def test_a_linked_step_is_read_and_resumed(moved: tuple[Path, Path], surgeon: Surgeon) -> None:
    root, disk = moved
    before, there = snapshot(root), exact_snapshot(disk)
    told = surgeon("status", "-C", root).stdout
    assert "symlinked: 6 8\n" in told and "global_step8" not in told
    document = json.loads(surgeon("status", "--json", "-C", root).stdout)
    assert [item["complete"] for item in document["steps"]] == [True] * 4
    for words in (["show", 6], ["verify", 6, "--level", 4], ["doctor"]):
        assert surgeon(*words, "-C", root).exit_code == 0
    assert surgeon("rollback", "6", "--yes", "--no-tb-note", "-C", root).exit_code == 0
    assert Run.open(root).latest() == 6 and look.verify(Run.open(root), level=4).findings == ()
    assert exact_snapshot(disk) == there
    assert surgeon("undo", "--yes", "-C", root).exit_code == 0
    assert snapshot(root) == before


def test_an_average_reads_a_linked_step(trained: Trained, tmp_path: Path) -> None:
    root, disk = trained(), tmp_path / "disk"
    wanted = from_data({"average": {"steps": ["6", "8"]}})
    apart = shutil.copytree(root, tmp_path / "apart")
    surgery.apply(Run.open(apart), plan(Run.open(apart), wanted))
    away(root / "global_step6", disk)
    there = exact_snapshot(disk)
    surgery.apply(Run.open(root), plan(Run.open(root), wanted))
    average, same = snapshot(root / "global_step8"), snapshot(apart / "global_step8")
    assert differs(average, same, times=False) is None
    assert exact_snapshot(disk) == there


def test_an_edit_behind_a_link_is_refused_with_what_helps(moved: tuple[Path, Path]) -> None:
    root, disk = moved
    before, there = exact_snapshot(root), exact_snapshot(disk)
    wanted = from_data({"set": {"lr": 1e-4}, **RESET})
    with pytest.raises(SurgeryError, match="no edit goes through one") as refused:
        plan(Run.open(root), wanted)
    assert exact_snapshot(root) == before
    (hint,) = refused.value.next
    subprocess.run(hint.split("    ")[0], shell=True, check=True)
    assert not (root / "global_step8").is_symlink()
    surgery.apply(Run.open(root), plan(Run.open(root), wanted))
    assert exact_snapshot(disk) == there
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert exact_snapshot(root / "global_step8") != there  # its own folder, the same bytes
    assert snapshot(root / "global_step8") == snapshot(disk / "global_step8")


def test_a_step_that_was_moved_after_its_surgery_comes_back_for_the_undo(
    trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    before = snapshot(root)
    surgery.apply(Run.open(root), plan(Run.open(root), from_data(RESET)))
    away(root / "global_step8", tmp_path / "disk")
    for attempt in (lambda: surgery.plan_undo(Run.open(root)),
                    lambda: surgery.plan_compact(Run.open(root), 8)):  # fmt: skip
        with pytest.raises(SurgeryError, match="no edit goes through one") as refused:
            attempt()
    subprocess.run(refused.value.next[0].split("    ")[0], shell=True, check=True)
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before


@pytest.mark.parametrize("where", ["the folder", "the link"])
def test_a_link_that_leads_elsewhere_since_the_plan_is_refused(
    moved: tuple[Path, Path], tmp_path: Path, where: str
) -> None:
    """To a copy with the same bytes, too: what was read is not what is there."""
    root, disk = moved
    planned = plan(Run.open(root), from_data({"rollback": {"to": 6}}))
    copy = shutil.copytree(disk / "global_step6", tmp_path / "copy")
    if where == "the folder":
        shutil.rmtree(disk / "global_step6")
        (disk / "global_step6").symlink_to(copy)
    else:
        (root / "global_step6").unlink()
        (root / "global_step6").symlink_to(copy)
    before = snapshot(root)
    with pytest.raises(SurgeryError, match="replaced by another file since the plan"):
        surgery.apply(Run.open(root), planned)
    assert snapshot(root) == before


def test_a_fork_begins_with_the_files_behind_a_link(
    moved: tuple[Path, Path], tmp_path: Path
) -> None:
    root, disk = moved
    fork(Run.open(root), 6, tmp_path / "branch", from_data(RESET), "copy")
    branch = tmp_path / "branch" / "global_step6"
    assert branch.is_dir() and not branch.is_symlink()
    assert snapshot(root / "global_step6") == snapshot(disk / "global_step6")


def test_a_whole_run_through_a_link_is_edited_where_it_is(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    (tmp_path / "link").symlink_to(root)
    surgery.apply(Run.open(tmp_path / "link"), plan(Run.open(tmp_path / "link"), from_data(RESET)))
    assert (root / ".ckptsurgeon" / "receipts" / "0001").is_dir()


def test_linked_steps_of_other_trainers_are_theirs(tmp_path: Path) -> None:
    """One that names its steps in the folders, and one whose `-last` are copies of a step."""
    root = tmp_path / "hugging face"
    hugging_face(root)
    away(root / "checkpoint-2", tmp_path / "disk")
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"rollback": {"to": 2}})))
    assert Run.open(root).latest() == 2
    root = nemo_files.make(tmp_path / "nemo")
    (step,) = root.glob("*step=20*")
    away(step, tmp_path / "disk")
    assert Run.open(root).steps() == [20, 30]
    before, there = snapshot(root), exact_snapshot(tmp_path / "disk")
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"rollback": {"to": 20}})))
    (last,) = root.glob("*-last")
    copied = snapshot(tmp_path / "disk" / step.name / "weights")
    assert differs(snapshot(last / "weights"), copied, times=False) is None
    assert Run.open(root).latest() == 20 and exact_snapshot(tmp_path / "disk") == there
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before
    (root / "again").symlink_to(step.name)  # by another name in the run, so no step of its own
    assert Run.open(root).entries(20) == [step]


def test_a_link_to_the_last_step_leads_on_where_that_is_a_link(tmp_path: Path) -> None:
    """`save_last="link"`, and the steps moved to another disk: two links, one after the other."""
    root = nemo_files.make(tmp_path / "nemo")
    (last,) = root.glob("*-last")
    shutil.rmtree(last)
    last.symlink_to(last.name.removesuffix("-last"))
    for step in (20, 30):
        away(next(path for path in root.glob(f"*step={step}*") if path != last), tmp_path / "disk")
    before, there = snapshot(root), exact_snapshot(tmp_path / "disk")
    assert Run.open(root).latest() == 30
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"rollback": {"to": 20}})))
    assert Run.open(root).latest() == 20 and "step=20" in str(last.readlink())
    assert exact_snapshot(tmp_path / "disk") == there
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before
