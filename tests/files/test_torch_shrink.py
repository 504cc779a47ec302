"""A shrunken file has the same tensors for torch, and only the bytes that they use."""

from __future__ import annotations

import shutil
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.shrink import shrink
from ckptsurgeon.plans.edits import Content
from tests.support.torch_files import apply


def views() -> dict[str, Any]:
    """What tr1-13B saved: weights of one layer as views of the buffer of all layers."""
    flat = torch.arange(100_000, dtype=torch.float32)
    other = torch.arange(1000, dtype=torch.bfloat16)
    matrix = flat[5000:5600].view(20, 30)
    return {
        "weight": matrix,
        "transposed": matrix.t(),
        "bias": flat[5600:5630],
        "whole": other,
        "twice": OrderedDict(a=other, b=other[10:20]),
        "scalar": torch.zeros(50)[7:8].view(()),
        "empty": torch.zeros(10)[3:3],
        "step": 7,
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right) and left.stride() == right.stride()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return bool(left == right)


@pytest.mark.parametrize("mmap", [False, True])
def test_the_tensors_stay_and_the_rest_goes(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "layer.pt"
    torch.save(views(), path)
    content = shrink(Archive.open(path), "layer.pt")
    assert isinstance(content, Content)
    small = tmp_path / "small.pt"
    shutil.copy(path, small)
    apply(small, content)
    assert small.stat().st_size < path.stat().st_size / 20
    again = torch.load(small, mmap=mmap, weights_only=True)
    assert same(torch.load(path, weights_only=True), again)
    assert again["weight"].untyped_storage().nbytes() == 630 * 4
    assert again["transposed"].data_ptr() == again["weight"].data_ptr()
    assert again["twice"]["a"].data_ptr() == again["whole"].data_ptr()
    assert subprocess.run(["unzip", "-tq", small], capture_output=True).returncode == 0
    assert shrink(Archive.open(small), "small.pt") is None


def test_a_file_without_waste_stays(tmp_path: Path) -> None:
    path = tmp_path / "layer.pt"
    torch.save({"a": torch.ones(5), "b": 1}, path)
    assert shrink(Archive.open(path), "layer.pt") is None
    torch.save(views(), path, _use_new_zipfile_serialization=False)
    assert shrink(Archive.open(path), "layer.pt") is None
