"""Somebody swaps a folder of the run for a link during a surgery: no byte goes elsewhere."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, disk, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.faults import toy
from tests.support.snapshot import exact_snapshot

RECIPE = from_data({"rollback": {"to": 6}, "set": {"lr": 1e-4}, "reset": ["moments"]})
FOLDERS = ("global_step6", "tensorboard", ".ckptsurgeon/staging", ".ckptsurgeon/attic")


def calls_of(root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    calls: list[str] = []
    monkeypatch.setattr(
        disk.calls, "hook", lambda operation, path, details: calls.append(operation)
    )
    run = Run.open(root)
    surgery.apply(run, plan(run, RECIPE), jobs=1)
    monkeypatch.setattr(disk.calls, "hook", None)
    return len(calls)


def applied_with_a_swap(
    root: Path, folder: str, elsewhere: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str] | None:
    """What was in the folder when, at call `at`, a link to a copy of it took its place."""
    count = 0
    found: dict[str, str] | None = None

    def swap(operation: str, path: str, details: Any) -> None:
        nonlocal count, found
        count += 1
        if count == at and (root / folder).is_dir():
            shutil.copytree(root / folder, elsewhere, symlinks=True)
            (root / folder).rename(root / "swapped-away")
            (root / folder).symlink_to(elsewhere)
            found = exact_snapshot(elsewhere)

    run = Run.open(root)
    wanted = plan(run, RECIPE)
    monkeypatch.setattr(disk.calls, "hook", swap)
    with contextlib.suppress(SurgeryError, OSError):
        surgery.apply(run, wanted, jobs=1)
    monkeypatch.setattr(disk.calls, "hook", None)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.long
def test_no_call_of_a_surgery_goes_through_a_swapped_folder(
    trained: Trained, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template"
    original = trained()
    shutil.copytree(original, template)
    total = calls_of(original, monkeypatch)
    assert total > 60
    swaps = 0
    for at in range(1, total + 1, 7):
        root, elsewhere = tmp_path / f"run{at}", tmp_path / f"elsewhere{at}"
        shutil.copytree(template, root)
        before = applied_with_a_swap(root, folder, elsewhere, at, monkeypatch)
        if before is not None:
            swaps += 1
            assert exact_snapshot(elsewhere) == before, f"call {at} went through the link"
    assert swaps > 3


def rolled_back_with_a_swap(world: Path, name: str, at: int, patch: pytest.MonkeyPatch) -> int:
    """The toy's rollback, which sets a link. At call `at` the folder `name`, or the folder that the
    link `name` leads to, becomes a link to a copy beside the run, which no call may change. Returns
    the number of calls, 0 if there was nothing to swap."""
    toy.build(world)
    path, elsewhere = world / "run" / name, world.with_name(f"{world.name}-elsewhere")
    calls = 0
    found: dict[str, Any] = {}

    def swap(operation: str, called: str, details: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at and path.is_dir():
            shutil.copytree(path, elsewhere, symlinks=True)
            path.rename(world / "swapped-away")
            path.symlink_to(elsewhere)
            found.update(exact_snapshot(elsewhere))

    patch.setattr(disk.calls, "hook", swap)
    with contextlib.suppress(SurgeryError, OSError):
        toy.act_rollback(world)
    patch.setattr(disk.calls, "hook", None)
    if found:
        assert exact_snapshot(elsewhere) == found, f"call {at} went through the link"
    return calls if found else 0


@pytest.mark.parametrize("name", ["last", ".ckptsurgeon/staging/0001", ".ckptsurgeon/attic/0001"])
@pytest.mark.long
def test_no_link_is_set_through_a_swapped_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swaps = 0
    for at in range(1, 130, 5):
        world = tmp_path / f"world{at}"
        world.mkdir()
        swaps += rolled_back_with_a_swap(world, name, at, monkeypatch) > 0
    assert swaps > 3
