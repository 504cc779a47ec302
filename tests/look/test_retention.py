"""`doctor` says that something else than the trainer removes steps, by the run's own config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.look.retention import few
from ckptsurgeon.recipe.file import from_data
from tests.conftest import STEPS, Trained
from tests.support.tiny_run import make_run


def keeping(root: Path, keep: int | None) -> None:
    config = root / "train.yaml"
    lines = [line for line in config.read_text().splitlines() if not line.startswith("keep_last")]
    given = [] if keep is None else [f"keep_last: {keep}"]
    config.write_text("\n".join([*lines, *given, ""]))


def test_fewer_than_the_bundled_trainer_keeps_are_said(trained: Trained) -> None:
    root = trained()
    assert few(Run.open(root), 8) == []
    keeping(root, 3)
    assert few(Run.open(root), 8) == []
    shutil.rmtree(root / "global_step4")
    shutil.rmtree(root / "global_step6")
    (found,) = diagnose(Run.open(root))
    assert found.what.startswith("the trainer keeps 3 steps and saves every 2: ")
    assert found.what.endswith("only 2, 8 are left") and "to 2" in str(found.next)
    keeping(root, 2)
    assert few(Run.open(root), 8) == []
    keeping(root, None)
    assert few(Run.open(root), 8) == []


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
@pytest.mark.long
def test_what_the_trainer_itself_leaves_is_enough(trained: Trained, keep: int) -> None:
    """Its newest ones, those of a run that began at any step, and what a rollback leaves."""
    root = trained()
    keeping(root, keep)
    for first in STEPS:
        assert few(Run.open(root), 8) == []
        surgery.apply(Run.open(root), plan(Run.open(root), from_data({"rollback": {"to": first}})))
        assert few(Run.open(root), first) == []
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    shutil.rmtree(root / "global_step2")
    assert few(Run.open(root), 8) == []  # it may have begun there


@pytest.mark.formats
@pytest.mark.parametrize("best", [False, True])
def test_of_transformers_by_its_saved_arguments(tmp_path: Path, best: bool) -> None:
    transformers = pytest.importorskip("transformers")
    root = make_run(tmp_path / "run", (2, 8))
    given = transformers.TrainingArguments(
        output_dir=str(root), save_total_limit=3, save_steps=2, use_cpu=True, eval_strategy="steps",
        eval_steps=2, load_best_model_at_end=best,
    )  # fmt: skip
    for step in (2, 8):
        folder = root / f"checkpoint-{step}"
        torch.save(given, folder / "training_args.bin")
        state = {"global_step": step, "save_steps": 2}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    assert bool(few(Run.open(root), 8)) is not best
