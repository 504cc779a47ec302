"""Settings that the code of a described trainer moves: a new value may be replaced there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.recipe.file import from_data

PAGE = """name: own
files:
  "step_{step}.pt": {optimizers: [[optimizer]], schedulers: SCHEDULERS}
"""
NEW = {"lr": 1e-4, "weight_decay": 0.3, "beta1": 0.5, "beta2": 0.7}


def save(root: Path, moved: set[str], steps: list[int], scheduler: bool) -> None:
    """By a loop that makes each value anew where it is in `moved`."""
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(adam, factor=1.0)
    (group,) = adam.param_groups
    for step in range(1, steps[-1] + 1):
        share = 1 - step / 100
        group["lr"] = 1e-3 * share if "lr" in moved else 1e-3
        group["weight_decay"] = 0.1 * share if "weight_decay" in moved else 0.1
        group["betas"] = tuple(
            beta * share if f"beta{i}" in moved else beta for i, beta in enumerate((0.9, 0.95), 1)
        )
        group["params"][0].grad = torch.ones(2)
        adam.step()
        if step in steps:
            state = {"optimizer": adam.state_dict()}
            state |= {"scheduler": schedule.state_dict()} if scheduler else {}
            torch.save(state, root / f"step_{step}.pt")


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    moved=st.sets(st.sampled_from(sorted(NEW))),
    wanted=st.sampled_from(sorted(NEW)),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True).map(sorted),
    scheduler=st.booleans(),
)
def test_what_moved_and_nothing_saved_moves_is_said_to_be_the_codes(
    tmp_path: Path, moved: set[str], wanted: str, steps: list[int], scheduler: bool
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        root, page = Path(folder) / "run", Path(folder) / "own.yaml"
        root.mkdir()
        schedulers = "[[scheduler]]" if scheduler else "[]"
        page.write_text(PAGE.replace("SCHEDULERS", schedulers))
        save(root, moved, steps, scheduler)
        run = Run.open(root, str(page))
        recipe = from_data({"set": {wanted: NEW[wanted]}})
        moving = wanted in moved and len(steps) > 1 and not scheduler
        if scheduler and wanted == "lr" and "lr" in moved:
            return  # refused: the rate is not what the saved scheduler gives
        made = plan(run, recipe)
        assert any(f"{wanted} was " in note for note in made.warnings) is moving
        surgery.apply(run, made)
        again = plan(Run.open(root, str(page)), from_data({"set": {wanted: NEW[wanted] / 2}}))
        assert not any(f"{wanted} was " in note for note in again.warnings)
