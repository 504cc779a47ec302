"""Folders that are open while many of their files are edited: how many, and one that moves away."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsurgeon import disk
from ckptsurgeon.disk.names import HELD


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_few_folders_are_held_and_the_others_are_walked_to(tmp_path: Path) -> None:
    """A universal copy has a folder for each parameter, and a process few descriptors."""
    paths = [tmp_path / f"{n}" / name for n in range(HELD + 20) for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"old")
    before = descriptors()
    with disk.Folders(paths) as folders:
        assert descriptors() == before + HELD
        for path in paths:
            with disk.opened(path, within=folders) as descriptor:
                disk.write_at(descriptor, path, 0, b"new")
        folders.refuse_moved()
    assert descriptors() == before
    assert {path.read_bytes() for path in paths} == {b"new"}


def test_a_folder_that_is_moved_away_is_refused_and_no_link_is_followed(tmp_path: Path) -> None:
    step, other = tmp_path / "step", tmp_path / "other"
    for folder in (step, other):
        folder.mkdir()
        (folder / "a").write_bytes(b"old")
        (folder / "b").write_bytes(b"old")
    paths = [step / "a", step / "b"]
    with disk.Folders(paths) as folders:
        step.rename(tmp_path / "away")
        step.symlink_to(other)
        with disk.opened(paths[0], within=folders) as descriptor:
            disk.write_at(descriptor, paths[0], 0, b"new")
        with pytest.raises(OSError, match="Not a directory"):
            folders.refuse_moved()
        step.unlink()
        other.rename(step)
        with pytest.raises(OSError, match="another folder took its place"):
            folders.refuse_moved()
    assert (tmp_path / "away/a").read_bytes() == b"new"
    assert (step / "a").read_bytes() == b"old"
    step.rename(other)
    step.symlink_to(other)
    with (  # a folder that can't be entered is not held: the file says so
        disk.Folders(paths) as folders,
        pytest.raises(OSError, match="Not a directory"),
        disk.opened(paths[0], within=folders),
    ):
        pass
