"""Tensors that two real ranks have cut are zeroed, and joined for an export."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.export import export
from tests.support.launch import run_module
from tests.support.sharded_dcp import NAMES, tensor
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back


@pytest.mark.formats
def test_chunks_of_two_ranks(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_module("tests.support.sharded_dcp", root / "step-3", ranks=2)
    assert len(list((root / "step-3").glob("*.distcp"))) == 2
    before = snapshot(root)

    export(Run.open(root), 3, tmp_path / "out")
    exported = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(file)
    assert exported.keys() == NAMES.keys()
    for name, found in exported.items():
        assert torch.equal(found, tensor(name))

    operate(root, {"reset": ["moments"], "set": {"eps": 1e-6}})
    state = {name: torch.ones(10, 6) for name in NAMES}
    state |= {
        f"optimizer.state.{n}.{m}": torch.ones(10, 6)
        for n in NAMES
        for m in ("exp_avg", "exp_avg_sq")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=root / "step-3", no_dist=True)
    for name, found in state.items():
        assert torch.equal(found, torch.zeros(10, 6) if "exp_avg" in name else tensor(name))
    take_back(root, before)
