"""Shards that the real DeepSpeed wrote, edited and loaded again with its real classes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from ckptsurgeon.files.archives.append import Archive
from ckptsurgeon.files.pickles.tree import Object, Tensor, get, tensors
from ckptsurgeon.plans.edits import ZEROS, Append
from tests.conftest import Trained
from tests.support.torch_files import GROUPS, STATE, change, edited, frozen


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def shards(run: Path) -> list[Path]:
    return sorted((run / "global_step8").glob("*.pt"))


def test_every_value_is_the_one_that_torch_loads(trained: Trained) -> None:
    for path in shards(trained()):
        compare(Archive.open(path).tree(), load(path))


def compare(inert: Any, real: Any) -> None:
    if isinstance(inert, Tensor):
        assert inert.size == tuple(real.shape) and f"torch.{inert.dtype}" == str(real.dtype)
    elif isinstance(inert, dict):
        assert list(inert) == list(real)
        for key, item in inert.items():
            compare(item, real[key])
    elif isinstance(inert, (list, tuple)):
        assert len(inert) == len(real)
        for item, other in zip(inert, real, strict=True):
            compare(item, other)
    elif isinstance(inert, Object):
        assert inert.cls.name in (type(real).__name__, "_reconstruct", "encode", "dtype")
        if isinstance(inert.state, dict):
            assert inert.state.keys() == vars(real).keys()
            for key, item in inert.state.items():
                compare(item, vars(real)[key])
    else:
        assert inert == real or repr(inert) == str(real)


def test_an_optimizer_shard_takes_lr_betas_and_zeroed_moments(trained: Trained) -> None:
    path = next(path for path in shards(trained()) if "optim_states" in path.name)
    before, expected = path.read_bytes(), load(path)
    archive = Archive.open(path)
    groups = range(len(get(archive.tree(), GROUPS)))
    zeroed = [p for p, _ in tensors(archive.tree()) if p[-1] in ("exp_avg", "exp_avg_sq", "step")]
    assert len(zeroed) == 3 * len(get(archive.tree(), STATE))
    edit = edited(
        path,
        *(change((*GROUPS, i, "lr"), 3e-5) for i in groups),
        *(change((*GROUPS, i, "betas"), [0.9, 0.95]) for i in groups),
        *(change(place, ZEROS) for place in zeroed),
    )
    assert isinstance(edit, Append) and path.read_bytes()[: len(before)] == before
    for i in groups:
        group = get(expected, (*GROUPS, i))
        group |= {"lr": 3e-5, "betas": type(group["betas"])((0.9, 0.95))}
    for place in zeroed:
        get(expected, place).zero_()
    assert str(frozen(load(path))) == str(frozen(expected))


def test_a_run_can_be_edited_and_put_back(trained: Trained, tmp_path: Path) -> None:
    for path in shards(trained()):
        copy = Path(shutil.copy2(path, tmp_path / path.name))
        edit = edited(copy, change(("ds_version",), "other"))
        assert isinstance(edit, Append) and load(copy)["ds_version"] == "other"
        with copy.open("r+b") as file:
            file.truncate(edit.old_size)
        assert copy.read_bytes() == path.read_bytes()
