"""Receipts are read once, however many a run has."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Hyperparameters, Recipe, Run, apply, plan
from ckptsurgeon.transaction import receipts
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
