"""Megatron-LM's torch_dcp and fsdp_dtensor: what was set, read back by torch's own loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.megatron_flat import NAMES, WRAPPED, gathered, loaded, save
from tests.support.new_numbers import cases, same
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

RECIPE: dict[str, Any] = {
    "rollback": {"to": 20},
    "set": {"lr": 3e-5, "min_lr": 3e-6, "beta2": 0.99, "eps": 1e-7, "weight_decay": 0.05},
    "reset": ["moments"],
}


@pytest.mark.parametrize("named", [True, False])
def test_what_was_set_is_what_is_loaded(tmp_path: Path, named: bool) -> None:
    root = save(tmp_path, named=named)
    before = snapshot(root)
    promise = operate(root, RECIPE).promise
    assert promise is not None and promise.step == 21
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "20"
    state = loaded(root, 20, named=named)
    assert state["iteration"] == 20 and state["args"].consumed_train_samples == 320
    schedule = state["opt_param_scheduler"]
    assert (schedule["max_lr"], schedule["min_lr"]) == (3e-5, 3e-6)
    assert (schedule["start_wd"], schedule["end_wd"]) == (0.05, 0.05)
    if named:
        groups = list(state["optimizer"]["param_to_group_meta"].values())
        assert groups[1] == groups[2], "the loader refuses two of one group that differ"
    else:
        groups = state["optimizer"]["optimizer"]["param_groups"]
    moments = (state["optimizer"] if named else state["optimizer"]["optimizer"])["state"]
    assert len(moments) == len(NAMES)
    assert len(groups) == len(NAMES) if named else len(groups) == 2
    for group in groups:
        assert (group["max_lr"], group["min_lr"], group["lr"]) == (3e-5, 3e-6, promise.lr)
        assert tuple(group["betas"]) == (0.9, 0.99) and group["eps"] == 1e-7 and group["step"] == 0
    for entry in moments.values():
        assert not entry["exp_avg"].any() and not entry["exp_avg_sq"].any()
    assert promise.weight_decay == (0.05, 0.0)
    assert promise.betas == (0.9, 0.99) and promise.eps == 1e-7 and promise.groups is None
    take_back(root, before)


def test_some_parameters_are_reset_by_their_names(tmp_path: Path) -> None:
    root = save(tmp_path)
    operate(root, {"reset": ["moments"], "moments": {"params": r"up\.weight"}})
    state = loaded(root, 30)["optimizer"]["state"]
    assert not state[WRAPPED[NAMES[0]]]["exp_avg"].any()
    assert state[WRAPPED[NAMES[1]]]["exp_avg"].all()


def test_counters_flags_and_the_scale(tmp_path: Path) -> None:
    root = save(tmp_path / "named")
    promise = operate(root, {"skip": ["31-40"], "skip_by_counters": True}).promise
    assert promise is not None and promise.consumed_samples == 640
    assert loaded(root, 30)["args"].consumed_train_samples == 640
    plan = surgery.plan(Run.open(root), from_data({"set": {"lr": 3e-5}}))
    assert any("relaunch with --lr 3e-05:" in text for text in plan.warnings)
    root = save(tmp_path / "numbered", named=False)
    operate(root, {"set": {"loss_scale": 1024}})
    assert float(loaded(root, 30, named=False)["optimizer"]["grad_scaler"]["scale"]) == 1024


def test_what_is_missing_or_contradicts_itself_is_found(tmp_path: Path) -> None:
    root = save(tmp_path)
    assert look.verify(Run.open(root), level=4).findings == ()
    (root / "iter_0000030" / "__0_0.distcp").unlink()
    run = Run.open(root)
    assert not run.complete(30) and run.complete(20)
    with pytest.raises(SurgeryError, match="incomplete"):
        surgery.plan(run, from_data({"set": {"eps": 1e-6}}))
    operate(root, {"rollback": {"to": 20}})


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.long
def test_new_numbers_are_torchs(tmp_path: Path, named: bool) -> None:
    root = save(tmp_path, named=named, shuffled=True)
    first, last = (gathered(root, step, named=named) for step in (20, 30))
    before = snapshot(root)
    name = NAMES[1] if not named else WRAPPED[NAMES[1]]
    for recipe, expected in cases(20, 30, NAMES[1]).values():
        if "scale" in recipe:
            recipe["scale"]["params"] = f"^{name}$"
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        assert look.verify(Run.open(root), level=4).findings == ()
        same(gathered(root, 30, named=named), expected(first, last), last)
        take_back(root, before)


def test_the_order_of_the_model_is_not_that_of_the_writers(tmp_path: Path) -> None:
    root = save(tmp_path, named=False, shuffled=True)
    saved = Saved.open(root / "iter_0000030")
    wanted = [f"model.{name}" for name in NAMES]
    assert [name for name in saved.items if name in wanted] != wanted
    assert [name for name in saved.flattened() if name in wanted] == wanted


@pytest.mark.parametrize("named", [True, False])
def test_groups_that_have_names_need_nothing_else_to_be_told_apart(
    tmp_path: Path, named: bool
) -> None:
    root = save(tmp_path, named=named, twins=True)
    warnings = surgery.plan(Run.open(root), from_data({"set": {"beta2": 0.99}})).warnings
    assert any("does not tell them apart" in text for text in warnings) == (not named)


MIXED = ((0, 1), (2, 3))
"""Both groups have parameters of one shape: which of the model's are in which is not saved."""


def test_masters_without_names_are_refused(tmp_path: Path) -> None:
    root = save(tmp_path, named=False, groups=MIXED)
    for recipe in ({"average": {"last": 2}}, {"clip_moments": {"above": 2}}):
        with pytest.raises(SurgeryError, match="which weights its fp32 masters are of") as error:
            surgery.plan(Run.open(root), from_data(recipe))
        assert "reset, graft" in " ".join(error.value.next)
    assert surgery.plan(Run.open(root), from_data({"graft": {"step": 20}})).changes


def test_moments_beside_fp32_weights_may_stay_numbered(tmp_path: Path) -> None:
    root = save(tmp_path, named=False, groups=MIXED, masters=False)
    before = snapshot(root)
    plan = surgery.plan(Run.open(root), from_data({"average": {"last": 2, "moments": "average"}}))
    told = {change.field for change in plan.changes if isinstance(change, Change)}
    assert {f"weights of {NAMES[0]}", "exp_avg of parameter 3"} <= told
    surgery.apply(Run.open(root), plan)
    assert look.verify(Run.open(root), level=4).findings == ()
    take_back(root, before)
    with pytest.raises(SurgeryError, match="have no names"):
        scale = {"params": "up", "by": 0.5, "moments": "scale"}
        surgery.plan(Run.open(root), from_data({"scale": scale}))
    with pytest.raises(SurgeryError, match="does not say which parameter"):
        surgery.plan(Run.open(root), from_data({"graft": {"step": 20, "params": "up"}}))
