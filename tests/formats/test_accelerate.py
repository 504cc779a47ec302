"""Accelerate: the real Accelerator writes, and loads what was edited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.look.ready import ready
from ckptsurgeon.recipe.file import from_data, load
from ckptsurgeon.run.run import Run
from tests.support.launch import REPO
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.usefixtures("accelerate_on_cpu"),
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]
PEAK = 1e-3


def accelerated(scaler: bool = False) -> tuple[Any, Any, Any]:
    """A real Accelerator with a model, its AdamW and a LambdaLR."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    adam = torch.optim.AdamW(model.parameters(), lr=PEAK)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.9**step)
    accelerator.register_for_checkpointing(Counter())
    _, adam, schedule = accelerator.prepare(model, adam, schedule)
    return accelerator, adam, schedule


class Counter:
    """An object of the user's, which Accelerate keeps in custom_checkpoint_0.pkl."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"count": 3}


def test_saves_that_are_numbered_by_themselves_lost_no_update(tmp_path: Path) -> None:
    """`automatic_checkpoint_naming` counts saves: Adam's step is further."""
    accelerator, adam, _ = accelerated()
    for step in range(1, 7):
        accelerator.backward(sum((p**2).sum() for p in adam.param_groups[0]["params"]))
        adam.step()
        if step % 3 == 0:
            accelerator.save_state(str(tmp_path / f"checkpoint_{step // 3 - 1}"))
    assert diagnose(Run.open(tmp_path)) == []


@pytest.mark.parametrize("name", ["checkpoint_{}", "step_{}", "epoch-{}"])
def test_an_accelerator_loads_what_was_operated_on(tmp_path: Path, name: str) -> None:
    root = tmp_path / "run"
    accelerator, adam, schedule = accelerated()
    for step in range(1, 5):
        accelerator.backward(sum((p**2).sum() for p in adam.param_groups[0]["params"]))
        adam.step()
        schedule.step()
        if step % 2 == 0:
            accelerator.save_state(str(root / name.format(step)), safe_serialization=True)
    before = snapshot(root)
    opened = Run.open(root)
    assert (opened.format.name, opened.steps(), opened.latest()) == ("accelerate", [2, 4], 4)
    assert look.verify(opened, level=4).findings == ()
    recipe = {"rollback": {"to": 2}, "set": {"lr": 5e-4, "beta2": 0.95}, "reset": ["moments"]}
    operate(root, recipe)
    assert [path.name for path in sorted(root.iterdir()) if path.name[0] != "."] == [name.format(2)]
    accelerator, adam, schedule = accelerated()
    accelerator.load_state(str(root / name.format(2)))
    group = adam.param_groups[0]
    assert group["lr"] == pytest.approx(5e-4 * 0.9**2)
    assert group["betas"] == (0.9, 0.95)
    for state in adam.optimizer.state.values():
        assert not state["exp_avg"].any() and not state["exp_avg_sq"].any() and state["step"] == 0
    accelerator.backward(sum((p**2).sum() for p in group["params"]))
    adam.step()
    schedule.step()
    assert group["lr"] == pytest.approx(5e-4 * 0.9**3)
    take_back(root, before)


def loaded(workers: int = 0) -> tuple[Any, Any]:
    """A real Accelerator with a loader that saves where it stands."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    torch.manual_seed(0)
    config = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=3
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    data = torch.utils.data.TensorDataset(torch.arange(64))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=PEAK)
    return accelerator, accelerator.prepare(loader, model, adam)[0]


def test_a_loader_that_saves_its_position_is_moved(tmp_path: Path) -> None:
    """From wherever in the epoch it was saved. At its end there is nothing to move: a resume begins
    the next one."""
    accelerator, loader = loaded()
    order = []
    for number, (batch,) in enumerate(loader, 1):
        order.append(batch.tolist())
        if number in (1, 3, 15, 16):
            accelerator.save_state(str(tmp_path / f"run{number}" / f"step_{number}"))
    for number in (1, 3, 15, 16):
        root = tmp_path / f"run{number}"
        before = snapshot(root)
        said = look.inspect(Run.open(root), number).promise.data_batches
        assert said == (number if number < len(order) else None)
        assert resumed(root / f"step_{number}") == (order[number:] or order)
        for recipe in ({"skip": ["17"], "skip_by_counters": True}, {"set": {"data_batches": 6}}):
            if said is None:
                with pytest.raises(SurgeryError):
                    surgery.plan(Run.open(root), from_data(recipe))
                continue
            recipe |= {"skip": [f"{number + 1}-{number + 3}"]} if "skip" in recipe else {}
            plan = operate(root, recipe)
            assert plan.promise is not None and plan.promise.data_batches is not None
            assert not [warning for warning in plan.warnings if "--" in warning]  # a Trainer's
            if plan.promise.data_batches < len(order):
                assert resumed(root / f"step_{number}") == order[plan.promise.data_batches :]
            take_back(root, before)


def resumed(step: Path) -> list[Any]:
    """What a loader gives out after a load, to the end of the epoch."""
    accelerator, loader = loaded()
    accelerator.load_state(str(step))
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize("left", ["checkpoint-8", "checkpoint-8-bad", "checkpoints-12-of-may"])
def test_what_diffusers_would_resume_leaves_with_the_steps(tmp_path: Path, left: str) -> None:
    """Its scripts take the folder with the highest number after the first dash, whatever it is:
    one that was renamed, or whose save was cut off."""
    root = tmp_path / "run"
    accelerator, *_ = accelerated()
    for step in (2, 4, 6):
        accelerator.save_state(str(root / f"checkpoint-{step}"))
    (root / left / "unet_ema").mkdir(parents=True)
    (root / "checkpoint-3-kept").mkdir()  # below: nobody resumes it
    before = snapshot(root)
    assert left in str(ready(Run.open(root)).found)
    operate(root, {"rollback": {"to": 4}})
    dirs = [path.name for path in root.iterdir() if path.name.startswith("checkpoint")]
    assert sorted(dirs) == ["checkpoint-2", "checkpoint-3-kept", "checkpoint-4"]
    assert max(dirs, key=lambda name: int(name.split("-")[1])) == "checkpoint-4"
    take_back(root, before)


def test_a_loader_with_workers_keeps_its_own_state(tmp_path: Path) -> None:
    root = tmp_path / "run"
    accelerator, loader = loaded(workers=1)
    for _ in loader:
        accelerator.save_state(str(root / "step_1"))
        break
    with pytest.raises(SurgeryError, match="keeps no data_batches"):
        surgery.plan(Run.open(root), from_data({"set": {"data_batches": 5}}))


@pytest.mark.parametrize(("name", "factor", "step"), [("14500", 0.75, 2), ("29000", 2.0, 4)])
def test_what_idefics_did_is_a_recipe(tmp_path: Path, name: str, factor: float, step: int) -> None:
    root = tmp_path / "run"
    accelerator, adam, schedule = accelerated()
    for done in range(1, 5):
        adam.step()
        schedule.step()
        if done % 2 == 0:
            accelerator.save_state(str(root / f"checkpoint_{done}"))
    before = snapshot(root)
    recipe = load(REPO / "recipes" / "history" / f"idefics-{name}.yaml", [f"rollback.to={step}"])
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), recipe))
    accelerator, adam, schedule = accelerated()
    accelerator.load_state(str(root / f"checkpoint_{step}"))
    assert adam.param_groups[0]["lr"] == pytest.approx(PEAK * factor * 0.9**step)
    schedule.step()
    assert adam.param_groups[0]["lr"] == pytest.approx(PEAK * factor * 0.9 ** (step + 1))
    take_back(root, before)


def test_two_folders_of_one_number_are_told(tmp_path: Path) -> None:
    root = tmp_path / "run"
    accelerator, _, _ = accelerated()
    for name in ("step_1", "epoch_1"):
        accelerator.save_state(str(root / name))
    with pytest.raises(SurgeryError, match="same number"):
        look.inspect(Run.open(root), 1)
