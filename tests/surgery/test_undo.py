"""Undo brings back every byte, also after the trainer went on from the edited state."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, look, plan, report, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.hints import Command
from ckptsurgeon.plans.edits import Aside, Content, Replace
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.style import Style
from tests.conftest import Trained
from tests.support.launch import launch
from tests.support.snapshot import snapshot

OF_THE_TRAINER = ("train.yaml", "zero_to_fp32.py", "zero_to_torch.py")
"""What a trainer and DeepSpeed write anew at every start and save."""


def test_undo_after_the_trainer_went_on_keeps_what_it_wrote(trained: Trained) -> None:
    root = trained()
    before = snapshot(root)
    run = Run.open(root)
    recipe = from_data({"rollback": {"to": 4}, "set": {"lr": 5e-4}})
    surgery.apply(run, plan(run, recipe))
    launch(f"--config={root / 'train.yaml'}", "train_iters=10")
    assert run.steps() == [2, 4, 6, 8, 10]
    trained_since = snapshot(root)

    surgery.apply(run, surgery.plan_undo(run))

    after = snapshot(root)
    for own in OF_THE_TRAINER:
        del before[own], after[own]
    assert after == before
    attic = {
        path.read_bytes()
        for path in (root / ".ckptsurgeon/attic/0002").rglob("*")
        if path.is_file()
    }

    kept = {hashlib.sha256(data).hexdigest() for data in attic}
    for name, (kind, digest, _) in trained_since.items():
        if kind == "file" and name.startswith(("global_step6", "global_step8", "global_step10")):
            assert digest in kept, name


@pytest.mark.parametrize(
    "data", [{"set": {"lr": 5e-4}}, {"rollback": {"to": 8}, "set": {"beta2": 0.9}}]
)
def test_what_was_trained_on_an_edited_step_goes_when_its_edit_goes(
    trained: Trained, data: dict[str, Any]
) -> None:
    """No pointer changes in these surgeries; the trainer alone moves them on."""
    root = trained()
    before = snapshot(root)
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data(data)))
    launch(f"--config={root / 'train.yaml'}", "train_iters=10")
    assert run.latest() == 10

    undone = surgery.apply(run, surgery.plan_undo(run))

    assert run.latest() == 8
    after = snapshot(root)
    for pointer in ("latest", "latest_checkpointed_iteration.txt"):
        for found in (before, after):
            found[pointer] = (*found[pointer][:2], 0)  # its time is that of the undo
    for own in OF_THE_TRAINER:
        del before[own], after[own]
    assert after == before
    assert (root / f".ckptsurgeon/attic/{undone.id}/global_step10").is_dir()
    assert "checkpoints and logs are byte for byte" in report.done(undone, Style(width=200))


def test_undo_of_renamed_tags_leaves_what_was_trained_since(trained: Trained) -> None:
    root = trained()
    run = Run.open(root)
    (log,) = (root / "tensorboard").iterdir()
    before = log.read_bytes()
    recipe = {"tensorboard": {"rename": {"lm-loss-training/lm loss": "loss"}}}
    surgery.apply(run, plan(run, from_data(recipe)))
    launch(f"--config={root / 'train.yaml'}", "train_iters=10")
    undone = surgery.apply(run, surgery.plan_undo(run))
    assert (run.latest(), run.steps(), log.read_bytes()) == (10, [2, 4, 6, 8, 10], before)
    assert "what it changed is byte for byte" in report.done(undone, Style(width=200))


def test_the_log_folder_stays_one_after_an_undo(trained: Trained) -> None:
    """The undo puts event files back that the rollback had set aside: they are the run's."""
    root = trained()
    launch(f"--config={root / 'train.yaml'}", "train_iters=10")
    run = Run.open(root)
    recipe = from_data({"rollback": {"to": 8}})
    wanted = plan(run, recipe)
    assert any(isinstance(c, Aside) and c.field == "tensorboard" for c in wanted.changes)
    surgery.apply(run, wanted)
    surgery.apply(run, surgery.plan_undo(run))
    assert run.logs.folders() == [root / "tensorboard"]
    told = [(type(change), change.field) for change in wanted.changes]
    assert [(type(change), change.field) for change in plan(run, recipe).changes] == told


def test_a_shard_that_was_saved_anew_is_not_cut(trained: Trained) -> None:
    root = trained()
    run = Run.open(root)
    made = plan(run, from_data({"set": {"beta2": 0.9, "iteration": 6}}))
    assert "at or after the next step: 8; the trainer will overwrite them" in made.warnings[-1]
    surgery.apply(run, made)
    launch(f"--config={root / 'train.yaml'}", "train_iters=8")
    before = snapshot(root)
    with pytest.raises(SurgeryError, match="saved again, or changed, since 0001") as refused:
        surgery.plan_undo(run)
    assert snapshot(root) == before
    hint = refused.value.hints[0]
    assert isinstance(hint, Command) and hint.words == ("set", "beta2=0.95", "iteration=8")
    back = plan(run, from_data({"set": {"beta2": 0.95}}))
    assert back.promise is not None and back.promise.betas == (0.9, 0.95)


@pytest.mark.parametrize("taken", [(4,), (2, 4)])
@pytest.mark.parametrize("since", [False, True])
def test_all_but_a_step_that_retention_took_comes_back(
    trained: Trained, taken: tuple[int, ...], since: bool
) -> None:
    """Its bytes are gone; what the rollback had moved aside is not."""
    root = trained()
    gone = tuple(f"global_step{step}" for step in taken)
    before = snapshot(root)
    before = {name: item for name, item in before.items() if not name.startswith(gone)}
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"rollback": {"to": 4}, "set": {"beta2": 0.9}})))
    if since:
        shutil.copytree(root / "global_step4", root / "global_step6")
        (root / "latest").write_text("global_step6")
    for name in gone:
        shutil.rmtree(root / name)
    left = snapshot(root)
    with pytest.raises(SurgeryError, match="which receipt 0001 changed, no longer exists") as told:
        surgery.plan_undo(run)
    hints = [str(hint) for hint in told.value.hints]
    assert hints[0] == "the same command with --as-they-are"
    assert hints[1:] == ["ckptsurgeon rollback --to STEP"] * bool(run.steps())
    back = surgery.plan_undo(run, as_they_are=True)
    shown = report.plan(back, "run", Style(width=300), undone=run.receipts()[0])
    assert "beta" not in shown.partition("\n")[2] and "from the attic" in shown
    assert any("not brought back: step" in text for text in back.warnings)
    assert "byte for byte" not in report.done(surgery.apply(run, back), Style(width=300))
    assert snapshot(root) == before
    surgery.apply(run, surgery.plan_redo(run, as_they_are=True))
    assert snapshot(root) == left


@pytest.mark.parametrize("data", [{"set": {"beta2": 0.9}}, {"reset": ["moments"]}])
def test_of_an_edit_whose_step_is_gone_nothing_comes_back(
    trained: Trained, data: dict[str, Any]
) -> None:
    root = trained()
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data(data)))
    shutil.rmtree(root / "global_step8")
    for as_they_are in (False, True):
        with pytest.raises(SurgeryError, match="no longer exists") as told:
            surgery.plan_undo(run, as_they_are=as_they_are)
        assert [str(hint) for hint in told.value.hints] == ["ckptsurgeon rollback --to STEP"]


def test_surgeries_are_undone_newest_first(trained: Trained) -> None:
    root = trained()
    start = snapshot(root)
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"set": {"beta2": 0.9}})))
    middle = snapshot(root)
    surgery.apply(run, plan(run, from_data({"reset": ["moments"]})))

    with pytest.raises(UsageError, match="receipt 0002 came after 0001"):
        surgery.plan_undo(run, "0001")
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == middle
    surgery.apply(run, surgery.plan_undo(run, "1"))
    assert snapshot(root) == start
    with pytest.raises(UsageError, match="no surgery to undo"):
        surgery.plan_undo(run)


def test_undo_of_a_rollback_with_a_kept_branch_removes_the_branch(trained: Trained) -> None:
    root = trained()
    folders = sorted(p for p in root.rglob("*") if p.is_dir() and ".ckptsurgeon" not in p.parts)
    run = Run.open(root)
    recipe = from_data({"rollback": {"to": 4}, "tensorboard": {"keep_as": "tb-glitch"}})
    surgery.apply(run, plan(run, recipe))
    assert list((root / "tensorboard" / "tb-glitch").iterdir())
    surgery.apply(run, surgery.plan_undo(run))
    assert folders == sorted(
        p for p in root.rglob("*") if p.is_dir() and ".ckptsurgeon" not in p.parts
    )


@pytest.mark.parametrize("linked", ["one", "all"])
def test_undo_of_shards_that_got_another_name_since(
    trained: Trained, tmp_path: Path, linked: str
) -> None:
    """A branch or a backup shares them: they keep the surgery, and the run gets its bytes back."""
    root = trained(ranks=2)
    before = snapshot(root)
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"set": {"lr": 1e-4}})))
    shards = sorted((root / "global_step8").glob("*.pt"))[: 1 if linked == "one" else None]
    for path in shards:
        os.link(path, tmp_path / path.name)
    other = {path.name: snapshot(tmp_path)[path.name] for path in shards}
    wanted = surgery.plan_undo(run)
    first, last = wanted.edits[0], wanted.edits[-1]
    assert isinstance(first, Replace) and isinstance(last, Replace)
    assert first.file == last.file  # meanwhile it is an empty file, which no reader takes
    assert first.content == Content(())
    surgery.apply(run, wanted)
    assert snapshot(root) == before
    assert {path.name: snapshot(tmp_path)[path.name] for path in shards} == other
    assert look.verify(run).findings == ()


@pytest.mark.parametrize("shift_s", [-3600, 0, 3600])
def test_no_clock_says_which_event_files_are_new(trained: Trained, shift_s: int) -> None:
    """The trainer's host may be an hour behind or ahead of the surgeon's."""
    root = trained()
    logs = root / "tensorboard"
    (first,) = logs.glob("*tfevents*")
    moved = first.rename(logs / f"events.out.tfevents.{int(time.time()) + shift_s}.elsewhere.1.0")
    os.utime(moved, (first_time := moved.stat().st_mtime - 3600, first_time))
    before = snapshot(root)
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"rollback": {"to": 8}, "set": {"beta2": 0.9}})))
    since = logs / f"events.out.tfevents.{int(time.time()) - shift_s}.elsewhere.2.0"
    since.write_bytes(moved.read_bytes())
    os.utime(since, (first_time, first_time))

    surgery.apply(run, surgery.plan_undo(run))

    assert snapshot(root) == before
    kept = [path.name for path in (root / ".ckptsurgeon/attic/0002").rglob("*events.*")]
    assert since.name.replace("tfevents", "tf-events") in kept
