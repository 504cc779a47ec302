"""diff: two steps, two runs, before and after a surgery, and the same run at two parallel sizes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, plan, report, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.look.diff.diff import Diff, diff
from ckptsurgeon.look.diff.sides import Side
from ckptsurgeon.look.diff.surgery import of_receipt
from ckptsurgeon.plans.edits import Aside, Change, NewText, Rewrite
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.style import Style
from tests.conftest import Trained
from tests.support import deepspeed_engine, nemo_files
from tests.support.dcp_trainers import torchtitan
from tests.support.deepspeed_engine import Options
from tests.support.in_process import one_rank
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run
from tests.support.torch_files import load_shard
from tests.support.universal import convert
from tests.support.witness import of_diff, of_plan

OPTIM = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def steps(one: Path, a: int, other: Path, b: int, **more: Any) -> Diff:
    before = snapshot(one), snapshot(other)
    found = diff(Side(Run.open(one), a), Side(Run.open(other), b), **more)
    assert (snapshot(one), snapshot(other)) == before
    return found


def values(found: Diff) -> dict[str, tuple[Any, Any]]:
    return {c.field: (c.old, c.new) for c in found.changes if isinstance(c, Change)}


def operate(root: Path, **recipe: Any) -> Any:
    made = plan(Run.open(root), from_data(recipe))
    return made, surgery.apply(Run.open(root), made)


# --- two steps -----------------------------------------------------------------------------------


def test_two_steps_differ_in_counters_rates_and_tensors(trained: Trained) -> None:
    root = trained()
    found = steps(root, 4, root, 8)
    assert found.tensors is None and not found.same
    seen = values(found)
    assert seen["iteration"] == seen["global_steps"] == (4, 8)
    assert seen["consumed_train_samples"] == (32, 64)
    assert "lr" in seen and not any("rng" in field for field in seen)
    whole = steps(root, 4, root, 8, tensors=True)
    assert whole.changes == found.changes and whole.tensors is not None
    assert {c.name.split(".")[-1] for c in whole.tensors.changed} >= {"exp_avg", "exp_avg_sq"}
    assert not whole.tensors.missing and not whole.tensors.reshaped


def test_a_step_that_is_saved_twice_is_compared_once(tmp_path: Path) -> None:
    """The last step of NeMo, of which a second folder is a copy, and an earlier one."""
    root = nemo_files.make(tmp_path / "run")
    found = steps(root, 20, root, 30, tensors=True)
    assert values(found)["consumed_samples"] == (320, 480)
    assert not any("place by place" in text for text in found.not_compared)
    assert found.tensors is not None and not found.tensors.missing


def test_a_step_and_itself_and_a_copy_are_the_same(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    shutil.copytree(root, tmp_path / "copy", symlinks=True)
    for other in (root, tmp_path / "copy"):
        found = steps(root, 8, other, 8, tensors=True)
        assert found.same and found.changes == () and found.tensors is not None
    assert found.tensors.identical > 30
    assert diff(Side(Run.open(root), None), Side(Run.open(tmp_path / "copy"), None)).same


def test_one_element_is_seen_with_its_size(trained: Trained, tmp_path: Path) -> None:
    root, copy = trained(), tmp_path / "copy"
    shutil.copytree(root, copy, symlinks=True)
    path = copy / "global_step8" / OPTIM
    held = load_shard(path)
    flat = held["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
    norm = float(flat.norm())
    flat[7] += 0.5
    torch.save(held, path)
    assert steps(root, 8, copy, 8).same
    found = steps(root, 8, copy, 8, tensors=True)
    assert found.changes == () and found.tensors is not None
    (changed,) = found.tensors.changed
    assert changed.path[-1] == "exp_avg" and changed.elements == 1
    assert changed.largest == pytest.approx(0.5) and changed.file.endswith(OPTIM)
    assert changed.relative == pytest.approx(0.5 / norm)


def test_keys_and_tensors_that_one_side_lacks_are_named(trained: Trained, tmp_path: Path) -> None:
    root, copy = trained(), tmp_path / "copy"
    shutil.copytree(root, copy, symlinks=True)
    path = copy / "global_step8" / "mp_rank_00_model_states.pt"
    held = load_shard(path)
    name, weight = next(iter(held["module"].items()))
    held["module"][name] = torch.cat([weight, weight])
    del held["module"]["final_layernorm.bias"]
    held["new"] = float("nan")
    torch.save(held, path)
    found = steps(root, 8, copy, 8, tensors=True)
    assert values(found)["new"] == ("absent", pytest.approx(float("nan"), nan_ok=True))
    assert found.tensors is not None
    ((lacking, where),) = found.tensors.missing
    assert lacking.endswith("final_layernorm.bias") and where == "only in the first"
    ((grown, old, new),) = found.tensors.reshaped
    assert grown.endswith(name) and (old, new) == ("float32 [256, 32]", "float32 [512, 32]")


# --- two runs ------------------------------------------------------------------------------------


def test_a_run_and_its_branch_differ_in_steps_pointers_and_the_edit(
    trained: Trained, tmp_path: Path
) -> None:
    root, branch = trained(), tmp_path / "branch"
    shutil.copytree(root, branch, symlinks=True)
    made, _ = operate(branch, rollback={"to": 4}, set={"beta2": 0.9})
    found = diff(Side(Run.open(root), None), Side(Run.open(branch), None), tensors=True)
    assert of_diff(found) == of_plan(made.changes, of_diff(found))
    gone = [c.file for c in found.changes if isinstance(c, Aside) and c.field == "checkpoint"]
    assert gone == ["global_step6", "global_step8"]
    assert NewText("latest", "latest", "global_step8", "global_step4") in found.changes
    text = report.diff(found, Style())
    assert "- 6 8                    only in run" in text and "attic" not in text
    back = diff(Side(Run.open(branch), None), Side(Run.open(root), None))
    assert "+ 6 8" in report.diff(back, Style())
    made_there = [c.file for c in back.changes if isinstance(c, Rewrite) and c.new_file]
    assert made_there[:2] == gone


def test_the_configs_of_two_runs_are_compared_key_by_key(trained: Trained, tmp_path: Path) -> None:
    root, other = trained(), tmp_path / "other"
    shutil.copytree(root, other, symlinks=True)
    config = other / "train.yaml"
    config.write_text(config.read_text().replace("\nseed: 1234\n", "\nseed: 7\n"))
    found = diff(Side(Run.open(root), None), Side(Run.open(other), None))
    assert found.changes == (Change("train.yaml", "seed", 1234, 7),)


# --- a surgery -----------------------------------------------------------------------------------


def test_a_surgery_on_json_is_seen_value_by_value(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    (root / "checkpoint-4" / "trainer_state.json").write_text(
        json.dumps({"global_step": 4, "log_history": [{"loss": 2.0, "step": 1}]}, indent=2)
    )
    operate(root, set={"iteration": 5})
    assert values(of_receipt(Run.open(root), "0001")) == {"global_step": (4, 5)}


def test_a_surgery_is_seen_as_it_was_when_others_came_after_it(trained: Trained) -> None:
    root = trained()
    first, one = operate(root, reset=["moments"], set={"lr": 5e-4})
    second, two = operate(root, set={"lr": 2e-4, "beta1": 0.8})
    third, three = operate(root, rollback={"to": 4})
    run = Run.open(root)
    for made, receipt in ((first, one), (second, two), (third, three)):
        before = snapshot(root)
        found = of_diff(of_receipt(run, receipt.id, tensors=True))
        assert found == of_plan(made.changes, found)
        assert snapshot(root) == before
    assert of_receipt(run, "2", tensors=True).tensors is not None


def test_a_pointer_that_the_trainer_set_since_is_told_as_the_surgery_left_it(
    trained: Trained,
) -> None:
    root = trained()
    planned, _ = operate(root, rollback={"to": 4})
    told = of_receipt(Run.open(root), "1").changes
    notes = [
        {c.note for c in changes if isinstance(c, Rewrite) and c.new_file}
        for changes in (told, planned.changes)
    ]
    assert notes[0] == notes[1] and len(notes[0]) == 2
    for name, text in (("latest", "global_step10"), ("latest_checkpointed_iteration.txt", "10")):
        assert (root / name).exists()
        (root / name).write_text(text)
    (root / "global_step4").rename(root / "global_step10")  # as a save and a clean-up leave it
    assert of_receipt(Run.open(root), "1").changes == told
    pointers = [c for c in told if isinstance(c, Change) and c.field == "latest"]
    assert [(c.old, c.new) for c in pointers] == [
        ("global_step8", "global_step4"), ("8", "4"),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_surgery_on_values_that_are_files_of_their_own(tmp_path: Path) -> None:
    with one_rank():
        root = torchtitan(tmp_path / "run")
    made, receipt = operate(root, reset=["moments"], set={"lr": 5e-4})
    found = of_diff(of_receipt(Run.open(root), receipt.id, tensors=True))
    assert found == of_plan(made.changes, found)


def test_a_surgery_that_is_not_there_undone_or_pruned_is_refused(trained: Trained) -> None:
    root = trained()
    run = Run.open(root)
    with pytest.raises(UsageError, match="no receipt 0007"):
        of_receipt(run, "7")
    operate(root, set={"lr": 5e-4})
    surgery.apply(run, surgery.plan_undo(run))
    with pytest.raises(UsageError, match="0001 was undone by 0002"):
        of_receipt(run, "1")
    with pytest.raises(UsageError, match="0002 is an undo"):
        of_receipt(run, "2")
    operate(root, set={"clip_grad": 0.5}, rollback={"to": 4})
    shutil.rmtree(root / ".ckptsurgeon" / "attic" / "0003")
    with pytest.raises(SurgeryError, match="attic was pruned"):
        of_receipt(run, "3")


# --- other layouts -------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    with deepspeed_engine.process_group():
        yield


def test_the_same_run_saved_at_two_parallel_sizes_has_no_difference(
    tmp_path: Path, alone: None
) -> None:
    """Two ranks of a real DeepSpeed save; one rank loads their universal copy and saves it."""
    many, few = tmp_path / "many", tmp_path / "few"
    options = Options(stage=1, dtype="bf16")
    deepspeed_engine.launched("make", many, options)
    copy = convert(many)
    loading = {"checkpoint": {"load_universal": True}, "train_micro_batch_size_per_gpu": 4}
    engine = deepspeed_engine.build(replace(options, config=loading))
    (many / "latest").write_text(copy.name)
    engine.load_checkpoint(str(many))
    (many / "latest").write_text("global_step6")
    shutil.rmtree(copy)
    engine.save_checkpoint(str(few), client_state=deepspeed_engine.client(6))

    found = steps(many, 6, few, 6, tensors=True)
    assert found.changes == () and found.same
    assert found.tensors is not None and found.tensors.identical == 6 * 4
    (said,) = found.not_compared
    assert "cut in another way" in said


def test_what_two_layouts_keep_otherwise_is_said(tmp_path: Path, alone: None) -> None:
    """ZeRO 1 and 0: stage 0 numbers its moments, so weights alone are joined."""
    for stage in (0, 1):
        deepspeed_engine.make(tmp_path / str(stage), Options(stage=stage), 3)
    found = steps(tmp_path / "0", 3, tmp_path / "1", 3, tensors=True)
    assert found.tensors is not None
    assert found.tensors.identical + len(found.tensors.changed) == 6
    assert any("only one side names" in text for text in found.not_compared)
