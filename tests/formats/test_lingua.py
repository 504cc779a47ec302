"""Meta Lingua: its loader fills tensors where they are, and puts back no setting of a group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.described_runs import lingua, lingua_parts
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")


def resumed(root: Path) -> dict[str, Any]:
    """As `CheckpointManager.load` does, by torch's own functions: the settings of the first update,
    the moments that it is made with, and the rate of the second one."""
    folder = max(path for path in root.iterdir() if path.name.isdigit())
    model, adam, schedule = lingua_parts()
    schedule.load_state_dict(
        json.loads((folder / "train_state_00000.json").read_text())["scheduler"]
    )
    weights, optimizer = get_state_dict(model, adam)
    dcp.load({"model": weights, "optim": optimizer}, checkpoint_id=folder, no_dist=True)
    (group,) = adam.param_groups
    used = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    used["adam_step"] = {float(state["step"]) for state in adam.state.values()}
    used["moments"] = any(bool(state["exp_avg"].any()) for state in adam.state.values())
    adam.step()
    schedule.step()
    return {**used, "then": group["lr"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return lingua(tmp_path / "checkpoints")


def test_a_rate_is_that_of_every_update_but_the_first(run: Path) -> None:
    before, plain = snapshot(run), resumed(run)
    assert Run.open(run).format.name == "lingua"
    plan = operate(run, {"set": {"lr": 5e-4}})
    assert plan.promise is not None and plan.promise.lr is None
    assert "of the first update" in plan.promise.not_known["lr"]
    used = resumed(run)
    assert used == {**plain, "then": pytest.approx(plain["then"] / 2, rel=1e-12)}
    take_back(run, before)


@pytest.mark.parametrize("key", ["beta1", "beta2", "eps", "weight_decay"])
def test_what_the_config_decides_is_refused_with_its_key(run: Path, key: str) -> None:
    before = snapshot(run)
    with pytest.raises(SurgeryError, match=f"does not decide {key}") as refused:
        surgery.plan(Run.open(run), from_data({"set": {key: 0.125}}))
    assert refused.value.next[0].startswith("start with optim.")
    assert refused.value.next[0].endswith("=0.125")
    assert snapshot(run) == before


def test_a_rollback_and_a_reset_are_what_it_loads(run: Path) -> None:
    before = snapshot(run)
    plan = operate(run, {"rollback": {"to": 4}, "reset": ["moments"]})
    assert plan.promise is not None and (plan.promise.step, plan.promise.adam_step) == (5, 0)
    assert plan.promise.betas is None and plan.promise.weight_decay is None
    used = resumed(run)
    assert used["adam_step"] == {0.0} and not used["moments"]
    assert look.verify(Run.open(run), level=4).findings == ()
    take_back(run, before)


def test_folders_that_are_called_by_a_number_are_not_all_of_lingua(run: Path) -> None:
    """Anybody's folders of torch.distributed.checkpoint may be called so."""
    for path in run.glob("*/train_state_*.json"):
        path.unlink()
    with pytest.raises(SurgeryError, match="no training run"):
        Run.open(run)
