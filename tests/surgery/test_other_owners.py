"""Runs of another user, and runs on a mount that nobody may write to."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run import attic
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

OWNER, GROUP = 65534, 65533
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root works in the runs of other users")
RECIPES: dict[str, dict[str, Any]] = {
    "an edit": {"set": {"lr": 5e-4}},
    "a rollback": {"rollback": {"to": 4}},
}


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_owner(act: Callable[[], object]) -> None:
    """Done in a child that is nobody but the owner of the run."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(GROUP)
            os.setuid(OWNER)
            act()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def undo(root: Path) -> None:
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))


@ROOT
@pytest.mark.parametrize("kind", RECIPES)
def test_what_root_makes_belongs_to_the_owner_who_can_undo_it(home: Path, kind: str) -> None:
    root = make_run(home / "run", steps=(4, 8))
    for path in (root, *root.rglob("*")):
        os.chown(path, OWNER, GROUP)
    before = snapshot(root)
    surgery.apply(Run.open(root), plan(Run.open(root), from_data(RECIPES[kind])))
    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in root.rglob("*")}
    assert owners == {(OWNER, GROUP)}
    undo(root)
    surgery.apply(Run.open(root), plan(Run.open(root), from_data(RECIPES[kind])))
    as_owner(lambda: undo(root))
    assert snapshot(root) == before
    as_owner(lambda: attic.prune(Run.open(root), attic.attics(Run.open(root))))


@ROOT
@pytest.mark.parametrize("kind", RECIPES)
def test_a_mount_that_is_read_only_is_called_so(home: Path, kind: str) -> None:
    """Root owns the run and may do all: nobody's rights are at fault."""
    root = make_run(home / "run", steps=(4, 8))
    wanted = plan(Run.open(root), from_data(RECIPES[kind]))
    mounts = [["mount", "--bind", root, root], ["mount", "-o", "remount,bind,ro", root]]
    for command in mounts:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and command is mounts[0]:
            pytest.skip(f"no mount may be made here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
    try:
        with pytest.raises(SurgeryError, match="is mounted read-only") as refused:
            surgery.apply(Run.open(root), wanted)
        assert refused.value.next[0].startswith("findmnt --target ")
        assert "user" not in refused.value.what
    finally:
        subprocess.run(["umount", root], check=True)
    surgery.apply(Run.open(root), wanted)
