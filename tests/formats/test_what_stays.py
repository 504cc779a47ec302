"""A plan names the steps that stay ahead of where the trainer goes on, and no others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.formats.matrix import FORMATS
from tests.support.lightning_files import lightning
from tests.support.own_pages import PAGES, Trainer
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]
LIGHTNING = "Lightning"
SAYS = "already saved at or after the next step: "


def named(warnings: tuple[str, ...]) -> set[int]:
    """The steps that a plan calls saved already."""
    (said,) = [text for text in warnings if text.startswith(SAYS)] or [f"{SAYS};"]
    return {int(word) for word in said.removeprefix(SAYS).partition(";")[0].split()}


def lightning_last(root: Path) -> Path:
    """The newest step is in `last.ckpt` alone, which a rollback replaces."""
    for step in (10, 20):
        lightning(root, step, torch.rand(100))
    (root / "epoch=0-step=20.ckpt").unlink()
    return root


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", [*PAGES, *FORMATS, LIGHTNING])
@pytest.mark.long
def test_what_a_plan_calls_saved_already_is_there_after_it(
    run_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    root = tmp_path / "run"
    if name == LIGHTNING:
        lightning_last(root)
    elif name in PAGES:
        trainer = Trainer(root, name, zipped=True)
        for step in (4, 8):
            trainer.save(step)
    else:
        shutil.copytree(run_of(name), root, symlinks=True)
    before, tried, ahead = snapshot(root), 0, set[int]()
    for step in Run.open(root).steps():
        recipes: tuple[Mapping[str, Any], ...] = (
            {"rollback": {"to": step}},
            {"repair_latest": {"to": step}},
            {"repair_latest": {"to": step}, "set": {"lr": "0.5x"}},
            {"rollback": {"to": step}, "set": {"iteration": step // 2}},
            {"rollback": {"to": step}, "set": {"iteration": step + 1}},
            {"repair_latest": {"to": step}, "set": {"iteration": step + 1}},
        )
        for recipe in recipes:
            run = Run.open(root)
            try:
                plan = surgery.plan(run, from_data(recipe))
            except SurgeryError:
                continue
            if plan.empty:
                continue
            tried += 1
            surgery.apply(run, plan)
            there = {saved for saved in Run.open(root).steps() if saved >= plan.promise.step}
            assert named(plan.warnings) == there
            ahead |= there
            surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
            assert snapshot(root) == before
    assert tried and (ahead or name == LIGHTNING or not Run.open(root).pointers())
