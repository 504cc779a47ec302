"""Megatron-LM's newer torch_dist: the common state is a value among the others, saved by torch."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckptsurgeon import surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe_file import from_data
from ckptsurgeon.run import Run
from tests.formats.megatron_legacy import BATCH, SCHEDULE, cosine
from tests.formats.surgeries import operate, snapshot, take_back

COMMON = "common_state/shard_0_1"


class Planner(DefaultSavePlanner):
    """As megatron-core's: an object comes as the bytes that it is to be saved as."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object


def save(root: Path, steps: tuple[int, ...] = (20, 30), *, integrity: bool = False) -> Path:
    for step in steps:
        folder = root / f"iter_{step:07d}"
        args = argparse.Namespace(
            lr=6e-5, min_lr=6e-6, weight_decay=0.1, global_batch_size=BATCH,
            consumed_train_samples=step * BATCH, use_distributed_optimizer=True,
        )  # fmt: skip
        schedule: dict[str, Any] = {**SCHEDULE, "num_steps": step * BATCH}
        groups = [
            {
                "wd_mult": mult, "lr_mult": 1.0, "max_lr": 6e-5, "min_lr": 6e-6,
                "lr": cosine(schedule, step * BATCH), "betas": (0.9, 0.95), "eps": 1e-8,
                "weight_decay": 0.1 * mult, "step": step, "default_config": True,
            }
            for mult in (1.0, 0.0)
        ]  # fmt: skip
        common = {
            "args": args, "checkpoint_version": 3.0, "iteration": step,
            "opt_param_scheduler": schedule, "optimizer": {"optimizer": {"param_groups": groups}},
            "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
        }  # fmt: skip
        data = io.BytesIO()
        torch.save([common], data)
        state: dict[str, Any] = {COMMON: data}
        for name in ("param", "exp_avg", "exp_avg_sq"):
            for weight in ("up", "down"):
                state[f"optimizer.state.{name}.{weight}.weight"] = torch.rand(64, 4) + 0.1
        dcp.save(state, checkpoint_id=folder, planner=Planner(), no_dist=True)
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(config))
        if integrity:
            sums = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}
            document = {"algorithm": "sha256", "files": sums}
            (folder / "integrity.json").write_text(json.dumps(document, indent=2))
    (root / "latest_checkpointed_iteration.txt").write_text(str(steps[-1]))
    return root


def loaded(root: Path, step: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The common state, read as newer versions read it, and the optimizer's tensors."""
    folder = root / f"iter_{step:07d}"
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.ones(64, 4) for name in names if name != COMMON}
    wanted: dict[str, Any] = {**tensors, COMMON: io.BytesIO()}
    dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    with torch.serialization.safe_globals([argparse.Namespace]):
        held = wanted[COMMON]
        held = torch.load(held, weights_only=True) if isinstance(held, io.BytesIO) else held
    return held[0], tensors


@pytest.mark.parametrize("integrity", [False, True])
def test_the_common_state_and_the_moments_are_rewritten(tmp_path: Path, integrity: bool) -> None:
    root = save(tmp_path, integrity=integrity)
    before = snapshot(root)
    recipe = {"rollback": {"to": 20}, "set": {"lr": 3e-5, "beta1": 0.8}, "reset": ["moments"]}
    promise = operate(root, recipe).promise
    assert promise is not None and promise.adam_step == 0
    common, tensors = loaded(root, 20)
    assert common["opt_param_scheduler"]["max_lr"] == 3e-5
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        assert group["betas"] == (0.8, 0.95) and group["step"] == 0 and group["max_lr"] == 3e-5
        assert group["lr"] == promise.lr
    assert len(tensors) == 6
    for name, tensor in tensors.items():
        assert bool(tensor.any()) == (".param." in name)
    if integrity:
        sums = json.loads((root / "iter_0000020" / "integrity.json").read_text())["files"]
        folder = root / "iter_0000020"
        assert sums == {
            f.name: hashlib.sha256(f.read_bytes()).hexdigest()
            for f in folder.iterdir() if f.name != "integrity.json"
        }  # fmt: skip
    take_back(root, before)


def test_damage_under_a_manifest_is_found_and_never_hidden(tmp_path: Path) -> None:
    root = save(tmp_path, integrity=True)
    folder = root / "iter_0000030"
    (folder / "metadata.json").write_text("{}")
    assert surgery.verify(Run.open(root), level=2).findings == ()
    assert any("metadata.json" in text for text in surgery.verify(Run.open(root), level=3).findings)
    manifest = json.loads((folder / "integrity.json").read_text())
    manifest["files"][".metadata"] = "0" * 64
    (folder / "integrity.json").write_text(json.dumps(manifest))
    with pytest.raises(SurgeryError, match=r"\.metadata: its sha256"):
        surgery.plan(Run.open(root), from_data({"set": {"eps": 1e-6}}))


def test_the_moments_of_some_parameters_become_zero(tmp_path: Path) -> None:
    root = save(tmp_path)
    operate(root, {"reset": ["moments"], "moments": {"params": "^up"}})
    _, tensors = loaded(root, 30)
    assert not tensors["optimizer.state.exp_avg.up.weight"].any()
    assert tensors["optimizer.state.exp_avg.down.weight"].all()


def test_an_unfinished_save_is_not_complete(tmp_path: Path) -> None:
    root = save(tmp_path)
    (root / "iter_0000030" / "metadata.json").unlink()
    run = Run.open(root)
    assert not run.complete(30) and run.complete(20)
    assert any("torch_dcp" in text for text in surgery.verify(run, 30).findings)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """torch warns that no process group is there, which `no_dist` asks for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
