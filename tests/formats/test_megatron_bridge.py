"""Megatron-Bridge (NeMo 2): its pointer, its counters, and what its config must say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.launch.flags import launch_flags
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support import megatron_dist, megatron_flat
from tests.support.megatron_bridge import resumed, save
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

RECIPE: dict[str, Any] = {
    "rollback": {"to": 20},
    "set": {"lr": 3e-5, "beta2": 0.99},
    "reset": ["moments"],
}


@pytest.mark.parametrize("flat", [False, True])
def test_a_rollback_is_what_bridge_resumes(tmp_path: Path, flat: bool) -> None:
    root = save(tmp_path, flat=flat)
    before = snapshot(root)
    assert Run.open(root).format.name == "megatron-bridge" and Run.open(root).latest() == 30
    promise = operate(root, RECIPE).promise
    assert promise is not None and promise.step == 21 and promise.consumed_samples == 320
    step, counters = resumed(root)
    assert (step, counters["step"], counters["consumed_train_samples"]) == (20, 20, 320)
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "20"
    if flat:
        held = megatron_flat.loaded(root, 20, args=False)
        groups = list(held["optimizer"]["param_to_group_meta"].values())
    else:
        common, _ = megatron_dist.loaded(root, 20)
        groups = common["optimizer"]["optimizer"]["param_groups"]
    for group in groups:
        assert (group["max_lr"], group["lr"]) == (3e-5, promise.lr) and group["step"] == 0
        assert tuple(group["betas"]) == (0.9, 0.99)
    take_back(root, before)


def test_the_plan_names_the_keys_of_the_config(tmp_path: Path) -> None:
    root = save(tmp_path / "run")
    plan = surgery.plan(Run.open(root), from_data({"set": {"lr": 3e-5, "decay": 8000}}))
    (text,) = [text for text in plan.warnings if text.startswith("relaunch with")]
    assert "relaunch with optimizer.lr=3e-05 scheduler.lr_decay_iters=500:" in text
    assert "scheduler.use_checkpoint_opt_param_scheduler=true" in text and "--" not in text
    flags = launch_flags(Run.open(root))
    assert flags[0] == f"checkpoint.load={root}" and "optimizer.lr=6e-05" in flags
    assert "scheduler.lr_warmup_iters=10" in flags and not any("--" in flag for flag in flags)
    for recipe, key in (
        ({"set": {"clip_grad": 0.3}}, "optimizer.clip_grad=0.3"),
        ({"skip": ["31-33"]}, "train.iterations_to_skip=[31,32,33]"),
        ({"set": {"seed": 7}}, "rng.seed=7"),
    ):
        with pytest.raises(SurgeryError) as error:
            surgery.plan(Run.open(root), from_data(recipe))
        assert key in " ".join(error.value.next)


def test_the_rate_that_bridge_takes_from_its_config_is_told(tmp_path: Path) -> None:
    """Its recipes override the saved schedule; a group is found by its peak all the same."""
    root = save(tmp_path, override=True)
    plan = surgery.plan(Run.open(root), from_data({"set": {"lr": 3e-5}}))
    told = "\n".join(plan.warnings)
    assert "scheduler.override_opt_param_scheduler=true: warm-up, decay" in told
    assert "optimizer.lr, which must be 3e-05" in told


def test_the_counters_are_those_of_the_step(tmp_path: Path) -> None:
    root = save(tmp_path)
    before = snapshot(root)
    promise = operate(root, {"skip": ["31-40"], "skip_by_counters": True}).promise
    assert promise is not None and promise.consumed_samples == 640
    assert resumed(root)[1]["consumed_train_samples"] == 640
    take_back(root, before)
    operate(root, {"set": {"iteration": 25}})
    assert resumed(root)[0] == 30 and resumed(root)[1]["step"] == 25
    assert surgery.plan(Run.open(root), from_data({"rollback": {"to": 30}})).empty
    (root / "latest_train_state.pt").unlink()
    with pytest.raises(SurgeryError, match="counts iteration 25") as error:
        surgery.plan(Run.open(root), from_data({"rollback": {"to": 30}}))
    assert "checkpoint.ckpt_step=30" in error.value.next[0]


def test_a_rollback_points_to_the_folder_whatever_the_counter_is_set_to(tmp_path: Path) -> None:
    root = save(tmp_path)
    before = snapshot(root)
    promise = operate(root, {"rollback": {"to": 20}, "set": {"iteration": 25}}).promise
    assert promise is not None and promise.step == 26
    assert resumed(root)[0] == 20 and resumed(root)[1]["step"] == 25
    take_back(root, before)


def test_a_transplant_points_to_the_folder_that_it_numbers_anew(tmp_path: Path) -> None:
    source, root = save(tmp_path / "source"), save(tmp_path / "run", (20,))
    before = snapshot(root)
    recipe = from_data({"transplant": {"source": str(source), "step": 30}})
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), recipe))
    assert resumed(root)[0] == resumed(root)[1]["step"] == Run.open(root).latest() == 30
    take_back(root, before)


def test_pointers_that_are_lost_or_disagree_are_repaired(tmp_path: Path) -> None:
    root = save(tmp_path)
    (root / "latest_train_state.pt").write_bytes(b"")
    findings = look.verify(Run.open(root)).findings
    assert any("latest_train_state.pt is missing or names no step" in text for text in findings)
    operate(root, {"repair_latest": {}})
    assert resumed(root)[0] == 30 and Run.open(root).latest() == 30
    (root / "iter_0000030" / "train_state.pt").unlink()
    assert not Run.open(root).complete(30)


@pytest.mark.long
def test_what_is_not_persistent_has_a_pointer_of_its_own(tmp_path: Path) -> None:
    """Bridge reads its counters there too, and its tracker nowhere."""
    root = save(tmp_path / "run", (10, 30), tier="global")
    tier = save(root / "non_persistent", (18, 40), tier="global")
    (tier / "latest_checkpointed_iteration.txt").write_text("18")
    assert Run.open(root).latest() == 40
    before = snapshot(root)
    operate(root, {"rollback": {"to": 10}})
    assert Run.open(root).latest() == resumed(root)[0] == 10
    assert [path.name for path in tier.iterdir()] == []
    take_back(root, before)
    operate(root, {"rollback": {"to": 18}})
    assert Run.open(root).latest() == resumed(tier)[0] == 18
    assert (tier / "latest_checkpointed_iteration.txt").read_text() == "18"
    assert [path.name for path in tier.glob("iter_*")] == ["iter_0000018"]


def test_a_config_that_can_not_be_read_is_told(tmp_path: Path) -> None:
    root = save(tmp_path)
    (root / "iter_0000030" / "run_config.yaml").write_text("a: &x 1\nb: *x\n")
    plan = surgery.plan(Run.open(root), from_data({"set": {"lr": 3e-5}}))
    assert any("run_config.yaml can't be read" in text for text in plan.warnings)


@pytest.mark.parametrize("flat", [False, True])
def test_what_a_surgery_makes_lies_in_the_step(tmp_path: Path, flat: bool) -> None:
    """Its counters alone are copied out of it."""
    root = save(tmp_path, flat=flat, sharding="dp_reshardable")
    operate(root, {**RECIPE, "set": {"consumed_samples": 80, "lr": 3e-5}})
    made = list(root.rglob("__ckptsurgeon*"))
    assert {path.parent.name for path in made} <= {"iter_0000020"} and len(made) == 1
    assert resumed(root)[1]["consumed_train_samples"] == 80
