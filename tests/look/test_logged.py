"""The curves of a run whose logs count samples alone, as those of DeepSpeed's own monitor do."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from ckptsurgeon import Run, inspect, plan, surgery
from ckptsurgeon.look.advise.advice import judge
from ckptsurgeon.look.logged import own
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained


def monitor(root: Path, batch: int, steps: int) -> None:
    """The event files of the run, as DeepSpeed's monitor would have written them."""
    folder = root / "tensorboard"
    for path in folder.iterdir():
        path.unlink()
    with SummaryWriter(folder) as writer:
        for step in range(1, steps + 1):
            writer.add_scalar("Train/Samples/train_loss", 5 - step / 10, step * batch)
            writer.add_scalar("Train/Samples/lr", step / 1000, step * batch)


def samples(root: Path) -> int:
    """What the newest step has consumed."""
    consumed = inspect(Run.open(root)).promise.consumed_samples
    assert consumed is not None
    return consumed


def test_steps_are_counted_by_the_batch_of_the_checkpoints(trained: Trained) -> None:
    root = trained()
    monitor(root, samples(root) // 8, 8)
    kept = own(Run.open(root), {}).kept
    assert sorted(kept) == ["loss", "lr"]
    assert list(kept["loss"].steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert kept["loss"].values[:2].tolist() == pytest.approx([4.9, 4.8])


def test_a_batch_that_changed_gives_no_steps(trained: Trained) -> None:
    root = trained()
    monitor(root, samples(root) // 8, 8)
    run = Run.open(root)
    recipe = from_data({"set": {"consumed_samples": 2 * samples(root)}})
    surgery.apply(run, plan(run, recipe))
    told = judge(own(Run.open(root), {}))
    assert not told.curves.kept
    assert told.reason == "the loss is logged over samples, and how many a step takes is not known"
