"""A step with several optimizers: what gives them one rate or one schedule is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, make, process_group
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

RATES = (1e-3, 1e-4)


def trained(bare: int | None = None) -> tuple[torch.nn.Sequential, list[Any], list[Any]]:
    """Two layers, each with an Adam and a scheduler of its own, as a GAN has them. The optimizer
    `bare` begins with a param group without parameters."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    empty = {"params": [], "lr": 0.7, "betas": (0.5, 0.6), "eps": 0.5, "weight_decay": 0.5}
    adams = [
        torch.optim.AdamW(
            [*([empty] if number == bare else []), {"params": layer.parameters()}], lr=rate
        )
        for number, (layer, rate) in enumerate(zip(model, RATES, strict=True))
    ]
    schedules = [torch.optim.lr_scheduler.LinearLR(adam, total_iters=40) for adam in adams]
    for _ in range(6):
        model(torch.rand(3, 4)).sum().backward()
        for adam, schedule in zip(adams, schedules, strict=True):
            adam.step()
            schedule.step()
    return model, adams, schedules


def accelerate(root: Path, bare: int | None = None) -> None:
    """By the names of `save_state`: `optimizer.bin`, `optimizer_1.bin`, …"""
    model, adams, schedules = trained(bare)
    folder = root / "checkpoint_6"
    folder.mkdir(parents=True)
    torch.save({}, folder / "random_states_0.pkl")
    save_file(model.state_dict(), folder / "model.safetensors")
    for end, adam, schedule in zip(("", "_1"), adams, schedules, strict=True):
        torch.save(adam.state_dict(), folder / f"optimizer{end}.bin")
        torch.save(schedule.state_dict(), folder / f"scheduler{end}.bin")


def lightning(root: Path, bare: int | None = None) -> None:
    """As `dump_checkpoint` has it: a list of each."""
    model, adams, schedules = trained(bare)
    root.mkdir(parents=True)
    state = {
        "epoch": 0, "global_step": 6, "pytorch-lightning_version": "2.5.0",
        "state_dict": model.state_dict(), "loops": {}, "callbacks": {},
        "optimizer_states": [adam.state_dict() for adam in adams],
        "lr_schedulers": [schedule.state_dict() for schedule in schedules],
    }  # fmt: skip
    torch.save(state, root / "epoch=0-step=6.ckpt")


@pytest.mark.parametrize(
    "recipe",
    [
        {"set": {"lr": 5e-5}},
        {"set": {"lr": 5e-5, "decay": 80}},
        {"cooldown": {"steps": 3}},
        {"cooldown": {"steps": 3, "shape": "cosine"}},
        {"rewarm_schedule": {"to": 5e-4, "warmup": 2, "decay": 4}},
    ],
    ids=["set-lr", "set decay", "cooldown", "cooldown of another shape", "set-lr --restart"],
)
@pytest.mark.parametrize("make", [accelerate, lightning])
def test_one_rate_for_several_optimizers_is_refused(
    make: Callable[[Path], None], recipe: dict[str, Any], tmp_path: Path
) -> None:
    make(tmp_path / "run")
    run = Run.open(tmp_path / "run")
    before = snapshot(run.root)
    with pytest.raises(SurgeryError, match="holds 2 optimizers, and a recipe has one lr"):
        surgery.plan(run, from_data(recipe))
    assert snapshot(run.root) == before


@pytest.mark.parametrize("make", [accelerate, lightning])
def test_what_is_one_for_all_reaches_each(make: Callable[[Path], None], tmp_path: Path) -> None:
    """eps and moments have no schedule: every optimizer gets them."""
    make(tmp_path / "run")
    run = Run.open(tmp_path / "run")
    before = snapshot(run.root)
    surgery.apply(run, surgery.plan(run, from_data({"reset": ["moments"], "set": {"eps": 1e-6}})))
    assert look.verify(Run.open(run.root), level=4).findings == ()
    checkpoint = Run.open(run.root).checkpoint(6)
    assert [place.value for place in checkpoint.locate("eps")] == [1e-6, 1e-6]
    assert all(checkpoint.is_zero(place) for place in checkpoint.locate("exp_avg"))
    take_back(run.root, before)


@pytest.mark.parametrize("bare", [0, 1])
@pytest.mark.parametrize("make", [accelerate, lightning])
def test_a_group_without_parameters_says_nothing_of_the_next_step(
    make: Callable[..., None], bare: int, tmp_path: Path
) -> None:
    """The other optimizer has parameters in the group of the same number."""
    make(tmp_path / "run")
    make(tmp_path / "bare", bare)
    known, found = (
        Run.open(tmp_path / name).checkpoint(6).state().promise for name in ("run", "bare")
    )
    assert known.weight_decay == (0.01, 0.01)
    assert found == known


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_of_several_engines_no_value_is_set_and_all_roll_back(tmp_path: Path) -> None:
    """Accelerate saves each model's engine in a folder of its own."""
    with process_group():
        make(tmp_path, Options(stage=1))
    root = tmp_path / "run"
    for number in (2, 4):
        for name in ("pytorch_model", "pytorch_model_1"):
            folder = root / f"step_{number}"
            shutil.copytree(tmp_path / "global_step6", folder / name)
        torch.save({}, folder / "random_states_0.pkl")
    before = snapshot(root)
    assert diagnose(Run.open(root)) == []
    for recipe in ({"set": {"lr": 1e-4}}, {"reset": ["moments"]}, {"average": {"last": 2}}):
        with pytest.raises(SurgeryError, match="2 engines") as error:
            surgery.plan(Run.open(root), from_data(recipe))
        assert "set the value of the model" in error.value.next[0]
    operate(root, {"rollback": {"to": 2}})
    assert Run.open(root).steps() == [2]
    take_back(root, before)
    (root / "step_4" / "pytorch_model_1" / "mp_rank_00_model_states.pt").unlink()
    assert not Run.open(root).complete(4)
