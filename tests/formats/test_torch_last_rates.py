"""States of torch's schedulers without what torch keeps beside their rule: torch before 1.4, and
classes with a `state_dict` of their own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import PEAK, schedulers
from tests.support.trainer_step import save_step

BESIDE = ("_last_lr", "_step_count", "_get_lr_called_within_step", "_is_initial", "verbose")
WANTED: tuple[Mapping[str, Any], ...] = (
    {"set": {"lr": "0.5x"}},
    {"set": {"position": 3}},
    {"cooldown": {"steps": 5, "shape": "linear", "to": 0.0}},
    {"cooldown": {"steps": 5, "shape": "cosine", "to": 0.0}},
)


@pytest.mark.long
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(schedulers())),
    without=st.sets(st.sampled_from(BESIDE)),
    wanted=st.sampled_from(WANTED),
)
def test_what_lies_beside_the_rule_changes_no_plan(
    tmp_path: Path, name: str, without: set[str], wanted: Mapping[str, Any]
) -> None:
    """The rates are those of the groups, too: the promise is the same, or the refusal is."""
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    save(folder / "whole", name, set())
    save(folder / "less", name, without)
    assert outcome(folder / "less", wanted) == outcome(folder / "whole", wanted)


def outcome(root: Path, wanted: Mapping[str, Any]) -> tuple[str, Any]:
    try:
        made = plan(Run.open(root), from_data(wanted))
    except SurgeryError as error:
        return str(error), None
    assert made.promise is not None
    left = [change for change in made.changes if not any(key in str(change) for key in BESIDE)]
    return f"{len(left)} changes", made.promise.lr


def save(root: Path, name: str, without: set[str]) -> None:
    """A step of Hugging Face's Trainer."""
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=PEAK)
    with warnings.catch_warnings():  # of a step that has no gradients
        warnings.simplefilter("ignore")
        schedule = schedulers()[name](adam)
        for _ in range(6):
            adam.step()
            schedule.step()
    state = lessened(schedule.state_dict(), without)
    save_step(root / "checkpoint-6", adam.state_dict(), state, 6)


def lessened(state: dict[str, Any], without: set[str]) -> dict[str, Any]:
    inner = state.get("_schedulers")
    more = {} if inner is None else {"_schedulers": [lessened(each, without) for each in inner]}
    return {key: value for key, value in {**state, **more}.items() if key not in without}
