"""Weights that a step keeps twice: no surgery on weights passes over the other copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim.swa_utils import AveragedModel

from ckptsurgeon import Run, report, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.export import export, preview
from tests.conftest import Trained
from tests.support.dcp_trainers import Trainer
from tests.support.tiny_run import make_run
from tests.support.trained_run import edit

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
AVERAGE = {"average": {"last": 2}}
SCALE = {"scale": {"params": "weight", "by": 0.5}}


class Shadows:
    """As torch_ema and diffusers keep an average: a list in the order of the parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow_params = [p.detach().clone() for p in model.parameters()]


def lightning(root: Path, more: Callable[[torch.nn.Module], dict[str, Any]]) -> Path:
    """What lightning 2.6 saves, and `more` of a callback."""
    root.mkdir()
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    for step in (2, 4):
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(torch.rand(3, 4)).sum().backward()
        adam.step()
        saved = {
            "pytorch-lightning_version": "2.6.6", "global_step": step, "epoch": 0,
            "state_dict": model.state_dict(), "optimizer_states": [adam.state_dict()],
            "lr_schedulers": [], "loops": {}, "callbacks": {},
        }  # fmt: skip
        torch.save({**saved, **more(model)}, root / f"step={step}.ckpt")
    return root


def average(model: torch.nn.Module) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("more", "where"),
    [
        (lambda m: {"current_model_state": average(m)}, "step=4.ckpt: current_model_state"),
        (
            lambda m: {"callbacks": {"EMA": {"ema": AveragedModel(m).state_dict()}}},
            "step=4.ckpt: callbacks.EMA.ema",
        ),
        (
            lambda m: {"callbacks": {"EMA": {"shadow": Shadows(m).shadow_params}}},
            "step=4.ckpt: callbacks.EMA.shadow",
        ),
    ],
)  # fmt: skip
def test_a_callback_keeps_an_average(tmp_path: Path, more: Any, where: str) -> None:
    root = lightning(tmp_path / "run", more)
    for recipe in (AVERAGE, SCALE):
        with pytest.raises(SurgeryError) as refused:
            surgery.plan(Run.open(root), from_data(recipe))
        assert refused.value.what.startswith(f"{where} holds a second copy of the weights")
    surgery.plan(Run.open(root), from_data({"graft": {"step": 2}}))
    done = export(Run.open(root), 4, tmp_path / "weights")
    assert [note for note in done.notes if where in note] == list(done.notes) != []
    assert preview(Run.open(root), 4, tmp_path / "more").notes == done.notes


def test_an_export_says_that_it_is_of_the_average(tmp_path: Path) -> None:
    """Of Lightning's WeightAveraging, which puts the average where the weights usually are."""
    root = lightning(tmp_path / "run", lambda m: {"current_model_state": average(m)})
    done = export(Run.open(root), 4, tmp_path / "weights")
    note = (
        "these weights are the average that WeightAveraging saved; step=4.ckpt: "
        "current_model_state is what it trains"
    )
    assert report.export(done.folder, done).splitlines()[1:] == [f"  note     {note}"]
    assert report.export_json(done.folder, done)["notes"] == [note]
    plain = lightning(tmp_path / "plain", lambda m: {})
    assert export(Run.open(plain), 4, tmp_path / "trained").notes == ()


@pytest.mark.parametrize(
    ("recipe", "works"),
    [
        ({"average": {"last": 2, "moments": "average"}}, False),
        ({"scale": {"params": "0.weight", "by": 0.5, "moments": "scale"}}, False),
        ({"clip_moments": {"above": 1}}, False),
        ({"average": {"last": 2, "moments": "zero"}}, True),
        ({"scale": {"params": "0.weight", "by": 0.5}}, True),
        ({"graft": {"step": 2}}, True),
    ],
)
def test_amsgrad_divides_by_more_than_exp_avg_sq(
    tmp_path: Path, recipe: dict[str, Any], works: bool
) -> None:
    """A clipped exp_avg_sq alone would change no update: max_exp_avg_sq is as large as ever."""
    root = tmp_path / "run"
    trainer = Trainer(amsgrad=True)
    for step in range(1, 5):
        trainer.update()
        if step % 2 == 0:
            state = {**trainer.model.state_dict(), "optimizer": trainer.flat()}
            state["train_state"] = {"step": step}
            dcp.save(state, checkpoint_id=root / f"step-{step}", no_dist=True)
    if works:
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        return
    with pytest.raises(SurgeryError, match="keeps max_exp_avg_sq beside the two moments"):
        surgery.plan(Run.open(root), from_data(recipe))


def test_what_only_resembles_weights_is_none(tmp_path: Path) -> None:
    """A metric of one number, a history of some, a name that no parameter has."""
    root = lightning(
        tmp_path / "run",
        lambda m: {"callbacks": {"M": {"weight": torch.ones(1), "seen": [torch.ones(7)]}}},
    )
    for recipe in (AVERAGE, SCALE):
        assert surgery.plan(Run.open(root), from_data(recipe)).changes


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_script_saves_an_average_beside(trained: Trained, zero: int) -> None:
    root = trained(zero=zero)
    folder = root / "global_step8"
    run = Run.open(root)
    weights = [p.parameter for p in run.checkpoint(8).parts() if p.kind in ("weights", "master")]
    torch.save({f"module.{name}": torch.ones(2) for name in weights}, folder / "ema.pt")
    for recipe in (AVERAGE, SCALE):
        with pytest.raises(
            SurgeryError, match=r"^global_step8/ema\.pt holds a second copy of the weights"
        ):
            surgery.plan(Run.open(root), from_data(recipe))
    (folder / "ema.pt").unlink()
    ema = {"decay": 0.99, "weights": {name: torch.ones(2) for name in weights}}
    for file in folder.glob("*model_states.pt"):
        edit(file, lambda content: content.update(ema=ema))
    with pytest.raises(
        SurgeryError, match=r"model_states\.pt: ema\.weights holds a second copy of the weights"
    ):
        surgery.plan(Run.open(root), from_data(AVERAGE))


def test_an_optimizer_of_the_scripts_own_is_told(tmp_path: Path) -> None:
    """The Trainer loads one; a lr that is set is not set there."""
    root = make_run(tmp_path / "run")
    shutil.copy(root / "checkpoint-4" / "optimizer.pt", root / "checkpoint-4" / "optimizer_d.pt")
    made = surgery.plan(Run.open(root), from_data({"set": {"lr": 1e-4}}))
    assert "optimizer_d.pt is not loaded by transformers: it is left as it is" in made.warnings
