"""What was done can be undone, redone and undone again, on any page, whatever was trained since."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.plans.edits import Truncate
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.recipe.file import from_data
from tests.support.own_pages import PAGES, Trainer
from tests.support.snapshot import differs, snapshot

MEMORY = Path("/dev/shm")
"""Where there is one, a file system on which fsync costs nothing."""
edits = st.sampled_from(
    [
        {"set": {"iteration": 4}},
        {"set": {"iteration": 40}},
        {"set": {"consumed_samples": 3}},
        {"set": {"iteration": 6, "consumed_samples": 6}},
        {"set": {"iteration": 6, "consumed_samples": 7}},
        {"set": {"beta2": 0.9}},
        {"set": {"lr": 3e-4}},
        {"reset": ["moments"]},
        {"rollback": {"to": 4}},
        {"rollback": {"to": 4}, "set": {"beta2": 0.9}},
        {"rollback": {"to": 8}, "set": {"iteration": 3}},
        {"repair_latest": {}},
    ]
)
histories = st.lists(edits, min_size=1, max_size=3)


def contents(root: Path) -> dict[str, tuple[str, str]]:
    """All but times: what a trainer or an undo writes anew has its own."""
    return {name: item[:2] for name, item in snapshot(root).items()}


def done(trainer: Trainer, data: Mapping[str, Any]) -> Receipt | None:
    """The surgery, if it can be done here and does something."""
    run = trainer.run()
    before = snapshot(run.root)
    try:
        made = plan(run, from_data(data))
    except (SurgeryError, UsageError):
        assert snapshot(run.root) == before
        return None
    return None if made.empty else surgery.apply(run, made)


def back_and_forth(
    page: str, zipped: bool, twice: bool, history: list[dict[str, Any]], trained: int
) -> None:
    """With `twice` the page says of one key that it is two fields."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        trainer = Trainer(Path(folder) / "run", page, zipped=zipped, also=ALSO if twice else ())
        for step in (4, 8):
            trainer.save(step)
        start = snapshot(trainer.root)
        receipts = [item for data in history if (item := done(trainer, data)) is not None]
        if not receipts:
            return
        single = "ckpt.pt" in trainer.path
        in_place = {e.file for r in receipts for e in r.inverse if isinstance(e, Truncate)}
        if single or "last.pt" in in_place:
            trained = 0  # a save over what was edited in place: test_saved_again.py
        for step in range(trained):
            trainer.save(100 + step)
        after = snapshot(trainer.root)
        for _ in range(2):
            for _ in receipts:
                surgery.apply(trainer.run(), surgery.plan_undo(trainer.run()))
            times = not trained
            assert differs(snapshot(trainer.root), start, times=times) is None
            for receipt in receipts:
                surgery.apply(trainer.run(), surgery.plan_redo(trainer.run(), receipt.id))
            assert differs(snapshot(trainer.root), after, times=times) is None
        trainer.save(200)
        again = contents(trainer.root)
        try:
            surgery.apply(trainer.run(), surgery.plan_undo(trainer.run()))
            surgery.apply(trainer.run(), surgery.plan_redo(trainer.run()))
        except SurgeryError:
            assert single or "last:" in trainer.page  # what was appended to was saved anew
        assert contents(trainer.root) == again


ALSO = ("consumed_samples",)
ONE = "one file, its step inside"
INSIDE = "folders of any name, the step inside"
COPY = "files, a pointer and a copy"


LAW = given(
    st.sampled_from(list(PAGES)), st.booleans(), st.booleans(), histories, st.integers(0, 2)
)
UNHURRIED: dict[str, Any] = {
    "deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None,
}  # fmt: skip


@example(ONE, True, True, [{"set": {"iteration": 4}}], 0)
@example(COPY, True, False, [{"rollback": {"to": 4}}, {"set": {"iteration": 40}}], 1)
@example(INSIDE, True, True, [{"rollback": {"to": 8}, "set": {"iteration": 3}}], 1)
@LAW
@settings(max_examples=3, **UNHURRIED)
def test_what_was_done_is_undone_and_redone(
    page: str, zipped: bool, twice: bool, history: list[dict[str, Any]], trained: int
) -> None:
    back_and_forth(page, zipped, twice, history, trained)


@pytest.mark.parametrize("page", PAGES)
def test_one_number_is_not_two(page: str, tmp_path: Path) -> None:
    """By a page that says of one key that it is two fields."""
    trainer = Trainer(tmp_path / "run", page, zipped=True, also=ALSO)
    trainer.save(4)
    before = snapshot(trainer.root)
    for values in (
        {"iteration": 6, "consumed_samples": 7},
        {"consumed_samples": 7, "iteration": 6},
    ):
        with pytest.raises(UsageError, match="are one number in"):
            plan(trainer.run(), from_data({"set": values}))
    assert snapshot(trainer.root) == before
    made = plan(trainer.run(), from_data({"set": {"iteration": 6, "consumed_samples": 6}}))
    assert made.promise is not None
    assert made.promise.step == 7


@pytest.mark.slow
@LAW
@settings(max_examples=40, **UNHURRIED)
def test_what_was_done_is_undone_and_redone_at_length(
    page: str, zipped: bool, twice: bool, history: list[dict[str, Any]], trained: int
) -> None:
    back_and_forth(page, zipped, twice, history, trained)
