"""Weights of NeMo Automodel: its own Checkpointer saves them and loads what was edited."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.launch import run_module
from tests.support.library_source import FOLDER
from tests.support.new_numbers import State, cases, same
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = pytest.mark.formats
if not (FOLDER / "nemo_automodel").is_dir():
    pytest.skip("make test-formats installs NeMo Automodel", allow_module_level=True)
PROGRAM = "tests.support.automodel"
CASES = cases(4, 6, "model.layers.1.mlp.up_proj.weight")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[object, ...], Path] = {}

    def make(ranks: int, *flags: str) -> Path:
        key = (ranks, *flags)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("saved") / "checkpoints"
            run_module(PROGRAM, "save", made[key], *flags, ranks=ranks)
        return made[key]

    return make


def told(root: Path, ranks: int, *flags: str) -> dict[str, Any]:
    out = root.parent / "told.pt"
    run_module(PROGRAM, "load", root, out, *flags, ranks=ranks)
    found: dict[str, Any] = torch.load(out)
    return found


def loaded(root: Path, ranks: int, *flags: str) -> State:
    held: State = told(root, ranks, *flags)["held"]
    return held


def resumed(root: Path, step: int) -> None:
    (root / "LATEST").unlink()
    (root / "LATEST").symlink_to(f"epoch_0_step_{step}")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["torch_save", "safetensors"])
def test_new_numbers_are_what_its_loader_takes(
    tmp_path: Path, saved: Callable[..., Path], form: str, ranks: int
) -> None:
    flags = ("--format", form)
    root = Path(shutil.copytree(saved(ranks, *flags), tmp_path / "run", symlinks=True))
    last = loaded(root, ranks, *flags)
    resumed(root, 4)
    first = loaded(root, ranks, *flags)
    resumed(root, 6)
    before = snapshot(root)
    run = Run.open(root)
    assert (run.format.name, run.steps(), run.latest()) == ("automodel", [2, 4, 6], 6)
    assert run.format.idle_paths(root, 6) == []
    shards = len(list((root / "epoch_0_step_6" / "model").glob("shard-*.safetensors")))
    assert shards == (ranks if form == "safetensors" else 0)
    for name in ("average-all", "scale-all", "graft"):
        recipe, expected = CASES[name]
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        assert look.verify(Run.open(root), level=4).findings == ()
        same(loaded(root, ranks, *flags), expected(first, last), last)
        take_back(root, before)


def test_settings_and_a_reset_are_what_its_loader_takes(
    tmp_path: Path, saved: Callable[..., Path]
) -> None:
    root = Path(shutil.copytree(saved(1), tmp_path / "run", symlinks=True))
    before, last = snapshot(root), told(root, 1)
    recipe = {"rollback": {"to": 4}, "set": {"beta2": 0.97, "eps": 1e-6}, "reset": ["moments"]}
    plan = operate(root, recipe)
    assert plan.promise is not None
    found = told(root, 1)
    (group,), (was,) = found["groups"], last["groups"]
    assert (group["betas"], group["eps"]) == ((0.9, 0.97), 1e-6) == (plan.promise.betas, 1e-6)
    assert group["weight_decay"] == was["weight_decay"] and group["lr"] == plan.promise.lr
    assert found["adam_steps"] == {0} and last["adam_steps"] == {6}
    assert not any(state["exp_avg"].any() for state in found["held"].values())
    take_back(root, before)


def test_weights_that_were_consolidated_too_are_refused_by_name(
    tmp_path: Path, saved: Callable[..., Path]
) -> None:
    """By default the last step of a training has them."""
    root = Path(
        shutil.copytree(saved(1, "--consolidated", "every"), tmp_path / "run", symlinks=True)
    )
    before = snapshot(root)
    for recipe in ({"average": {"last": 2}}, {"scale": {"params": "mlp", "by": 0.9}}):
        with pytest.raises(
            SurgeryError, match=r"model/consolidated/model-00001-of-.* a second copy"
        ):
            surgery.plan(Run.open(root), from_data(recipe))
    assert snapshot(root) == before
