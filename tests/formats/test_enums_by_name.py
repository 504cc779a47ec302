"""Steps that trainers on Debian 12's Python saved: members of enums are in them by name."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run
from ckptsurgeon.files.pickles.tree import Object, named
from ckptsurgeon.formats.schedules.transformers import schedule
from tests.conftest import Trained
from tests.support import enums_by_name
from tests.support.dcp_trainers import torchtitan
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back
from tests.support.torch_files import load_shard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
RECIPE = {"set": {"beta2": 0.97}, "reset": ["moments"]}


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.long
def test_a_zero_step_is_edited(trained: Trained, zero: int) -> None:
    root = trained(zero=zero)
    shards = sorted((root / "global_step8").glob("*zero_pp_rank_*_optim_states.pt"))
    for shard in shards:
        state = load_shard(shard)
        torch.save(state, shard, pickle_module=enums_by_name.MODULE)
        assert b"getattr" in shard.read_bytes()
    before = snapshot(root)
    assert f"zero {zero}" in Run.open(root).checkpoint(8).state().dialect
    plan = operate(root, RECIPE)
    assert plan.promise is not None and plan.promise.betas == (0.9, 0.97)
    for shard in shards:
        outer = load_shard(shard)["optimizer_state_dict"]
        inner = outer.get("base_optimizer_state") or outer["optimizer_state_dict"]
        assert all(group["betas"][1] == 0.97 for group in inner["param_groups"])
        assert all(not state["exp_avg"].any() for state in inner["state"].values())
    take_back(root, before)


def test_a_schedule_of_the_trainer_is_known() -> None:
    kind = named("transformers.trainer_utils", "SchedulerType")
    by_value, by_name = (
        schedule({"lr_scheduler_type": Object(kind, (word,)), "warmup_steps": 2}, 10)
        for word in ("cosine", "COSINE")
    )
    assert by_value is not None and by_name is not None
    assert [by_name(step) for step in range(10)] == [by_value(step) for step in range(10)]
    assert by_name(1) == 0.5 and by_name(6) == pytest.approx(0.5)


def test_a_step_of_torch_distributed_is_edited(tmp_path: Path) -> None:
    root = torchtitan(tmp_path / "run")
    file = next(root.glob("step-6/.metadata"))
    file.write_bytes(enums_by_name.dumped(pickle.loads(file.read_bytes()), 4))
    assert b"getattr" in file.read_bytes()
    before = snapshot(root)
    plan = operate(root, RECIPE)
    assert plan.promise is not None and plan.promise.betas == (0.9, 0.97)
    assert b"getattr" in file.read_bytes()
    take_back(root, before)
