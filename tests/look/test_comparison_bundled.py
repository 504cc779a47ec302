"""The bundled trainer's own lines and points, held against the promise as any other trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.look.listen import listen
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.launch import launch

RECIPES: dict[str, dict[str, Any]] = {
    "lr": {"set": {"lr": "0.5x", "beta2": 0.9}},
    "rollback": {"rollback": {"to": 6}, "set": {"lr": "0.5x"}},
    "ramp": {"reset": ["moments"], "rewarm": {"iterations": 4, "kind": "ramp"}},
    "hold": {"reset": ["moments"], "rewarm": {"iterations": 4, "kind": "hold"}},
    "skip": {"skip": ["9-10"]},
    "skip later": {"skip": ["10-11"]},
}


def operated(trained: Trained, recipe: dict[str, Any]) -> Path:
    root = trained()
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data(recipe)))
    return root


def printed(root: Path) -> Path:
    """The trainer goes on for some updates; what it prints."""
    log = root / "trainer.out"
    done = launch(f"--config={root / 'train.yaml'}", "train_iters=14", "log_interval=1")
    log.write_text(done.stdout)
    return log


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.long
def test_its_word_is_kept(trained: Trained, name: str) -> None:
    root = operated(trained, RECIPES[name])
    run = Run.open(root)
    log = printed(root)
    for word in (listen(run, log=log), listen(run, folder=root / "tensorboard")):
        assert word.differs == []
        rates = [item for item in word.agrees if item.startswith("lr of update ")]
        assert len(rates) == 2
