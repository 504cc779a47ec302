"""A safetensors file is read as the library writes it, and a damaged header is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.safetensors import SafetensorsFile

TENSORS = {
    "b.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.arange(5).bfloat16(),
    "none": torch.empty(0, 3), "number": torch.tensor(7), "eight": torch.ones(3).to(torch.int8),
    "f8": torch.ones(4).to(torch.float8_e4m3fn),
}  # fmt: skip


def test_every_tensor_is_where_the_library_put_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, {"format": "pt"})
    file, data = SafetensorsFile.open(path), path.read_bytes()
    assert file.tree().keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        found = file.tree()[name]
        assert (found.dtype, found.size) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        start, size = file.payload(f"data/{name}"), file.storage(found).size
        raw = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else b""
        assert data[start : start + size] == bytes(raw)


def written(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"w": entry(0, 8)}, 7), ({"w": entry(0, 8)}, 9), ({"w": entry(4, 12)}, 12),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12), ({"w": entry(0, 8, (3,))}, 8),
        ({"w": entry(0, 8, (-1, -2))}, 8), ({"w": entry(0, 8.0)}, 8), ({"w": entry(8, 0)}, 8),
        ({"w": entry(0, 8, dtype=["F32"])}, 8), ({"w": 3}, 8), ([1], 8), (b"{", 8), (b"", 8),
        (b"[" * 5000, 8), ({"w": {"dtype": "F32"}}, 8), ({"w": entry(False, 8)}, 8),
    ],
)  # fmt: skip
def test_a_header_that_no_library_writes_is_refused(tmp_path: Path, header: Any, data: int) -> None:
    with pytest.raises(DamagedFile):
        SafetensorsFile.open(written(tmp_path / "x.safetensors", header, bytes(data)))


def test_a_length_beyond_the_file_is_refused(tmp_path: Path) -> None:
    for length in (0, 10**6, 2**63):
        path = written(tmp_path / "x.safetensors", {"w": entry(0, 8)}, bytes(8), length)
        with pytest.raises(DamagedFile, match="a header of"):
            SafetensorsFile.open(path)
    path.write_bytes(b"\x01")
    with pytest.raises(DamagedFile):
        SafetensorsFile.open(path)
