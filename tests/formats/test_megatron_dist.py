"""Megatron-LM's newer torch_dist: the common state is a value among the others, saved by torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.megatron_dist import loaded, save, save_chained
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back


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
    assert look.verify(Run.open(root), level=2).findings == ()
    assert any("metadata.json" in text for text in look.verify(Run.open(root), level=3).findings)
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
    assert any("torch_dcp" in text for text in look.verify(run, 30).findings)


def test_each_optimizer_of_a_chain_begins_anew(tmp_path: Path) -> None:
    """Muon's parameters and Adam's lie under one name, and keep different keys."""
    root = save_chained(tmp_path)
    before = snapshot(root)
    promise = operate(root, {"reset": ["moments"]}).promise
    assert promise is not None and promise.adam_step == 0
    assert "AdaptiveMuon" in str(promise.optimizer) and "Adam" in str(promise.optimizer)
    common, tensors = loaded(root, 20)
    assert {name: bool(tensor.any()) for name, tensor in tensors.items()} == {
        name: ".fp32_param." in name for name in tensors
    }
    assert len(tensors) == 6
    chain = [each["optimizer"]["param_groups"] for each in common["optimizer"].values()]
    assert [group["step"] for groups in chain for group in groups] == [0, 0]
    take_back(root, before)


def test_a_key_of_one_in_a_chain_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    root = save_chained(tmp_path, second="third_buffer")
    with pytest.raises(SurgeryError, match=r"no known optimizer keeps third_buffer \(of 1\)"):
        surgery.plan(Run.open(root), from_data({"reset": ["moments"]}))
