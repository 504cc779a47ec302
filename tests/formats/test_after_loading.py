"""What the trainer's code must do where no rate can be set here, done to the letter in torch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.schedules.check import AFTER_LOADING
from ckptsurgeon.recipe.file import from_data

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda adam: torchs.ChainedScheduler(
        [torchs.LinearLR(adam, total_iters=9), torchs.ExponentialLR(adam, 0.9)]
    ),
    "ConstantLR": lambda adam: torchs.ConstantLR(adam, total_iters=9),
    "CosineAnnealingLR": lambda adam: torchs.CosineAnnealingLR(adam, 20),
    "CosineAnnealingWarmRestarts": lambda adam: torchs.CosineAnnealingWarmRestarts(adam, 8),
    "CyclicLR": lambda adam: torchs.CyclicLR(adam, 0.01, 0.1, 4, cycle_momentum=False),
    "ExponentialLR": lambda adam: torchs.ExponentialLR(adam, 0.9),
    "LambdaLR": lambda adam: torchs.LambdaLR(adam, lambda step: 1 / (1 + step)),
    "LinearLR": lambda adam: torchs.LinearLR(adam, total_iters=9),
    "MultiStepLR": lambda adam: torchs.MultiStepLR(adam, [3, 9]),
    "MultiplicativeLR": lambda adam: torchs.MultiplicativeLR(adam, lambda step: 0.9),
    "OneCycleLR": lambda adam: torchs.OneCycleLR(adam, 0.1, 30),
    "PolynomialLR": lambda adam: torchs.PolynomialLR(adam, 20),
    "ReduceLROnPlateau": lambda adam: torchs.ReduceLROnPlateau(adam, patience=1),
    "SequentialLR": lambda adam: torchs.SequentialLR(
        adam, [torchs.LinearLR(adam, total_iters=4), torchs.CosineAnnealingLR(adam, 20)], [8]
    ),
    "StepLR": lambda adam: torchs.StepLR(adam, 3),
}
SAVED, LAST = 5, 21


class Loop:
    """A trainer of one optimizer and one scheduler."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 2)
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.0)
        self.schedule: Any = SCHEDULERS[name](self.adam)

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.schedule.load_state_dict(copy.deepcopy(state["scheduler"]))

    def saved(self) -> dict[str, Any]:
        state = {"optimizer": self.adam.state_dict(), "scheduler": self.schedule.state_dict()}
        return copy.deepcopy(state)

    def rates(self, updates: int) -> list[float]:
        """Those that the next updates use."""
        used = []
        for _ in range(updates):
            used.append(float(self.adam.param_groups[0]["lr"]))
            self.model(torch.ones(1, 2)).sum().backward()
            self.adam.step()
            plateau = isinstance(self.schedule, torchs.ReduceLROnPlateau)
            self.schedule.step(1.0) if plateau else self.schedule.step()
        return used

    def follow(self, factor: float) -> None:
        """The hint, by the names that it has."""
        of_groups, of_schedulers = (
            names.split(", ") for names in re.findall(r"\(([^)]*)\)", AFTER_LOADING)
        )
        for group in self.adam.param_groups:
            for name in {*of_groups} & {*group}:
                group[name] *= factor
        for schedule in every(self.schedule):
            for name in {*of_schedulers} & {*vars(schedule)}:
                setattr(schedule, name, [rate * factor for rate in getattr(schedule, name)])


def every(schedule: Any) -> Iterator[Any]:
    """A scheduler, and those that it is made of."""
    yield schedule
    for inner in getattr(schedule, "_schedulers", ()):
        yield from every(inner)


def test_every_scheduler_of_torch_is_among_them() -> None:
    own = {
        name for name, kind in vars(torchs).items()
        if isinstance(kind, type) and issubclass(kind, torchs.LRScheduler)
        and kind.__module__ == torchs.__name__ and not name.startswith("_")
    }  # fmt: skip
    assert own - {"LRScheduler"} == {*SCHEDULERS}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_hint_holds_for_every_later_update(name: str) -> None:
    """And what is done before the checkpoint is loaded is lost, as the hint says."""
    loop = Loop(name)
    loop.rates(SAVED)
    saved, usual = loop.saved(), loop.rates(LAST - SAVED)
    after, before = Loop(name), Loop(name)
    after.load(saved)
    after.follow(0.5)
    assert after.rates(LAST - SAVED) == pytest.approx([rate / 2 for rate in usual], abs=1e-12)
    before.follow(0.5)
    before.load(saved)
    assert before.rates(1) == usual[:1]


def test_a_weight_decay_of_groups_without_names_is_set_there_too(tmp_path: Path) -> None:
    """The refusal names no command that would be refused next; what it says holds in torch."""
    loop = Loop("StepLR")
    loop.rates(SAVED)
    torch.save(loop.saved()["optimizer"], tmp_path / "step-5.pt")
    run = Run.open(tmp_path, "torch:step-{step}.pt=")
    with pytest.raises(SurgeryError) as refused:
        surgery.plan(run, from_data({"set": {"weight_decay": 0.1}}))
    (hint,) = refused.value.hints
    assert "in param_groups in the trainer's code, once the checkpoint is loaded" in str(hint)
    for late in (True, False):
        resumed = Loop("StepLR")
        for load in (late, not late):
            if load:
                resumed.load(loop.saved())
            else:
                resumed.adam.param_groups[0]["weight_decay"] = 0.1
        group = resumed.adam.param_groups[0]
        assert group["weight_decay"] == (0.1 if late else 0.0)
