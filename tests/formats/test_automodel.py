"""Weights of NeMo Automodel: its own Checkpointer saves them and loads what was edited."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.launch import run_module
from tests.support.library_source import FOLDER
from tests.support.new_numbers import State, cases, same
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

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


def loaded(root: Path, ranks: int, *flags: str) -> State:
    out = root.parent / "held.pt"
    run_module(PROGRAM, "load", root, out, *flags, ranks=ranks)
    held: State = torch.load(out)
    return held


def resumed(root: Path, step: int) -> None:
    (root / "LATEST").unlink()
    (root / "LATEST").symlink_to(f"epoch_0_step_{step}")


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
    for name in ("average-all", "scale-all", "graft"):
        recipe, expected = CASES[name]
        surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
        assert look.verify(Run.open(root), level=4).findings == ()
        same(loaded(root, ranks, *flags), expected(first, last), last)
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
        with pytest.raises(SurgeryError, match=r"model/consolidated/model-00001-of-.* once more"):
            surgery.plan(Run.open(root), from_data(recipe))
    assert snapshot(root) == before
