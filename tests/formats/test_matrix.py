"""docs/formats.md says what `plan` answers, and what it says yes to is done and undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.edits import Plan
from tests.formats.matrix import DOCUMENT, FORMATS, OPERATIONS, make, measured, outcome, table
from tests.formats.matrix import written as with_table
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]


def test_the_table_is_what_plan_answers(tmp_path: Path) -> None:
    """`python -m tests.formats.matrix` writes it anew."""
    outcomes = measured(tmp_path)
    assert all(outcomes[name].keys() == OPERATIONS.keys() for name in FORMATS)
    text = DOCUMENT.read_text("utf-8")
    assert text == with_table(text, table(outcomes))


@pytest.mark.parametrize("name", FORMATS)
def test_each_yes_is_done_verified_and_undone(tmp_path: Path, name: str) -> None:
    root = make(name, tmp_path / "run")
    before = snapshot(root)
    done = 0
    for operation in OPERATIONS:
        found = outcome(root, operation)
        if not isinstance(found, Plan) or found.empty:
            continue
        surgery.apply(Run.open(root), found)
        assert look.verify(Run.open(root), level=4).findings == (), operation
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
        assert snapshot(root) == before, operation
        done += 1
    assert done >= 7
