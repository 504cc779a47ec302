"""A shape in a pickle is of so many axes, and of so large numbers, as torch makes: no more work."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest

from tests.hostile.hostile_run import call, text
from tests.support.tiny_run import make_run, write_torch_file

STORAGE = b"ctorch\nFloatStorage\n"
LONG = b"\x8b" + struct.pack("<I", 4096) + b"\x01" * 4096
SHAPES = {
    "100,000 axes": b"(" + b"K\x01" * 100_000 + b"t",
    "one number of 4,096 bytes, 2,000 times": LONG + b"r\x70\x00\x00\x000("
    + b"j\x70\x00\x00\x00" * 2_000 + b"t",
    "a number of 64 bits": b"(\x8a\x09" + b"\xff" * 8 + b"\x00t",
}  # fmt: skip


def tensor(shape: bytes) -> bytes:
    """The opcodes of a tensor, as torch writes them."""
    storage = b"(" + text("storage") + STORAGE + text("0") + text("cpu") + b"K\x01tQ"
    ordered = b"ccollections\nOrderedDict\n)R"
    rest = storage + b"K\x00" + shape + b"(K\x01t" + b"\x89" + ordered
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + rest + b"tR"


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_costs_no_more_than_torchs_longest(tmp_path: Path, name: str) -> None:
    """`call` fails on work beyond a bound."""
    root = make_run(tmp_path / "run", (4, 8))
    path = root / "checkpoint-8/optimizer.pt"
    write_torch_file(path, {})
    data = b"\x80\x02}(" + text("state") + tensor(SHAPES[name]) + text("param_groups") + b"]u."
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for member, content in members.items():
            archive.writestr(member, data if member.endswith("data.pkl") else content)
    for words in (("status",), ("verify",), ("set", "lr=1e-5", "-n")):
        code, out, said = call(*words, "-C", root)
        assert code in (0, 1, 4) and (code or words == ("status",)), (words, out, said)
        assert "axes" in out + said or "63 bits" in out + said or words == ("status",), out + said
