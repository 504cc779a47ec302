"""The table is closed: each key has a role, and each entry can be told from the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.optimizers.entry import ANEW, CONSTANT, ZERO
from ckptsurgeon.formats.optimizers.roles import ROLES, WORDS
from ckptsurgeon.formats.optimizers.table import COMMON, ENTRIES, HYPERPARAMETERS
from ckptsurgeon.recipe.file import from_data
from tests.support.megatron_legacy import megatron_enums, save
from tests.support.optimizer_page import DOCUMENT, known, libraries, written
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back


def test_each_key_of_a_state_has_one_role() -> None:
    keys = {key for item in ENTRIES for key in item.state}
    assert keys - set(ROLES) == set()
    assert set(ROLES) - keys == set()
    assert sum(len(words.split()) for words in WORDS.values()) == len(ROLES)


def test_each_entry_is_one_of_a_kind() -> None:
    sources = [(item.name, item.source) for item in ENTRIES]
    assert len(set(sources)) == len(sources)
    for item in ENTRIES:
        assert not set(item.group) & set(item.counters), item.name
        assert not item.unless or item.unless in item.group, item.name
        for start in item.state.values():
            assert start in (ZERO, CONSTANT, ANEW) or isinstance(start, float), item.name
        for start in item.counters.values():
            if str(start).startswith("<"):
                assert str(start)[1:] in item.group, item.name
    assert not HYPERPARAMETERS & COMMON


def test_the_page_has_what_the_table_has() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert text == written(text, known(), "known")
    assert text == written(text, libraries(), "libraries")


def adaptive_muon(root: Path, **more: torch.Tensor) -> Path:
    """A checkpoint of Megatron-LM whose optimizer keeps a second moment of its own."""
    save(root, (20,), tensor=1, pipeline=1)
    file = root / "iter_0000020" / "mp_rank_00" / "model_optim_rng.pt"
    (file.parent / "distrib_optim.pt").unlink()
    with megatron_enums():
        tree = torch.load(file, weights_only=False)
        inner = tree["optimizer"]["optimizer"]
        tree["args"].use_distributed_optimizer = False
        for group in inner["param_groups"]:
            for key in ("betas", "bias_correction"):
                del group[key]
            group |= {"momentum": 0.95, "nesterov": True, "beta2": 0.95, "eps": 1e-8}
        moments = {"momentum_buffer": torch.ones(4, 4), "moment2_buffer": torch.ones(4, 1)}
        inner["state"] = {0: {**moments, **more}}
        torch.save(tree, file)
    return file


def test_a_second_moment_of_its_own_begins_anew(tmp_path: Path) -> None:
    file = adaptive_muon(tmp_path)
    before = snapshot(tmp_path)
    promise = operate(tmp_path, {"reset": ["moments"], "set": {"momentum": 0.9}}).promise
    assert promise is not None and "AdaptiveMuon" in str(promise.optimizer)
    with megatron_enums():
        inner = torch.load(file, weights_only=False)["optimizer"]["optimizer"]
    assert not any(tensor.any() for tensor in inner["state"][0].values())
    assert {group["momentum"] for group in inner["param_groups"]} == {0.9}
    take_back(tmp_path, before)


def test_what_nobody_knows_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    adaptive_muon(tmp_path, third_moment=torch.ones(4))
    before = snapshot(tmp_path)
    with pytest.raises(SurgeryError, match=r"no known optimizer keeps third_moment \(of 1\)"):
        surgery.plan(Run.open(tmp_path), from_data({"reset": ["moments"]}))
    assert snapshot(tmp_path) == before
