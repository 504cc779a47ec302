"""Five schedulers of NeMo whose states are alike: set is what all make the same of."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support import library_source
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

WARMUP, END, PEAK = 4, 20, 1e-3
BASES = (PEAK, PEAK / 4)
FILE = "nemo/core/optim/lr_scheduler.py"
Formula = Callable[[float, int, float], float]
FORMULAS: dict[str, Formula] = {
    "WarmupPolicy": lambda base, step, low: base,
    "SquareAnnealing": lambda base, step, low: max(low, base * (1 - done(step)) ** 2),
    "SquareRootAnnealing": lambda base, step, low: max(low, base * math.sqrt(1 - step / END)),
    "WarmupAnnealing": lambda base, step, low: low + (1 - done(step)) * (PEAK - low),
    "InverseSquareRootAnnealing": lambda base, step, low: (
        base / math.sqrt((step + 1) / (WARMUP + 1))
    ),
}


def done(step: int) -> float:
    return (step - WARMUP) / (END - WARMUP)


class Policy(torch.optim.lr_scheduler.LRScheduler):
    """`WarmupPolicy` and what its children make of a step."""

    def __init__(self, optimizer: Any, name: str, min_lr: float) -> None:
        self.max_steps, self.warmup_steps, self.min_lr = END, WARMUP, min_lr
        self.formula = FORMULAS[name]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        step = self.last_epoch
        if step <= WARMUP:
            return [base * (step + 1) / (WARMUP + 1) for base in self.base_lrs]
        if step > END:
            return [self.min_lr] * len(self.base_lrs)
        first = self.base_lrs[0] / PEAK  # WarmupAnnealing takes it for every group
        return [
            self.formula(base, step, self.min_lr)
            * (first if self.formula is FORMULAS["WarmupAnnealing"] else 1.0)
            for base in self.base_lrs
        ]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "formula"}


def made(name: str, min_lr: float = 0.0) -> tuple[Any, Any]:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": base} for base in BASES]
    adam = torch.optim.AdamW(groups)
    return adam, Policy(adam, name, min_lr)


def saved(root: Path, name: str, step: int, min_lr: float = 0.0) -> Path:
    """One file of NeMo's trainers on plain Lightning."""
    adam, schedule = made(name, min_lr)
    for _ in range(step):
        adam.zero_grad()
        sum(p.sum() for group in adam.param_groups for p in group["params"]).backward()
        adam.step()
        schedule.step()
    root.mkdir()
    state = {
        "pytorch-lightning_version": "2.4.0", "epoch": 0, "global_step": step, "loops": {},
        "callbacks": {}, "state_dict": {"a": torch.ones(2)}, "hparams_name": None,
        "optimizer_states": [adam.state_dict()], "lr_schedulers": [schedule.state_dict()],
    }  # fmt: skip
    torch.save(state, root / f"epoch=0-step={step}.ckpt")
    return root


def to_come(root: Path, name: str, step: int) -> list[list[float]]:
    """The rates of all updates that follow a load, until after the end."""
    state = torch.load(root / f"epoch=0-step={step}.ckpt", weights_only=True)
    adam, schedule = made(name)
    adam.load_state_dict(state["optimizer_states"][0])
    schedule.load_state_dict(state["lr_schedulers"][0])
    rates = []
    for _ in range(END + 3 - step):
        rates.append([group["lr"] for group in adam.param_groups])
        adam.step()
        schedule.step()
    return rates


@pytest.mark.thinned(3)
@pytest.mark.parametrize("step", [2, 9, 18])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_third_of_the_peak_is_a_third_of_every_rate_to_come(
    tmp_path: Path, name: str, step: int
) -> None:
    root = saved(tmp_path / "run", name, step)
    before, rates = snapshot(root), to_come(root, name, step)
    plan = operate(root, {"set": {"lr": PEAK / 3}})
    assert look.verify(Run.open(root)).findings == ()
    after = to_come(root, name, step)
    assert plan.promise is not None and plan.promise.lr == after[0][0]
    assert after == [pytest.approx([rate / 3 for rate in each], abs=1e-18) for each in rates]
    for recipe in ({"set": {"warmup": 3}}, {"set": {"min_lr": 1e-5}}, {"set": {"decay": 40}},
                   {"set": {"position": 3}}):  # fmt: skip
        with pytest.raises(SurgeryError, match="three more of NeMo's save the same keys"):
            surgery.plan(Run.open(root), from_data(recipe))
    with pytest.raises(SurgeryError, match="can't decay") as refused:
        surgery.plan(Run.open(root), from_data({"cooldown": {"steps": 1}}))
    assert "LambdaLR" in refused.value.next[0]
    take_back(root, before)


def test_above_a_floor_they_differ_and_a_rate_of_another_kind_is_refused(tmp_path: Path) -> None:
    root = saved(tmp_path / "run", "SquareAnnealing", 9, 1e-5)
    with pytest.raises(SurgeryError, match="above a min_lr of 0 they differ"):
        surgery.plan(Run.open(root), from_data({"set": {"lr": 5e-4}}))
    root = saved(tmp_path / "other", "SquareAnnealing", 9)
    (file,) = root.glob("*.ckpt")
    state = torch.load(file, weights_only=True)
    state["lr_schedulers"][0]["_last_lr"] = [7e-4, 7e-4 / 4]
    torch.save(state, file)
    with pytest.raises(SurgeryError, match=r"last rate is 0\.0007, and WarmupPolicy or alike"):
        surgery.plan(Run.open(root), from_data({"set": {"lr": 5e-4}}))


@pytest.mark.formats
@pytest.mark.parametrize("min_lr", [0.0, 1e-5])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_formulas_are_nemos(name: str, min_lr: float) -> None:
    """The same rates and the same keys as of the library's own class."""
    if not (library_source.FOLDER / FILE).is_file():
        pytest.skip("make test-formats installs NeMo's sources")
    names = ["_squareroot_annealing", "_square_annealing", "WarmupPolicy"]
    names += [] if name == "WarmupPolicy" else [name]
    known = {"_LRScheduler": torch.optim.lr_scheduler.LRScheduler, "warnings": warnings}
    library = library_source.taken(FILE, names, **known)
    adam, mine = made(name, min_lr)
    other, _ = made(name)
    for group in other.param_groups:
        group["lr"] = group.pop("initial_lr")
    kind = getattr(library, name)
    theirs = kind(other, warmup_steps=WARMUP, max_steps=END, min_lr=min_lr)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    for _ in range(END + 3):
        for schedule, optimizer in ((mine, adam), (theirs, other)):
            optimizer.step()
            schedule.step()
        assert mine.get_last_lr() == pytest.approx(theirs.get_last_lr(), rel=1e-12)
