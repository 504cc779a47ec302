"""Receipts are read once, however many a run has; an id is used once, whatever becomes of them."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Hyperparameters, Recipe, Rollback, Run, apply, plan
from ckptsurgeon.surgery import plan_undo
from ckptsurgeon.transaction import receipts
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run


def test_a_plan_reads_each_receipt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.open(make_run(tmp_path / "run", steps=(4,)))
    apply(run, plan(run, Recipe(Hyperparameters(beta1=0.8))))
    first = (run.root / receipts.receipt_file("0001")).read_text()
    for number in range(2, 151):
        path = run.root / receipts.receipt_file(f"{number:04d}")
        path.parent.mkdir()
        path.write_text(first.replace('"0001"', f'"{number:04d}"'))
    read: Counter[str] = Counter()

    def counted(data: bytes) -> Any:
        receipt = parsed(data)
        read[receipt.id] += 1
        return receipt

    parsed = receipts.parsed
    monkeypatch.setattr(receipts, "parsed", counted)
    assert plan(Run.open(run.root), Recipe(Hyperparameters(beta1=0.7))).id == "0151"
    assert len(read) == 150 and set(read.values()) == {1}


@pytest.mark.parametrize("lost", [["0001"], ["0002"], ["0001", "0002"], ["0001", "0002", "0003"]])
def test_no_id_is_used_twice_though_receipts_are_lost(tmp_path: Path, lost: list[str]) -> None:
    """What an attic keeps is not mixed with what the next surgery moves there."""
    root = make_run(tmp_path / "run", steps=(4, 8, 12))
    for step in (8, 4):
        apply(Run.open(root), plan(Run.open(root), Recipe(Rollback(step))))
    apply(Run.open(root), plan_undo(Run.open(root)))
    for id in lost:
        shutil.rmtree(root / f".ckptsurgeon/receipts/{id}")
    kept = snapshot(root / ".ckptsurgeon/attic")
    before = snapshot(root)
    made = plan(Run.open(root), Recipe(Rollback(4)))
    assert made.id not in {name.partition("/")[0] for name in kept}
    apply(Run.open(root), made)
    now = snapshot(root / ".ckptsurgeon/attic")
    assert {name: item for name, item in now.items() if not name.startswith(made.id)} == kept
    apply(Run.open(root), plan_undo(Run.open(root)))
    assert snapshot(root) == before
