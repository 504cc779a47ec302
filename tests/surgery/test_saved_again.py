"""A trainer may save any step again after a surgery. What it wrote is never lost nor mixed: an undo
moves it to the attic, or names the file and the command that helps."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.hints import Command
from ckptsurgeon.look.diff.surgery import of_receipt
from ckptsurgeon.plans.edits import Change, Truncate
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.recipe.file import from_data
from tests.support.own_pages import PAGES, Trainer
from tests.support.snapshot import snapshot

MEMORY = Path("/dev/shm")
ONE, TWO = "one file, its step inside", "folders of two files"
COPY = "files, a pointer and a copy"
OVER = {"ckpt.pt", "last.pt"}
"""What each save writes over, of all that a page here describes."""
EDITS: tuple[dict[str, Any], ...] = (
    {"set": {"beta2": 0.9}},
    {"set": {"lr": 3e-4}},
    {"set": {"beta1": 0.8, "weight_decay": 0.2}},
    {"set": {"iteration": 5}},
    {"reset": ["moments"]},
    {"rollback": {"to": 4}},
    {"rollback": {"to": 4}, "set": {"beta2": 0.9}},
    {"rollback": {"to": 4}, "reset": ["moments"]},
)


def operate(trainer: Trainer, data: Mapping[str, Any]) -> Receipt | None:
    run = trainer.run()
    try:
        made = plan(run, from_data(data))
    except SurgeryError:
        return None
    if made.empty:
        return None
    receipt = surgery.apply(run, made)
    in_place = {edit.file for edit in receipt.inverse if isinstance(edit, Truncate)}
    ends = [line for line in made.warnings if line.startswith(f"undo {receipt.id} works until")]
    assert [name for line in ends for name in OVER if name in line] == sorted(in_place & OVER)
    return receipt


def whole(trainer: Trainer) -> None:
    """Each step is of one save."""
    run = trainer.run()
    for step in run.steps():
        files = run.format.files(run.root, step)
        assert len({frozenset(trainer.marks(path)) for path in files}) == 1, files


def refused(trainer: Trainer, error: SurgeryError, receipt: Receipt) -> None:
    """The file is named, nothing was changed, and where values were set, one command sets them back
    in what is saved now, and another one where the surgery was, if the trainer went on from there.
    """
    names = {path.name for step in trainer.run().steps()
             for path in trainer.run().format.files(trainer.root, step)}  # fmt: skip
    assert any(name in error.what for name in names)
    hint = error.hints[0]
    went_on = (
        "iteration" in receipt.recipe.get("set", ()) and trainer.run().latest() != receipt.step
    )
    if isinstance(hint, Command) and hint.words[0] == "set":
        pairs = dict(str(word).split("=") for word in hint.words[1:])
        values = {key: float(value) for key, value in pairs.items()}
        assert values.keys() == receipt.recipe["set"].keys()
        assert plan(trainer.run(), from_data({"set": values})).promise is not None
        run, step = trainer.run(), receipt.step
        rollbacks = [h for h in error.hints if isinstance(h, Command) and h.words[0] == "rollback"]
        assert len(rollbacks) == (step in run.steps() and step != run.latest())
        if rollbacks:
            assert rollbacks[0].words[1:3] == ("--to", str(step))
            back = plan(run, from_data({"rollback": {"to": step}, "set": values}))
            assert back.promise is not None and back.promise.step == step + 1
    else:
        assert went_on or "set" not in receipt.recipe or "rollback" in receipt.recipe


def there_and_back(page: str, zipped: bool, data: dict[str, Any], since: list[int]) -> str:
    """What became of the undo: "done", "rest" with --as-they-are, or "refused"."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        trainer = Trainer(Path(folder) / "run", page, zipped=zipped)
        for step in (4, 8):
            trainer.save(step)
        latest = trainer.run().latest()
        receipt = operate(trainer, data)
        if receipt is None:
            return "refused"
        for step in since:
            trainer.save(step)
        last = trainer.marks(trainer.root)
        before = snapshot(trainer.root)
        outcome, as_they_are = "done", False
        try:
            made = surgery.plan_undo(trainer.run())
        except SurgeryError as error:
            assert snapshot(trainer.root) == before
            refused(trainer, error, receipt)
            outcome, as_they_are = "rest", True
            if not any("--as-they-are" in line for line in error.next):
                with pytest.raises(SurgeryError, match="saved again"):
                    surgery.plan_undo(trainer.run(), as_they_are=True)
                return "refused"
            made = surgery.plan_undo(trainer.run(), as_they_are=True)
        undone = surgery.apply(trainer.run(), made)
        whole(trainer)
        assert (undone.restored == "same") == (outcome == "done")
        if outcome != "done":  # the plan has said so, or the trainer saved this very step again
            in_place = {edit.file for edit in receipt.inverse if isinstance(edit, Truncate)}
            assert in_place & OVER or receipt.step in since
        assert trainer.marks(trainer.root) == last
        if receipt.step not in since:  # nor does a copy lead to what was trained since
            assert trainer.run().latest() == latest
        if page == ONE and since:
            assert any("to the attic: ckpt.pt" in line for line in made.warnings)
        surgery.apply(trainer.run(), surgery.plan_redo(trainer.run(), as_they_are=as_they_are))
        whole(trainer)
        assert trainer.marks(trainer.root) == last
        return outcome


def test_without_its_format_no_undo_takes_a_run_for_bare_logs(tmp_path: Path) -> None:
    """Of a step that was saved again it would not know what is in its way."""
    trainer = Trainer(tmp_path / "run", "files of any name, the step inside", zipped=True)
    for step in (4, 8):
        trainer.save(step)
    assert operate(trainer, {"rollback": {"to": 4}, "set": {"beta2": 0.9}})
    trainer.save(8)
    (trainer.root / "ckptsurgeon.yaml").unlink()
    before = snapshot(trainer.root)
    with pytest.raises(UsageError, match="has none that is known") as refused:
        surgery.plan_undo(Run.open(trainer.root))
    assert "--format FORMAT" in refused.value.next[0]
    assert snapshot(trainer.root) == before
    page = str(trainer.root / "own.yaml")
    undo = surgery.plan_undo(run := Run.open(trainer.root, page))
    assert {(c.file, c.field) for c in undo.changes} >= {("at-8.pt", "checkpoint")}
    surgery.apply(run, undo)
    with pytest.raises(UsageError, match="has none that is known"):
        surgery.plan_redo(Run.open(trainer.root))
    surgery.apply(run, surgery.plan_redo(run))
    whole(trainer)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_a_surgery_did_to_a_file_that_was_saved_again_is_what_its_plan_said(
    tmp_path: Path, zipped: bool
) -> None:
    """Of each of two surgeries; nothing that the trainer wrote since is said of them."""
    trainer = Trainer(tmp_path / "run", ONE, zipped=zipped)
    trainer.save(8)
    first = operate(trainer, {"set": {"beta2": 0.9}})
    second = operate(trainer, {"reset": ["moments"]})
    assert first is not None and second is not None
    trainer.save(12)
    before = snapshot(trainer.root)
    told = {id: of_receipt(trainer.run(), id, tensors=True) for id in ("1", "2")}
    assert snapshot(trainer.root) == before
    assert told["2"].changes == tuple(c for c in second.changes if c.file == "ckpt.pt")
    assert told["2"].not_compared == ("ckpt.pt: saved again since; this is what the plan said",)
    (betas,) = told["1"].changes
    assert isinstance(betas, Change) and betas.field == "betas"
    assert list(betas.new) == [0.9, 0.9]
    assert not any(diff.tensors and diff.tensors.changed for diff in told.values())
    assert bool(told["1"].not_compared) is zipped  # what was replaced whole is in the attic


LAW = given(
    st.sampled_from(list(PAGES)), st.booleans(), st.sampled_from(EDITS),
    st.lists(st.sampled_from([2, 4, 6, 8, 12, 16]), max_size=3),
)  # fmt: skip
UNHURRIED: dict[str, Any] = {
    "deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None,
}  # fmt: skip


@example(ONE, True, {"set": {"beta2": 0.9}}, [12])
@example("files of any name, the step inside", True, {"set": {"iteration": 5}}, [8, 12])
@example(ONE, False, {"set": {"beta2": 0.9}}, [12])
@example(COPY, True, {"set": {"beta2": 0.9}}, [12])
@example(COPY, False, {"set": {"beta2": 0.9}}, [12])
@example(TWO, True, {"set": {"beta2": 0.9}}, [8])
@example(TWO, False, {"set": {"beta2": 0.9}}, [8])
@example(TWO, True, {"rollback": {"to": 4}, "set": {"beta2": 0.9}}, [4, 8])
@LAW
@settings(max_examples=6, **UNHURRIED)
@pytest.mark.long
def test_what_was_saved_again_is_neither_lost_nor_mixed(
    page: str, zipped: bool, data: dict[str, Any], since: list[int]
) -> None:
    there_and_back(page, zipped, data, since)


@pytest.mark.slow
@LAW
@settings(max_examples=60, **UNHURRIED)
def test_what_was_saved_again_is_neither_lost_nor_mixed_at_length(
    page: str, zipped: bool, data: dict[str, Any], since: list[int]
) -> None:
    there_and_back(page, zipped, data, since)
