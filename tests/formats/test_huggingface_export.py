"""What is exported of a Trainer's or Accelerate's step is what its library loads from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptsurgeon import Run
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.surgery.export import export

Weights = Mapping[str, torch.Tensor]


def step(root: Path, names: tuple[str, str, str]) -> Path:
    """A folder with the states of a real optimizer and scheduler, and no weights yet."""
    name, optimizer, scheduler = names
    model = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0)
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    schedule.step()
    folder = root / name
    folder.mkdir(parents=True)
    torch.save(adam.state_dict(), folder / optimizer)
    torch.save(schedule.state_dict(), folder / scheduler)
    if name.startswith("checkpoint-"):
        (folder / "trainer_state.json").write_text('{"global_step": 4}')
    else:
        torch.save({}, folder / "random_states_0.pkl")
    return folder


TRAINER = ("checkpoint-4", "optimizer.pt", "scheduler.pt")
ACCELERATE = ("checkpoint_4", "optimizer.bin", "scheduler.bin")


def exported(root: Path) -> Weights:
    export(Run.open(root), 4, root.parent / "out")
    (file,) = (root.parent / "out").glob("*.safetensors")
    return load_file(file)


def same(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("names", [TRAINER, ACCELERATE], ids=["trainer", "accelerate"])
@pytest.mark.parametrize(
    "file", ["model.safetensors", "adapter_model.safetensors", "pytorch_model.bin"]
)
def test_one_file_has_the_weights(tmp_path: Path, names: tuple[str, str, str], file: str) -> None:
    folder = step(tmp_path / "run", names)
    weights = {"a": torch.rand(3, 2), "b": torch.arange(4), "c": torch.rand(5).bfloat16()}
    if file.endswith(".bin"):
        torch.save(weights, folder / file)
    else:
        save_file(weights, folder / file)
    same(exported(tmp_path / "run"), weights)


def test_an_index_names_the_files(tmp_path: Path) -> None:
    folder = step(tmp_path / "run", TRAINER)
    one, other = {"a": torch.rand(3, 2)}, {"b": torch.rand(2)}
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, weights in zip(names, (one, other), strict=True):
        save_file(weights, folder / name)
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    same(exported(tmp_path / "run"), one | other)


def test_safetensors_are_taken_before_a_torch_file(tmp_path: Path) -> None:
    folder = step(tmp_path / "run", TRAINER)
    torch.save({"a": torch.zeros(2)}, folder / "pytorch_model.bin")
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    same(exported(tmp_path / "run"), {"a": torch.ones(2)})


def test_several_models_are_refused_by_their_number(tmp_path: Path) -> None:
    folder = step(tmp_path / "run", ACCELERATE)
    for name in ("model.safetensors", "model_1.safetensors"):
        save_file({"a": torch.ones(2)}, folder / name)
    with pytest.raises(SurgeryError, match="holds 2 models, and one export holds one"):
        export(Run.open(tmp_path / "run"), 4, tmp_path / "out")
    assert not (tmp_path / "out").exists()
