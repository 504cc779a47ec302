"""Schedulers that follow a metric or a cycle: the lr that is set is used, and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

Make = Callable[[torch.optim.Optimizer], Any]
STEPS = 4


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch_lr.ReduceLROnPlateau(optimizer, factor=0.1, patience=3, min_lr=1e-7)


def cyclic(optimizer: torch.optim.Optimizer) -> Any:
    """Of Adam's beta1 too, by default."""
    return torch_lr.CyclicLR(optimizer, 1e-5, 1e-3, step_size_up=5, mode="triangular2")


class Trainer:
    """AdamW with two groups, of which the second learns at half the rate."""

    def __init__(self, make: Make) -> None:
        weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        groups = [{"params": weights[:1], "lr": 1e-3}, {"params": weights[1:], "lr": 5e-4}]
        self.optimizer = torch.optim.AdamW(groups)
        self.schedule = make(self.optimizer)
        self.weights = weights

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def update(self) -> list[float]:
        """One update at a loss that never improves; the rates that it used."""
        used = self.rates()
        for weight in self.weights:
            weight.grad = torch.ones(3)
        self.optimizer.step()
        self.schedule.step(*([1.0] if hasattr(self.schedule, "num_bad_epochs") else []))
        return used


def saved(root: Path, make: Make) -> Path:
    """A folder as the Hugging Face Trainer saves it."""
    trainer = Trainer(make)
    for _ in range(STEPS):
        trainer.update()
    folder = root / f"checkpoint-{STEPS}"
    folder.mkdir(parents=True)
    torch.save(trainer.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(trainer.schedule.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEPS}))
    return root


def resumed(root: Path, make: Make) -> Trainer:
    trainer, folder = Trainer(make), root / f"checkpoint-{STEPS}"
    trainer.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=False))
    trainer.schedule.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=False))
    return trainer


def test_the_rate_under_a_plateau_is_set_and_kept_until_it_falls(tmp_path: Path) -> None:
    root = saved(tmp_path, plateau)
    before = snapshot(root)
    made = operate(root, {"set": {"lr": 4e-4}})
    assert made.promise is not None and made.promise.lr == 4e-4
    assert made.promise.one_step == {}
    (note,) = [text for text in made.warnings if text.startswith("ReduceLROnPlateau keeps")]
    assert (
        "after 1 more bad evaluation in a row it multiplies the rate by 0.1, down to 1e-07" in note
    )
    trainer = resumed(root, plateau)
    assert trainer.schedule.get_last_lr() == [4e-4, 2e-4]
    assert trainer.update() == [4e-4, 2e-4]
    assert trainer.update() == [pytest.approx(4e-5), pytest.approx(2e-5)]
    assert (
        "ReduceLROnPlateau, 3 bad of 3 allowed, then × 0.1"
        in look.inspect(Run.open(root)).scheduler
    )
    take_back(root, before)


def test_the_floor_of_a_plateau_is_set_and_what_it_lacks_is_refused(tmp_path: Path) -> None:
    root = saved(tmp_path, plateau)
    operate(root, {"set": {"lr": 5e-4, "min_lr": 1e-4}})
    trainer = resumed(root, plateau)
    for _ in range(9):
        trainer.update()
    assert trainer.rates() == [pytest.approx(1e-4)] * 2
    with pytest.raises(SurgeryError, match="no decay: a metric decides") as refused:
        plan(Run.open(root), from_data({"set": {"lr": 1e-4, "decay": 9}}))
    assert "set-lr LR --min-lr LR" in refused.value.next[0]
    with pytest.raises(UsageError, match="below min_lr"):
        plan(Run.open(root), from_data({"set": {"min_lr": 1.0}}))


def test_a_cycle_is_scaled_as_a_whole(tmp_path: Path) -> None:
    root = saved(tmp_path, cyclic)
    ways = resumed(root, cyclic)
    expected = [[rate * 0.5 for rate in ways.update()] for _ in range(12)]
    before = snapshot(root)
    made = operate(root, {"set": {"lr": 5e-4}})
    trainer = resumed(root, cyclic)
    assert [trainer.update() for _ in range(12)] == [pytest.approx(rates) for rates in expected]
    assert made.promise is not None and made.promise.lr == pytest.approx(expected[0][0])
    assert set(made.promise.one_step) == {"betas"}  # its beta1 is cycled too
    take_back(root, before)
    with pytest.raises(SurgeryError, match="CyclicLR keeps no min_lr"):
        plan(Run.open(root), from_data({"set": {"min_lr": 1e-6}}))
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"set": {"beta1": 0.7}})))
    trainer = resumed(root, cyclic)
    trainer.update()
    assert trainer.optimizer.param_groups[0]["betas"][0] != 0.7


def test_a_rate_below_the_floor_of_a_plateau_is_never_said_to_fall(tmp_path: Path) -> None:
    root = saved(tmp_path, plateau)
    made = operate(root, {"set": {"lr": 1e-8}})
    assert "ReduceLROnPlateau never lowers this rate: it is not above its floor of 1e-07" in (
        made.warnings
    )
    trainer = resumed(root, plateau)
    assert [trainer.update() for _ in range(9)] == [[1e-8, 5e-9]] * 9


def test_a_pause_after_a_fall_counts_before_the_next_one(tmp_path: Path) -> None:
    def pausing(optimizer: torch.optim.Optimizer) -> Any:
        return torch_lr.ReduceLROnPlateau(optimizer, factor=0.1, patience=1, cooldown=3)

    root = saved(tmp_path, pausing)
    made = operate(root, {"set": {"lr": 4e-4}})
    (note,) = [text for text in made.warnings if text.startswith("ReduceLROnPlateau keeps")]
    left = int(note.partition(" more bad")[0].split()[-1])
    trainer = resumed(root, pausing)
    assert [trainer.update()[0] for _ in range(left)] == [4e-4] * left
    assert trainer.update()[0] == pytest.approx(4e-5)


@pytest.mark.formats
def test_a_schedule_that_also_raises_the_rate_is_called_by_its_name(tmp_path: Path) -> None:
    from transformers.optimization import GreedyLR

    def greedy(optimizer: torch.optim.Optimizer) -> Any:
        return GreedyLR(optimizer, factor=0.5, patience=6, min_lr=1e-5)

    root = saved(tmp_path, greedy)
    before = snapshot(root)
    assert look.inspect(Run.open(root)).scheduler.startswith("GreedyLR, 3 bad of 6 allowed")
    made = operate(root, {"set": {"lr": 4e-4}})
    (note,) = [text for text in made.warnings if text.startswith("GreedyLR")]
    assert "after 4 more bad evaluations in a row it multiplies the rate by 0.5" in note
    assert "where the metric keeps improving it divides it by 0.5, up to 1" in note
    trainer = resumed(root, greedy)
    assert trainer.rates() == [4e-4, 2e-4]
    assert [trainer.update()[0] for _ in range(5)] == [4e-4] * 4 + [2e-4]
    for metric in range(8):
        trainer.schedule.step(-metric)
    assert trainer.rates() == [4e-4, 2e-4]
    take_back(root, before)
    with pytest.raises(SurgeryError, match="GreedyLR has no decay"):
        plan(Run.open(root), from_data({"set": {"lr": 1e-4, "decay": 9}}))
