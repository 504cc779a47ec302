"""AdamW becomes SGDW and back in a run that goes on, and the trainer trains with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, report, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import from_data, load
from ckptsurgeon.report.style import Style
from tests.conftest import Trained
from tests.support.launch import REPO, first_line, launch
from tests.support.snapshot import snapshot

SHARD = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def swap(to: str, **more: Any) -> Any:
    return from_data({"swap_optimizer": {"to": to, **more}})


def states(root: Any, step: int) -> Any:
    shard = torch.load(root / f"global_step{step}" / SHARD, weights_only=False)
    return shard["optimizer_state_dict"]["base_optimizer_state"]["state"]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.long
def test_adamw_becomes_sgdw_and_adamw_again(trained: Trained, keep: bool) -> None:
    root = trained()
    before, moments = snapshot(root), states(root, 8)
    run = Run.open(root)
    recipe = swap("sgdw", momentum=0.8, keep=keep)
    wanted = plan(run, recipe)
    assert wanted.promise is not None
    surgery.apply(run, wanted)
    for key, state in states(root, 8).items():
        assert list(state) == (["step", "momentum_buffer"] if keep else ["step"])
        if keep:
            assert torch.equal(state["momentum_buffer"], moments[key]["exp_avg"])
    line = first_line(root)
    assert compare(wanted.promise, line) == []
    assert plan(run, recipe).empty
    assert look.verify(run, level=3).findings == ()

    launch(f"--config={root / 'train.yaml'}", "train_iters=10", "save_interval=10")
    trained_on = states(root, 10)
    assert all(set(state) == {"step", "momentum_buffer"} for state in trained_on.values())
    args = torch.load(root / "global_step10" / "mp_rank_00_model_states.pt", weights_only=False)[
        "args"
    ]
    assert (args.optimizer, args.sgd_momentum) == ("sgdw", 0.8)

    back = plan(run, swap("adamw"))
    assert back.promise is not None
    surgery.apply(run, back)
    assert states(root, 10) == {0: {}, 1: {}}
    told = json.loads(first_line(root))
    assert (told["adam_step"], told["betas"]) == (0, [0.9, 0.95])
    launch(f"--config={root / 'train.yaml'}", "train_iters=12", "save_interval=12")
    assert all(float(state["step"]) == 2 for state in states(root, 12).values())
    surgery.apply(run, surgery.plan_undo(run, back.id))
    surgery.apply(run, surgery.plan_undo(run, wanted.id))
    after = snapshot(root)
    assert {name: after[name] for name in before if "step8" in name} == {
        name: before[name] for name in before if "step8" in name
    }


def test_sgdw_without_momentum_trains_without_a_buffer(trained: Trained) -> None:
    """OPT's run 12.41."""
    root = trained()
    run = Run.open(root)
    surgery.apply(run, plan(run, load(REPO / "recipes" / "real-sgd.yaml")))
    launch(f"--config={root / 'train.yaml'}", "train_iters=10", "save_interval=10")
    assert all(list(state) == ["step"] for state in states(root, 10).values())
    folder = root / "global_step10"
    saved = torch.load(folder / SHARD, weights_only=False)["optimizer_state_dict"]
    groups = saved["base_optimizer_state"]["param_groups"]
    assert {group["momentum"] for group in groups} == {0.0}
    args = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["args"]
    assert (args.optimizer, args.sgd_momentum) == ("sgdw", 0.0)


def test_a_step_from_before_the_swap_is_resumed_with_its_own_optimizer(trained: Trained) -> None:
    root = trained()
    run = Run.open(root)
    surgery.apply(run, plan(run, swap("sgdw", momentum=0.8)))
    back = plan(run, from_data({"rollback": {"to": 4}}))
    assert back.promise is not None
    surgery.apply(run, back)
    assert compare(back.promise, first_line(root)) == []
    assert plan(run, from_data({"rollback": {"to": 4}})).empty
    surgery.apply(run, surgery.plan_undo(run))
    assert json.loads(first_line(root))["betas"] == [0.9, 0.95]  # kept for a swap back
    surgery.apply(run, plan(run, swap("adamw")))
    assert "optimizer: adamw\n" in (root / "train.yaml").read_text()


def test_what_can_not_be_swapped_is_refused(trained: Trained) -> None:
    root = trained()
    with pytest.raises(UsageError, match=r"`swap_optimizer\.to` takes no 'sgd2'"):
        swap("sgd2")
    with pytest.raises(UsageError, match="can't be combined"):
        from_data({"swap_optimizer": {"to": "sgdw"}, "reset": ["moments"]})
    path = root / "global_step8" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    del state["trainer"]
    torch.save(state, path)
    with pytest.raises(SurgeryError, match="does not say which optimizer"):
        plan(Run.open(root), swap("sgdw"))


def test_every_report_names_the_optimizer_that_is_there(trained: Trained) -> None:
    """SGDW stands on groups that keep Adam's betas for the way back, and is not Adam."""
    root, style = trained(), Style(100)
    run = Run.open(root)
    surgery.apply(run, plan(run, swap("sgdw", momentum=0.8)))
    promise = look.inspect(run).promise
    assert (promise.optimizer, promise.settings) == ("SGDW", (("momentum", (0.8, 0.8)),))
    assert promise.betas is None and promise.eps is None
    text = {
        "status": report.status(run, look.inspect(run), None, style),
        "show": report.checkpoint(run, run.checkpoint(8), style),
        "verify": report.verification(look.verify(run), style),
    }
    assert "  SGDW          step 8   momentum 0.8" in text["status"].splitlines()
    assert "  optimizer  SGDW" in text["show"].splitlines()
    assert "  step 9 uses SGDW: lr 9.917e-04   optimizer step 8   momentum 0.8" in text["verify"]
    for name in text:
        assert "dam" not in text[name].partition("  lr  ")[0 if name == "show" else 2], name
    surgery.apply(run, plan(run, swap("adamw")))
    assert look.inspect(run).promise.optimizer == "AdamW"
    assert "uses AdamW: lr" in report.verification(look.verify(run), style)
