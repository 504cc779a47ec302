"""Retention removes old checkpoints of the branch in use, whole or not at all, and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.snapshot import snapshot
from train.retention import remove_old


def save(root: Path, *steps: int, shards: int = 2) -> Path:
    """Checkpoints in the order in which they were saved, a second apart."""
    clock = 1_700_000_000 + 10 * len(list(root.rglob("*.pt")))
    for when, step in enumerate(steps):
        folder = root / f"global_step{step}"
        folder.mkdir(parents=True, exist_ok=True)
        for shard in range(shards):
            file = folder / f"shard{shard}.pt"
            file.write_bytes(b"x" * 8)
            os.utime(file, (clock + when, clock + when))
        (root / "latest").write_text(f"global_step{step}")
    return root


def steps(root: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("global_step")) for p in root.glob("global_step*"))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 6, 8, 10)
    assert remove_old(tmp_path, 10, keep_last=3) == [2, 4]
    assert steps(tmp_path) == [6, 8, 10]
    assert remove_old(tmp_path, 10, keep_last=3) == []


def test_steps_above_are_another_branch_and_are_not_counted(tmp_path: Path) -> None:
    """After a rollback by hand 300 and 400 still lie there: keep-last-2 must not keep them and
    remove what has just been saved."""
    save(tmp_path, 100, 200, 300, 400)
    save(tmp_path, 110, 120)
    assert remove_old(tmp_path, 120, keep_last=2) == [100]
    assert steps(tmp_path) == [110, 120, 200, 300, 400]


def test_a_step_in_between_that_a_rollback_left_is_another_branch_too(tmp_path: Path) -> None:
    save(tmp_path, 100, 200, 250)  # back to 100, by hand
    save(tmp_path, 180, 260, 340)
    assert remove_old(tmp_path, 340, keep_last=2) == [100, 180]
    assert steps(tmp_path) == [200, 250, 260, 340]


def test_what_a_pointer_names_and_what_is_spared_stay(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 6, 8)
    (tmp_path / "latest").write_text("global_step2\n")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    assert remove_old(tmp_path, 8, keep_last=1, spare=(4,)) == [6]
    assert steps(tmp_path) == [2, 4, 8]


def test_an_incomplete_one_is_not_counted(tmp_path: Path) -> None:
    save(tmp_path, 2, 4)
    save(tmp_path, 6, shards=1)
    save(tmp_path, 8)
    assert remove_old(tmp_path, 8, keep_last=2) == [2]
    assert steps(tmp_path) == [4, 6, 8]


def test_nothing_but_its_own_folders_is_touched(tmp_path: Path) -> None:
    root = save(tmp_path / "run", 2, 4, 6)
    precious = save(tmp_path / "elsewhere", 1) / "global_step1"
    (root / "global_step1").symlink_to(precious)
    (root / ".global_step3.removed").symlink_to(precious)
    for name in ("global_step2_universal", "global_step", "attic/global_step2", "notes"):
        (root / name).mkdir(parents=True)
        (root / name / "shard0.pt").write_bytes(b"mine")
    outside = {
        name: entry
        for name, entry in snapshot(root).items()
        if Path(name).parts[0] != "global_step2"
    }
    assert remove_old(root, 6, keep_last=2) == [2]
    kept = snapshot(root)
    assert {name: kept[name] for name in outside} == outside
    assert not (root / "global_step2").exists()
    assert (precious / "shard1.pt").exists()


def test_a_removal_that_is_cut_off_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2, 4)

    class Killed(Exception):
        pass

    def half(folder: Path) -> None:
        next(iter(Path(folder).iterdir())).unlink()
        raise Killed

    with monkeypatch.context() as cut, pytest.raises(Killed):
        cut.setattr(shutil, "rmtree", half)
        remove_old(tmp_path, 4, keep_last=1)
    assert steps(tmp_path) == [4]
    assert (tmp_path / ".global_step2.removed").is_dir()
    remove_old(tmp_path, 4, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step4", "latest"]
