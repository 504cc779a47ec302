"""metaseq and fairseq: every shard and its copy is edited, and what only flags say is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.diff.diff import diff
from ckptsurgeon.look.diff.sides import Side
from ckptsurgeon.plans.edits import Change, Replace
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.fork import fork
from tests.support.fairseq_files import NAMES, PEAK, held, make_run, names, rate, refused, resumed
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.mark.parametrize(
    "layout",
    [{}, {"fused": True}, {"folders": True}, {"arguments": True}, {"suffixes": [""]}],
    ids=["shards", "step-in-group", "folders", "namespace", "one-file"],
)
def test_every_layout_is_read_and_verified(tmp_path: Path, layout: dict[str, Any]) -> None:
    root = make_run(tmp_path / "run", **layout)
    run = Run.open(root)
    assert run.format.name == "fairseq"
    assert run.steps() == [10, 20, 30]
    assert run.latest() == 30
    assert look.verify(run, level=4).findings == ()
    state = look.inspect(run)
    assert state.data_parallel * state.model_parallel == len(layout.get("suffixes", NAMES))
    assert state.promise.step == 31
    assert state.promise.lr == rate(30)
    assert (state.promise.betas, state.promise.adam_step) == ((0.9, 0.95), 30)
    assert state.promise.loss_scale == 8.0
    assert "flags" in state.scheduler
    assert not state.promise.asked  # fairseq was, and no metaseq


@pytest.mark.parametrize("fused", [False, True])
def test_betas_eps_and_decay_reach_every_shard_and_its_copy(tmp_path: Path, fused: bool) -> None:
    root = make_run(tmp_path / "run", fused=fused)
    before, listed = snapshot(root), names(root)
    values = {"beta1": 0.0, "beta2": 0.98, "eps": 1.0, "weight_decay": 0.05, "loss_scale": 2.0}
    operate(root, {"set": values})
    for suffix in NAMES:
        numbered, last = (root / f"checkpoint_{name}{suffix}.pt" for name in ("30", "last"))
        assert numbered.read_bytes() == last.read_bytes()
        adam, document = resumed(last)
        group = adam.param_groups[0]
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.0, 0.98), 1.0, 0.05)
        assert document["last_optimizer_state"]["loss_scale"] == 2.0
    assert names(root) == listed
    take_back(root, before)


def test_a_reset_zeroes_the_moments_and_the_step_wherever_it_is(tmp_path: Path) -> None:
    for fused in (False, True):
        root = make_run(tmp_path / f"run-{fused}", fused=fused)
        before = snapshot(root)
        operate(root, {"reset": ["moments", "loss_scale"]})
        adam, document = resumed(root / f"checkpoint_last{NAMES[3]}.pt")
        for state in adam.state.values():
            assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()
            assert state["step"] == 0
        assert document["last_optimizer_state"]["loss_scale"] == 4
        take_back(root, before)


def test_a_rollback_makes_the_last_files_copies_of_the_edited_step(run: Path) -> None:
    before = snapshot(run)
    operate(run, {"rollback": {"to": 10}, "set": {"beta2": 0.98}, "reset": ["moments"]})
    assert names(run) == {f"checkpoint_{n}{suffix}.pt" for n in ("10", "last") for suffix in NAMES}
    for suffix in NAMES:
        last = run / f"checkpoint_last{suffix}.pt"
        assert torch.load(last)["optimizer_history"][-1]["num_updates"] == 10
        assert last.read_bytes() == (run / f"checkpoint_10{suffix}.pt").read_bytes()
        assert held(last, "betas") == (0.9, 0.98)
        assert held(last, "lr") == rate(10)
    assert Run.open(run).latest() == 10
    take_back(run, before)


def test_a_rollback_without_an_edit_copies_too(run: Path) -> None:
    before = snapshot(run)
    plan = operate(run, {"rollback": {"to": 20}})
    assert plan.promise is not None and plan.promise.adam_step == 20
    replaced = [edit.file for edit in plan.edits if isinstance(edit, Replace)]
    assert replaced[0] == replaced[-1]  # empty until the others are done: no reader mixes steps
    for suffix in NAMES:
        last = (run / f"checkpoint_last{suffix}.pt").read_bytes()
        assert last == (run / f"checkpoint_20{suffix}.pt").read_bytes()
    take_back(run, before)


def test_a_step_that_only_the_last_files_hold_is_one(run: Path) -> None:
    for suffix in NAMES:
        (run / f"checkpoint_30{suffix}.pt").unlink()
    before = snapshot(run)
    assert Run.open(run).latest() == 30
    operate(run, {"set": {"eps": 1e-6}})
    assert held(run / f"checkpoint_last{NAMES[2]}.pt", "eps") == 1e-6
    take_back(run, before)
    operate(run, {"rollback": {"to": 20}})
    assert Run.open(run).latest() == 20
    take_back(run, before)


def test_a_copy_that_was_cut_off_is_repaired(run: Path) -> None:
    torn = run / f"checkpoint_last{NAMES[1]}.pt"
    torn.write_bytes(torn.read_bytes()[:1000])
    shutil.copyfile(run / f"checkpoint_20{NAMES[2]}.pt", run / f"checkpoint_last{NAMES[2]}.pt")
    before = snapshot(run)
    assert look.verify(Run.open(run)).findings
    operate(run, {"repair_latest": {}})
    for suffix in NAMES:
        last = (run / f"checkpoint_last{suffix}.pt").read_bytes()
        assert last == (run / f"checkpoint_30{suffix}.pt").read_bytes()
    take_back(run, before)


def test_what_was_best_on_a_branch_leaves_with_it(run: Path) -> None:
    """fairseq ranks a new step by the scores in these names, and loads none of them by itself."""
    best = {30: ("_best", ".best_loss_4.1250"), 10: (".best_loss_4.5131",)}
    for step, stems in best.items():
        for stem in stems:
            for suffix in NAMES:
                source = run / f"checkpoint_{step}{suffix}.pt"
                shutil.copyfile(source, run / f"checkpoint{stem}{suffix}.pt")
    before = snapshot(run)
    assert Run.open(run).steps() == [10, 20, 30]
    operate(run, {"rollback": {"to": 20}, "set": {"eps": 1e-6}})
    stems = ("_10", "_20", "_last", ".best_loss_4.5131")
    assert names(run) == {f"checkpoint{stem}{suffix}.pt" for stem in stems for suffix in NAMES}
    take_back(run, before)
    for suffix in NAMES:  # a run that keeps no others: --no-epoch-checkpoints
        for step in (10, 20, 30):
            (run / f"checkpoint_{step}{suffix}.pt").unlink()
    before = snapshot(run)
    assert Run.open(run).steps() == [10, 30]
    operate(run, {"rollback": {"to": 10}, "set": {"eps": 1e-6}})
    assert held(run / f"checkpoint_last{NAMES[3]}.pt", "eps") == 1e-6
    take_back(run, before)


def test_steps_of_other_epochs_are_compared_place_by_place(run: Path) -> None:
    for epoch, step in ((1, 10), (2, 20)):
        for suffix in NAMES:
            named = run / f"checkpoint_{step}{suffix}.pt"
            named.rename(run / f"checkpoint_{epoch}_{step}{suffix}.pt")
    ends = Side(Run.open(run), 30)  # its names have no epoch
    for step in (10, 20):
        found = diff(Side(Run.open(run), step), ends, tensors=True)
        assert found.not_compared == () and found.tensors is not None and found.tensors.changed
        assert {change.file for change in found.changes if isinstance(change, Change)}


def test_a_schedule_is_refused_with_the_flags_that_make_it(run: Path) -> None:
    told = refused(run, {"set": {"lr": 9e-5, "warmup": 200, "decay": 1000}})
    assert "--lr 9e-05 --warmup-updates 200 --total-num-update 1000" in told
    assert "--restore-file" in told
    assert f"--lr {PEAK / 2} " in refused(run, {"set": {"lr": "0.5x"}})
    told = refused(run, {"set": {"decay_style": "constant"}})
    assert f"with --end-learning-rate {PEAK}" in told  # metaseq has no fixed one
    told = refused(run, {"set": {"decay_style": "cosine", "decay": 1000, "min_lr": 1e-6}})
    assert "--lr-scheduler cosine --min-lr 1e-06 --lr-period-updates 990" in told
    _, document = resumed(run / f"checkpoint_last{NAMES[0]}.pt", peak=9e-5)
    assert document["optimizer_history"][-1]["lr_scheduler_state"] == {"best": None}


def test_what_the_flags_decide_is_refused_with_the_flag(run: Path) -> None:
    assert "--skip-batches 31-40,40-50" in refused(run, {"skip": ["50-60", "31-40"]})
    assert "--skip-batches 31-32;" in refused(run, {"skip": ["29-32"]})  # 29 and 30 are past
    assert "--clip-norm 0.3" in refused(run, {"set": {"clip_grad": 0.3}})
    assert "--seed 7" in refused(run, {"set": {"seed": 7}})
    assert "counts it elsewhere" in refused(run, {"set": {"consumed_samples": 7}})


def test_missing_foreign_and_mixed_files_are_found(run: Path) -> None:
    (run / f"checkpoint_20{NAMES[3]}.pt").unlink()
    (run / "checkpoint_30-shard0.pt.backup").write_bytes(b"x")  # by its end no trainer counts it
    (run / "checkpoint_30-model_part-0-shard0.old.pt").write_bytes(b"x")
    shutil.copyfile(run / f"checkpoint_10{NAMES[0]}.pt", run / f"checkpoint_30{NAMES[0]}.pt")
    told = "\n".join(look.verify(Run.open(run), 20).findings)
    assert f"checkpoint_20{NAMES[3]}.pt" in told
    told = "\n".join(look.verify(Run.open(run), 30).findings)
    assert "checkpoint_30-model_part-0-shard0.old.pt: is counted by the trainer" in told
    assert "backup" not in told
    assert "was saved after 30 updates, and the other shards after 10" in told


def test_a_fork_has_its_own_last_files(run: Path, tmp_path: Path) -> None:
    before = snapshot(run)
    recipe = from_data({"set": {"eps": 1e-6}})
    made = fork(Run.open(run), 20, tmp_path / "branch", recipe, how="copy")
    assert Run.open(made.folder).latest() == 20
    assert held(made.folder / f"checkpoint_last{NAMES[1]}.pt", "eps") == 1e-6
    assert snapshot(run) == before


def test_a_shard_that_points_to_the_first_one_keeps_no_optimizer(run: Path) -> None:
    for suffix in NAMES[1:]:
        for name in ("30", "last"):
            path = run / f"checkpoint_{name}{suffix}.pt"
            document = torch.load(path)
            torch.save({**document, "last_optimizer_state": -1}, path)
    before = snapshot(run)
    operate(run, {"set": {"beta2": 0.97}})
    assert held(run / f"checkpoint_last{NAMES[0]}.pt", "betas") == (0.9, 0.97)
    assert torch.load(run / f"checkpoint_last{NAMES[1]}.pt")["last_optimizer_state"] == -1
    take_back(run, before)


def test_flags_of_the_saved_run_that_would_undo_a_surgery_are_told(tmp_path: Path) -> None:
    line = {
        "reset_optimizer": True, "optimizer_overrides": "{'betas': (0.9, 0.98)}",
        "reset_dataloader": True, "restore_file": "/runs/old/checkpoint_8.pt",
    }  # fmt: skip
    root = make_run(tmp_path / "run", command_line={"checkpoint": line})
    plan = surgery.plan(Run.open(root), from_data({"set": {"beta2": 0.99}}))
    told = "\n".join(plan.warnings)
    assert "--reset-optimizer: relaunch without it" in told
    assert "--reset-dataloader: relaunch without it" in told
    assert "--restore-file /runs/old/checkpoint_8.pt: a relaunch with it loads that again" in told
    assert "--optimizer-overrides \"{'betas': (0.9, 0.98)}\"" in told
    line = {"reset_optimizer": False, "optimizer_overrides": "{}"}
    line |= {"reset_dataloader": False, "restore_file": "checkpoint_last.pt"}
    root = make_run(tmp_path / "other", command_line={"checkpoint": line})
    plan = surgery.plan(Run.open(root), from_data({"set": {"beta2": 0.99}}))
    for word in ("--reset-", "overrides", "--restore-file"):
        assert word not in str(plan.warnings)


@pytest.mark.parametrize(("warmup", "kept"), [(0, True), (10, True), (100, False)])
def test_a_plateau_keeps_the_lr_of_the_groups(tmp_path: Path, warmup: int, kept: bool) -> None:
    """fairseq's reduce_lr_on_plateau sets an lr in its warm-up alone: a load leaves it."""
    flags = {"_name": "reduce_lr_on_plateau", "warmup_updates": warmup, "total_num_update": None}
    root = make_run(tmp_path / "run", command_line={"lr_scheduler": flags})
    if not kept:
        with pytest.raises(SurgeryError, match="from its flags at every load"):
            surgery.plan(Run.open(root), from_data({"set": {"lr": 3e-5}}))
        return
    plan = operate(root, {"set": {"lr": 3e-5}})
    assert plan.promise is not None and plan.promise.lr == 3e-5
    for suffix in NAMES:
        document = torch.load(root / f"checkpoint_last{suffix}.pt", weights_only=False)
        assert {g["lr"] for g in document["last_optimizer_state"]["param_groups"]} == {3e-5}
