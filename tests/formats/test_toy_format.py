"""What a new format takes: one class, one line in `detect.FORMATS`, and every surgery works."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.formats import detect
from ckptsurgeon.formats.fields.shard_files import read_shards
from ckptsurgeon.formats.layout import Format
from ckptsurgeon.formats.plain.checkpoint import TorchCheckpoint
from ckptsurgeon.recipe.file import from_data
from tests.support.conformance import LAWS
from tests.support.snapshot import snapshot


class Toy(Format):
    """A trainer that saves its optimizer's state dict in `toy-<N>.pt`, and resumes the highest."""

    name = "toy"

    def recognizes(self, run: Path) -> bool:
        return bool(self.steps(run))

    def steps(self, run: Path) -> list[int]:
        return sorted(int(path.stem.removeprefix("toy-")) for path in run.glob("toy-*.pt"))

    def directory(self, run: Path, step: int) -> Path:
        return run

    def entries(self, run: Path, step: int) -> list[Path]:
        return [run / f"toy-{step}.pt"]

    files = entries

    def missing(self, run: Path, step: int) -> list[str]:
        return []

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> TorchCheckpoint:
        file = run / f"toy-{step}.pt"
        trees, archives = read_shards([file])
        return TorchCheckpoint(file, step, trees, archives, optimizers=((file, ("optimizer",)),))


def test_a_format_is_one_class_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    adam = torch.optim.AdamW([weight], lr=1e-3)
    for step in (1, 2):
        weight.grad = torch.ones(4)
        adam.step()
        torch.save({"optimizer": adam.state_dict()}, tmp_path / f"toy-{step}.pt")
    before = snapshot(tmp_path)

    monkeypatch.setattr(detect, "FORMATS", (*detect.FORMATS, f"{__name__}:Toy"))
    lawful = Path(shutil.copytree(tmp_path, tmp_path.with_name("lawful")))
    for law in LAWS:
        law(lawful)
    run = Run.open(tmp_path)
    recipe = {"rollback": {"to": 1}, "set": {"lr": 3e-5, "beta2": 0.98}, "reset": ["moments"]}
    surgery.apply(run, plan(run, from_data(recipe)))
    assert look.verify(run, level=3).findings == ()
    assert [path.name for path in tmp_path.glob("toy-*.pt")] == ["toy-1.pt"]
    held = torch.load(tmp_path / "toy-1.pt", weights_only=True)["optimizer"]
    assert held["param_groups"][0]["lr"] == 3e-5
    assert held["param_groups"][0]["betas"] == (0.9, 0.98)
    assert float(held["state"][0]["step"]) == 0
    assert not held["state"][0]["exp_avg"].any()

    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(tmp_path) == before
