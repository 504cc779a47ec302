"""ESPnet's one checkpoint, and its WarmupLR under a new peak or warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.epoch_runs import WarmupLR, espnet
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

EPOCHS, UPDATES = 4, 3


def loaded(root: Path, peak: float, warmup: int) -> tuple[Any, Any]:
    """What `Trainer.resume` loads into an optimizer and a scheduler that flags made."""
    state = torch.load(root / "checkpoint.pth", weights_only=True)
    model = torch.nn.Linear(4, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=peak)
    schedule = WarmupLR(adam, warmup)
    adam.load_state_dict(state["optimizers"][0])
    schedule.load_state_dict(state["schedulers"][0])
    return adam, schedule


def rates(adam: Any, schedule: Any, updates: int) -> list[float]:
    """Those of so many updates."""
    used = []
    for _ in range(updates):
        used.append(adam.param_groups[0]["lr"])
        adam.step()
        schedule.step()
    return used


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@example(5e-4, 4, 12)
@given(
    peak=st.sampled_from([1e-4, 5e-4, 2e-3]),
    before=st.integers(1, 20),
    warmup=st.one_of(st.none(), st.integers(1, 40)),
)
def test_a_new_peak_or_warm_up_gives_the_rates_of_a_run_that_began_with_it(
    tmp_path_factory: pytest.TempPathFactory, peak: float, before: int, warmup: int | None
) -> None:
    root = espnet(tmp_path_factory.mktemp("espnet") / "run", before)
    assert Run.open(root).format.name == "espnet"
    values = {"lr": peak} if warmup is None else {"lr": peak, "warmup": warmup}
    plan = surgery.plan(Run.open(root), from_data({"set": values}))
    surgery.apply(Run.open(root), plan)
    used = rates(*loaded(root, 1.0, before), 10)
    adam = torch.optim.AdamW(torch.nn.Linear(4, 2).parameters(), lr=peak)
    whole = rates(adam, WarmupLR(adam, warmup or before), EPOCHS * UPDATES + 10)
    assert used == pytest.approx(whole[EPOCHS * UPDATES :], rel=1e-9)
    assert plan.promise is not None and plan.promise.lr == used[0]


def test_what_the_checkpoint_promises_is_undone(tmp_path: Path) -> None:
    root = espnet(tmp_path / "run", 10)
    before = snapshot(root)
    plan = operate(root, {"set": {"beta2": 0.9, "weight_decay": 0.3}, "reset": ["moments"]})
    adam, _ = loaded(root, 1.0, 10)
    group = adam.param_groups[0]
    assert (group["betas"][1], group["weight_decay"]) == (0.9, 0.3)
    assert plan.promise is not None and plan.promise.adam_step == 0
    assert all(float(state["step"]) == 0 for state in adam.state.values())
    take_back(root, before)


def test_a_rule_of_another_is_refused(tmp_path: Path) -> None:
    """A scheduler of somebody's own with the same keys, and rates that are not by this rule."""
    root = espnet(tmp_path / "run", 10)
    state = torch.load(root / "checkpoint.pth", weights_only=True)
    state["schedulers"][0]["_last_lr"] = [1.5e-4]
    torch.save(state, root / "checkpoint.pth")
    with pytest.raises(SurgeryError, match="the scheduler's last rate is"):
        surgery.plan(Run.open(root), from_data({"set": {"lr": 1e-4}}))
