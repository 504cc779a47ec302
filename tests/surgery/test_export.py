"""What is exported is what torch, and DeepSpeed's own consolidation, find in the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors import safe_open

from ckptsurgeon import Run, disk
from ckptsurgeon.errors import UsageError
from ckptsurgeon.surgery.export import INDEX, export, preview
from tests.conftest import Trained
from tests.support.snapshot import snapshot


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the files that the index names, read by the safetensors library."""
    index = json.loads((folder / INDEX).read_text())
    out = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as reader:
            out[name] = reader.get_tensor(name)
    total = sum(t.numel() * t.element_size() for t in out.values())
    assert index["metadata"]["total_size"] == total
    return out


@pytest.mark.parametrize(("ranks", "zero", "dtype"), [(1, 1, "bf16"), (2, 2, "fp32")])
def test_the_weights_are_those_of_the_model_file(
    trained: Trained, ranks: int, zero: int, dtype: str, tmp_path: Path
) -> None:
    root = trained(ranks=ranks, zero=zero, dtype=dtype)
    before = snapshot(root)
    done = export(Run.open(root), 4, tmp_path / "out", shard_bytes=30_000)
    assert len(done.files) > 3
    saved = torch.load(root / "global_step4" / "mp_rank_00_model_states.pt", weights_only=False)
    wanted: dict[str, Any] = saved["module"]
    found = loaded(tmp_path / "out")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    seen = preview(Run.open(root), 4, tmp_path / "seen")
    assert (done.tensors, done.size, seen.files) == (seen.tensors, seen.size, ())
    assert snapshot(root) == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_zero_3_is_consolidated_as_deepspeed_does(
    trained: Trained, ranks: int, tmp_path: Path
) -> None:
    root = trained(ranks=ranks, zero=3)
    export(Run.open(root), 8, tmp_path / "out")
    wanted = get_fp32_state_dict_from_zero_checkpoint(str(root), "global_step8")
    found = loaded(tmp_path / "out")
    assert found.keys() >= {name for name in wanted if name != "head.weight"}
    for name in found:
        assert torch.equal(found[name], wanted[name]), name


def test_an_export_that_fails_leaves_nothing(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open(trained())
    calls = []

    def fail(operation: str, path: str, details: Any) -> None:
        calls.append(operation)
        if operation == "copy" and calls.count("copy") == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.calls, "hook", fail)
    with pytest.raises(OSError, match="No space left"):
        export(run, 4, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    monkeypatch.setattr(disk.calls, "hook", None)
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="out already exists"):
        export(run, 4, tmp_path / "out")
