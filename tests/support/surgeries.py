"""One surgery through the public API, and what must hold around it whatever the format."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon import Plan, Run, look, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import Snapshot, snapshot


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


def take_back(root: Path, before: Snapshot) -> None:
    """Undo the last surgery: the run is byte for byte what it was."""
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before


WANTED = {"lr": 5e-4, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.3}
