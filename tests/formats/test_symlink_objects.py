"""What Composer has in a bucket for its link, in a run that came from there to a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsurgeon import surgery
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.fork import fork
from tests.support.described_runs import composer
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate


@pytest.mark.parametrize("key", ["lab/run/", ""])
def test_what_a_bucket_has_for_a_link_names_the_step_below_the_same_key(
    key: str, tmp_path: Path
) -> None:
    root = composer(tmp_path / "run")
    (root / "latest-rank0.pt").unlink()
    link = root / "latest-rank0.pt.symlink"
    link.write_text(f"{key}ep0-ba6-rank0.pt")
    before = snapshot(root)
    assert Run.open(root).latest() == 6
    operate(root, {"rollback": {"to": 4}})
    assert link.read_text() == f"{key}ep0-ba4-rank0.pt" and Run.open(root).latest() == 4
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("key", "of_fork"), [("lab/run/", "lab/branch/"), ("run/", "branch/"), ("", "")]
)
def test_a_fork_names_its_own_step(key: str, of_fork: str, tmp_path: Path) -> None:
    """Where it is put beside the run; not the step of the run, which is there, and not edited."""
    root = composer(tmp_path / "run")
    (root / "latest-rank0.pt").unlink()
    (root / "latest-rank0.pt.symlink").write_text(f"{key}ep0-ba6-rank0.pt")
    before = snapshot(root)
    recipe = from_data({"set": {"lr": 3e-4}})
    fork(Run.open(root), 4, tmp_path / "branch", recipe, "copy")
    link = tmp_path / "branch/latest-rank0.pt.symlink"
    assert link.read_text() == f"{of_fork}ep0-ba4-rank0.pt"
    assert Run.open(tmp_path / "branch").latest() == 4 and snapshot(root) == before
