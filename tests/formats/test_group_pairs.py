"""What a promise says of param groups that differ in their betas or eps: both, of each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, look, plan, report
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.style import Style

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.distributed")

PAIRS = st.tuples(
    st.sampled_from([(0.9, 0.95), (0.8, 0.9), (0.9, 0.99)]), st.sampled_from([1e-8, 1e-6, 1e-10])
)


def by_parameter(root: Path, pairs: list[Any]) -> None:
    """As torchtitan saves them: each parameter has the settings of its group."""
    flat: dict[str, Any] = {}
    for number, (betas, eps) in enumerate(pairs):
        held = {"lr": 1e-3, "betas": betas, "eps": eps, "weight_decay": 0.1}
        flat |= {f"param_groups.w{number}.{key}": value for key, value in held.items()}
        moments = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
        state = {"step": torch.tensor(4.0), **moments}
        flat |= {f"state.w{number}.{key}": value for key, value in state.items()}
    weights = {f"w{number}": torch.ones(2) for number in range(len(pairs))}
    beside = {"lr_scheduler": {"last_epoch": 4}, "train_state": {"step": 4}}
    dcp.save({**weights, "optimizer": flat, **beside}, checkpoint_id=root / "step-4", no_dist=True)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pairs=st.lists(PAIRS, min_size=1, max_size=4))
def test_each_pair_is_one_that_a_group_holds(tmp_path: Path, pairs: list[Any]) -> None:
    """Of settings that each parameter has for itself, every different pair once."""
    root = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    by_parameter(root, pairs)
    run = Run.open(root)
    found = look.inspect(run).promise.groups
    several = len({betas for betas, _ in pairs}) > 1 or len({eps for _, eps in pairs}) > 1
    assert found == (tuple(dict.fromkeys(pairs)) if several else None)
    text = report.status(run, run.state(4), None, Style(100))
    assert "nothing (by group)" not in text and "| nothing" not in text


def test_one_eps_for_groups_with_other_betas_is_said_once(tmp_path: Path) -> None:
    by_parameter(tmp_path, [((0.9, 0.95), 1e-8), ((0.8, 0.9), 1e-8)])
    made = plan(Run.open(tmp_path), from_data({"set": {"eps": 1e-6}}))
    assert made.promise is not None
    assert made.promise.groups == (((0.9, 0.95), 1e-6), ((0.8, 0.9), 1e-6))
