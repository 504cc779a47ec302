"""A step's folder stands for its run, also where a surgery has just moved it away."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import UsageError
from ckptsurgeon.recipe.file import from_data
from tests.cli.conftest import Surgeon, hints
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run


def folders(root: Path) -> list[Path]:
    return [Path(here) for here, _, _ in os.walk(root)]


def test_nothing_in_an_attic_is_a_run(tmp_path: Path) -> None:
    """From every folder of a run, before and after its surgeries: the run, or where that is."""
    root = make_run(tmp_path / "a run", (4, 8, 12))
    for step in (8, 4):
        surgery.apply(Run.open(root), plan(Run.open(root), from_data({"rollback": {"to": step}})))
    refused = 0
    for folder in folders(root):
        if "attic" not in folder.parts:
            assert Run.open(folder).root == root
        elif len(folder.relative_to(root).parts) > 2:  # from attic/<id> on
            with pytest.raises(UsageError) as told:
                Run.open(folder)
            assert any(str(root) in hint for hint in told.value.next)
            refused += 1
    assert refused == 4
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert all(Run.open(folder).root == root for folder in folders(root))


def test_who_stands_in_a_step_that_left_is_led_to_its_run(
    surgeon: Surgeon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run(tmp_path / "a run", (4, 8))
    before = snapshot(root)
    monkeypatch.chdir(root / "checkpoint-8")
    done = surgeon("rollback", "--to", "../checkpoint-4/", "-y")
    assert hints(done.stdout)[0] == ["-C", str(root), "undo", "0001"]
    rolled_back = snapshot(root)
    refused = surgeon("set", "beta2=0.9", "-y")
    assert (refused.exit_code, snapshot(root)) == (2, rolled_back)
    assert "checkpoint-8 is no longer in the run: surgery 0001 (rollback 8 → 4)" in refused.stderr
    here, back = hints(refused.stderr)
    assert here == ["set", "beta2=0.9", "-y", "-C", str(root)]
    assert surgeon(*here, "-n").exit_code == 0
    assert surgeon(*back, "-y").exit_code == 0
    assert snapshot(root) == before
    assert surgeon("status").exit_code == 0  # the folder under one's feet is the step again


def test_a_step_named_with_C_stands_for_its_run(
    surgeon: Surgeon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run(tmp_path / "acc", (4, 8))
    before = snapshot(root)
    monkeypatch.chdir(tmp_path)
    done = surgeon("-C", "acc/checkpoint-8", "rollback", "--to", "4", "-y")
    undo = hints(done.stdout)[0]
    assert undo == ["-C", "acc", "undo", "0001"]
    for gone in ("acc/checkpoint-8", "acc/checkpoint-8/"):
        refused = surgeon("show", "latest", "-C", gone)
        assert refused.exit_code == 2 and "surgery 0001 (rollback 8 → 4) moved" in refused.stderr
        assert surgeon(*hints(refused.stderr)[0]).exit_code == 0
    assert surgeon(*undo, "-y").exit_code == 0
    assert snapshot(root) == before
    kept = surgeon("-C", "acc/checkpoint-8", "set", "beta2=0.9", "-y")
    assert hints(kept.stdout)[0] == ["-C", "acc/checkpoint-8", "undo", "0003"]
    monkeypatch.chdir(root / "checkpoint-8")
    assert surgeon("show", ".").stdout == surgeon("show", "8").stdout


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "place", ["", "checkpoint-8", "checkpoint-8/inner", ".ckptsurgeon", "not/there", "8/not/there"]
)
@pytest.mark.parametrize("words", [["export", "8", "-o"], ["fork", "--copy"]])
@pytest.mark.parametrize("whose", ["own", "other"])
def test_nothing_is_written_into_a_run(
    surgeon: Surgeon, tmp_path: Path, place: str, words: list[str], whose: str
) -> None:
    root = make_run(tmp_path / "run", (4, 8))
    target = make_run(tmp_path / "other", (4, 8)) if whose == "other" else root
    surgeon("set", "beta2=0.9", "-y", "-C", target)
    (target / "checkpoint-8/inner").mkdir()
    before = snapshot(tmp_path)
    for dry in ([], ["-n"]):
        told = surgeon(*words, target / place / "new", *dry, "-C", root)
        assert told.exit_code == 2 and re.search("lies inside", told.stderr)
        assert snapshot(tmp_path) == before
