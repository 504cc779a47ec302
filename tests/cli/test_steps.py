"""A step is meant by its number, by the name of its folder, or by `latest`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptsurgeon.run.run import Run
from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.support.tiny_run import make_run


@pytest.mark.parametrize("name", ["4", "global_step4", "global_step4/", "{run}/global_step4"])
def test_a_rollback_goes_to_the_step_that_is_named(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root = trained()
    monkeypatch.chdir(root)
    for words in (["--to", name.format(run=root)], [name.format(run=root)]):
        told = surgeon("rollback", *words, "--dry-run")
        assert told.stdout.startswith("run   rollback 8 → 4\n"), told.stderr


def test_the_latest_step_is_named_wherever_a_step_is_taken(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    assert surgeon("rollback", "--to", "latest", "-C", root).stdout.startswith("nothing to do")
    assert surgeon("show", "latest", "-C", root).stdout.startswith("run   step 8\n")
    assert surgeon("verify", "global_step6", "-C", root).stdout.startswith("sound: step 6:")
    fork = surgeon("fork", tmp_path / "b", "--step", "global_step4", "-n", "-C", root)
    assert ": step 4," in fork.stdout
    export = surgeon("export", "latest", "-o", tmp_path / "w", "-n", "-C", root)
    assert export.stdout.startswith("would write")
    cut = surgeon("truncate-tb-events", "--after", "global_step4", "-n", "-C", root)
    assert cut.stdout.startswith("run   cut events after 4\n")
    repaired = surgeon("repair-latest", "--to", "global_step6", "-n", "-C", root)
    assert repaired.stdout.startswith("run   repair latest → 6\n")
    for command in ("compact", "shrink"):
        assert surgeon(command, "latest", "-n", "-C", root).exit_code == 0


@pytest.mark.parametrize("name", ["soon", "global_step5", "1.5", "../other/global_step4"])
def test_what_names_no_step_is_told_what_does(
    surgeon: Surgeon, trained: Trained, name: str
) -> None:
    root = trained()
    shutil.copytree(root / "global_step4", root.parent / "other" / "global_step4")
    told = surgeon("rollback", "--to", name, "-C", root)
    assert told.exit_code == 2
    assert f"{name!r} is not a step of {root}" in told.stderr
    assert "its number, its name (global_step8), or latest" in told.stderr
    assert f"next: ckptsurgeon -C {root} status" in told.stderr


def test_other_trainers_name_their_folders_otherwise(tmp_path: Path) -> None:
    assert Run.open(make_run(tmp_path)).step("checkpoint-4") == 4
