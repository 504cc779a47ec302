"""One surgery through the public API, and what must hold around it whatever the format."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon import look, surgery
from ckptsurgeon.edits import Plan
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.home import HOME


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file of the run but the surgeon's own."""
    files = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    inside = ((path.relative_to(root), path) for path in files)
    return {name.as_posix(): path.read_bytes() for name, path in inside if name.parts[0] != HOME}


def operate(root: Path, recipe: dict) -> Plan:  # type: ignore[type-arg]
    """Plan and apply; the promise holds, applying again is nothing to do, and verify is content."""
    wanted = from_data(recipe)
    plan = surgery.plan(Run.open(root), wanted)
    assert not plan.empty
    surgery.apply(Run.open(root), plan)
    assert surgery.plan(Run.open(root), wanted).empty
    found = look.verify(Run.open(root), level=4)
    assert found.findings == ()
    assert found.promise == plan.promise
    return plan


def take_back(root: Path, before: dict[str, bytes]) -> None:
    """Undo the last surgery: the run is byte for byte what it was."""
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before
