"""The first example: open a run, plan a new rate, apply it, take it back."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run


def test_set_the_rate_and_take_it_back(tmp_path: Path) -> None:
    run = Run.open(make_run(tmp_path / "run"))
    before = snapshot(run.root)

    planned = plan(run, from_data({"set": {"lr": 5e-4}}))  # reads, and writes nothing
    assert snapshot(run.root) == before
    assert planned.promise is not None and planned.promise.lr == 5e-4

    receipt = surgery.apply(run, planned)
    assert run.checkpoint(4).state().promise == planned.promise

    surgery.apply(run, surgery.plan_undo(run, receipt.id))
    assert snapshot(run.root) == before
